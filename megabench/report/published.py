"""Latencies from elsewhere (`data/published.json`), and a run's rows that do the same work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from megabench.results import CaseResult, Run
from megabench.results.schema import Column

PUBLISHED_FILE = "published.json"


@dataclass(frozen=True)
class Series:
    """One op's latencies on one device, as somebody measured or published them."""

    label: str
    device: str
    """Part of the device's name."""
    op: str
    column: Column
    source: str
    """How the figures came about."""
    where: dict[str, list[Any]]
    """Axes of a case and the values at which it does this work."""
    points: list[tuple[int, float]]
    """Query tokens and microseconds."""

    def does(self, case: CaseResult) -> bool:
        """Whether a case of this many tokens asks for the work that was timed."""
        return case.tokens in dict(self.points) and all(
            case.case.get(axis) in values for axis, values in self.where.items()
        )


@cache
def published() -> tuple[Series, ...]:
    """Every series of the packaged file."""
    text = (resources.files("megabench.data") / PUBLISHED_FILE).read_text(encoding="utf-8")
    return tuple(Series(**series) for series in json.loads(text)["series"])


@dataclass(frozen=True)
class Beside:
    """A row of a run and a figure from elsewhere for the same work."""

    case_id: str
    backend: str
    tokens: int
    median_us: float
    series: Series
    published_us: float

    @property
    def ratio(self) -> float:
        """The run's time over the other; below 1 the run is faster."""
        return self.median_us / self.published_us


def beside(run: Run) -> list[Beside]:
    """The run's times of work that a series of its device did too, series by series."""
    device = run.header.environment.device_name if run.header else ""
    found = [
        Beside(case.case_id, case.backend, case.tokens, m.median_us, series, times[case.tokens])
        for series in published()
        if series.device in device
        for times in [dict(series.points)]
        for case in run.cases
        if series.does(case)
        for m in case.measurements
        if (m.op, m.column) == (series.op, series.column) and m.median_us > 0
    ]
    return sorted(found, key=lambda row: (row.series.op, row.series.label, row.tokens))
