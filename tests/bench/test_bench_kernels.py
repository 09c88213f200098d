"""A graph's kernels are its kernel nodes, at any depth; what the driver refuses is an error."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from megabench.bench import kernels

KERNEL, COPY, FILL, CHILD = 0, 1, 2, 4
GRAPHS = {100: [(1, KERNEL), (2, COPY), (3, CHILD), (4, KERNEL), (5, FILL)], 300: [(6, KERNEL)]}
"""Nodes of graphs by handle; node 3 holds graph 300."""
KINDS = {node: kind for nodes in GRAPHS.values() for node, kind in nodes}


class Driver:
    """Three functions of libcuda on `GRAPHS`."""

    status = 0

    def cuGraphGetNodes(self, graph: ctypes.c_void_p, nodes: Any, count: Any) -> int:  # noqa: N802
        found = GRAPHS.get(graph.value or 0, [])
        count._obj.value = len(found)
        if nodes is not None:
            nodes[:] = [node for node, _ in found]
        return self.status

    def cuGraphNodeGetType(self, node: ctypes.c_void_p, kind: Any) -> int:  # noqa: N802
        kind._obj.value = KINDS[node.value or 0]
        return self.status

    def cuGraphChildGraphNodeGetGraph(  # noqa: N802
        self, node: ctypes.c_void_p, graph: Any
    ) -> int:
        graph._obj.value = 100 * (node.value or 0)
        return self.status


class Graph:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def raw_cuda_graph(self) -> int:
        return self.handle


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(kernels, "_driver", lambda: fake)
    return fake


@pytest.mark.parametrize(("graph", "expected"), [(100, 3), (300, 1), (500, 0)])
def test_kernel_nodes_are_counted_and_no_others(graph: int, expected: int, driver: Driver) -> None:
    counted: Any = Graph(graph)
    assert kernels.kernels_of(counted) == expected


def test_a_refusal_is_an_error(driver: Driver) -> None:
    driver.status = 400
    graph: Any = Graph(100)
    with pytest.raises(RuntimeError, match="cuGraphGetNodes gave CUDA error 400"):
        kernels.kernels_of(graph)
