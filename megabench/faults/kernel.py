"""The attention kernels in steps, eager, so that a fault can get any one of them wrong.

Right as it stands: a fault is a subclass with one method of its own.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megabench.backends import Backend
from megabench.backends.paged import read_records
from megabench.faults.base import Args, Op, PutOn, Right, Wear, wearing
from megabench.formats import FP8, NOPE_DIM, KVRecord, PageLayout, record_of
from megabench.layout import heads_of, output_order
from megabench.quant import dequantize_mxfp8, dequantize_nvfp4, quantize_kv_mxfp8
from megabench.validate.trace import DECODE, GATHER, PREFILL

Pair = tuple[Tensor, Tensor]


class Kernel:
    """The decode, prefill and gather ops of one page layout. t tokens, H heads, n rows a token."""

    def __init__(self, page_layout: PageLayout) -> None:
        self.page_layout: PageLayout = page_layout

    # ---- ops ----------------------------------------------------------------

    def attend(self, args: Args, right: Right) -> list[Tensor]:
        """Either attention op, into the buffers it was given."""
        q = heads_of(args["q"])
        angles = self.angles(args["cos_sin_cache"], self.positions(args))
        rows, valid = self.rows(args)
        rows = self.cleared(rows, valid)
        scores = torch.bmm(self.rotated_query(q, angles), rows.transpose(1, 2)) * self.scale(args)
        scores = scores.masked_fill(~valid[:, None], -math.inf)
        weights, top, total = self.softmax(scores)
        lse = self.lse(top, total)
        out = self.product(self.probabilities(weights), rows)
        out = out / self.divisor(weights, total)[..., None]
        out = out * self.sink_factor(args["attn_sink"], lse)[..., None]
        out = self.turned_back(out, angles)
        out = self.empty_rows(out, top, args)
        self.store(args, *self.cast(out, args))
        lse = self.reported_lse(lse, args)
        logs = [top, lse] if "kv" in args and "extra_kv" not in args else [lse]
        return [args["out_fp8"], args["out_sf"], *logs]

    def gather(self, args: Args, right: Right) -> None:
        """Dequantize each request's last rows into the workspace."""
        out, table, page = args["out"], args["block_table"], args["block_size"]
        for request in range(len(out)):
            seq = int(args["seq_lens"][request])
            length = seq if args["gather_lens"] is None else int(args["gather_lens"][request])
            row = torch.arange(seq - length, seq, device=out.device)
            slots = table[request][row // page].long() * page + row % page
            here = slice(args["offset"], args["offset"] + length)
            out[request, here] = self.read(args["k_cache"], slots).to(out.dtype)

    # ---- rows ---------------------------------------------------------------

    def rows(self, args: Args) -> Pair:
        """Rows float32 [t, n, 512] and which of them are valid, bool [t, n]."""
        if "extra_kv" not in args:
            index, kv = args["indices"][:, 0].long(), args["kv"][:, 0]
            valid = self.named(index, args["topk_length"]) & (index < len(kv))
            return kv[torch.where(valid, index, 0)].float(), valid
        parts = [self.paged(args["kv"], args["indices"], args["topk_length"])]
        if args["extra_kv"] is not None:
            lens = args["extra_topk_length"]
            parts.append(self.paged(args["extra_kv"], args["extra_indices"], lens))
        rows, valid = zip(*parts, strict=True)
        return torch.cat(rows, 1), torch.cat(valid, 1)

    def named(self, slots: Tensor, length: Tensor) -> Tensor:
        """Which entries [t, n] of a list count."""
        column = torch.arange(slots.shape[1], device=slots.device)
        return (slots >= 0) & (column < length[:, None])

    def paged(self, cache: Tensor, slots: Tensor, length: Tensor) -> Pair:
        valid = self.named(slots, length)
        return self.read(cache, torch.where(valid, slots.long(), 0)), valid

    def read(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Dequantized rows float32 [..., 512] of slots."""
        record = record_of(cache.shape[-1])
        raw = read_records(cache, slots, self.page_layout)
        return self.values(record, raw[..., : record.data_bytes], raw[..., record.data_bytes :])

    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        return dequantize_mxfp8(data, scale) if record is FP8 else dequantize_nvfp4(data, scale)

    def cleared(self, rows: Tensor, valid: Tensor) -> Tensor:
        """Zeros where not valid: a probability of zero times NaN would be NaN."""
        return torch.where(valid[..., None], rows, 0.0)

    # ---- rotation -----------------------------------------------------------

    def positions(self, args: Args) -> Tensor:
        positions: Tensor = args["token_positions"].long()
        return positions

    def angles(self, table: Tensor, positions: Tensor) -> Pair:
        """cos and sin float32 [t, 1, 32]."""
        cos, sin = table[positions][:, None].chunk(2, -1)
        return cos, sin

    def turned(self, x: Tensor, angles: Pair, sign: float = 1.0) -> Tensor:
        """Adjacent pairs of the last 64 dims of x [t, H, 512] rotated by sign · angle."""
        x, (cos, sin) = x.float(), angles
        even, odd = x[..., NOPE_DIM::2], x[..., NOPE_DIM + 1 :: 2]
        pairs = (even * cos - sign * odd * sin, sign * even * sin + odd * cos)
        return torch.cat((x[..., :NOPE_DIM], torch.stack(pairs, -1).flatten(-2)), -1)

    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        """RoPE'd Q, rounded to bf16, as float32."""
        return self.turned(q, angles).bfloat16().float()

    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return self.turned(out, angles, sign=-1.0)

    # ---- softmax ------------------------------------------------------------

    def scale(self, args: Args) -> float:
        return float(args["sm_scale"])

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unnormalized probabilities [t, H, n], the largest score and their sum [t, H]."""
        top = scores.amax(-1)
        weights = torch.exp(scores - torch.where(top.isinf(), 0.0, top)[..., None])
        return weights, top, weights.sum(-1)

    def probabilities(self, weights: Tensor) -> Tensor:
        """As the product with V takes them: bf16."""
        return weights.bfloat16().float()

    def product(self, p: Tensor, rows: Tensor) -> Tensor:
        """[t, H, n] times [t, n, 512], summed in float32."""
        return torch.bmm(p, rows)

    def divisor(self, weights: Tensor, total: Tensor) -> Tensor:
        return torch.where(total == 0, 1.0, total)

    def lse(self, top: Tensor, total: Tensor) -> Tensor:
        return torch.where(top.isinf(), math.inf, top + total.log())

    def reported_lse(self, lse: Tensor, args: Args) -> Tensor:
        return lse

    def sink_factor(self, sink: Tensor, lse: Tensor) -> Tensor:
        return torch.sigmoid(lse - sink)

    def empty_rows(self, out: Tensor, top: Tensor, args: Args) -> Tensor:
        """Zeros for a token without a valid row."""
        return torch.where(top.isinf()[..., None], 0.0, out)

    # ---- output -------------------------------------------------------------

    def cast(self, out: Tensor, args: Args) -> Pair:
        """Codes uint8 [t, H, 512] and scale bytes uint8 [t, H, 16]."""
        return quantize_kv_mxfp8(out)

    def store(self, args: Args, codes: Tensor, scale: Tensor) -> None:
        args["out_fp8"].view(torch.uint8).copy_(output_order(codes))
        args["out_sf"].copy_(output_order(scale).contiguous().view(torch.int32))


def _with(kind: type[Kernel]) -> PutOn:
    def put_on(backend: Backend) -> AbstractContextManager[Backend]:
        made = kind(backend.page_layout)
        ops: dict[str, Op] = {DECODE: made.attend, PREFILL: made.attend, GATHER: made.gather}
        return nullcontext(wearing(backend, ops))

    return put_on


_RIGHT = _with(Kernel)


def kernel(kind: type[Kernel]) -> Wear:
    """The decorated kernel takes the place of a backend's attention and gather ops."""
    return Wear(_with(kind), right=_RIGHT)
