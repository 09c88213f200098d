"""One attention layer's step on one tensor-parallel rank, golden on golden, and the sum over ranks.

Order as in the contract, section 7: wq_b, K/V insertion, compressed insertion, attention of every
token (decode and prefill mean the same: a window and a top-k of cache rows), cast, wo_a, wo_b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from . import indices
from .attention import Attended, attend
from .bounds import BF16_ROUNDOFF, FP32_ROUNDOFF, Bounded
from .cache import InsertedRows, inserted_rows
from .cast import cast_output
from .codes import round_bf16
from .linear import Weight, dequantize_weight, linear, wo_a
from .model import Model
from .records import write_record
from .rows import Paged, paged_rows


@dataclass(frozen=True)
class Weights:
    """FP8 weights in standard order (e4m3 and ue8m0 bytes), of a whole layer or of one rank.

    ``wq_b [H * 512, r]``, ``wo_a [G, d, 4096]``, ``wo_b [hidden, G * d]``; each ``*_scale`` has one
    byte per row and 32 columns; ``sinks`` fp32 ``[H]``.
    """

    wq_b: Tensor
    wq_b_scale: Tensor
    wo_a: Tensor
    wo_a_scale: Tensor
    wo_b: Tensor
    wo_b_scale: Tensor
    sinks: Tensor

    def shard(self, tp: int, rank: int) -> Weights:
        """Rank ``rank``'s heads of wq_b, groups of wo_a and input columns of wo_b."""

        def part(t: Tensor, dim: int = 0) -> Tensor:
            return t.chunk(tp, dim)[rank]

        return Weights(
            part(self.wq_b),
            part(self.wq_b_scale),
            part(self.wo_a),
            part(self.wo_a_scale),
            part(self.wo_b, 1),
            part(self.wo_b_scale, 1),
            part(self.sinks),
        )

    def prepare(self, dtype: torch.dtype = torch.float32) -> PreparedWeights:
        """Dequantize once, to be used by many steps."""
        return PreparedWeights(
            dequantize_weight(self.wq_b, self.wq_b_scale, dtype),
            dequantize_weight(self.wo_a, self.wo_a_scale, dtype),
            dequantize_weight(self.wo_b, self.wo_b_scale, dtype),
            self.sinks,
        )


class PreparedWeights(NamedTuple):
    """Dequantized weights of one rank; their dtype is the dtype of the linears."""

    wq_b: Weight
    wo_a: Weight
    wo_b: Weight
    sinks: Tensor


class Request(NamedTuple):
    """``query_len`` tokens of this step end a sequence that is ``seq_len`` long after it."""

    query_len: int
    seq_len: int
    is_decode: bool


class Tokens(NamedTuple):
    """Per token of a step: ``position``, ``request``, ``is_decode`` and ``valid``, each ``[T]``."""

    position: Tensor
    request: Tensor
    is_decode: Tensor
    valid: Tensor


def tokens_of(requests: Sequence[Request], total: int | None = None) -> Tokens:
    """Tokens of the requests in order (decodes must come first), then padding up to ``total``.

    Padding tokens are not valid: position 0, request 0. ValueError for a decode after a prefill.
    """
    kinds = [r.is_decode for r in requests]
    if kinds != sorted(kinds, reverse=True):
        raise ValueError("requests: decodes must come before prefills")
    query = torch.tensor([r.query_len for r in requests], dtype=torch.long)
    request = torch.repeat_interleave(torch.arange(len(requests)), query)
    start = query.cumsum(0) - query
    prefix = torch.tensor([r.seq_len - r.query_len for r in requests], dtype=torch.long)
    position = (prefix - start)[request] + torch.arange(len(request))
    decode = torch.tensor(kinds, dtype=torch.bool)[request]
    padding = (0, (len(request) if total is None else total) - len(request))
    tokens = (position, request, decode, torch.ones_like(decode))
    return Tokens(*(torch.nn.functional.pad(t, padding) for t in tokens))


@dataclass(frozen=True)
class Step:
    """Inputs of one rank's step. T tokens, R requests; ``table`` is the layer's cos/sin
    ``[P, 64]``.

    ``qr`` bf16 ``[T, r]``, ``kv`` bf16 ``[T, 512]``; caches hold their bytes before the step and
    are not changed. ``compress_ratio`` 0 is an SWA-only layer: no compressed cache, table or top-k.
    ``latent`` bf16 ``[T, 512]`` is None when an earlier layer inserted the compressed rows.
    Padding is ``tokens.valid`` False: such a token writes nothing and attends to nothing.
    """

    tokens: Tokens
    seq_lens: Tensor
    qr: Tensor
    kv: Tensor
    table: Tensor
    swa_cache: Tensor
    swa_block_table: Tensor
    weights: PreparedWeights
    compress_ratio: int = 0
    compressed_cache: Tensor | None = None
    compressed_block_table: Tensor | None = None
    latent: Tensor | None = None
    topk: Tensor | None = None
    page_layout: str = "interleaved"
    model: Model = field(default_factory=Model)
    q_norm_eps: float | None = None


class Inserted(NamedTuple):
    """An insertion: slots int64 ``[T]`` (-1 writes nothing), expected records.

    The cache after it.
    """

    slots: Tensor
    rows: InsertedRows
    cache: Tensor


class Selected(NamedTuple):
    """Rows a token attends to in one cache: slots int32 ``[T, n]`` and lens int32 ``[T]``."""

    slots: Tensor
    lens: Tensor


class RankResult(NamedTuple):
    """Every value of a step, in order. ``q`` bf16 ``[T, H, 512]`` un-roped, natural order;
    ``codes`` and ``scales`` the cast output ``[T, H, 512]`` and ``[T, H, 16]``; ``z`` bf16
    ``[T, G, d]``; ``output`` bf16 ``[T, hidden]``, this rank's summand."""

    q: Tensor
    swa: Inserted
    compressed: Inserted | None
    swa_selected: Selected
    compressed_selected: Selected | None
    attended: Attended
    codes: Tensor
    scales: Tensor
    z: Tensor
    output: Tensor


def _insert(step: Step, rows: Tensor, cache: Tensor, block_table: Tensor, ratio: int) -> Inserted:
    """Insert one row a token; ratio 0 is the SWA cache, where every position has its row."""
    position, request, _, valid = step.tokens
    every = max(ratio, 1)
    closing = valid & ((position + 1) % every == 0)
    local = torch.where(closing, position // every, -1)[:, None]
    slots = indices.slots_of(local, request, block_table, cache.shape[1])[:, 0]
    expected = inserted_rows(rows, position, step.table, cache.shape[-1], ratio or None)
    after = cache.clone()
    write_record(after, slots, expected.bytes, step.page_layout)
    return Inserted(slots, expected, after)


def _select_compressed(step: Step, topk: Tensor, block_table: Tensor, page: int) -> Selected:
    """Decode counts the row's entries; prefill takes the columns that its position allows."""
    position, request, is_decode, valid = step.tokens
    ratio = step.compress_ratio
    held = (step.seq_lens.long() // ratio)[request][:, None]
    local = torch.where(is_decode[:, None] | (topk < held), topk, -1)
    slots, lens = indices.global_topk(local, request, block_table, page, valid)
    allowed = ((position + 1) // ratio).clamp(max=topk.shape[1]) * valid
    return Selected(slots, torch.where(is_decode, lens, allowed.int()))


def rank_step(step: Step, dtype: torch.dtype = torch.float32, bounds: bool = False) -> RankResult:
    """A whole mixed-batch step of one rank; ``dtype`` is attention's arithmetic."""
    position, request, _, valid = step.tokens
    model, weights = step.model, step.weights
    q = round_bf16(linear(step.qr, weights.wq_b).value).bfloat16()
    q = torch.unflatten(q, 1, (-1, model.head_dim))

    swa = _insert(step, step.kv, step.swa_cache, step.swa_block_table, 0)
    page = step.swa_cache.shape[1]
    window = Selected(
        *indices.decode_swa(
            position, step.swa_block_table, request, page, model.sliding_window, valid
        )
    )
    parts = [Paged(swa.cache, *window, layout=step.page_layout)]

    compressed, chosen = None, None
    if step.compress_ratio:
        cache, block_table, topk = step.compressed_cache, step.compressed_block_table, step.topk
        if cache is None or block_table is None or topk is None:
            raise ValueError("a compressed layer needs compressed_cache, its block table and topk")
        if step.latent is not None:
            compressed = _insert(step, step.latent, cache, block_table, step.compress_ratio)
            cache = compressed.cache
        chosen = _select_compressed(step, topk, block_table, cache.shape[1])
        parts.append(Paged(cache, *chosen, layout=step.page_layout))

    attended = attend(
        q,
        position,
        step.table,
        paged_rows(parts),
        weights.sinks,
        model.softmax_scale,
        dtype,
        step.q_norm_eps,
        bounds=bounds,
    )
    codes, scales = cast_output(attended.o)
    z = round_bf16(wo_a(codes, scales, weights.wo_a).value).bfloat16()
    output = round_bf16(linear(z.flatten(1), weights.wo_b).value).bfloat16()
    return RankResult(q, swa, compressed, window, chosen, attended, codes, scales, z, output)


def tp_sum(outputs: Sequence[Tensor]) -> Bounded:
    """Sum of the ranks' bf16 outputs ``[T, hidden]`` in float64, before its rounding to bf16.

    An all-reduce may round every partial sum to bf16, which the bound allows: all but the last,
    which is the result's own rounding.
    """
    stacked = torch.stack([o.double() for o in outputs])
    ranks = len(outputs)
    relative = max(ranks - 2, 0) * BF16_ROUNDOFF + ranks * FP32_ROUNDOFF
    return Bounded(stacked.sum(0), (relative * stacked.abs().sum(0)).float())
