"""The kernel span stands beside the event pair, and says when it differs or is not there."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch

from megabench.bench.cupti import SPANS, Activity, CuptiTracer, FakeTracer, Spans, span_us
from megabench.bench.timers import Sample
from megabench.runs import RunError, check_cross_check


class Launches:
    """Counts what it is asked to run."""

    overhead_us = 3.0

    def __init__(self) -> None:
        self.order: list[str] = []

    def samples(self, n: int) -> list[Sample]:
        return [Sample(lambda: self.order.append("sweep"), lambda: self.order.append("launch"))] * n


def kernels(*spans: tuple[int, int]) -> list[Activity]:
    return [Activity(start, end) for start, end in spans]


class Refusing:
    method = "refusing records"

    def trace(self, samples: Sequence[Sample]) -> list[list[Activity]]:
        raise RuntimeError("CUPTI_ERROR_NOT_COMPATIBLE")


def test_a_span_reaches_from_the_first_start_to_the_last_end_on_any_stream() -> None:
    assert span_us(kernels((5_000, 9_000), (1_000, 4_000), (2_000, 21_000))) == 20.0


def test_every_sample_is_launched_after_its_sweep() -> None:
    launches = Launches()
    Spans(FakeTracer([kernels((0, 10_000))])).check(launches, 10.0)
    assert launches.order == ["sweep", "launch"] * SPANS


@pytest.mark.parametrize(("median_us", "status"), [(14.9, "agrees"), (15.1, "differs")])
def test_two_microseconds_beyond_an_empty_pair_are_no_difference(
    median_us: float, status: str
) -> None:
    found = Spans(FakeTracer([kernels((0, 6_000), (7_000, 10_000))])).check(Launches(), median_us)
    assert (found.status, found.span_us, found.activities) == (status, 10.0, 2)
    assert len(found.spans_us) == SPANS
    assert bool(found.message) == (status == "differs")


@pytest.mark.parametrize(("median_us", "status"), [(91.0, "agrees"), (89.0, "differs")])
def test_many_kernels_are_stretched_by_tracing(median_us: float, status: str) -> None:
    many = kernels(*((i * 2_000, i * 2_000 + 2_000) for i in range(50)))
    assert Spans(FakeTracer([many])).check(Launches(), median_us + 3).status == status


def test_work_outside_of_the_event_pair_shows() -> None:
    found = Spans(FakeTracer([kernels((0, 5_000), (0, 400_000))])).check(Launches(), 5.0)
    assert found.status == "differs"
    assert found.message == "the event pair, less its own time, says -398.0 us"


def test_the_median_launch_counts() -> None:
    slow, usual = kernels((0, 900_000)), kernels((0, 10_000))
    found = Spans(FakeTracer([slow, usual])).check(Launches(), 13.0)
    assert (found.status, max(found.spans_us)) == ("agrees", 900.0)


def test_a_tracer_that_fails_leaves_its_message_and_no_figure() -> None:
    found = Spans(Refusing()).check(Launches(), 10.0)
    assert (found.status, found.span_us, found.spans_us) == ("failed", None, [])
    assert found.message == "RuntimeError: CUPTI_ERROR_NOT_COMPATIBLE"


def test_launches_without_records_are_a_failure_not_a_zero() -> None:
    found = Spans(FakeTracer([kernels((0, 1_000)), []])).check(Launches(), 10.0)
    assert (found.status, found.span_us) == ("failed", None)
    assert found.message == f"no device work recorded for {SPANS - 1} of {SPANS} launches"


def test_an_absent_package_is_said_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    found = Spans(CuptiTracer()).check(Launches(), 10.0)
    assert found.status == "failed"
    assert "cupti" in found.message


def test_a_request_without_graphs_or_without_the_package_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RunError, match="no CUDA graphs"):
        check_cross_check(torch.device("cpu"))
    monkeypatch.setattr("megabench.bench.cupti.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install 'megabench\[cupti\]'"):
        check_cross_check(torch.device("cuda"))
