"""What is compared: medians over fresh processes, or ABBA pairs of one process.

Samples of one process share its memory placement, clocks and neighbours, so a thousand of them say
less than five processes do. The unit here is therefore the process: its median is one value, and
intervals are interpolated order statistics of those values (Hettmansperger and Sheather, 1986).
They know nothing of how noisy the device is: at 0.92 and five processes a side, noise alone sets
them apart upwards in 0.6 % of comparisons, whatever its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, median, stdev

MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)
"""The median's standard error is sqrt(pi/2) times the mean's, for a normal distribution."""
ROOM_LEVEL = 0.95
"""Confidence of the largest slowdown that two sets of samples leave room for."""


@dataclass(frozen=True)
class Times:
    """One op's median time in each of several processes, in microseconds."""

    medians_us: tuple[float, ...]
    clocks_mhz: tuple[float, ...] = ()
    """The mean SM clock of each process; empty when any of them does not know it."""

    @property
    def processes(self) -> int:
        return len(self.medians_us)

    @property
    def median_us(self) -> float:
        return median(self.medians_us)

    @property
    def cycles(self) -> float | None:
        """Median over processes of time x SM clock; None without clocks."""
        if not self.clocks_mhz:
            return None
        return median(t * f for t, f in zip(self.medians_us, self.clocks_mhz, strict=True))

    @property
    def clock_mhz(self) -> float | None:
        return median(self.clocks_mhz) if self.clocks_mhz else None

    @property
    def cv(self) -> float | None:
        """Coefficient of variation of the process medians; None for fewer than two."""
        if self.processes < 2:
            return None
        return stdev(self.medians_us) / (sum(self.medians_us) / self.processes)

    def interval(self, level: float) -> tuple[float, float] | None:
        """Interval of the median over processes at `level` or better; None with too few."""
        return median_interval(self.medians_us, level)

    def joined(self, other: Times) -> Times:
        """The processes of both; clocks are kept only when both have them."""
        known = bool(self.clocks_mhz) and bool(other.clocks_mhz)
        clocks = self.clocks_mhz + other.clocks_mhz if known else ()
        return Times(self.medians_us + other.medians_us, clocks)


@dataclass(frozen=True)
class Pairs:
    """time(backend) / time(reference) over ABBA pairs of one process, with a 95 % interval."""

    ratio: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Change:
    """How a measurement differs from its baseline; everything a verdict on time rests on."""

    base_us: float
    run_us: float
    relative: float
    """run / baseline - 1."""
    apart: bool
    """The two intervals of the median do not touch."""
    room: float
    """The largest relative slowdown the samples leave room for, at `ROOM_LEVEL`."""
    cycles: float | None = None
    """run / baseline - 1 in SM cycles; None when a clock is not known."""

    @property
    def absolute_us(self) -> float:
        return self.run_us - self.base_us

    @property
    def ratio(self) -> float:
        """run / baseline."""
        return 1 + self.relative

    @property
    def ratio_interval(self) -> tuple[float, float]:
        """What the samples leave of `ratio`, at `ROOM_LEVEL` on either side: 90 % in all."""
        high = 1 + self.room
        return self.ratio**2 / high, high


@cache
def coverage(count: int, cut: int) -> float:
    """Chance that the median lies between the (cut+1)-th smallest and largest of `count`."""
    tail: int = sum(math.comb(count, k) for k in range(cut + 1))
    return 1 - 2 * math.ldexp(tail, -count)


def median_interval(values: tuple[float, ...], level: float) -> tuple[float, float] | None:
    """Interval of the median that covers `level`, interpolated between order statistics.

    None when even the range of all values covers less: at 92 % that is below five values.
    """
    count = len(values)
    if count == 0 or coverage(count, 0) < level:
        return None
    last = (count - 1) // 2
    cut = max(c for c in range(last + 1) if coverage(count, c) >= level or c == 0)
    ordered = sorted(values)
    if cut == last:
        return ordered[cut], ordered[-1 - cut]
    outer, inner, rank = coverage(count, cut), coverage(count, cut + 1), cut + 1
    share = (outer - level) / (outer - inner)
    weight = (count - rank) * share / (rank + (count - 2 * rank) * share)
    low = ordered[cut] + weight * (ordered[cut + 1] - ordered[cut])
    high = ordered[-1 - cut] + weight * (ordered[-2 - cut] - ordered[-1 - cut])
    return low, high


def compare_times(base: Times, run: Times, level: float) -> Change | None:
    """The change from `base` to `run`; None when either has too few processes for an interval."""
    old, new = base.interval(level), run.interval(level)
    if old is None or new is None:
        return None
    relative = run.median_us / base.median_us - 1
    error = math.hypot(_log_error(base.medians_us), _log_error(run.medians_us))
    cycles = None
    if base.cycles and run.cycles:
        cycles = run.cycles / base.cycles - 1
    return Change(
        base_us=base.median_us,
        run_us=run.median_us,
        relative=relative,
        apart=_apart(old, new),
        room=_room(relative, error, base.processes + run.processes - 2),
        cycles=cycles,
    )


def compare_pairs(base: Pairs, run: Pairs, base_us: float) -> Change:
    """The change of a ratio to a reference backend; `base_us` gives it a size in microseconds.

    Interleaved arms share one clock, so the ratio is the same in cycles.
    """
    relative = run.ratio / base.ratio - 1
    width = 2 * NormalDist().inv_cdf(0.975)
    errors = [math.log(p.high / p.low) / width for p in (base, run)]
    return Change(
        base_us=base_us,
        run_us=base_us * (1 + relative),
        relative=relative,
        apart=_apart((base.low, base.high), (run.low, run.high)),
        room=_room(relative, math.hypot(*errors), base.pairs + run.pairs - 2),
        cycles=relative,
    )


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def _log_error(values: tuple[float, ...]) -> float:
    """Standard error of the log of the median."""
    return MEDIAN_EFFICIENCY * stdev(math.log(v) for v in values) / math.sqrt(len(values))


def _room(relative: float, error: float, dof: int) -> float:
    """Upper confidence bound of the change; Student's t by its expansion in 1/dof."""
    z = NormalDist().inv_cdf(ROOM_LEVEL)
    t = z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
    return (1 + relative) * math.exp(t * error) - 1
