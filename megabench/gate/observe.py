"""A run's rows gathered by case and backend over its processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from megabench.gate.pool import Pairs, Times
from megabench.results import CaseResult, Comparison, Measurement, Run
from megabench.results.names import STEP
from megabench.results.schema import Column

Key = tuple[str, str]
"""Case id, backend."""
TimeKey = tuple[str, Column]
"""Op, column."""
PairKey = tuple[str, Column, str]
"""Op, column, reference backend."""
WHOLE = "all"
"""Stands for an op where a finding is about the whole case."""
LEAST_US, MOST_US = 1e-3, 1e10
"""A nanosecond, as fine as a baseline is, and some hours: a median outside is no time."""


@dataclass
class Observed:
    """One case on one backend, a row a process."""

    rows: list[CaseResult] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def case_hash(self) -> str:
        return self.rows[0].case_hash

    def time_keys(self) -> list[TimeKey]:
        """Every (op, column) any process measured, in the order measured."""
        return list(dict.fromkeys((m.op, m.column) for m in self._measurements()))

    def times(self, op: str, column: Column) -> Times:
        """The medians of the processes whose measurement stands."""
        sound = [m for m in self._of(op, column) if _flaw(m) is None]
        clocks = [_clock(m) for m in sound]
        known = tuple(c for c in clocks if c is not None)
        return Times(tuple(m.median_us for m in sound), known if len(known) == len(clocks) else ())

    def problems(self, op: str, column: Column) -> list[str]:
        """Why measurements do not stand, one line each that does not."""
        return [flaw for m in self._of(op, column) if (flaw := _flaw(m)) is not None]

    def pairs(self) -> dict[PairKey, Pairs]:
        """Ratios to each reference backend; over processes, the median and the widest interval."""
        found: dict[PairKey, list[Comparison]] = {}
        for c in self.comparisons:
            if not 0 < c.ci.low <= c.ratio <= c.ci.high < math.inf:
                continue
            found.setdefault((c.op, c.column, c.baseline), []).append(c)
        return {
            key: Pairs(
                ratio=median(c.ratio for c in several),
                low=min(c.ci.low for c in several),
                high=max(c.ci.high for c in several),
                pairs=sum(c.pairs for c in several),
            )
            for key, several in found.items()
        }

    def kernels(self) -> set[int]:
        """Kernels a step launches, every count seen; empty where they were not counted."""
        return {m.kernels for m in self._measurements() if m.op == STEP and m.kernels is not None}

    def stages(self) -> dict[str, float]:
        """Worst error / bound by judged stage over processes; NaN is the worst of all."""
        worst: dict[str, float] = {}
        for row in self.rows:
            for stage in row.stages:
                if stage.verdict and stage.worst is not None:
                    seen = worst.get(stage.name, 0.0)
                    worst[stage.name] = max(seen, stage.worst, key=_nan_last)
        return worst

    def fault(self) -> tuple[str, str] | None:
        """(code, message) when a process got a wrong result or broke; None when none did."""
        total = len(self.rows)
        for row in self.rows:
            if row.status == "failed":
                return "failed", f"{row.reason}{_share(self.rows, 'failed', total)}"
            if row.raised:
                return "error", f"{row.reason}{_share(self.rows, 'error', total)}"
            if broken := [s for s in row.stages if s.verdict and not s.ok]:
                return "failed", f"{broken[0].name}: {broken[0].message or 'not ok'}"
        for m in self._measurements():
            if m.n > 0 and not m.rechecked:
                unseen = f"{m.op} ({m.column}): its outputs after timing are not vouched for"
                return "recheck", m.complaint or unseen
        return None

    def skipped(self) -> str | None:
        """Why every process skipped the case, or None."""
        if all(row.status == "skipped" for row in self.rows):
            return self.rows[0].reason
        return None

    def _of(self, op: str, column: Column) -> list[Measurement]:
        return [m for m in self._measurements() if (m.op, m.column) == (op, column)]

    def _measurements(self) -> Iterator[Measurement]:
        return (m for row in self.rows for m in row.measurements)


def observe(runs: Iterable[Run]) -> dict[Key, Observed]:
    """The rows of a run's processes by case and backend, in the order first met."""
    found: dict[Key, Observed] = {}
    for run in runs:
        for case in run.cases:
            found.setdefault((case.case_id, case.backend), Observed()).rows.append(case)
        for comparison in run.comparisons:
            key = (comparison.case_id, comparison.backend)
            found.setdefault(key, Observed()).comparisons.append(comparison)
    return {key: seen for key, seen in found.items() if seen.rows}


def _flaw(m: Measurement) -> str | None:
    """Why a measurement does not stand: what its run says of it, or a median that is no time."""
    if m.problem is None and not LEAST_US <= m.median_us <= MOST_US:
        return f"a median of {m.median_us:g} us is no time"
    return m.problem


def _clock(m: Measurement) -> float | None:
    clock = m.telemetry.sm_clock_mhz if m.telemetry else None
    return clock if clock is not None and 0 < clock < math.inf else None


def _share(rows: list[CaseResult], status: str, total: int) -> str:
    count = sum(row.status == status for row in rows)
    return f" (in {count} of {total} processes)" if total > 1 else ""


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
