"""Floating-point operations and bytes of each op, counted from the index lists it was given.

Two byte counts: compulsory is each distinct byte once (the floor of any implementation), issued is
every read and write the op asks for, repeats and padded heads included. FLOPs are those of live
heads and live rows: a multiply-add is two, QK and PV each 2 * 512 a head and row; RoPE, softmax and
the casts are left out (under 1 %).

For the whole step, what passes from op to op is not compulsory: a fused step could keep it on
chip. Its compulsory bytes are inputs, weights, distinct cache rows and outputs. Rows written in
the step and read in it count once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megabench.bench.calls import OpCall
from megabench.formats import HEAD_DIM, QUANT_GROUP

BF16 = 2
ROPE_ROW_BYTES = 256
"""One row of the fp32 [P, 64] cos/sin table."""


@dataclass(frozen=True)
class Work:
    """What an op has to do."""

    flops: int = 0
    flops_fp8: int = 0
    """Of `flops`, those whose two operands are e4m3: the fp8 matmul rate bounds them."""
    bytes_compulsory: int = 0
    bytes_issued: int = 0
    bytes_written: int = 0
    """Of `bytes_compulsory`: a cache may still hold them when the op has ended."""


@dataclass(frozen=True)
class Rows:
    """Rows of one pool that a call reads or writes, repeats kept."""

    pool: int
    """Address of the pool: equal for equal caches."""
    row_bytes: int
    slots: torch.Tensor
    """int64 [n]"""
    internal: bool = False
    """A pool that lives inside the step (the prefill workspace)."""
    written: bool = False

    @property
    def issued(self) -> int:
        return self.slots.numel() * self.row_bytes


@dataclass(frozen=True)
class Traffic:
    """One call's work, in the parts that ops and steps add up differently."""

    flops: int = 0
    flops_fp8: int = 0
    external: int = 0
    """Distinct bytes that enter or leave the step."""
    internal: int = 0
    """Distinct bytes that pass between ops of the step."""
    repeated: int = 0
    """Bytes beyond the distinct ones that the op asks for, rows apart."""
    external_out: int = 0
    """Of `external`, those written."""
    internal_out: int = 0
    """Of `internal`, those written."""
    rows: tuple[Rows, ...] = ()


def traffic_of(call: OpCall, *, live_heads: int | None = None, output: bool = False) -> Traffic:
    """One call's traffic. `live_heads` of the padded ones do useful work (default: all of them);
    `output` marks the linear whose result leaves the step."""
    arguments = call.arguments
    if call.op == "linear":
        return _linear(arguments, output)
    counter: Callable[[Mapping[str, Any], int | None], Traffic] = _COUNTERS[call.op]
    return counter(arguments, live_heads)


def op_work(traffic: list[Traffic]) -> Work:
    """The work of calls timed together as one op."""
    return _sum(traffic, [r for t in traffic for r in t.rows], inside=True)


def step_work(traffic: list[Traffic]) -> Work:
    """The work of a whole step: see the module's text for what is compulsory in it."""
    rows = [r for t in traffic for r in t.rows if not r.internal]
    return _sum(traffic, rows, inside=False)


def _sum(traffic: list[Traffic], rows: list[Rows], *, inside: bool) -> Work:
    external = sum(t.external for t in traffic)
    internal = sum(t.internal for t in traffic)
    issued = sum(r.issued for t in traffic for r in t.rows) + sum(t.repeated for t in traffic)
    return Work(
        flops=sum(t.flops for t in traffic),
        flops_fp8=sum(t.flops_fp8 for t in traffic),
        bytes_compulsory=external + (internal if inside else 0) + _distinct(rows),
        bytes_issued=external + internal + issued,
        bytes_written=sum(t.external_out + (t.internal_out if inside else 0) for t in traffic)
        + _distinct([r for r in rows if r.written]),
    )


def _distinct(rows: list[Rows]) -> int:
    """Bytes of the distinct rows over all reads and writes, pool by pool."""
    pools: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    for call, part in enumerate(rows):
        # The workspace is filled anew for every chunk: equal slots are then different rows.
        key = (part.pool, part.row_bytes, call if part.internal else 0)
        pools.setdefault(key, []).append(part.slots)
    return sum(_count_distinct(torch.cat(s)) * key[1] for key, s in pools.items())


def _count_distinct(values: torch.Tensor) -> int:
    return int(torch.unique(values).numel())


def _nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _rope_bytes(positions: torch.Tensor) -> tuple[int, int]:
    """(distinct, repeated) bytes of the cos/sin rows at `positions`."""
    distinct = _count_distinct(positions)
    return distinct * ROPE_ROW_BYTES, (positions.numel() - distinct) * ROPE_ROW_BYTES


def _linear(a: Mapping[str, Any], output: bool) -> Traffic:
    x, w, sw = a["x"], a["w"], a["sw"]
    (tokens, k), n = x.shape, w.shape[0]
    result = tokens * n * BF16
    flops = 2 * tokens * n * k
    passed, outside = (_nbytes(x), result) if output else (result, _nbytes(x))
    return Traffic(
        flops,
        flops,
        external=_nbytes(w, sw) + outside,
        internal=passed,
        external_out=result if output else 0,
        internal_out=0 if output else result,
    )


def _einsum(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    (x, sx), (w, sw), out = a["x"], a["w"], a["out"]
    flops = 2 * out.numel() * x.shape[-1]
    return Traffic(
        flops,
        flops,
        external=_nbytes(w, sw),
        internal=_nbytes(x, sx, out),
        internal_out=_nbytes(out),
    )


def _pad_and_insert(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    q, slots, padded = a["q"], a["slot_mapping"], a["padded_heads"]
    tokens, heads, _ = q.shape
    moved_heads = heads + padded if heads < padded else 0  # without padding Q may be handed on
    rope, repeated = _rope_bytes(a["positions"])
    return Traffic(
        external=_nbytes(a["kv"], slots, a["positions"]) + rope,
        internal=tokens * moved_heads * HEAD_DIM * BF16,
        internal_out=tokens * (padded if moved_heads else 0) * HEAD_DIM * BF16,
        repeated=repeated,
        rows=(_written(a["swa_cache"], slots),),
    )


def _insert_compressed(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    positions, slots, ratio = a["positions"], a["slot_mapping"], a["compress_ratio"]
    closing = (positions + 1) % ratio == 0
    row_positions = positions[closing & (slots >= 0)] // ratio * ratio
    rope, repeated = _rope_bytes(row_positions)
    return Traffic(
        external=row_positions.numel() * HEAD_DIM * BF16 + _nbytes(slots, positions) + rope,
        repeated=repeated,
        rows=(_written(a["cache"], slots[closing]),),
    )


def _written(cache: torch.Tensor, slots: torch.Tensor) -> Rows:
    kept = slots[slots >= 0].to(torch.int64)
    return Rows(cache.data_ptr(), cache.shape[-1], kept, written=True)


def _gather(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    """Each request's last `gather_lens` rows up to `seq_lens`, through its block table."""
    cache, table, size = a["k_cache"], a["block_table"], a["block_size"]
    lens = a["seq_lens"] if a["gather_lens"] is None else a["gather_lens"]
    slots, blocks = [], 0
    for request in range(a["out"].shape[0]):
        end, length = int(a["seq_lens"][request]), int(lens[request])
        position = torch.arange(end - length, end, device=cache.device)
        slots.append(table[request][position // size].to(torch.int64) * size + position % size)
        blocks += _count_distinct(position // size)
    rows = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
    return Traffic(
        external=4 * blocks + _nbytes(a["seq_lens"], a["gather_lens"]),
        internal=rows.numel() * HEAD_DIM * BF16,
        internal_out=rows.numel() * HEAD_DIM * BF16,
        rows=(Rows(cache.data_ptr(), cache.shape[-1], rows),),
    )


def _global_topk(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    topk, valid = a["topk_indices"], a["is_valid_token"]
    tokens = topk.shape[0]
    named = topk >= 0
    request = a["token_to_req_indices"][:tokens].to(torch.int64)
    block = request.unsqueeze(1) * a["block_table"].shape[1] + topk // a["block_size"]
    blocks = _count_distinct(block[named])
    return Traffic(
        external=_nbytes(topk, valid[:tokens]) + 4 * tokens + 4 * blocks,
        internal=_nbytes(topk) + 4 * tokens,
        internal_out=_nbytes(topk) + 4 * tokens,
        repeated=4 * (int(named.sum()) - blocks),
    )


def _combine(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    topk = a["topk_indices"][:, : a["topk"]]
    tokens = topk.shape[0]
    width = a["out"][0].shape[1] if a["out"] else a["topk"] + a["window_size"]
    lists = _nbytes(a["query_start_loc"], a["seq_lens"], a["gather_lens"])
    made = 4 * tokens * (width + 1)
    return Traffic(external=_nbytes(topk) + lists, internal=made, internal_out=made)


def _decode(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    rows = [_live_slots(a["kv"], a["indices"], a["topk_length"])]
    if a["extra_kv"] is not None:
        rows.append(_live_slots(a["extra_kv"], a["extra_indices"], a["extra_topk_length"]))
    lens = _nbytes(a["topk_length"], a["extra_topk_length"])
    return _attention(a, tuple(rows), lens, live_heads)


def _prefill(a: Mapping[str, Any], live_heads: int | None) -> Traffic:
    kv, indices = a["kv"], a["indices"][:, 0]
    slots = _within_length(indices, a["topk_length"])
    slots = slots[(slots >= 0) & (slots < kv.shape[0])].to(torch.int64)
    rows = (Rows(kv.data_ptr(), kv.shape[-1] * BF16, slots, internal=True),)
    return _attention(a, rows, _nbytes(a["topk_length"]), live_heads)


def _attention(
    a: Mapping[str, Any], rows: tuple[Rows, ...], lens: int, live_heads: int | None
) -> Traffic:
    tokens, padded, _ = a["q"].shape
    heads = padded if live_heads is None else min(live_heads, padded)
    live_rows = sum(r.slots.numel() for r in rows)
    rope, repeated = _rope_bytes(a["token_positions"])
    out_per_head = HEAD_DIM + HEAD_DIM // QUANT_GROUP + 4  # codes, scales and lse of a token
    per_head = HEAD_DIM * BF16 + out_per_head
    return Traffic(
        flops=4 * heads * HEAD_DIM * live_rows,
        external=4 * heads + _nbytes(a["token_positions"]) + rope,
        internal=tokens * heads * per_head + 4 * live_rows + lens,
        internal_out=tokens * heads * out_per_head,
        repeated=repeated + tokens * (padded - heads) * per_head,
        rows=rows,
    )


def _within_length(indices: torch.Tensor, length: torch.Tensor | None) -> torch.Tensor:
    """The entries of each row that its length keeps, flattened."""
    if length is None:
        return indices.reshape(-1)
    column = torch.arange(indices.shape[-1], device=indices.device)
    return indices[column < length.unsqueeze(1)]


def _live_slots(cache: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None) -> Rows:
    slots = _within_length(indices, length)
    pool = cache.shape[0] * cache.shape[1]
    slots = slots[(slots >= 0) & (slots < pool)].to(torch.int64)
    return Rows(cache.data_ptr(), cache.shape[-1], slots)


_COUNTERS: dict[str, Callable[[Mapping[str, Any], int | None], Traffic]] = {
    "fp8_einsum": _einsum,
    "pad_q_and_insert_kv": _pad_and_insert,
    "insert_compressed": _insert_compressed,
    "dequantize_and_gather_k_cache": _gather,
    "compute_global_topk_indices_and_lens": _global_topk,
    "combine_topk_swa_indices": _combine,
    "fused_norm_rope_attn_rope_cast_decode": _decode,
    "fused_norm_rope_attn_rope_cast_fwd": _prefill,
}
