"""One op on one or several backends: timed in every column the device has, and judged.

An untimed run keeps the expected outputs. Then, for each column, arms are sampled interleaved, the
outputs are checked again, and the median is placed on the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from megabench.bench.copies import Copy
from megabench.bench.cupti import Spans
from megabench.bench.kernels import count_kernels
from megabench.bench.phases import PhaseClock
from megabench.bench.recheck import Expected, last_round, recheck
from megabench.bench.roofline import place
from megabench.bench.rotation import MAX_SETS, Rotation, make_sweep, plan_rotation, turn_problem
from megabench.bench.sampling import MIN_PAIRS, Policy, Sampled, interleave, paired_ratio, summarise
from megabench.bench.telemetry import INVALIDATING, Probe, Reading, summarise_readings
from megabench.bench.timers import (
    EventTimer,
    Timer,
    cpu_timer,
    eager_timer,
    graph_timer,
)
from megabench.bench.work import Work
from megabench.results import Ceilings, Comparison, Interval, Measurement
from megabench.results.names import STEP
from megabench.results.schema import Column

COLUMNS: dict[str, tuple[Column, ...]] = {"cpu": ("cpu",), "cuda": ("cold", "warm", "eager")}
EAGER_SAMPLES = 16
"""Two in each of the rounds that arms compared with each other take."""
CLEAN_SHARE = 0.5
"""Least share of samples that telemetry must leave for a row to count."""


@dataclass(frozen=True)
class Bench:
    """What all measurements of a run share."""

    device: torch.device
    ceilings: Ceilings
    probe: Probe
    policy: Policy
    l2_bytes: int | None = None
    seed: int = 0
    clock: PhaseClock = field(default_factory=PhaseClock)
    threads: int = field(default_factory=torch.get_num_threads)
    """Of torch on the host, for every arm alike."""
    spans: Spans | None = None
    """Checks rows that replay a graph by a second clock."""

    def free_bytes(self) -> int:
        """Device memory that copies may draw on."""
        return torch.cuda.mem_get_info(self.device)[0]


@dataclass(frozen=True)
class Arm:
    """One op on one backend, in as many pointer-distinct copies as asked for."""

    backend: str
    op: str
    work: Work
    calls: int
    copy_bytes: int
    """Memory a copy takes."""
    first: Copy
    """On the layer's own memory."""
    more: Callable[[int], list[Copy]]
    """n copies on memory of their own."""
    note: str = ""
    max_sets: int = MAX_SETS


def measure(bench: Bench, arms: list[Arm]) -> tuple[list[list[Measurement]], list[Comparison]]:
    """Measure one op's arms in every column -> rows arm by arm, and each later arm against the
    first (case and suite left blank for the caller)."""
    rows: list[list[Measurement]] = [[] for _ in arms]
    comparisons = []
    with bench.clock.phase("setup"):
        expected = [_expected(bench, arm) for arm in arms]
    for column in COLUMNS[bench.device.type]:
        _put_back_threads(bench.threads)
        with bench.clock.phase("setup"):
            prepared = [
                _prepare(bench, arm, column, want) for arm, want in zip(arms, expected, strict=True)
            ]
        watches = [_Watch(p.timer.take, bench.probe, bench.threads) for p in prepared]
        policy = bench.policy
        if column == "eager":
            policy = replace(
                policy, max_samples=EAGER_SAMPLES, min_seconds=0.0, block=EAGER_SAMPLES // MIN_PAIRS
            )
        sampled = interleave([w.take for w in watches], policy)
        for arm, ready, watch, outcome, want, own in zip(
            arms, prepared, watches, sampled, expected, rows, strict=True
        ):
            own.append(_row(bench, arm, column, ready, watch, outcome, want))
            bench.clock.timed(own[-1].samples_us)
        comparisons += _compare(bench, arms, column, sampled)
    for want in expected:
        bench.clock.timed(want.checked_us)
    return rows, comparisons


@dataclass(frozen=True)
class _Prepared:
    timer: Timer
    copies: list[Copy]
    rotation: Rotation | None = None


class _Watch:
    """Reads the device after each block; a block under a slowdown counts as nothing. Nothing is
    allocated between blocks, so that memory is read after the first alone."""

    def __init__(self, take: Callable[[int], list[float]], probe: Probe, threads: int) -> None:
        self._take, self._probe, self._threads = take, probe, threads
        self.readings: list[Reading] = []
        self.discarded = 0
        self.problem: str | None = None

    def take(self, n: int) -> list[float]:
        return self.kept(self._take(n))

    def kept(self, values: list[float]) -> list[float]:
        """A block just taken, unless it fell under a slowdown."""
        left = _put_back_threads(self._threads)
        if left is not None:
            self.problem = f"it set torch's threads to {left}, not {self._threads}"
        reading = self._probe.read(memory=not self.readings)
        self.readings.append(reading)
        if reading.throttle_mask & INVALIDATING:
            self.discarded += len(values)
            return []
        return values


def _put_back_threads(count: int) -> int | None:
    """Have torch use `count` threads -> how many somebody else has set, None when nobody did."""
    found = torch.get_num_threads()
    if found == count:
        return None
    torch.set_num_threads(count)
    return found


def _expected(bench: Bench, arm: Arm) -> Expected:
    """What the arm's op writes when launched eagerly, which on a GPU is a way it is timed: the run
    that compiles and warms up."""
    on_gpu = bench.device.type == "cuda"
    return Expected(arm.first, eager_timer(arm.first.run) if on_gpu else None)


def _prepare(bench: Bench, arm: Arm, column: Column, expected: Expected) -> _Prepared:
    if column == "cpu":
        return _Prepared(cpu_timer(arm.first.run), [arm.first])
    if column == "eager":
        return _Prepared(expected.timer, [arm.first])
    if column == "warm":
        return _Prepared(graph_timer([arm.first.run], "warm L2"), [arm.first])
    l2 = bench.l2_bytes or 0
    rotation = plan_rotation(
        arm.work.bytes_compulsory, arm.copy_bytes, l2, bench.free_bytes(), arm.max_sets
    )
    copies = arm.more(rotation.sets)
    sweep = make_sweep(l2, bench.device) if rotation.sweep else None
    timer = graph_timer([copy.run for copy in copies], "cold L2", sweep)
    return _Prepared(timer, copies, rotation)


def _row(
    bench: Bench,
    arm: Arm,
    column: Column,
    ready: _Prepared,
    watch: _Watch,
    outcome: Sampled,
    expected: Expected,
) -> Measurement:
    timer, work = ready.timer, arm.work
    _put_back_threads(bench.threads)
    last, stale = last_round(ready.copies, timer, expected)
    values = outcome.values + watch.kept(last)
    common = _as_taken(bench, arm, column, ready, watch, replace(outcome, values=values))
    note = "; ".join(filter(None, (timer.note, arm.note)))
    if not values:
        return Measurement.model_validate(common | _NO_SAMPLES | {"note": note})
    summary = summarise(values, bench.seed)
    placed = place(work, summary.median, column, bench.ceilings, bench.l2_bytes)
    slowed = ""
    if stale is None:
        stale, slowed = recheck(ready.copies, timer, expected, median(outcome.values or values))
    wrong = stale or turn_problem(timer.counts) or _too_few(watch, len(values)) or watch.problem
    checked = None
    if bench.spans is not None and isinstance(timer, EventTimer):
        checked = bench.spans.check(timer, summary.median)
    return Measurement.model_validate(
        common
        | summary.fields()
        | {
            "note": "; ".join(filter(None, (note, placed.note, slowed))),
            "rechecked": stale is None,
            "flops_per_s": work.flops / summary.median * 1e6,
            "bytes_per_s": work.bytes_compulsory / summary.median * 1e6,
            "bound": placed.bound,
            "floor_us": placed.floor_us,
            "roofline_fraction": placed.fraction,
            "datasheet_floor_us": placed.datasheet_floor_us,
            "datasheet_fraction": placed.datasheet_fraction,
            "problem": wrong or placed.problem,
            "cross_check": checked,
        }
    )


def _as_taken(
    bench: Bench, arm: Arm, column: Column, ready: _Prepared, watch: _Watch, outcome: Sampled
) -> dict[str, Any]:
    """A row's fields that say how its samples came about."""
    timer, rotation = ready.timer, ready.rotation
    return {
        "op": arm.op,
        "column": column,
        "method": timer.method,
        "calls": arm.calls,
        "kernels": _kernels(arm, timer) if column == "warm" and arm.op == STEP else None,
        "sets": timer.sets,
        "bytes_rotated": rotation.bytes_rotated if rotation else None,
        "samples_us": outcome.values,
        "n": len(outcome.values),
        "discarded": watch.discarded,
        "stop_reason": outcome.reason,
        "overhead_us": timer.overhead_us,
        "flops": arm.work.flops,
        "bytes_compulsory": arm.work.bytes_compulsory,
        "bytes_issued": arm.work.bytes_issued,
        "telemetry": summarise_readings(bench.probe.source, watch.readings),
    }


def _kernels(arm: Arm, timer: Timer) -> int | None:
    """Kernels of one run: those of the graph that is timed, else as a profiler counts them."""
    counted = timer.kernels() if isinstance(timer, EventTimer) else None
    return counted or count_kernels(arm.first.run)


def _too_few(watch: _Watch, kept: int) -> str | None:
    """What took most of the samples away; None when enough are left."""
    if kept >= CLEAN_SHARE * (kept + watch.discarded):
        return None
    state = summarise_readings("none", watch.readings).invalid
    return f"{watch.discarded} samples fell under {state}; too few are left"


_NO_SAMPLES = {
    "median_us": math.nan,
    "mad_us": math.nan,
    "q1_us": math.nan,
    "q3_us": math.nan,
    "min_us": math.nan,
    "ci_us": Interval(low=math.nan, high=math.nan),
    "problem": "INVALID: every sample fell under a hardware or thermal slowdown",
}


def _compare(
    bench: Bench, arms: list[Arm], column: Column, sampled: list[Sampled]
) -> list[Comparison]:
    """Each later arm against the first."""
    found = []
    for arm, outcome in zip(arms[1:], sampled[1:], strict=True):
        paired = paired_ratio(outcome.rounds, sampled[0].rounds, bench.seed)
        if paired is None:
            continue
        ratio, interval, pairs = paired
        found.append(
            Comparison(
                suite="",
                case_id="",
                op=arm.op,
                column=column,
                backend=arm.backend,
                baseline=arms[0].backend,
                ratio=ratio,
                ci=interval,
                pairs=pairs,
            )
        )
    return found
