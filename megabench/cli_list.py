"""The `list` command: the packaged case files, or the cases of one."""

from __future__ import annotations

import json
from typing import Any

import click

from megabench.cases import Case, CaseError, Suite, load_suite, nearest, packaged_suites
from megabench.cli_options import case_options, suite_at


@click.command("list")
@case_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object a case.")
def list_command(
    suite: str | None, patterns: tuple[str, ...], seed: int | None, as_json: bool
) -> None:
    """List a file's cases, or the packaged files when none is named."""
    if suite is None and not patterns and not as_json:
        for path in packaged_suites():
            loaded = load_suite(path)
            click.echo(f"{loaded.name:9}  {_budget(loaded, loaded.cases):33}  {loaded.description}")
        return
    for loaded, cases in _chosen(suite, patterns, seed):
        for case in cases:
            click.echo(json.dumps(_described(case)) if as_json else f"{case.id}  {case.num_tokens}")
        if not as_json:
            click.echo(f"{loaded.source}: {_budget(loaded, cases)}")


def _chosen(
    name: str | None, patterns: tuple[str, ...], seed: int | None
) -> list[tuple[Suite, list[Case]]]:
    """The cases asked for; of every packaged file that has any when none is named."""
    if name is not None:
        suite = suite_at(name, seed)
        return [(suite, suite.select(*patterns))]
    suites = [suite_at(path.stem, seed) for path in packaged_suites()]
    for pattern in patterns:
        if not any(suite.matching(pattern) for suite in suites):
            hint = nearest(pattern, sorted({case.id for suite in suites for case in suite.cases}))
            raise CaseError(f"no case of a packaged file matches {pattern!r}{hint}")
    found = []
    for suite in suites:
        here = [pattern for pattern in patterns or ("*",) if suite.matching(pattern)]
        if here:
            found.append((suite, suite.select(*here)))
    return found


def _budget(suite: Suite, cases: list[Case]) -> str:
    tokens = sum(case.num_tokens for case in cases)
    allowed = "" if suite.token_budget is None else f" of {suite.token_budget:,}"
    plural = "" if len(cases) == 1 else "s"
    return f"{len(cases)} case{plural}, {tokens:,}{allowed} tokens"


def _described(case: Case) -> dict[str, Any]:
    requests = case.requests
    decodes = sum(request.is_decode for request in requests)
    return {
        "id": case.id,
        "hash": case.hash,
        "tokens": case.num_tokens,
        "decodes": decodes,
        "prefills": len(requests) - decodes,
        **case.model_dump(mode="json"),
    }
