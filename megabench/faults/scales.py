"""Faults of where scale words and codes go in the step's output pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabench.faults.base import Args, Right, after, fault, instead
from megabench.faults.triggers import MIXED, TWO
from megabench.quant import tma_aligned
from megabench.validate.trace import DECODE, PREFILL

ATTENTION = (DECODE, PREFILL)
SCALES = ("output_scales_decode",)


def scale_bytes(args: Args) -> Tensor:
    """The scale bytes uint8 [t, groups, 128] that an op wrote, copied."""
    words: Tensor = args["out_sf"].contiguous().view(torch.uint8).clone()
    return words


def put_bytes(target: Tensor, scale: Tensor) -> None:
    """Write scale bytes uint8 [t, groups, 128] as words of any strides."""
    target.copy_(scale.contiguous().view(torch.int32))


def _elsewhere(args: Args, right: Right, target: Tensor) -> Any:
    """Run an op, put back its words as they were, and write what it made to `target`."""
    before = args["out_sf"].clone()
    result = right(args)
    made = args["out_sf"].clone()
    args["out_sf"].copy_(before)
    target.copy_(made)
    return result


@fault("L1", "the bytes of a scale word are big-endian", TWO, *SCALES)
@after(*ATTENTION)
def big_endian(args: Args, result: Any) -> Any:
    put_bytes(args["out_sf"], torch.unflatten(scale_bytes(args), -1, (-1, 4)).flip(-1).flatten(-2))
    return result


@fault(
    "L2",
    "scale columns are strided by the slice's tokens, not by the step's",
    "r1-nvfp4-tp1-2q1s300_1q3s140",
    *SCALES,
)
@instead(*ATTENTION)
def stride_of_the_slice(args: Args, right: Right) -> Any:
    words = args["out_sf"]
    tokens, groups, columns = words.shape
    pitch = tma_aligned(tokens)
    strides = (1, columns * pitch, pitch)
    target = words.as_strided((tokens, groups, columns), strides, words.storage_offset())
    return _elsewhere(args, right, target)


@fault(
    "L3",
    "a slice's first token moves its codes, but not its scales",
    MIXED,
    "output_scales_prefill",
)
@instead(PREFILL)
def scales_from_the_first_token(args: Args, right: Right) -> Any:
    words = args["out_sf"]
    moved = words.as_strided(words.shape, words.stride(), words.storage_offset() - 1)
    return _elsewhere(args, right, moved)


@fault("L4", "scale rows past the step's tokens are written", TWO, "canaries")
@after(*ATTENTION)
def rows_past_the_step(args: Args, result: Any) -> Any:
    words = args["out_sf"]
    past = words.as_strided(
        (1, *words.shape[1:]), words.stride(), words.storage_offset() + len(words)
    )
    past.fill_(0x69696969)
    return result


@fault("L5", "scale words are written row by row, not token by token", TWO, *SCALES)
@instead(*ATTENTION)
def row_major(args: Args, right: Right) -> Any:
    words = args["out_sf"]
    _, groups, columns = words.shape
    strides = (groups * columns, columns, 1)
    return _elsewhere(args, right, words.as_strided(words.shape, strides, words.storage_offset()))


@fault("L6", "a byte is lost where two heads update one word", TWO, *SCALES)
@instead(*ATTENTION)
def lost_update(args: Args, right: Right) -> Any:
    old = scale_bytes(args)
    result = right(args)
    made = scale_bytes(args)
    made[:, :, 5::16] = old[:, :, 5::16]
    put_bytes(args["out_sf"], made)
    return result


@fault("L7", "codes of head h stand where head h + 1 belongs", TWO, "output_codes_decode")
@after(*ATTENTION)
def heads_one_further(args: Args, result: Any) -> Any:
    codes = torch.unflatten(args["out_fp8"].view(torch.uint8), -1, (16, 8, 32))
    codes.copy_(codes.roll(1, 3))
    return result


@fault("L8", "the last token's codes are never written", TWO, "output_codes_decode")
@instead(*ATTENTION)
def last_token_left_out(args: Args, right: Right) -> Any:
    codes = args["out_fp8"].view(torch.uint8)
    old = codes[-1].clone()
    result = right(args)
    codes[-1] = old
    return result
