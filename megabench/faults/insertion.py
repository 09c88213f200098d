"""Faults of cache insertion: RoPE of K, quantization of the records, the slots they go to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabench.backends.eager_attention import rope
from megabench.backends.paged import read_records, write_records, write_rows
from megabench.faults.base import Args, Right, after, before, fault, instead
from megabench.faults.triggers import IDLE, MIXED, ODD, SATURATING, SPACED, TWO
from megabench.quant import quantize_nvfp4
from megabench.validate.trace import INSERT_COMPRESSED, PAD_AND_INSERT


def _written(args: Args) -> tuple[Tensor, Tensor]:
    """The cache an insertion wrote, and its slots that were named."""
    slots: Tensor = args["slot_mapping"]
    cache: Tensor = args["swa_cache"] if "swa_cache" in args else args["cache"]
    return cache, slots[slots >= 0]


@fault("K1", "K is turned by the negative angle", MIXED, "swa_cache")
@before(PAD_AND_INSERT)
def k_of_the_negative_angle(args: Args) -> None:
    table = args["cos_sin_cache"].clone()
    table[:, 32:] *= -1
    args["cos_sin_cache"] = table


@fault("K2", "K's rotation uses a bf16 table", MIXED, "swa_cache")
@before(PAD_AND_INSERT)
def k_of_a_bf16_table(args: Args) -> None:
    args["cos_sin_cache"] = args["cos_sin_cache"].bfloat16().float()


@fault("K3", "a RoPE'd K row is rounded to bf16 before it is quantized", MIXED, "swa_cache")
@instead(PAD_AND_INSERT)
def k_of_bf16_before_quantization(args: Args, right: Right) -> Any:
    padded = right(args)
    rows = rope(args["kv"], args["cos_sin_cache"][args["positions"]]).bfloat16().float()
    write_rows(args["swa_cache"], args["slot_mapping"], rows, "interleaved")
    return padded


@fault(
    "K4", "a compressed row is turned at its last position, not its first", ODD, "compressed_cache"
)
@before(INSERT_COMPRESSED)
def compressed_row_at_its_last_position(args: Args) -> None:
    table = args["cos_sin_cache"]
    args["cos_sin_cache"] = torch.cat((table[1:], table[-1:]))


@fault("K5", "a negative slot writes the pool's last row", IDLE, "swa_cache")
@before(PAD_AND_INSERT)
def negative_slot_is_the_last_row(args: Args) -> None:
    slots, cache = args["slot_mapping"], args["swa_cache"]
    args["slot_mapping"] = torch.where(slots < 0, cache.shape[0] * cache.shape[1] - 1, slots)


@fault("K6", "the bytes after a page are written", SPACED, "compressed_cache")
@after(INSERT_COMPRESSED)
def page_padding_is_written(args: Args, result: None) -> None:
    cache = args["cache"]
    end = cache.storage_offset() + cache.shape[1] * cache.shape[2]
    cache.as_strided((1,), (1,), end).zero_()


@fault("K7", "one code is off by one", TWO, "swa_cache")
@after(PAD_AND_INSERT)
def one_code_off(args: Args, padded: Tensor) -> Tensor:
    cache, slots = _written(args)
    record = read_records(cache, slots[:1], "interleaved")
    record[:, 17] ^= 1
    write_records(cache, slots[:1], record, "interleaved")
    return padded


@fault("K8", "NVFP4 nibbles are stored in the other order", TWO, "compressed_cache")
@after(INSERT_COMPRESSED)
def nibbles_stored_swapped(args: Args, result: None) -> None:
    cache, slots = _written(args)
    record = read_records(cache, slots, "interleaved")
    data = record[:, :256]
    record[:, :256] = (data >> 4) | (data << 4)
    write_records(cache, slots, record, "interleaved")


@fault("K9", "an NVFP4 scale beyond 448 becomes NaN", SATURATING, "compressed_cache")
@after(INSERT_COMPRESSED)
def nvfp4_scale_overflows(args: Args, result: None) -> None:
    cache, slots = _written(args)
    record = read_records(cache, slots, "interleaved")
    scale = record[:, 256:]
    record[:, 256:] = torch.where(scale == 0x7E, 0x7F, scale)
    write_records(cache, slots, record, "interleaved")


@fault("K10", "e2m1 ties are rounded away from zero", MIXED, "compressed_cache")
@instead(INSERT_COMPRESSED)
def e2m1_ties_away(args: Args, right: Right) -> None:
    right(args)
    cache, slots = _written(args)
    away = rope(args["latent"], args["cos_sin_cache"][args["positions"]])
    pairs, _ = quantize_nvfp4(away * (1 + 2.0**-20))
    record = read_records(cache, slots, "interleaved")
    record[:, :256] = pairs[args["slot_mapping"] >= 0]
    write_records(cache, slots, record, "interleaved")


@fault("K11", "a record's scales are stored one place late", TWO, "swa_cache")
@after(PAD_AND_INSERT)
def scales_a_place_late(args: Args, padded: Tensor) -> Tensor:
    cache, slots = _written(args)
    record = read_records(cache, slots, "interleaved")
    record[:, 512:] = record[:, 512:].roll(1, -1)
    write_records(cache, slots, record, "interleaved")
    return padded
