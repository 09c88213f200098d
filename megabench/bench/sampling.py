"""When to stop sampling, and what to say of the samples.

Samples come in blocks (`take(n)` returns n of them, in microseconds). Sampling goes on until the
least count and the least time are reached and then one of these holds; which one is kept:

- target: the relative standard error of the median is at or below the target;
- plateau: it has stopped improving from window to window;
- timeout, max_samples: the budget is spent. A time-out may end below the least count (n says so),
  and below `FLOOR_SAMPLES` only after `HARD_TIMEOUT` times its length.

A block may come back empty (telemetry refused it). No sample is dropped here: outliers stay in the
samples and in the quartiles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

import numpy as np
from numpy.random import default_rng

from megabench.results import Interval
from megabench.results.schema import StopReason

Take = Callable[[int], list[float]]
"""Takes n samples in microseconds; may give none when the device's state forbids it."""

FLOOR_SAMPLES = 3
HARD_TIMEOUT = 4
"""Multiples of the time-out after which sampling ends whatever it has, even nothing."""
MIN_PAIRS = 8
"""Rounds that arms compared with each other take at least, time permitting."""
BOOTSTRAP_DRAWS = 1000
LEVEL = 0.95
"""Of an interval: the share of draws that lie in it."""
MAD_TO_SIGMA = 1.4826
"""sigma = 1.4826 * MAD for a normal distribution."""
MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)
"""The median's standard error is sqrt(pi/2) times the mean's, for a normal distribution."""


@dataclass(frozen=True)
class Policy:
    """Stopping rule of one measurement; times in seconds."""

    min_samples: int = 10
    min_seconds: float = 0.005
    """Least measured time: the sum of the samples."""
    timeout: float = 0.5
    """Most wall time, everything between samples included."""
    max_samples: int = 400
    target: float = 0.005
    """Relative standard error of the median that is good enough."""
    plateau: float = 0.05
    """Relative improvement over a block below which noise counts as steady."""
    plateau_blocks: int = 4
    """Blocks in a row without improvement that make a plateau."""
    block: int = 10
    """Most samples a block."""
    block_seconds: float = 0.05
    """Blocks of slow ops are shorter, down to one sample, so that a time-out is kept."""


CUDA_POLICY = Policy(min_seconds=0.006, max_samples=64, block=8, block_seconds=0.02)
"""A graph's replays scatter by 1 % of 30 us and by 0.3 % of 300 us (H200): 6 ms of either tell the
median to 0.2 %, and so do 64 samples of less. What lies between samples of an op of 6 us takes ten
times as long as they do, and its processes differ by more."""
CPU_POLICY = Policy(timeout=0.25)


@dataclass
class Samples:
    """What one measurement has so far, and the stopping decision over it."""

    policy: Policy
    values: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    _errors: list[float] = field(default_factory=list)

    def next_block(self) -> int:
        """Samples to take next: one to learn the op's time, then as many as fit a block."""
        if not self.values:
            return 1
        fitting = self.policy.block_seconds * 1e6 / max(median(self.values), 1e-3)
        return max(1, min(self.policy.block, int(fitting)))

    def add(self, block: list[float]) -> StopReason | None:
        """Add a block; the reason to stop now, or None to go on."""
        self.values.extend(block)
        self._errors.append(relative_error(self.values))
        return decide(
            self.policy,
            n=len(self.values),
            measured_seconds=sum(self.values) * 1e-6,
            wall_seconds=time.perf_counter() - self.started,
            errors=self._errors,
        )


def decide(
    policy: Policy, *, n: int, measured_seconds: float, wall_seconds: float, errors: list[float]
) -> StopReason | None:
    """The stopping rule. `errors` are the relative errors after each block, the last one now's."""
    if n >= policy.min_samples and measured_seconds >= policy.min_seconds:
        if errors[-1] <= policy.target:
            return "target"
        if _steady(errors, policy):
            return "plateau"
    if n >= policy.max_samples:
        return "max_samples"
    overdue = wall_seconds >= policy.timeout * HARD_TIMEOUT
    if wall_seconds >= policy.timeout and (n >= FLOOR_SAMPLES or overdue):
        return "timeout"
    return None


def _steady(errors: list[float], policy: Policy) -> bool:
    window = errors[-(policy.plateau_blocks + 1) :]
    if len(window) <= policy.plateau_blocks:
        return False
    return min(window[1:]) > window[0] * (1 - policy.plateau)


@dataclass(frozen=True)
class Sampled:
    """One arm's outcome: every sample, why sampling stopped, and each round's median."""

    values: list[float]
    reason: StopReason
    rounds: list[float | None]
    """None for a round whose block came back empty."""


def interleave(takes: list[Take], policy: Policy) -> list[Sampled]:
    """Sample arms in rounds, their order reversed every other round (ABBA), until all have stopped.

    The arms share clocks, heat and neighbours; one that has stopped goes on until the last has, so
    that rounds stay paired. With one arm this is plain sampling.
    """
    arms = [Samples(replace(policy, timeout=policy.timeout * len(takes))) for _ in takes]
    reasons: list[StopReason | None] = [None] * len(takes)
    rounds: list[list[float | None]] = [[] for _ in takes]
    forward = True
    while not (all(reasons) and _paired_enough(len(rounds[0]), reasons)):
        order = range(len(takes)) if forward else reversed(range(len(takes)))
        forward = not forward
        for i in order:
            block = takes[i](arms[i].next_block())
            rounds[i].append(median(block) if block else None)
            reasons[i] = arms[i].add(block) or reasons[i]
    return [
        Sampled(arm.values, reason, medians)
        for arm, reason, medians in zip(arms, reasons, rounds, strict=True)
        if reason is not None
    ]


def _paired_enough(rounds: int, reasons: list[StopReason | None]) -> bool:
    """Whether arms have rounds enough for a ratio's interval, or no time for more."""
    return len(reasons) == 1 or rounds >= MIN_PAIRS or "timeout" in reasons


def relative_error(values: list[float]) -> float:
    """Standard error of the median over the median, from the MAD; inf when it cannot be told."""
    if len(values) < 2:
        return math.inf
    middle = median(values)
    if middle <= 0:
        return math.inf
    sigma = MAD_TO_SIGMA * median(abs(value - middle) for value in values)
    return MEDIAN_EFFICIENCY * sigma / math.sqrt(len(values)) / middle


@dataclass(frozen=True)
class Summary:
    """Order statistics of samples, in their unit."""

    n: int
    median: float
    mad: float
    q1: float
    q3: float
    minimum: float
    ci: Interval

    def fields(self) -> dict[str, object]:
        """Under the names that a row gives them, of samples in microseconds."""
        return {
            "median_us": self.median,
            "mad_us": self.mad,
            "q1_us": self.q1,
            "q3_us": self.q3,
            "min_us": self.minimum,
            "ci_us": self.ci,
        }


def summarise(values: list[float], seed: int = 0) -> Summary:
    """Median, MAD, quartiles and a bootstrap interval of the median; ValueError without samples."""
    if not values:
        raise ValueError("values: no samples to summarise")
    ordered = sorted(values)
    middle = median(ordered)
    return Summary(
        n=len(ordered),
        median=middle,
        mad=median(abs(value - middle) for value in ordered),
        q1=quantile(ordered, 0.25),
        q3=quantile(ordered, 0.75),
        minimum=ordered[0],
        ci=bootstrap_median(ordered, seed=seed),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, by a line between neighbours. numpy's takes ten times as long on so few."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))


def bootstrap_median(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of the median; the same values and seed give the same one."""
    data = np.sort(np.asarray(values, dtype=np.float64))
    medians = np.sort(data[_median_ranks(data.size, seed)].mean(axis=1)).tolist()
    tail = (1 - LEVEL) / 2
    return Interval(low=quantile(medians, tail), high=quantile(medians, 1 - tail), level=LEVEL)


@lru_cache
def _median_ranks(size: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """The two middle ranks of each drawn set: its median is theirs, whatever the values."""
    shape, middle = (BOOTSTRAP_DRAWS, size), ((size - 1) // 2, size // 2)
    ranks = default_rng(seed).integers(0, size, shape, dtype=np.uint16)
    ranks.partition(middle, axis=1)
    return ranks[:, middle]


def paired_ratio(
    first: list[float | None], second: list[float | None], seed: int = 0
) -> tuple[float, Interval, int] | None:
    """Median over rounds of first/second, with its interval and count, from `Sampled.rounds`.

    Pairs are taken in time order, so drift common to both arms cancels. None without a pair.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b]
    if not pairs:
        return None
    ratios = [a / b for a, b in pairs]
    return median(ratios), bootstrap_median(ratios, seed=seed), len(pairs)
