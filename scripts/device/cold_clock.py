"""The clock of the sm90 kernels' scripts: cold replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def median_us(launch: Callable[[], object], samples: int = 21) -> float:
    """Median of a CUDA graph's replays, 256 MB written before each."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    events = []
    for _ in range(samples):
        flush.fill_(1)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return sorted(1e3 * a.elapsed_time(b) for a, b in events)[samples // 2]
