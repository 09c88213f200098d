"""What keeps the host ahead of the device between samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from megabench.bench import timers
from megabench.bench.timers import (
    AHEAD_US,
    NEXT_SPIN_CYCLES,
    CaptureError,
    EventTimer,
    Launch,
    graph_timer,
)

GRAPH = cast(Any, object())


@pytest.mark.parametrize(
    ("graph", "block", "spins"),
    [
        (GRAPH, [AHEAD_US, AHEAD_US + 1], 0),
        (GRAPH, [AHEAD_US - 1, AHEAD_US + 1], NEXT_SPIN_CYCLES),
        (GRAPH, [AHEAD_US + 1], NEXT_SPIN_CYCLES),
        (None, [AHEAD_US, AHEAD_US + 1], NEXT_SPIN_CYCLES),
        (GRAPH, [], NEXT_SPIN_CYCLES),
    ],
    ids=["long", "short", "first", "launches", "none"],
)
def test_a_graph_that_keeps_the_host_ahead_by_itself_has_no_spin_before_later_samples(
    graph: Any, block: list[float], spins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycles: list[int] = []

    def timed(samples: Any, pairs: Any, next_cycles: int) -> list[float]:
        cycles.append(next_cycles)
        return block

    monkeypatch.setattr(timers, "event_pair_us", lambda: 2.0)
    monkeypatch.setattr(timers, "_Pair", lambda: None)
    monkeypatch.setattr(timers, "_timed", timed)
    timer = EventTimer([Launch(lambda: None, [], graph)], "fake")
    assert timer.take(len(block)) == block
    timer.take(2)
    assert cycles == [NEXT_SPIN_CYCLES, spins]


@pytest.mark.parametrize("sweep", [None, lambda: None], ids=["warm", "cold"])
def test_launches_that_were_not_captured_do_not_claim_a_host_that_is_ahead(
    sweep: Callable[[], object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*_: object) -> Launch:
        raise CaptureError("it synchronizes")

    monkeypatch.setattr(timers, "event_pair_us", lambda: 2.0)
    monkeypatch.setattr(timers, "capture", capture)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    method = graph_timer([lambda: []], "fake", sweep).method
    assert method.startswith("eager launches")
    assert "ahead" not in method
    assert "spin before each" in method
    assert ("L2 sweep" in method) == (sweep is not None)
