"""What stands in the way of a case on a device: topology, length, backend, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megabench.backends.base import Backend
from megabench.cases import Case
from megabench.formats import (
    COMPRESSED_BLOCK,
    FP8,
    HEAD_DIM,
    PREFILL_CHUNK_SIZE,
    SWA_PAGE,
    KVRecord,
    round_up,
)
from megabench.geometry import Geometry, topology_problem
from megabench.metadata import prefill_workspace_rows
from megabench.weights import linear_shapes

_CACHE_COPIES = 3
"""The workload's, the layer's, and one kept to compare with."""
_POOL_EXTRA_PAGES = 6
"""The null page, three spare ones, one before the pool and one after it."""
_BYTES_PER_ELEMENT = 16
"""Of a token's queries and outputs: kernel operands in bf16 and a float64 golden chunk."""
_SCRATCH = 512 << 20
"""Chunks of dequantized rows and interpreter overhead."""


def obstacle(case: Case, backend: Backend, device: torch.device) -> str | None:
    """Why `case` cannot run on `backend` and `device`, one sentence, or None when it can."""
    geometry = Geometry.load(case.model)
    problem = topology_problem(geometry, case.tp)
    if problem:
        return problem
    if case.max_seq_len > geometry.max_position_embeddings:
        return (
            f"a length of {case.max_seq_len} exceeds the model's "
            f"{geometry.max_position_embeddings} positions"
        )
    support = backend.supports(geometry, device, case.record)
    if not support.ok:
        return support.reason or f"backend {backend.name} does not support this case"
    needed, available = needed_bytes(case), available_bytes(device)
    if available is not None and needed > available:
        return f"needs {_gib(needed)} GiB of memory, {device} has {_gib(available)} GiB free"
    return None


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


def needed_bytes(case: Case) -> int:
    """Estimated bytes of one case: caches and copies, tokens, workspace, RoPE table, weights."""
    geometry = Geometry.load(case.model)
    width = geometry.num_heads // case.tp * HEAD_DIM + geometry.hidden_size + geometry.q_lora_rank
    listed = (geometry.window_size + geometry.index_topk) * 16
    tokens = case.num_tokens * (width * _BYTES_PER_ELEMENT + listed)
    table = case.max_seq_len * geometry.rope_dim * 24
    linears = sum(rows * columns for rows, columns in linear_shapes(geometry).values())
    weights = linears + linears * 6 // case.tp  # checkpoint; then codes twice and a dense form
    caches = _CACHE_COPIES * pool_bytes(case, geometry)
    return caches + tokens + table + workspace_bytes(case, geometry) + weights + _SCRATCH


def pool_bytes(case: Case, geometry: Geometry) -> int:
    """Bytes of a case's two cache pools: the pages a step may name, of which no decode's top-k
    names more than one page an entry."""
    requests, ratio = case.requests, case.compress_ratio
    pages = sum((r.query_len + geometry.window_size) // SWA_PAGE + 2 for r in requests)
    caches = _pool_bytes(case, pages, SWA_PAGE, FP8)
    if ratio:
        blocks = sum(
            min(
                round_up(r.seq_len, COMPRESSED_BLOCK) // COMPRESSED_BLOCK,
                r.query_len * (geometry.index_topk + 1) if r.is_decode else r.seq_len,
            )
            for r in requests
        )
        caches += _pool_bytes(case, blocks, COMPRESSED_BLOCK // ratio, case.record)
    return caches


def workspace_bytes(case: Case, geometry: Geometry) -> int:
    """Bytes of the prefill workspace's gathered rows; 0 for a step of decodes only."""
    if all(r.is_decode for r in case.requests):
        return 0
    window, tokens = geometry.window_size, case.num_tokens
    rows = prefill_workspace_rows(case.max_seq_len, case.compress_ratio, window, tokens)
    return PREFILL_CHUNK_SIZE * rows * HEAD_DIM * 2


def _pool_bytes(case: Case, pages: int, page: int, record: KVRecord) -> int:
    return (pages + _POOL_EXTRA_PAGES) * (page + case.page_padding) * record.nbytes


def available_bytes(device: torch.device) -> int | None:
    """Free bytes on a device, or None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return min(_host_limits(), default=None)


def _host_limits() -> Iterator[int]:
    """Free host memory as the kernel and the control group see it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        yield int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        yield max(limit - int((group / "memory.current").read_text()), 0)
    except (OSError, ValueError):
        pass
