"""The `faults` command: how much of the catalogue validation catches."""

from __future__ import annotations

import fnmatch
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING

import click

from megabench.cases import load_suite, nearest

if TYPE_CHECKING:
    from megabench.faults import Finding


@click.command()
@click.option(
    "--cases", "suite", default="faults", metavar="FILE", help="Case file with the trigger cases."
)
@click.option(
    "--fault",
    "patterns",
    default=("*",),
    multiple=True,
    metavar="GLOB",
    help="Fault ids, as in 'X*'; given again, those of either.",
)
@click.option("--backend", default="torch", metavar="NAME", help="The backend to wear them.")
@click.option("--device", help="cpu, cuda or cuda:N; the first GPU by default, if any.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a fault, with every check.")
def faults(
    suite: str, patterns: tuple[str, ...], backend: str, device: str | None, as_json: bool
) -> None:
    """Wear every fault on a backend and see what validation catches.

    Exit 1 when one survives or shows nowhere.
    """
    from megabench.faults import CATALOGUE, Trials
    from megabench.faults.isolated import IsolatedTrials
    from megabench.faults.runner import BAD
    from megabench.runs import find_device, resolve_backends

    where, loaded = find_device(device), load_suite(suite)
    for pattern in patterns:
        if not fnmatch.filter(CATALOGUE, pattern):
            raise click.UsageError(f"no fault matches {pattern!r}{nearest(pattern, CATALOGUE)}")
    chosen = [
        fault
        for name, fault in CATALOGUE.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    (name,) = resolve_backends([backend], loaded.cases, where)
    kind = Trials if where.type == "cpu" else IsolatedTrials
    trials, found = kind(loaded.cases, name, where), []
    for fault in chosen:
        found.append(trials.of(fault))
        (_json if as_json else _line)(found[-1])
    if not as_json:
        _summary(found)
    sys.exit(int(any(finding.outcome in BAD for finding in found)))


def _json(finding: Finding) -> None:
    fault = finding.fault
    content = {
        "id": fault.id,
        "group": fault.group,
        "says": fault.says,
        "case": fault.case,
        "outcome": finding.outcome,
        "checks": finding.checks,
        "reason": finding.reason,
    }
    click.echo(json.dumps(content))


def _line(finding: Finding) -> None:
    """One row of the table: fault, outcome, the checks that found it (or why none did)."""
    fault = finding.fault
    told = ", ".join(finding.found_by)
    if finding.reason:
        told = f"{told}: {finding.reason}" if told else finding.reason
    click.echo(f"{fault.id:4} {finding.outcome:17} {fault.says}")
    click.echo(f"{'':22} {told}")


def _summary(found: list[Finding]) -> None:
    """Faults by check, and by outcome."""
    checks = Counter(check for finding in found for check in finding.found_by)
    alone = Counter(f.found_by[0] for f in found if len(f.found_by) == 1)
    click.echo(f"\n{'check':25} finds  alone")
    for check, count in checks.most_common():
        click.echo(f"{check:25} {count:5}  {alone[check]:5}")
    outcomes = Counter(finding.outcome for finding in found)
    said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    plural = "" if len(found) == 1 else "s"
    click.echo(f"\n{len(found)} fault{plural}: {said}")
