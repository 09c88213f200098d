"""CUPTI's records on a device: the span of a replayed graph, whichever stream the work is on."""

from __future__ import annotations

import statistics

import pytest
import torch

from megabench.bench.cupti import CuptiTracer, Spans
from megabench.bench.kernels import count_kernels
from megabench.bench.timers import EventTimer, Launch, Run, graph_timer
from megabench.results import CrossCheck

pytest.importorskip("cupti")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES = 200_000
"""About 100 us."""


def spins(count: int) -> Run:
    def run() -> list[torch.Tensor]:
        for _ in range(count):
            torch.cuda._sleep(CYCLES)
        return []

    return run


def checked(timer: EventTimer) -> CrossCheck:
    """A check between two equal medians: spins take cycles, and the clock of a device that has just
    worked hard still rises."""
    for _ in range(5):
        before = statistics.median(timer.take(20))
        found = Spans(CuptiTracer()).check(timer, before)
        if statistics.median(timer.take(20)) == pytest.approx(before, rel=0.01):
            break
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_the_span_of_a_graph_agrees_with_its_event_pair(count: int) -> None:
    found = checked(graph_timer([spins(count)], "warm"))
    assert (found.status, found.activities) == ("agrees", count), found.message


def test_work_on_another_stream_is_in_the_span_and_not_in_the_event_pair() -> None:
    timer = graph_timer([spins(1)], "warm")
    honest = statistics.median(timer.take(20))
    side = torch.cuda.Stream()
    replay = timer._launches[0].launch

    def escaping() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(20 * CYCLES)
        replay()

    timer._launches[0] = Launch(escaping, [])
    found = Spans(CuptiTracer()).check(timer, honest)
    assert found.status == "differs"
    assert found.span_us is not None
    assert found.span_us > 5 * honest


def test_torch_s_profiler_and_the_tracer_take_turns() -> None:
    """Its sessions give CUPTI another clock; spans are in microseconds all the same."""
    timer = graph_timer([spins(2)], "warm")
    for _ in range(2):
        assert count_kernels(spins(2)) == 2
        found = checked(timer)
        assert (found.status, found.activities) == ("agrees", 2), found.message


def test_replays_take_no_longer_after_tracing() -> None:
    timer = graph_timer([spins(1)], "warm")
    before = statistics.median(timer.take(50))
    Spans(CuptiTracer()).check(timer, before)
    assert statistics.median(timer.take(50)) == pytest.approx(before, rel=0.02, abs=1.0)
