"""How much memory validating a case takes, judged before anything of it is built."""

from __future__ import annotations

from pathlib import Path

import torch

from megabench.cases import Case
from megabench.formats import COMPRESSED_BLOCK, FP8, HEAD_DIM, PREFILL_CHUNK_SIZE, SWA_PAGE
from megabench.geometry import Geometry
from megabench.metadata import prefill_workspace_rows
from megabench.weights import linear_shapes
from reference.attention import CHUNK_BYTES

_WEIGHT_BYTES = 16
"""A weight element's copies: checkpoint, shard, permuted, dense on both sides, one in making."""
_CACHE_COPIES = 8
"""A pool's: workload, layer, snapshot, restored, for two runs."""
_TOKEN_BYTES = 24
"""A head's dim of a token: Q three times in bf16, output codes, golden's output and bounds."""
_TABLE_BYTES = 64 * (4 + 8 + 8)
"""A position of the rotation table while it is made."""


def needed_bytes(case: Case, geometry: Geometry) -> int:
    """An upper estimate, in bytes, of validating `case`: weights, pools, workspaces, results."""
    elements = sum(rows * columns for rows, columns in linear_shapes(geometry).values())
    swa = sum(
        min(r.seq_len, r.query_len + geometry.window_size) + 2 * SWA_PAGE for r in case.requests
    )
    pools = (swa + case.page_padding * swa // SWA_PAGE) * FP8.nbytes
    if case.compress_ratio:
        page = COMPRESSED_BLOCK // case.compress_ratio
        rows = sum(r.seq_len // case.compress_ratio + 2 * page for r in case.requests)
        pools += (rows + case.page_padding * rows // page) * case.record.nbytes
    workspace = 0
    if not all(r.is_decode for r in case.requests):
        rows = prefill_workspace_rows(
            case.max_seq_len, case.compress_ratio, geometry.window_size, case.num_tokens
        )
        workspace = 2 * PREFILL_CHUNK_SIZE * rows * HEAD_DIM * 2
    results = case.num_tokens * (geometry.num_heads // case.tp) * HEAD_DIM * _TOKEN_BYTES
    table = case.max_seq_len * _TABLE_BYTES
    return (
        elements * _WEIGHT_BYTES
        + pools * _CACHE_COPIES
        + workspace
        + results
        + table
        + 2 * CHUNK_BYTES
    )


def available_bytes(device: torch.device) -> int:
    """Memory a new allocation may still use on `device`, weights of this run included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reused = torch.cuda.memory_reserved(device)
        return free + reused
    return _host_available() + _resident()


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _resident() -> int:
    """What this process already holds: mostly the weights that the estimate counts again."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def memory_problem(case: Case, geometry: Geometry, device: torch.device) -> str | None:
    """Why a case does not fit, with the GiB it needs, or None when it does."""
    needed, free = needed_bytes(case, geometry), available_bytes(device)
    if needed <= free:
        return None
    return f"needs {needed / 2**30:.1f} GiB on {device}, {free / 2**30:.1f} GiB are free"
