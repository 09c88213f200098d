"""The `torch` backend: every op in eager, unfused torch, on CPU and CUDA.

It is the baseline others are measured against and the class a user's backend inherits from.
Docstrings and signatures of the ops are the protocol's (backends/base.py); here stands how they
are done. The attention ops bind their long argument list once (arguments.py): override `decode` or
`prefill` to work on bound arguments, or the contract's op itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.backends.base import Pair, Support
from megabench.backends.checks import check_tensor, require
from megabench.backends.eager_attention import attend, rope, store_output
from megabench.backends.eager_indices import combine_topk_swa, global_topk
from megabench.backends.eager_matmul import DenseWeights, fp8_einsum, linear, operand_dtype
from megabench.backends.paged import read_rows, read_valid_rows, write_rows
from megabench.backends.step_arguments import (
    check_combine,
    check_gather,
    check_global_topk,
    check_insert_compressed,
    check_pad_and_insert,
)
from megabench.formats import (
    HEAD_DIM,
    PAGE_LAYOUTS,
    QUANT_GROUP,
    WV_GROUP_SIZE,
    KVRecord,
    PageLayout,
)
from megabench.geometry import Geometry
from megabench.layout import chunk_columns, chunk_rows, heads_of, pad_q
from megabench.quant import (
    QuantizedActivation,
    pack_mn_major,
    token_slice,
    unpack_scales,
)

ATTENTION_BYTES = 256 << 20
"""Dequantized rows held at a time; attention runs over token chunks of this size."""


class TorchBackend:
    """Eager torch. `page_layout` says how this backend's caches lay out a page."""

    name = "torch"

    def __init__(self, page_layout: PageLayout = "interleaved") -> None:
        require(page_layout in PAGE_LAYOUTS, "page_layout", f"expected one of {PAGE_LAYOUTS}")
        self.page_layout: PageLayout = page_layout
        self._dense = DenseWeights()

    def supports(self, geometry: Geometry, device: torch.device, record: KVRecord) -> Support:
        if device.type == "cuda" and not torch.cuda.is_available():
            return Support(False, "torch sees no CUDA device")
        if device.type not in ("cpu", "cuda"):
            return Support(False, f"device type {device.type} is neither cpu nor cuda")
        return Support(True)

    # ---- attention ----------------------------------------------------------

    def fused_norm_rope_attn_rope_cast_decode(
        self, *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        return self.decode(DecodeArguments(*args, **kwargs))

    def fused_norm_rope_attn_rope_cast_fwd(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return self.prefill(PrefillArguments(*args, **kwargs))

    def decode(self, args: DecodeArguments) -> list[torch.Tensor]:
        """The decode op on its bound arguments -> [out_fp8, out_sf, lse]."""
        args.check()

        def rows_of(tokens: slice) -> Pair:
            parts = [self._paged_rows(args.kv, args.indices, args.topk_length, tokens)]
            if args.extra_kv is not None and args.extra_indices is not None:
                extra = (args.extra_kv, args.extra_indices, args.extra_topk_length)
                parts.append(self._paged_rows(*extra, tokens))
            rows, valid = zip(*parts, strict=True)
            return torch.cat(rows, 1), torch.cat(valid, 1)

        extra_width = 0 if args.extra_indices is None else args.extra_indices.shape[1]
        out, lse, _ = _attend_in_chunks(args, rows_of, args.indices.shape[1] + extra_width)
        return [out.data, out.scale, lse]

    def prefill(self, args: PrefillArguments) -> list[torch.Tensor]:
        """The prefill op on its bound arguments -> [out_fp8, out_sf, max_logits, lse]."""
        args.check()
        kv = args.kv

        def rows_of(tokens: slice) -> Pair:
            row = args.indices[tokens, 0].to(torch.int64)
            valid = _within(row, args.topk_length, tokens) & (row >= 0) & (row < kv.shape[0])
            operand = operand_dtype(kv.device)
            if kv.shape[0] == 0:
                return kv.new_zeros((*row.shape, HEAD_DIM), dtype=operand), valid
            gathered = kv[torch.where(valid, row, 0), 0].to(operand)
            # Zeros in words of eight bytes: a fill under a mask goes element by element.
            gathered.view(torch.int64).masked_fill_(~valid.unsqueeze(-1), 0)
            return gathered, valid

        out, lse, max_logits = _attend_in_chunks(args, rows_of, args.indices.shape[2])
        return [out.data, out.scale, max_logits, lse]

    def _paged_rows(
        self,
        cache: torch.Tensor,
        indices: torch.Tensor,
        length: torch.Tensor | None,
        tokens: slice,
    ) -> Pair:
        slots = indices[tokens]
        inside = _within(slots, length, tokens)
        rows, valid = read_valid_rows(cache, slots, inside, self.page_layout)
        return rows.to(operand_dtype(rows.device)), valid

    # ---- weights ------------------------------------------------------------

    def permute_q_b_proj(
        self, q_b_proj: torch.Tensor, scale_factors: torch.Tensor, h_q: int, d_q: int
    ) -> list[torch.Tensor]:
        require(d_q == HEAD_DIM, "d_q", f"only {HEAD_DIM} is supported, got {d_q}")
        rows, device = h_q * d_q, q_b_proj.device
        check_tensor("q_b_proj", q_b_proj, torch.float8_e4m3fn, (rows, None), device)
        check_tensor("scale_factors", scale_factors, torch.int32, (rows, None), device)
        weight = chunk_rows(q_b_proj.view(torch.uint8), h_q, d_q).view(torch.float8_e4m3fn)
        scale = chunk_rows(unpack_scales(scale_factors), h_q, d_q)
        return [weight, pack_mn_major(scale.unsqueeze(0)).squeeze(0)]

    def permute_wv_proj(
        self, wv_proj: torch.Tensor, scale_factors: torch.Tensor, wv_group_size: int, d_o: int
    ) -> list[torch.Tensor]:
        require(
            wv_group_size == WV_GROUP_SIZE,
            "wv_group_size",
            f"only {WV_GROUP_SIZE} is supported, got {wv_group_size}",
        )
        require(d_o == HEAD_DIM, "d_o", f"only {HEAD_DIM} is supported, got {d_o}")
        width = wv_group_size * d_o
        check_tensor("wv_proj", wv_proj, torch.float8_e4m3fn, (None, None, width), wv_proj.device)
        check_tensor(
            "scale_factors",
            scale_factors,
            torch.int32,
            (*wv_proj.shape[:2], width // (4 * QUANT_GROUP)),
            wv_proj.device,
        )
        codes = chunk_columns(wv_proj.view(torch.uint8), wv_group_size, QUANT_GROUP)
        scale = chunk_columns(unpack_scales(scale_factors), wv_group_size, 1)
        return [codes.view(torch.float8_e4m3fn), pack_mn_major(scale)]

    # ---- caches -------------------------------------------------------------

    def pad_q_and_insert_kv(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        swa_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        padded_heads: int,
    ) -> torch.Tensor:
        check_pad_and_insert(q, kv, swa_cache, slot_mapping, positions, cos_sin_cache, padded_heads)
        write_rows(swa_cache, slot_mapping, rope(kv, cos_sin_cache[positions]), self.page_layout)
        return pad_q(q, padded_heads)

    def insert_compressed(
        self,
        latent: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        compress_ratio: int,
    ) -> None:
        check_insert_compressed(
            latent, positions, cos_sin_cache, cache, slot_mapping, compress_ratio
        )
        closes = (positions + 1) % compress_ratio == 0
        slots = torch.where(closes, slot_mapping, -1)
        row_positions = positions // compress_ratio * compress_ratio
        rows = rope(latent, cos_sin_cache[row_positions])
        write_rows(cache, slots, rows, self.page_layout)

    def dequantize_and_gather_k_cache(
        self,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor | None,
        block_table: torch.Tensor,
        block_size: int,
        offset: int,
    ) -> None:
        check_gather(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset)
        column = torch.arange(out.shape[1] - offset, device=out.device)
        for request in range(out.shape[0]):
            length = (seq_lens if gather_lens is None else gather_lens)[request].to(torch.int64)
            position = seq_lens[request].to(torch.int64) - length + column
            wanted = column < length
            block = (position // block_size).clamp(0, block_table.shape[1] - 1)
            slots = block_table[request][block].to(torch.int64) * block_size + position % block_size
            rows = read_rows(k_cache, torch.where(wanted, slots, 0), self.page_layout)
            target = out[request, offset:]
            target.copy_(torch.where(wanted.unsqueeze(-1), rows.to(out.dtype), target))

    # ---- index lists --------------------------------------------------------

    def compute_global_topk_indices_and_lens(
        self,
        topk_indices: torch.Tensor,
        token_to_req_indices: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        is_valid_token: torch.Tensor,
    ) -> Pair:
        check_global_topk(
            topk_indices, token_to_req_indices, block_table, block_size, is_valid_token
        )
        return global_topk(
            topk_indices, token_to_req_indices, block_table, block_size, is_valid_token
        )

    def combine_topk_swa_indices(
        self,
        topk_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor,
        window_size: int,
        compress_ratio: int,
        topk: int,
        M: int,
        N: int,
        out: Pair | None = None,
    ) -> Pair:
        check_combine(
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            window_size,
            compress_ratio,
            topk,
            out,
        )
        return combine_topk_swa(
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            window_size,
            compress_ratio,
            topk,
            M,
            N,
            out,
        )

    # ---- matrix products ----------------------------------------------------

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._dense.prepare(weight, scale)

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        return linear(x, w, sw, self._dense)

    def fp8_einsum(
        self, equation: str, x: Pair, w: Pair, out: torch.Tensor, recipe: tuple[int, int, int]
    ) -> None:
        fp8_einsum(equation, x, w, out, recipe, self._dense)


def _attend_in_chunks(
    args: DecodeArguments | PrefillArguments, rows_of: Callable[[slice], Pair], width: int
) -> tuple[QuantizedActivation, torch.Tensor, torch.Tensor]:
    """Attend chunk by chunk and write each chunk's slice -> (output, lse, max_logits)."""
    out, lse, max_logits = args.output(), args.empty_lse(), args.empty_lse()
    s_q = args.q.shape[0]
    row_bytes = operand_dtype(args.q.device).itemsize * HEAD_DIM
    chunk = max(1, ATTENTION_BYTES // (row_bytes * max(width, 1)))
    for start in range(0, s_q, chunk):
        tokens = slice(start, min(start + chunk, s_q))
        rows, valid = rows_of(tokens)
        attended = attend(
            heads_of(args.q[tokens]),
            rows,
            valid,
            args.cos_sin_cache[args.token_positions[tokens].to(torch.int64)],
            args.sm_scale,
            args.attn_sink,
            args.q_norm_eps,
        )
        lse[tokens], max_logits[tokens] = attended.lse, attended.max_logits
        store_output(attended.out, token_slice(out, tokens.start, tokens.stop))
    return out, lse, max_logits


def _within(slots: torch.Tensor, length: torch.Tensor | None, tokens: slice) -> torch.Tensor:
    """bool [t, n]: the entry is among the first `length` of its row."""
    column = torch.arange(slots.shape[1], device=slots.device).expand(slots.shape)
    return column >= 0 if length is None else column < length[tokens].unsqueeze(1)
