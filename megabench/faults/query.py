"""Faults of the query: the layout wq_b writes, padding to the kernel's heads, RoPE inside it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megabench.faults.base import Args, after, before, fault, patch
from megabench.faults.kernel import Kernel, Pair, kernel
from megabench.faults.triggers import FAR, MIXED, SHARDED, TWO
from megabench.formats import HEAD_DIM, NOPE_DIM, Q_CHUNK, ROPE_DIM
from megabench.layer import state
from megabench.validate.trace import DECODE, PAD_AND_INSERT, PREFILL

CHUNKS = HEAD_DIM // Q_CHUNK


# ---- Q layout and permutation --------------------------------------------------------------------


@fault("Q1", "chunks of Q are strided by padded heads, not by live ones", TWO, "q_layout")
@after(PAD_AND_INSERT)
def chunk_stride_of_padded_heads(args: Args, padded: Tensor) -> Tensor:
    live, heads = args["q"].shape[1], padded.shape[1]
    flat = args["q"].flatten(1)
    start = torch.arange(CHUNKS)[:, None] * heads * Q_CHUNK + torch.arange(live * Q_CHUNK)
    chunks = flat[:, start.flatten().to(flat.device) % flat.shape[1]]
    padded.view(len(padded), CHUNKS, -1)[..., : live * Q_CHUNK] = chunks.view(
        len(padded), CHUNKS, -1
    )
    return padded


@fault("Q2", "padding follows all live data instead of standing in every chunk", TWO, "q_layout")
@after(PAD_AND_INSERT)
def padding_at_the_end(args: Args, padded: Tensor) -> Tensor:
    out = torch.zeros_like(padded)
    out.flatten(1)[:, : args["q"].shape[1] * HEAD_DIM] = args["q"].flatten(1)
    return out


@fault("Q3", "wq_b's scales stay where they were while its rows move", TWO, "weights")
@patch(state, "permute_wq_b_")
def scales_left_behind(right: Any) -> Any:
    return lambda weight, scale, heads: right(weight, scale.clone(), heads)


@fault("Q4", "wq_b is permuted twice", TWO, "weights")
@patch(state, "permute_wq_b_")
def permuted_twice(right: Any) -> Any:
    def twice(weight: Tensor, scale: Tensor, heads: int) -> None:
        for _ in range(2):
            right(weight, scale, heads)

    return twice


@fault("Q5", "wq_b is permuted by the inverse order", TWO, "weights")
@patch(state, "permute_wq_b_")
def permuted_by_the_inverse(right: Any) -> Any:
    def inverse(weight: Tensor, scale: Tensor, heads: int) -> None:
        for tensor in (weight.view(torch.uint8), scale.view(torch.uint8)):
            split = torch.unflatten(tensor, 0, (CHUNKS, heads, Q_CHUNK))
            tensor.copy_(split.transpose(0, 1).flatten(0, 2))

    return inverse


def _fill_padding(padded: Tensor, live: int, value: float) -> Tensor:
    padded.view(len(padded), CHUNKS, -1, Q_CHUNK)[:, :, live:] = value
    return padded


@fault("Q6a", "padded heads hold NaN", TWO, "q_layout")
@after(PAD_AND_INSERT)
def padding_of_nan(args: Args, padded: Tensor) -> Tensor:
    return _fill_padding(padded, args["q"].shape[1], math.nan)


@fault("Q6b", "padded heads hold 1e30", TWO, "q_layout")
@after(PAD_AND_INSERT)
def padding_of_1e30(args: Args, padded: Tensor) -> Tensor:
    return _fill_padding(padded, args["q"].shape[1], 1e30)


@fault("Q7", "wq_b is permuted for all heads of the model, not for this rank's", SHARDED, "weights")
@patch(state, "permute_wq_b_")
def permuted_for_all_heads(right: Any) -> Any:
    def wide(weight: Tensor, scale: Tensor, heads: int) -> None:
        for tensor in (weight.view(torch.uint8), scale.view(torch.uint8)):
            split = torch.unflatten(tensor, 0, (2 * heads, CHUNKS // 2, Q_CHUNK))
            tensor.copy_(split.transpose(0, 1).flatten(0, 2))

    return wide


# ---- RoPE on Q -----------------------------------------------------------------------------------


@fault("R1", "RoPE pairs dim i with dim i + 32 instead of adjacent dims", MIXED, "lse_decode")
@kernel
class HalfSplit(Kernel):
    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        cos, sin = angles
        low, high = q[..., NOPE_DIM:].float().chunk(2, -1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        return torch.cat((q[..., :NOPE_DIM].float(), turned.bfloat16().float()), -1)


@fault("R2", "RoPE turns dims 0..63 of Q instead of 448..511", MIXED, "lse_decode")
@kernel
class FirstDims(Kernel):
    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        moved = q.roll(-ROPE_DIM, -1)
        return super().rotated_query(moved, angles).roll(ROPE_DIM, -1)


@fault("R3", "Q is turned by the negative angle", MIXED, "lse_decode", "lse_prefill")
@kernel
class NegativeAngle(Kernel):
    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        return self.turned(q, angles, sign=-1.0).bfloat16().float()


@fault("R4", "a row of the table is read as cos, sin, cos, sin", MIXED, "lse_decode")
@kernel
class InterleavedTable(Kernel):
    def rotated_query(self, q: Tensor, angles: Pair) -> Tensor:
        row = torch.cat(angles, -1)
        return super().rotated_query(q, (row[..., 0::2], row[..., 1::2]))


@fault("R5", "positions are cut to 16 bits", FAR, "lse_decode")
@before(DECODE, PREFILL)
def positions_of_16_bits(args: Args) -> None:
    args["token_positions"] = args["token_positions"] & 0xFFFF


@fault("R6", "int64 positions are read as int32: every odd token is at 0", TWO, "lse_decode")
@before(DECODE, PREFILL)
def positions_of_half_the_width(args: Args) -> None:
    words = args["token_positions"].long().view(torch.int32)
    args["token_positions"] = words[: len(args["token_positions"])].clone()
