"""Taking a run as the new baseline: what would change, and then the shard itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megabench.gate.baseline import (
    Baseline,
    CorrectnessEntry,
    Entry,
    KernelsEntry,
    PairsEntry,
    TimeEntry,
    baseline_of,
    entry_key,
    read_shard,
    shard_path,
)
from megabench.gate.compare import compare
from megabench.gate.environment import Mismatch, mismatches
from megabench.gate.lines import write_whole
from megabench.gate.observe import observe
from megabench.gate.policy import EnvironmentRule, Policy
from megabench.gate.pool import Times
from megabench.gate.processes import GateError, cut_short
from megabench.gate.verdicts import digits
from megabench.results import Run


@dataclass(frozen=True)
class Update:
    """A shard as it would become, and how that differs from what is there."""

    path: Path
    new: Baseline
    added: list[Entry]
    changed: list[tuple[Entry, Entry]]
    removed: list[Entry]
    kept: int
    """Entries of cases that the run did not have."""
    environment: list[Mismatch]
    """When not empty, the whole shard is replaced: one shard has one environment."""

    def write(self) -> None:
        """Replace the shard's file whole."""
        write_whole(self.path, self.new.text())


def plan_update(runs: list[Run], folder: Path, *, prune: bool = False) -> Update:
    """What accepting a run would do to its shard under `folder`; nothing is written.

    The run's cases take the place of theirs. Cases it did not have are kept, unless `prune` or a
    different environment drops them. GateError for a run with a wrong, broken or invalid case.
    """
    _check_sound(runs)
    fresh = baseline_of(runs)
    path = shard_path(folder, fresh.header.environment.device_name, fresh.header.suite)
    old = read_shard(path) if path.is_file() else None
    environment = _moved(old, fresh) if old else []
    kept: list[Entry] = []
    if old and not environment and not prune:
        ran = {(entry.case_id, entry.backend) for entry in fresh.entries}
        kept = [e for e in old.entries if (e.case_id, e.backend) not in ran]
    new = Baseline(fresh.header, sorted([*fresh.entries, *kept], key=entry_key))
    before = {entry_key(e): e for e in old.entries} if old else {}
    after = {entry_key(e): e for e in new.entries}
    return Update(
        path=path,
        new=new,
        added=[e for key, e in after.items() if key not in before],
        changed=[(before[k], e) for k, e in after.items() if k in before and before[k] != e],
        removed=[e for key, e in before.items() if key not in after],
        kept=len(kept),
        environment=environment,
    )


def describe(update: Update) -> list[str]:
    """The update in lines for a person, the environment first."""
    lines = [f"{update.path}"]
    if update.environment:
        moved = "; ".join(str(m) for m in update.environment)
        lines.append(f"environment changes ({moved}): the whole shard is replaced")
    for sign, entries in (("+", update.added), ("-", update.removed)):
        lines += [f"{sign} {_name(e)}  {_value(e)}" for e in entries]
    for old, new in update.changed:
        lines.append(f"~ {_name(new)}  {_value(old)} -> {_value(new)}{_percent(old, new)}")
    lines.append(
        f"{len(update.added)} added, {len(update.changed)} changed, "
        f"{len(update.removed)} removed, {update.kept} of other cases kept"
    )
    return lines


def too_noisy(runs: list[Run]) -> list[str]:
    """The times of a run that by the default policy not even the run itself can be SAME as."""
    findings = compare(baseline_of(runs), runs, Policy()).findings
    noisy = [f for f in findings if f.decision.code == "noisy"]
    return [f"{f.case_id} {f.backend} {f.op} {f.column}" for f in noisy]


def _check_sound(runs: list[Run]) -> None:
    for run in cut_short(runs):
        raise GateError(f"{run.path} is no baseline: it was cut short")
    for (case_id, backend), seen in observe(runs).items():
        fault = seen.fault()
        if fault is not None:
            raise GateError(f"{case_id} on {backend} is no baseline: {fault[1]}")
        for op, column in seen.time_keys():
            for problem in seen.problems(op, column):
                raise GateError(
                    f"{case_id} on {backend} is no baseline: {op} ({column}): {problem}"
                )


def _moved(old: Baseline, fresh: Baseline) -> list[Mismatch]:
    return mismatches(
        old.header.environment,
        fresh.header.environment,
        EnvironmentRule().ignore,
        (old.header.clocks, fresh.header.clocks),
    )


def _name(entry: Entry) -> str:
    return f"{entry.case_id} {entry.backend} {entry.op} {entry.column}"


def _value(entry: Entry) -> str:
    match entry:
        case TimeEntry():
            times = Times(tuple(entry.medians_us))
            return f"{digits(times.median_us)} us of {times.processes}"
        case PairsEntry():
            return f"{entry.ratio:.4f} x {entry.reference}"
        case KernelsEntry():
            return f"{entry.count} kernels"
        case CorrectnessEntry():
            worst = max(entry.stages.values(), default=0.0)
            return f"{len(entry.stages)} stages, worst {worst:.3g}"


def _percent(old: Entry, new: Entry) -> str:
    if isinstance(old, TimeEntry) and isinstance(new, TimeEntry):
        ratio = Times(tuple(new.medians_us)).median_us / Times(tuple(old.medians_us)).median_us
        return f" ({100 * (ratio - 1):+.2f} %)"
    return ""
