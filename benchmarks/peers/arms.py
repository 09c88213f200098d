"""Arms of a comparison, how they are timed, and what comes out.

An arm is checked, captured in a CUDA graph and sampled in turns with the group's others, their
order reversed every other round; 256 MB are written before each sample, outside its event pair.
Timers and statistics are megabench's own (`bench/timers.py`, `bench/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.peers.judge import Read
from megabench.bench.runner import describe
from megabench.bench.sampling import Policy, Sampled, interleave, paired_ratio, summarise
from megabench.bench.timers import Run, Timer, cpu_timer, graph_timer

FLUSH_BYTES = 256 << 20
POLICY = Policy(min_samples=60, max_samples=100, block=4, timeout=0.6)


class Judge(Protocol):
    """Says what is wrong with an arm's values."""

    def problem(self, got: torch.Tensor) -> str | None: ...


@dataclass
class Arm:
    """One way to compute a group's result."""

    name: str
    run: Run
    read: Read
    truth: Judge
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """`ours` may take at most `bar` times what `peer` takes."""

    ours: str
    peer: str
    bar: float | None = None


@dataclass
class Group:
    """Arms that are timed together."""

    part: str
    size: str
    arms: list[Arm]
    absent: dict[str, str] = field(default_factory=dict)
    """Arms that cannot run here, by name, and why."""
    bars: list[Bar] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One arm's outcome. status: timed, right (only checked), WRONG, FAILED, not installed, or,
    where time was short, NOT RUN."""

    part: str
    size: str
    arm: str
    status: str
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    samples: int = 0
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"kind": "arm", **asdict(self)}


@dataclass(frozen=True)
class Ratio:
    """Time of `ours` over that of `peer`, pair by pair: median and 95 % interval."""

    part: str
    size: str
    ours: str
    peer: str
    ratio: float
    low: float
    high: float
    bar: float | None

    @property
    def verdict(self) -> str:
        """met, MISSED, or undecided: the bar lies between the interval's low end and the median."""
        if self.bar is None:
            return ""
        if self.ratio <= self.bar:
            return "met"
        return "undecided" if self.low <= self.bar else "MISSED"

    def as_json(self) -> dict[str, Any]:
        return {"kind": "ratio", **asdict(self), "verdict": self.verdict}


def checked(arm: Arm) -> str | None:
    """What is wrong with an arm's values, None when nothing is."""
    return arm.truth.problem(arm.read(arm.run()))


def make_flush(device: torch.device) -> Callable[[], object] | None:
    """A function that enqueues a write of 256 MB; None where there is no GPU."""
    if device.type != "cuda":
        return None
    buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    return lambda: buffer.fill_(1)


def check(group: Group) -> tuple[list[Row], list[Arm]]:
    """A row for every arm that is absent, wrong or broken, and the arms that are right."""
    rows = [
        Row(group.part, group.size, n, "not installed", note=w) for n, w in group.absent.items()
    ]
    right = []
    for arm in group.arms:
        status = "WRONG"
        try:
            problem = checked(arm)
        except Exception as error:
            status, problem = "FAILED", describe(error)
        if problem is None:
            right.append(arm)
        else:
            rows.append(Row(group.part, group.size, arm.name, status, note=problem))
    return rows, right


def measure(
    group: Group, flush: Callable[[], object] | None, policy: Policy = POLICY
) -> tuple[list[Row], list[Ratio]]:
    """Check every arm, time those that are right, check them again."""
    rows, arms = check(group)
    if not arms:
        return rows, []
    timers = [_timer(arm, flush) for arm in arms]
    sampled = interleave([timer.take for timer in timers], policy)
    right: dict[str, Sampled] = {}
    for arm, timer, outcome in zip(arms, timers, sampled, strict=True):
        row = _row(group, arm, timer, outcome)
        rows.append(row)
        if row.status == "timed":
            right[arm.name] = outcome
    return rows, list(_ratios(group, right))


def _timer(arm: Arm, flush: Callable[[], object] | None) -> Timer:
    return cpu_timer(arm.run) if flush is None else graph_timer([arm.run], "cold L2", flush)


def _row(group: Group, arm: Arm, timer: Timer, outcome: Sampled) -> Row:
    """An arm's row; its timed form is run once more and must still be right."""
    problem = arm.truth.problem(arm.read(timer.replay(0)))
    if problem is not None:
        note = f"after timing: {problem}"
        return Row(group.part, group.size, arm.name, "WRONG", note=note)
    summary = summarise(outcome.values)
    eager = timer.note if "capture failed" in timer.note else ""
    return Row(
        group.part,
        group.size,
        arm.name,
        "timed",
        summary.median,
        summary.ci.low,
        summary.ci.high,
        summary.n,
        "; ".join(filter(None, (arm.note, eager))),
    )


def _ratios(group: Group, sampled: dict[str, Sampled]) -> Iterator[Ratio]:
    for bar in group.bars:
        if bar.ours not in sampled or bar.peer not in sampled:
            continue
        paired = paired_ratio(sampled[bar.ours].rounds, sampled[bar.peer].rounds)
        if paired is not None:
            ratio, interval, _ = paired
            yield Ratio(
                group.part,
                group.size,
                bar.ours,
                bar.peer,
                ratio,
                interval.low,
                interval.high,
                bar.bar,
            )
