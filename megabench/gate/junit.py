"""Verdicts as JUnit XML, for CI systems that show test results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

from megabench.gate.findings import Finding, GateResult
from megabench.gate.verdicts import UNDECIDED, WRONG

_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold."""


def write_junit(result: GateResult, suite: str, path: Path) -> None:
    """Write a result: SLOWER and BROKEN as failures, what is undecided as errors.

    Findings that are not gated are skipped tests, NEW, FASTER and SAME passed ones; the verdict,
    its code, message and evidence are kept for all. OSError when `path` cannot be written.
    """
    wrong = _count(result.findings, WRONG)
    undecided = _count(result.findings, UNDECIDED)
    root = ET.Element("testsuites")
    top = ET.SubElement(
        root,
        "testsuite",
        name=f"megabench gate: {suite}",
        tests=str(len(result.findings)),
        failures=str(wrong),
        errors=str(undecided),
        skipped=str(sum(not f.gated for f in result.findings)),
    )
    for finding in result.findings:
        _testcase(top, finding)
    ET.indent(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _testcase(parent: ET.Element, finding: Finding) -> None:
    decision = finding.decision
    case = ET.SubElement(
        parent,
        "testcase",
        classname=_legal(f"{finding.case_id}.{finding.backend}"),
        name=_legal(f"{finding.op} {finding.column}"),
        time=f"{(finding.run_us or 0.0) * 1e-6:.9f}",
    )
    text = _legal(f"{decision.verdict} {decision.code}: {decision.message}")
    if not finding.gated:
        ET.SubElement(case, "skipped", message=text)
    elif decision.verdict in WRONG:
        ET.SubElement(case, "failure", type=decision.code, message=text)
    elif decision.verdict in UNDECIDED:
        ET.SubElement(case, "error", type=decision.code, message=text)
    output = ET.SubElement(case, "system-out")
    output.text = _legal("\n".join((text, *finding.evidence)))


def _count(findings: Iterable[Finding], verdicts: tuple[str, ...]) -> int:
    return sum(f.gated and f.decision.verdict in verdicts for f in findings)


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
