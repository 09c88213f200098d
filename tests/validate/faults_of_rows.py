"""Faults up to attention: the query, cache rows, index lists and gathered rows."""

from __future__ import annotations

from typing import Any

import torch
from faulty_backends import (
    FAULTS,
    Args,
    Fault,
    after,
    before,
    row_bytes,
)

from megabench.quant import dequantize_mxfp8, quantize_activation
from megabench.validate.trace import (
    COMBINE,
    GATHER,
    GLOBAL_TOPK,
    INSERT_COMPRESSED,
    LINEAR,
    PAD_AND_INSERT,
)

# ---- query ---------------------------------------------------------------------------------------


@after("wq_b_linear", LINEAR)
def linear_truncates_to_bf16(args: Args, out: torch.Tensor) -> torch.Tensor:
    x = dequantize_mxfp8(*quantize_activation(args["x"]))
    exact = x @ dequantize_mxfp8(args["w"].view(torch.uint8), args["sw"]).T
    return (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@before("wq_b_linear", LINEAR)
def linear_reads_the_next_rows_scales(args: Args) -> None:
    args["sw"] = args["sw"].roll(1, 0)


@after("q_layout", PAD_AND_INSERT)
def q_padding_goes_after_the_live_heads(args: Args, padded: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(padded)
    out[:, : args["q"].shape[1]] = args["q"]
    return out


@after("q_layout", PAD_AND_INSERT)
def q_padding_is_left_unwritten(args: Args, padded: torch.Tensor) -> torch.Tensor:
    live = args["q"].shape[1]
    padded.view(len(padded), 32, -1, 16)[:, :, live:] = 1e30
    return padded


# ---- caches --------------------------------------------------------------------------------------


@before("swa_cache", PAD_AND_INSERT)
def k_rope_has_the_sign_of_sin_flipped(args: Args) -> None:
    table = args["cos_sin_cache"].clone()
    table[:, 32:] *= -1
    args["cos_sin_cache"] = table


@before("swa_cache", PAD_AND_INSERT)
def k_rope_rounds_the_table_to_bf16(args: Args) -> None:
    args["cos_sin_cache"] = args["cos_sin_cache"].bfloat16().float()


@before("swa_cache", PAD_AND_INSERT, batch="3q1s200", padding_tokens=2)
def a_negative_slot_writes_the_last_row(args: Args) -> None:
    slots = args["slot_mapping"]
    last = args["swa_cache"].shape[0] * args["swa_cache"].shape[1] - 1
    args["slot_mapping"] = torch.where(slots < 0, last, slots)


@after("swa_cache", PAD_AND_INSERT)
def one_code_is_off_by_one(args: Args, padded: torch.Tensor) -> torch.Tensor:
    block, row = row_bytes(args["swa_cache"], args["slot_mapping"])
    args["swa_cache"][block[0], row[0], 17] ^= 1
    return padded


@after("swa_cache", PAD_AND_INSERT)
def scales_land_sixteen_bytes_late(args: Args, padded: torch.Tensor) -> torch.Tensor:
    block, row = row_bytes(args["swa_cache"], args["slot_mapping"])
    record = args["swa_cache"][block[0], row[0]]
    record[512:528] = record[512:528].roll(1)
    return padded


@before("compressed_cache", INSERT_COMPRESSED, compress_ratio=2)
def a_compressed_row_is_rotated_at_its_last_position(args: Args) -> None:
    table = args["cos_sin_cache"]
    args["cos_sin_cache"] = torch.cat((table[1:], table[-1:]))


@after("compressed_cache", INSERT_COMPRESSED, kv_cache="nvfp4_ds_mla")
def nibbles_are_swapped(args: Args, result: None) -> None:
    block, row = row_bytes(args["cache"], args["slot_mapping"])
    data = args["cache"][block, row, :256]
    args["cache"][block, row, :256] = (data >> 4) | (data << 4)


@after("compressed_cache", INSERT_COMPRESSED, page_padding=1)
def a_page_pad_is_written(args: Args, result: None) -> None:
    cache = args["cache"]
    end = cache.shape[1] * cache.shape[2]
    cache.as_strided((1,), (1,), cache.storage_offset() + end).zero_()


# ---- index lists and gathered rows ---------------------------------------------------------------


@before("indices_decode", GLOBAL_TOPK)
def a_page_has_twice_its_rows(args: Args) -> None:
    args["block_size"] *= 2


@after("indices_decode", GLOBAL_TOPK)
def a_length_is_one_short(args: Args, pair: Any) -> Any:
    return pair[0], pair[1] - 1


@after("indices_decode", GLOBAL_TOPK, batch="3q1s200", padding_tokens=2)
def a_padding_token_has_a_length(args: Args, pair: Any) -> Any:
    return pair[0], pair[1].clamp(min=1)


@before("indices_prefill", COMBINE)
def the_window_is_127_keys(args: Args) -> None:
    args["window_size"] -= 1


@after("indices_prefill", COMBINE)
def a_missing_row_becomes_row_zero(args: Args, pair: Any) -> Any:
    pair[0].clamp_(min=0)
    return pair


@before("gathered_rows", GATHER)
def gather_reads_the_next_rows_page(args: Args) -> None:
    args["block_table"] = args["block_table"].roll(1, -1)


@after("gathered_rows", GATHER, kv_cache="fp8_ds_mla")
def gathered_rows_are_rounded_to_fp8(args: Args, result: None) -> None:
    args["out"].copy_(args["out"].clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.bfloat16))


class StaleGather:
    """A workspace gathered once and never again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, args: Args) -> None:
        self.calls += 1
        if self.calls > 2:
            args["out"] = args["out"].clone()


FAULTS.append(
    Fault(
        "the_second_chunk_reads_the_firsts_rows",
        "gathered_rows",
        (GATHER,),
        before=StaleGather(),
        case={"batch": "12q2s200"},
    )
)
