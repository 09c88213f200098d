"""A run of several processes as one set of rows, so that one report tells of all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from megabench.results import CaseResult, Run

_WORST_FIRST = ("failed", "error", "measured", "passed", "skipped")
Item = TypeVar("Item")


def pooled(runs: Sequence[Run]) -> Run:
    """The processes as one run: of each case the row that is wrong in any of them, and of each
    time and ratio the whole measurement of the process in the middle.

    One process stays as it is. Header and ceilings are the first one's.
    """
    first = runs[0]
    if len(runs) == 1:
        return first
    rows: dict[Hashable, list[CaseResult]] = {}
    for case in (case for run in runs for case in run.cases):
        rows.setdefault((case.case_id, case.case_hash, case.backend), []).append(case)
    comparisons = _middles(
        (comparison for run in runs for comparison in run.comparisons),
        key=lambda c: (c.case_id, c.op, c.column, c.backend, c.baseline),
        value=lambda c: c.ratio,
    )
    ends = [run.end for run in runs if run.end is not None]
    return replace(
        first,
        path=first.path.parent,
        cases=[_case(several) for several in rows.values()],
        comparisons=list(comparisons.values()),
        end=max(ends, key=lambda end: end.exit_code) if len(ends) == len(runs) else None,
        torn=any(run.torn for run in runs),
    )


def _case(rows: list[CaseResult]) -> CaseResult:
    chosen = min(rows, key=lambda row: _WORST_FIRST.index(row.status))
    sound = (m for row in rows for m in row.measurements if m.problem is None)
    middles = _middles(sound, key=lambda m: (m.op, m.column), value=lambda m: m.median_us)
    kept = [middles.get((m.op, m.column), m) for m in chosen.measurements]
    return chosen.model_copy(update={"measurements": kept})


def _middles(
    items: Iterable[Item], key: Callable[[Item], Hashable], value: Callable[[Item], float]
) -> dict[Hashable, Item]:
    """By key, the item whose value is the (lower) median."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return {name: sorted(g, key=value)[(len(g) - 1) // 2] for name, g in groups.items()}
