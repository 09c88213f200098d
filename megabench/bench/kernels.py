"""How many kernels a step launches: the nodes of its captured graph, or what a profiler saw."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

KERNEL_NODE, CHILD_NODE = 0, 4
"""CU_GRAPH_NODE_TYPE_KERNEL and _GRAPH (cuda.h, CUgraphNodeType)."""


def kernels_of(graph: torch.cuda.CUDAGraph) -> int:
    """Kernel nodes of a graph captured with `keep_graph`, those of its child graphs included
    and those behind a condition left out. RuntimeError when the driver refuses."""
    return _kernel_nodes(graph.raw_cuda_graph())


def _kernel_nodes(graph: int | None) -> int:
    found = 0
    for node in _nodes(graph):
        kind = ctypes.c_int()
        _ask("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == CHILD_NODE:
            child = ctypes.c_void_p()
            _ask("cuGraphChildGraphNodeGetGraph", ctypes.c_void_p(node), ctypes.byref(child))
            found += _kernel_nodes(child.value)
        found += kind.value == KERNEL_NODE
    return found


def _nodes(graph: int | None) -> Iterator[int | None]:
    """Handles of a graph's nodes."""
    count = ctypes.c_size_t()
    _ask("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _ask("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    yield from nodes


def _ask(function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        raise RuntimeError(f"{function} gave CUDA error {status}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def count_kernels(run: Callable[[], object]) -> int | None:
    """Kernels that one run launches, copies and fills left out; None when the profiler saw none."""
    _spend_first_session()
    names = _device_work(run)
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names) or None


@cache
def _spend_first_session() -> None:
    """The profiler's first session of a process takes seconds, and may record nothing."""
    _device_work(lambda: torch.zeros(1, device="cuda"))


def _device_work(run: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and fills that one run launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type.name == "CUDA"]
