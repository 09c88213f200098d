"""Faults of the matrix products: the two linears, and the grouped wo_a between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabench.faults.base import (
    Args,
    Op,
    Right,
    after,
    before,
    fault,
    fresh,
    instead,
    rolled,
)
from megabench.faults.triggers import MIXED, TWO
from megabench.quant import (
    dequantize_mxfp8,
    encode_e4m3,
    quantize_activation,
    ue8m0_to_float,
    unpack_scales,
)
from megabench.validate.trace import EINSUM, LINEAR

STAGE = ("wo_a_einsum",)
TILE = 128


def _operands(args: Args) -> tuple[Tensor, Tensor]:
    """The einsum's x [T, G, 4096] and w [G, d, 4096], float32."""
    x, w = (
        dequantize_mxfp8(codes.contiguous().view(torch.uint8), unpack_scales(words))
        for codes, words in (args["x"], args["w"])
    )
    return x, w


def _multiply(args: Args, x: Tensor, w: Tensor) -> None:
    args["out"].copy_(torch.einsum("bhr,hdr->bhd", x, w))


# ---- linears -------------------------------------------------------------------------------------


@fault("A1", "a linear truncates its result to bf16", TWO, "wq_b_linear")
@after(LINEAR)
def truncated_result(args: Args, out: Tensor) -> Tensor:
    x = dequantize_mxfp8(*quantize_activation(args["x"]))
    exact = x @ dequantize_mxfp8(args["w"].view(torch.uint8), args["sw"]).T
    return (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@fault("A2", "a weight row is scaled by the next row's scales", TWO, "wq_b_linear")
@before(LINEAR)
def scales_of_the_next_row(args: Args) -> None:
    args["sw"] = args["sw"].roll(1, 0)


@fault("A3", "activations are not quantized", TWO, "wq_b_linear")
@instead(LINEAR)
def plain_activations(args: Args, right: Right) -> Tensor:
    w = dequantize_mxfp8(args["w"].view(torch.uint8), args["sw"])
    out: Tensor = (args["x"].float() @ w.T).bfloat16()
    return out


@fault("A4", "an activation block has the exponent below, and saturates", TWO, "wq_b_linear")
@instead(LINEAR)
def saturated_activations(args: Args, right: Right) -> Tensor:
    _, scale = quantize_activation(args["x"])
    factor = ue8m0_to_float(scale - 1).repeat_interleave(32, -1)
    x = dequantize_mxfp8(encode_e4m3(args["x"].float() / factor), scale - 1)
    w = dequantize_mxfp8(args["w"].view(torch.uint8), args["sw"])
    return (x @ w.T).bfloat16()


@fault("A5", "wo_b reads the token before", MIXED, "wo_b_linear")
@fresh(LINEAR)
def wo_b_a_token_late() -> Op:
    calls = 0

    def faulty(args: Args, right: Right) -> Any:
        nonlocal calls
        calls += 1
        return right(args) if calls % 2 else right(args).roll(1, 0)

    return faulty


# ---- wo_a ----------------------------------------------------------------------------------------


@fault("E1", "group g uses the weight of group g + 1", TWO, *STAGE)
@before(EINSUM)
def weight_of_the_next_group(args: Args) -> None:
    args["w"] = tuple(rolled(part, -1, 0) for part in args["w"])


@fault("E2", "activations are scaled once per 128 columns", TWO, *STAGE)
@before(EINSUM)
def scale_of_128_columns(args: Args) -> None:
    codes, words = args["x"]
    args["x"] = codes, (words & 0xFF) * 0x01010101


@fault("E3", "rows of the result are one group apart, not all groups", TWO, *STAGE)
@after(EINSUM)
def pitch_of_one_group(args: Args, result: None) -> None:
    out = args["out"]
    made, width = out.clone(), out.shape[-1]
    for token in range(len(out)):
        start = token * width
        out.view(-1)[start : start + made[token].numel()] = made[token].flatten()


@fault("E4", "groups of padded heads are added to live ones", TWO, *STAGE)
@instead(EINSUM)
def padded_groups_added(args: Args, right: Right) -> None:
    (codes, words), groups = args["x"], args["x"][0].shape[1]
    padded = codes.shape[0], 2 * groups, codes.shape[2]
    every = tuple(
        t.as_strided((*padded[:2], t.shape[2]), t.stride(), t.storage_offset())
        for t in (codes, words)
    )
    x, w = _operands({**args, "x": every})
    _multiply(args, x[:, :groups] + x[:, groups:], w)


@fault("E5", "sums are rounded to bf16 every 128 columns", TWO, *STAGE)
@after(EINSUM)
def sums_of_bf16(args: Args, result: None) -> None:
    x, w = _operands(args)
    args["out"].zero_()
    for start in range(0, x.shape[-1], TILE):
        some = slice(start, start + TILE)
        args["out"] += torch.einsum("bhr,hdr->bhd", x[..., some], w[..., some]).bfloat16()


@fault("E6", "tokens after the last multiple of 4 take the scales of padding rows", TWO, *STAGE)
@before(EINSUM)
def scales_of_padding_rows(args: Args) -> None:
    codes, words = args["x"]
    tokens = len(words)
    rows = words.as_strided(
        (tokens + 1, *words.shape[1:]), words.stride(), words.storage_offset()
    ).clone()
    rows[tokens // 4 * 4 : tokens] = rows[tokens]
    args["x"] = codes, rows[:tokens]


@fault("E7", "weight scales stand as before the permutation", TWO, *STAGE)
@instead(EINSUM)
def scales_before_permutation(args: Args, right: Right) -> None:
    weight, words = args["w"]
    scale = torch.unflatten(unpack_scales(words), -1, (16, 8)).transpose(-2, -1).flatten(-2)
    x, _ = _operands(args)
    _multiply(args, x, dequantize_mxfp8(weight.view(torch.uint8), scale))


@fault("E8", "the result is truncated to bf16", TWO, *STAGE)
@instead(EINSUM)
def truncated_product(args: Args, right: Right) -> None:
    exact = torch.einsum("bhr,hdr->bhd", *_operands(args))
    args["out"].copy_((exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16))


@fault("E9", "the product is added to what the result held", TWO, *STAGE)
@instead(EINSUM)
def added_to_the_old(args: Args, right: Right) -> None:
    old = torch.ones_like(args["out"])
    right(args)
    args["out"] += old
