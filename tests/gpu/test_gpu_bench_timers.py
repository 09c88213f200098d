"""The CUDA timers themselves: floor, scaling with work, set-up excluded, no silent fallback."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import pytest
import torch

from megabench.bench.copies import Copy
from megabench.bench.kernels import count_kernels
from megabench.bench.ops import Target
from megabench.bench.recheck import Expected, last_round, recheck
from megabench.bench.rotation import make_sweep
from megabench.bench.timers import (
    AHEAD_US,
    CaptureError,
    Run,
    Timer,
    capture,
    eager_timer,
    event_pair_us,
    graph_timer,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MEDIAN_US = 40_000.0
"""More than a run here takes, changed input or not."""


def spin(cycles: int) -> Run:
    def run() -> list[torch.Tensor]:
        torch.cuda._sleep(cycles)
        return []

    return run


def judge(copy: Copy, timer: Timer, expected: Expected) -> str | None:
    """What is found wrong after timing."""
    wrong = last_round([copy], timer, expected)[1]
    return wrong or recheck([copy], timer, expected, MEDIAN_US)[0]


def median(timer: object, n: int = 20) -> float:
    return statistics.median(timer.take(n))  # type: ignore[attr-defined]


def test_an_empty_pair_takes_less_than_ten_microseconds() -> None:
    assert 0 <= event_pair_us() < 10


def test_time_scales_with_work() -> None:
    short = median(graph_timer([spin(200_000)], "warm"))
    long = median(graph_timer([spin(800_000)], "warm"))
    assert 3.5 < long / short < 4.5


def test_a_spin_takes_its_cycles_at_some_clock_the_device_has() -> None:
    """Per cycle, between the fastest clock and half of it; the floor is the pair's own time."""
    cycles = 1_000_000
    per_us = cycles / (median(graph_timer([spin(cycles)], "warm")) - event_pair_us())
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(0).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    fastest = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    assert fastest / 2 < per_us < fastest * 1.02


def test_time_is_a_line_through_the_floor() -> None:
    """Equal steps of work take equal time, down to an empty launch."""
    steps = [0, 200_000, 400_000, 600_000]
    times = [median(graph_timer([spin(cycles)], "warm")) for cycles in steps]
    slopes = [later - earlier for earlier, later in pairwise(times)]
    assert max(slopes) < 1.1 * min(slopes)
    assert times[0] < 20


def test_a_graph_that_keeps_the_host_ahead_takes_as_long_without_spins() -> None:
    """Its first block has them, later ones do not."""
    graph_timer([spin(2_000_000)], "warm").take(20)
    timer = graph_timer([spin(400_000)], "warm")
    spun, alone = median(timer), median(timer)
    assert spun > AHEAD_US
    assert alone == pytest.approx(spun, rel=0.02)


def test_what_capture_and_warm_up_cost_is_not_in_a_sample() -> None:
    """Warm-ups and capture run the op's host side; no sample does."""
    ran = []

    def run() -> list[torch.Tensor]:
        ran.append(time.perf_counter())
        time.sleep(0.02)
        torch.cuda._sleep(10_000)
        return []

    timer = graph_timer([run], "warm")
    before = len(ran)
    assert median(timer) < 1_000
    assert len(ran) == before == 3


def test_a_captured_launch_excludes_the_host() -> None:
    """A hundred tiny launches: the graph replays them faster than the host can launch them."""
    x = torch.zeros(16, device="cuda")

    def run() -> list[torch.Tensor]:
        for _ in range(100):
            x.add_(1.0)
        return [x]

    assert median(graph_timer([run], "warm")) < median(eager_timer(run))


def test_the_sweep_lies_outside_the_pair_and_makes_reads_cold() -> None:
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    x = torch.ones(l2 // 4 // 4, device="cuda")
    run: Run = lambda: [x.sum()]  # noqa: E731
    sweep = make_sweep(l2, torch.device("cuda"))
    cold = median(graph_timer([run], "cold", sweep))
    warm = median(graph_timer([run], "warm"))
    assert cold > warm
    assert cold < warm + 1e6 * 2 * l2 / 4e11  # far less than the sweep itself at 400 GB/s more


def test_every_copy_of_a_rotation_is_replayed() -> None:
    timer = graph_timer([spin(1000) for _ in range(5)], "cold")
    timer.take(12)
    assert timer.counts == [3, 3, 2, 2, 2]


def test_a_run_that_cannot_be_captured_is_timed_eagerly_and_says_why() -> None:
    x = torch.ones(4, device="cuda")

    def run() -> list[torch.Tensor]:
        assert x.sum().item() > 0  # a host sync is forbidden while capturing
        return [x * 2]

    with pytest.raises(CaptureError):
        capture(run)
    timer = graph_timer([run], "warm")
    assert timer.method.startswith("eager launches")
    assert "graph capture failed" in timer.note
    assert median(timer, 5) > 0
    assert torch.equal(timer.replay(0)[0], x * 2)


def test_work_on_an_unjoined_stream_cannot_hide_from_the_graph() -> None:
    x = torch.ones(1 << 20, device="cuda")
    side = torch.cuda.Stream()

    def run() -> list[torch.Tensor]:
        with torch.cuda.stream(side):
            y = x * 2
        return [y]

    copy = Copy(run, flippable=x)
    expected = Expected(copy)
    torch.cuda.synchronize()
    timer = graph_timer([run], "warm")
    wrong = judge(copy, timer, expected)
    assert wrong is not None or timer.method.startswith("eager launches")


def test_an_op_that_caches_its_output_is_caught() -> None:
    x = torch.ones(1 << 10, device="cuda")
    out = torch.empty_like(x)
    cache: dict[int, torch.Tensor] = {}

    def run() -> list[torch.Tensor]:
        if x.data_ptr() not in cache:
            cache[x.data_ptr()] = x * 2
        out.copy_(cache[x.data_ptr()])
        return []

    def honest() -> list[torch.Tensor]:
        torch.mul(x, 2, out=out)
        return []

    copy = Copy(honest, [Target(out)], flippable=x)
    expected = Expected(copy)
    wrong = judge(copy, graph_timer([run], "warm"), expected)
    assert wrong is not None
    assert "changed input" in wrong


def test_a_graph_s_own_outputs_pass_the_recheck() -> None:
    x = torch.randn(256, device="cuda")
    run: Run = lambda: [x * 3]  # noqa: E731
    copy = Copy(run, flippable=x)
    expected = Expected(copy)
    assert judge(copy, graph_timer([run], "warm"), expected) is None


def test_a_graph_s_kernels_are_those_a_profiler_sees() -> None:
    """Two kernels; the copy between them is none."""
    x, y = torch.ones(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    run: Run = lambda: [x.add_(1.0), y.copy_(x), x.mul_(2.0)]  # noqa: E731
    assert graph_timer([run], "warm").kernels() == count_kernels(run) == 2


def test_eager_launches_have_no_graph_to_count() -> None:
    x = torch.ones(4, device="cuda")
    assert graph_timer([lambda: [x * x.sum().item()]], "warm").kernels() is None
