"""How much memory validating a case takes, judged before anything of it is built."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megabench.cases import Case
from megabench.formats import HEAD_DIM
from megabench.geometry import Geometry
from megabench.weights import linear_shapes
from megabench.workload import available_bytes, pool_bytes, workspace_bytes
from reference.attention import CHUNK_BYTES

_WEIGHT_BYTES = 16
"""A weight element's copies: checkpoint, shard, permuted, dense on both sides, one in making."""
_CACHE_COPIES = 10
"""A pool's: workload, layer and snapshot of two runs, of a third, and two to compare with."""
_WORKSPACE_COPIES = 5
"""The layer's, what the trace keeps of it and found changed, and two to compare with."""
_TOKEN_BYTES = 32
"""A head's dim of a token: Q three times in bf16, output codes, golden's output and bounds."""
_USABLE = 0.9
"""Of a device's memory, what a process may expect to have where nobody else is."""
_TABLE_BYTES = 64 * (4 + 4 + 8 + 8)
"""A position of the rotation table, of its copy to compare with, and while it is made."""


def needed_bytes(case: Case, geometry: Geometry) -> int:
    """An upper estimate, in bytes, of validating `case`: weights, pools, workspaces, results."""
    elements = sum(rows * columns for rows, columns in linear_shapes(geometry).values())
    results = case.num_tokens * (geometry.num_heads // case.tp) * HEAD_DIM * _TOKEN_BYTES
    return (
        elements * _WEIGHT_BYTES
        + pool_bytes(case, geometry) * _CACHE_COPIES
        + workspace_bytes(case, geometry) * _WORKSPACE_COPIES
        + results
        + case.max_seq_len * _TABLE_BYTES
        + 2 * CHUNK_BYTES
    )


def _held_bytes(device: torch.device) -> int:
    """What this process already holds: mostly the weights that the estimate counts again."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _total_bytes(device: torch.device) -> int:
    """What the device has when nobody else holds any of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_problem(case: Case, geometry: Geometry, device: torch.device) -> str | None:
    """Why a case does not fit a device, with the GiB it needs, or None when it does.

    MemoryError when it would fit but for what others hold: to skip it then would let a run that
    judged nothing pass for a good one.
    """
    available = available_bytes(device)
    if available is None:
        return None
    needed, free = needed_bytes(case, geometry), available + _held_bytes(device)
    if needed <= free:
        return None
    total = _total_bytes(device)
    said = f"needs {_gib(needed)} GiB on {device}, {_gib(free)} GiB are free"
    if needed <= total * _USABLE:
        raise MemoryError(f"{said} of {_gib(total)}")
    return said


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
