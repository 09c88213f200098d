"""The suite as a kernel author's CI runs it: a command line, tests, markers, JUnit XML."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_suite import environment, write_suite

from megabench.cases import load_suite
from megabench.conformance.groups import GROUPS, stages_of
from megabench.results import StageResult
from megabench.validate import Store, validate_case

EVIL = "evil_backends:Evil"
SUITE = ("--pyargs", "megabench.conformance")


def pytest_there(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest in `folder`, with the plugin that an installed wheel registers."""
    plugin = ("-p", "megabench.conformance.plugin", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", *plugin, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@dataclass
class Suite:
    """What one run of the suite left."""

    code: int
    said: str
    tests: dict[str, ET.Element]
    """JUnit's test cases by name."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """A right case, a crash and a topology that cannot be, on the evil backend."""
    folder = tmp_path_factory.mktemp("conformance")
    path = write_suite(folder, ["1q1s9", "3q1s9"])
    path.write_text(path.read_text() + "include: [{compress_ratio: 0, batch: 1q1s9, tp: 2}]\n")
    words = ("--backend", EVIL, "--cases", "tiny.yaml", "--device", "cpu", "--junitxml", "out.xml")
    done = pytest_there(folder, *SUITE, *words)
    cases = ET.parse(folder / "out.xml").getroot().iter("testcase")
    return Suite(done.returncode, done.stdout, {case.attrib["name"]: case for case in cases})


def test_there_is_a_test_for_every_case_and_stage_group(suite: Suite) -> None:
    cases = ("r0-nvfp4-tp1-1q1s9-small", "r0-nvfp4-tp1-3q1s9-small", "r0-auto-tp2-1q1s9-small")
    assert set(suite.tests) == {f"test_{group}[{case}]" for group in GROUPS for case in cases}
    assert {test.attrib["classname"] for test in suite.tests.values()} == {"megabench.conformance"}


def test_a_right_case_passes_and_says_how_far_from_its_bounds_it_was(suite: Suite) -> None:
    test = suite.tests["test_attention[r0-nvfp4-tp1-1q1s9-small]"]
    assert test.find("failure") is None
    properties = {p.attrib["name"]: p.attrib["value"] for p in test.iter("property")}
    assert "checked, error / bound " in properties["output_codes_decode"]
    assert "--case r0-nvfp4-tp1-1q1s9-small" in properties["repro"]


def test_a_crash_fails_the_tests_of_its_case_and_the_session_goes_on(suite: Suite) -> None:
    assert suite.code == 1
    for group in GROUPS:
        failure = suite.tests[f"test_{group}[r0-nvfp4-tp1-3q1s9-small]"].find("failure")
        assert failure is not None
        assert "the process crashed: SIGSEGV" in failure.attrib["message"]
    assert "7 failed, 7 passed, 7 skipped" in suite.said


def test_a_case_that_cannot_run_here_is_skipped_with_the_reason(suite: Suite) -> None:
    skipped = suite.tests["test_query[r0-auto-tp2-1q1s9-small]"].find("skipped")
    assert skipped is not None
    assert "TP 2" in skipped.attrib["message"]


def test_markers_choose_stage_groups_and_kinds_of_steps(tmp_path: Path) -> None:
    write_suite(tmp_path, ["1q1s9", "1q4"])
    words = ("--cases", "tiny.yaml", "--backend", "torch", "--device", "cpu", "--collect-only")
    done = pytest_there(tmp_path, *SUITE, *words, "-m", "attention and prefill")
    assert (
        done.stdout.splitlines()[0]
        == "megabench.conformance::test_attention[r0-nvfp4-tp1-1q4-small]"
    )
    assert "1/14 tests collected" in done.stdout


def test_a_backend_that_does_not_exist_is_a_usage_error_in_one_line(tmp_path: Path) -> None:
    done = pytest_there(tmp_path, *SUITE, "--backend", "torhc", "--cases", "smoke")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = done.stderr.strip().splitlines()
    assert "megabench: backend torhc: no such backend; did you mean torch?" in line


def test_other_suites_do_not_notice_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend')\n"
    )
    (tmp_path / "test_mine.py").write_text(
        "import sys\n\n"
        "def test_mine(pytestconfig):\n"
        "    assert pytestconfig.getoption('--backend') == 'mine'\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = pytest_there(tmp_path, "--backend", "mine")
    assert done.returncode == 0, done.stdout


def test_every_stage_of_a_step_belongs_to_a_group_by_name(tmp_path: Path) -> None:
    (case,) = load_suite(write_suite(tmp_path, ["2q1s9_1q2"])).cases
    stages = validate_case(case, "torch", torch.device("cpu"), Store(torch.device("cpu")))
    named = {name for names in GROUPS.values() for name in names}
    assert {stage.name for stage in stages if stage.verdict} <= named


def test_a_stage_no_group_knows_is_judged_with_the_guards() -> None:
    new = StageResult(name="brand_new", ok=False, checked=1)
    beside = StageResult(name="end_to_end", ok=True, checked=1, verdict=False)
    found = {group: stages_of(group, [new, beside]) for group in GROUPS}
    assert found.pop("guards") == [new]
    assert not any(found.values())
