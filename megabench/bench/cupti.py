"""The kernel span by CUPTI's activity records: a second clock beside the event pair.

A span is the time from the first start to the last end of all device work (kernels, copies, fills,
on any stream) of one launch. What an event pair misses, work that runs outside of it, is in here;
what it adds, the graph's launch, is not. Never a stand-in for a time: a check that could not be
made says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch

from megabench.bench.timers import Sample, spin
from megabench.results import CrossCheck

SPANS = 10
AGREE_US, AGREE_SHARE, STRETCH_US = 2.0, 0.05, 0.2
"""Span and event pair agree within the largest of these, `STRETCH_US` an activity. Tracing puts
0.1 to 0.15 us between two kernels of a graph (H200, CUPTI 13.0, 2026-11-30)."""
CLOCK_SECONDS = 0.02
"""Least time over which CUPTI's clock is compared with the host's."""
BUFFER_BYTES = 8 << 20
FLUSH_FORCED = 1
"""CUPTI_ACTIVITY_FLAG_FLUSH_FORCED: hand over buffers that are not full, too."""


class Activity(NamedTuple):
    """One kernel, copy or fill."""

    start_ns: float
    end_ns: float


class Tracer(Protocol):
    """Where activity records come from."""

    method: str

    def trace(self, samples: Sequence[Sample]) -> list[list[Activity]]:
        """Take each sample, one after another and apart -> the device work of each launch."""
        ...


class Launching(Protocol):
    """A timer whose samples can be taken without its clock."""

    overhead_us: float | None

    def samples(self, n: int) -> list[Sample]:
        """The next n samples, copies in rotation."""
        ...


def installed() -> bool:
    """Whether cupti-python is there; its library may still refuse, which rows then say."""
    return find_spec("cupti") is not None


class CuptiTracer:
    """CUPTI's activity API through cupti-python. `trace` raises whatever that does, ImportError
    where it is not installed."""

    method = "CUPTI activity records"

    def __init__(self) -> None:
        self._cupti: Any = None
        self._seen: list[Activity] = []

    def trace(self, samples: Sequence[Sample]) -> list[list[Activity]]:
        from cupti import cupti

        self._cupti = cupti
        kinds = cupti.ActivityKind
        with self._tracing((kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)):
            began, then = self._clocks()
            traced = [self._one(sample) for sample in samples]
            time.sleep(CLOCK_SECONDS)
            ended, now = self._clocks()
        # Another profiler may have given CUPTI a clock of its own: torch's counts processor cycles.
        scale = (now - then) / (ended - began)

        def at(ticks: float) -> float:
            return (ticks - began) * scale

        return [[Activity(at(r.start_ns), at(r.end_ns)) for r in one] for one in traced]

    def _clocks(self) -> tuple[int, int]:
        return self._cupti.get_timestamp(), time.perf_counter_ns()

    def _one(self, sample: Sample) -> list[Activity]:
        """As an event pair times it, behind a spin kernel, whose record is the first."""
        sample.before()
        self._drain()
        spin()
        sample.launch()
        return sorted(self._drain())[1:]

    def _drain(self) -> list[Activity]:
        """The device idle and all records in hand -> those since the last call."""
        torch.cuda.synchronize()
        self._cupti.activity_flush_all(FLUSH_FORCED)
        seen, self._seen = self._seen, []
        return seen

    def _keep(self, records: Sequence[Any]) -> None:
        # The records' memory is CUPTI's again after the callback.
        self._seen += [Activity(record.start, record.end) for record in records]

    @contextmanager
    def _tracing(self, kinds: Sequence[Any]) -> Iterator[None]:
        # Registered anew each time: torch's profiler takes the same one place for callbacks. Each
        # side's buffers go back to it before: the other would free them by an allocator of its own.
        self._cupti.activity_flush_all(FLUSH_FORCED)
        self._cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), self._keep)
        for kind in kinds:
            self._cupti.activity_enable(kind)
        try:
            yield
        finally:
            self._drain()
            for kind in kinds:
                self._cupti.activity_disable(kind)
            self._cupti.activity_flush_all(FLUSH_FORCED)


class FakeTracer:
    """Runs the launches and plays back given records, the last ones again and again."""

    method = "fake records"

    def __init__(self, records: Sequence[list[Activity]]) -> None:
        self._records = list(records)

    def trace(self, samples: Sequence[Sample]) -> list[list[Activity]]:
        found = []
        for sample in samples:
            sample.before()
            sample.launch()
            found.append(self._records.pop(0) if len(self._records) > 1 else self._records[0])
        return found


@dataclass(frozen=True)
class Spans:
    """Cross-checks the columns that replay graphs."""

    tracer: Tracer

    def check(self, timer: Launching, median_us: float) -> CrossCheck:
        """The median span of `SPANS` launches of `timer` against the event pair's median."""
        method = f"span of {self.tracer.method}, median of {SPANS} launches"
        try:
            traced = self.tracer.trace(timer.samples(SPANS))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return CrossCheck(method=method, status="failed", message=message)
        empty = sum(not records for records in traced)
        if empty:
            message = f"no device work recorded for {empty} of {SPANS} launches"
            return CrossCheck(method=method, status="failed", message=message)
        spans = [span_us(records) for records in traced]
        span, activities = statistics.median(spans), len(traced[0])
        off = median_us - (timer.overhead_us or 0.0) - span
        agree = abs(off) <= max(AGREE_US, AGREE_SHARE * median_us, STRETCH_US * activities)
        return CrossCheck(
            method=method,
            status="agrees" if agree else "differs",
            message="" if agree else f"the event pair, less its own time, says {off:+.1f} us",
            span_us=span,
            spans_us=spans,
            activities=activities,
        )


def span_us(records: Sequence[Activity]) -> float:
    """Microseconds from the first start to the last end."""
    return (max(r.end_ns for r in records) - min(r.start_ns for r in records)) * 1e-3
