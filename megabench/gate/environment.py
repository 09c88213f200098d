"""What two runs must share before their times are compared."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megabench.results import Environment, Measurement, Run
from megabench.results.schema import Column

HOST_FIELDS = ("cpu", "cpu_count", "torch_threads", "python", "packages.numpy")
"""What replays of a CUDA graph do not depend on: compared for host-timed columns alone."""
HOST_COLUMNS: tuple[Column, ...] = ("cpu", "eager")
UNTIMED = "untimed"
_APPLICATION_CLOCKS = "application clocks setting"


@dataclass(frozen=True)
class Mismatch:
    """One field on which two environments differ."""

    field: str
    base: str
    run: str

    @property
    def host_only(self) -> bool:
        """Whether graph-replayed columns can be compared all the same."""
        return self.field in HOST_FIELDS

    def __str__(self) -> str:
        return f"{self.field} {self.base} -> {self.run}"


def facts(environment: Environment) -> dict[str, str]:
    """An environment flattened to `field: text`; absent values are "none".

    The device's index, a host's memory size, and what a backend says of itself (but its library's
    version) are left out: they change no time.
    """
    fields = environment.model_dump(exclude={"device", "packages", "backends"})
    if environment.compute_capability is None:
        fields.pop("memory_bytes")
    found = {name: _text(value) for name, value in fields.items()}
    found |= {f"packages.{name}": version for name, version in environment.packages.items()}
    found |= {f"backends.{b.name}": _text(b.version) for b in environment.backends}
    return found


def mismatches(
    base: Environment,
    run: Environment,
    ignore: Sequence[str],
    clocks: tuple[str, str] = (UNTIMED, UNTIMED),
) -> list[Mismatch]:
    """Fields that differ and match none of the `ignore` globs.

    `clocks` are the two clock policies. A backend that only one side has is no mismatch.
    """
    old, new = facts(base), facts(run)
    if UNTIMED not in clocks:
        old["clocks"], new["clocks"] = clocks
    return [
        Mismatch(name, old.get(name, "none"), new.get(name, "none"))
        for name in sorted(old.keys() | new.keys())
        if old.get(name, "none") != new.get(name, "none")
        and not (name.startswith("backends.") and not (name in old and name in new))
        and not any(fnmatch.fnmatchcase(name, glob) for glob in ignore)
    ]


def applying(found: Iterable[Mismatch], column: Column) -> list[Mismatch]:
    """The mismatches that matter to a column's times."""
    return [m for m in found if column in HOST_COLUMNS or not m.host_only]


def clock_policy(runs: Sequence[Run]) -> str:
    """ "application" when clocks were set, "default" when not, "unknown" without telemetry,
    "untimed" where there is no time to compare.

    A power cap is no policy: it is where these parts settle under load.
    """
    measured = [m for run in runs for case in run.cases for m in case.measurements]
    if not measured:
        return UNTIMED
    told = [labels for m in measured if (labels := _labels(m)) is not None]
    if not told:
        return "unknown"
    locked = sum(_APPLICATION_CLOCKS in labels for labels in told)
    return "application" if 2 * locked > len(told) else "default"


def _labels(measurement: Measurement) -> list[str] | None:
    telemetry = measurement.telemetry
    return telemetry.labels if telemetry is not None and telemetry.source != "none" else None


def _text(value: object) -> str:
    return "none" if value is None else str(value)
