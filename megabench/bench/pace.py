"""How long a changed input may take, and how busy the host is while it does."""

from __future__ import annotations

import math
from functools import cache
from time import perf_counter_ns

import torch

SKIPPED_FACTOR, SKIPPED_US = 2.0, 10.0
"""A run on a changed input takes no longer than the samples' median times and plus these."""
BUSY_FACTOR = 4.0
"""What samples may have been slowed by since they were taken, if not by what slows the host. An op
that turns honest when it is looked at is slower than that."""
SIZE = 256
"""Of a matrix whose square takes some 0.3 ms: on all of torch's threads, as an op's own work is."""


class HostPace:
    """Remembers the least time that the work ever took."""

    def __init__(self) -> None:
        self._least = math.inf

    def slowdown(self) -> float:
        """How many times as long as at best it takes now, 1 at least."""
        work = _matrix()
        start = perf_counter_ns()
        torch.mm(work, work)
        taken = perf_counter_ns() - start
        self._least = min(self._least, taken)
        return taken / self._least


@cache
def _matrix() -> torch.Tensor:
    return torch.ones(SIZE, SIZE, dtype=torch.float32, device="cpu")


HOST = HostPace()


def slow(changed_us: float, sample_us: float) -> bool:
    """Whether a run on a changed input did more than samples did."""
    return changed_us > SKIPPED_FACTOR * sample_us + SKIPPED_US


def judge(
    changed_us: float, median_us: float, again_us: float, host: float
) -> tuple[str | None, str]:
    """What is wrong with samples of `median_us` when changed inputs take longer; a note in place of
    it when samples do, too, by now (`again_us`), and the host's slowdown explains how much."""
    again_us = min(again_us, max(BUSY_FACTOR, host) * median_us)
    if slow(changed_us, max(median_us, again_us)):
        times = f"{changed_us:.1f} us, not {median_us:.1f}"
        return f"with a changed input it takes {times}: the samples found their work done", ""
    return None, f"when checked, samples took {again_us:.1f} us, not {median_us:.1f}"
