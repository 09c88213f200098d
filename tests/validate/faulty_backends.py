"""Backends with one fault each: what an op is given or gives back is changed as a bug would.

A fault names the case that shows it and the first stage that must notice. `before` changes an op's
arguments in place in their dict, `after` gets the arguments and the result and may change either.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megabench.backends import Backend, TorchBackend
from megabench.quant import dequantize_mxfp8, quantize_activation, quantize_kv_mxfp8
from megabench.validate.trace import (
    COMBINE,
    DECODE,
    EINSUM,
    GATHER,
    GLOBAL_TOPK,
    INSERT_COMPRESSED,
    LINEAR,
    PAD_AND_INSERT,
    PREFILL,
)

Args = dict[str, Any]
Before = Callable[[Args], None]
After = Callable[[Args, Any], Any]
ATTENTION = (DECODE, PREFILL)


@dataclass(frozen=True)
class Fault:
    """One deliberate mistake."""

    name: str
    stage: str
    ops: tuple[str, ...]
    before: Before | None = None
    after: After | None = None
    case: dict[str, object] = field(default_factory=dict)


FAULTS: list[Fault] = []


def before(stage: str, *ops: str, **case: object) -> Callable[[Before], Before]:
    """Register a fault in what ops are given."""

    def register(change: Before) -> Before:
        FAULTS.append(Fault(change.__name__, stage, ops, before=change, case=case))
        return change

    return register


def after(stage: str, *ops: str, **case: object) -> Callable[[After], After]:
    """Register a fault in what ops give back or have written."""

    def register(change: After) -> After:
        FAULTS.append(Fault(change.__name__, stage, ops, after=change, case=case))
        return change

    return register


def faulty(fault: Fault, page_layout: str = "interleaved") -> TorchBackend:
    """The torch backend with one fault."""

    def method(name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(Backend, name))

        def call(self: TorchBackend, *positional: Any, **named: Any) -> Any:
            bound = signature.bind(self, *positional, **named)
            bound.apply_defaults()
            args = dict(bound.arguments)
            args.pop("self")
            if fault.before is not None:
                fault.before(args)
            result = getattr(TorchBackend, name)(self, *args.values())
            return result if fault.after is None else fault.after(args, result)

        return call

    kind = type("FaultyBackend", (TorchBackend,), {name: method(name) for name in fault.ops})
    return kind(page_layout)


# ---- helpers -------------------------------------------------------------------------------------


def output_values(args: Args) -> torch.Tensor:
    """What an attention op wrote, float32 [t, groups, 4096]."""
    scale = args["out_sf"].contiguous().view(torch.uint8)
    return dequantize_mxfp8(args["out_fp8"].view(torch.uint8), scale)


def recast(args: Args, values: torch.Tensor) -> None:
    """Write values [t, groups, 4096] back as codes and scales."""
    codes, scale = quantize_kv_mxfp8(values)
    args["out_fp8"].view(torch.uint8).copy_(codes)
    args["out_sf"].copy_(scale.contiguous().view(torch.int32))


def codes_of(args: Args) -> torch.Tensor:
    """The code bytes an attention op wrote, in memory order."""
    return args["out_fp8"].view(torch.uint8)


def with_scales(args: Args, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the scale bytes uint8 [t, groups, 128] an attention op wrote."""
    scale = args["out_sf"].contiguous().view(torch.uint8)
    args["out_sf"].copy_(change(scale).contiguous().view(torch.int32))


def row_bytes(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and row of the slots that are written."""
    named = slots[slots >= 0]
    return named // cache.shape[1], named % cache.shape[1]


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


# ---- attention -----------------------------------------------------------------------------------


@before("lse_decode", *ATTENTION)
def q_rope_has_the_sign_of_sin_flipped(args: Args) -> None:
    table = args["cos_sin_cache"].clone()
    table[:, 32:] *= -1
    args["cos_sin_cache"] = table


@before("lse_decode", *ATTENTION)
def rope_is_half_split(args: Args) -> None:
    order = torch.arange(64).view(2, 32).T.flatten()
    q = args["q"].view(len(args["q"]), 32, -1, 16).clone()
    rope = q[:, 28:].permute(0, 2, 1, 3).reshape(len(q), -1, 64)
    q[:, 28:] = rope[..., order].view(len(q), -1, 4, 16).permute(0, 2, 1, 3)
    args["q"] = q.view_as(args["q"])


@before("lse_decode", *ATTENTION)
def int64_positions_are_read_as_int32(args: Args) -> None:
    positions = args["token_positions"].long().view(torch.int32)
    args["token_positions"] = positions[: len(args["token_positions"])].contiguous()


@before("lse_decode", DECODE, batch="1q1s65600", compress_ratio=0)
def positions_are_cut_to_16_bits(args: Args) -> None:
    args["token_positions"] = args["token_positions"] & 0xFFFF


@before("lse_decode", *ATTENTION)
def the_softmax_scale_counts_576_dims(args: Args) -> None:
    args["sm_scale"] = 576**-0.5


@before("lse_decode", DECODE)
def one_key_too_few_is_read(args: Args) -> None:
    args["topk_length"] = args["topk_length"] - 1


@before("lse_decode", DECODE, batch="1q1s300_1q1s9")
def extra_lengths_come_from_the_next_row(args: Args) -> None:
    args["extra_topk_length"] = args["extra_topk_length"].roll(1)


@before("lse_decode", DECODE, batch="2q1s100")
def a_missing_index_is_slot_zero(args: Args) -> None:
    args["indices"] = args["indices"].clamp(min=0)
    args["topk_length"] = torch.full_like(args["topk_length"], args["indices"].shape[1])


@before("lse_decode", DECODE, page_padding=3)
def the_page_stride_ignores_padding(args: Args) -> None:
    cache = args["extra_kv"]
    _, page, _, width = cache.shape
    args["extra_kv"] = cache.as_strided(cache.shape, (page * width, width, width, 1))


@after("lse_decode", *ATTENTION)
def lse_is_in_log2_units(args: Args, result: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*result[:-1], result[-1] / math.log(2)]


@after("lse_decode", *ATTENTION)
def the_sink_is_part_of_lse(args: Args, result: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*result[:-1], torch.logaddexp(result[-1], args["attn_sink"])]


@after("lse_decode", DECODE, batch="3q1s200", padding_tokens=1)
def an_empty_token_has_lse_minus_infinity(args: Args, result: Any) -> Any:
    return [*result[:-1], torch.where(result[-1].isposinf(), -torch.inf, result[-1])]


@after("max_logits", PREFILL)
def max_logits_are_in_log2_units(args: Args, result: Any) -> Any:
    return [*result[:2], result[2] / math.log(2), result[3]]


@before("output_scales_decode", *ATTENTION)
def the_sink_is_the_next_heads(args: Args) -> None:
    args["attn_sink"] = args["attn_sink"].roll(1)


@before("output_scales_decode", *ATTENTION)
def the_sink_is_ignored(args: Args) -> None:
    args["attn_sink"] = None


@after("output_scales_decode", *ATTENTION)
def the_output_rotation_is_not_conjugated(args: Args, result: Any) -> Any:
    values = output_values(args)
    rope = values.unflatten(-1, (16, 8, 32))[:, :, 14:]
    pairs = rope.permute(0, 1, 3, 2, 4).flatten(3)
    rows = args["cos_sin_cache"][args["token_positions"].long()][:, None, None]
    cos, sin = rows.chunk(2, -1)
    for _ in range(2):
        even, odd = pairs[..., 0::2], pairs[..., 1::2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    rope.copy_(pairs.unflatten(3, (2, 32)).permute(0, 1, 3, 2, 4))
    recast(args, values)
    return result


@after("output_scales_decode", *ATTENTION)
def amax_spans_64_dims(args: Args, result: Any) -> Any:
    def widened(scale: torch.Tensor) -> torch.Tensor:
        chunks = scale.unflatten(-1, (8, 2, 8))
        return chunks.amax(-2, keepdim=True).expand_as(chunks).flatten(2)

    with_scales(args, widened)
    return result


@after("output_scales_decode", *ATTENTION)
def scale_words_are_big_endian(args: Args, result: Any) -> Any:
    with_scales(args, lambda scale: scale.unflatten(-1, (-1, 4)).flip(-1).flatten(2))
    return result


@after("output_scales_decode", *ATTENTION, family="zeros")
def a_zero_block_has_scale_byte_zero(args: Args, result: Any) -> Any:
    with_scales(args, lambda scale: torch.where(scale == 105, 0, scale))
    return result


@after("output_codes_decode", *ATTENTION)
def codes_saturate_to_nan(args: Args, result: Any) -> Any:
    codes = codes_of(args)
    codes.copy_(torch.where((codes & 0x7F) >= 0x7D, codes | 0x7F, codes))
    return result


@after("output_codes_decode", *ATTENTION)
def one_head_lands_in_the_next_heads_place(args: Args, result: Any) -> Any:
    codes = codes_of(args).unflatten(-1, (16, 8, 32))
    codes.copy_(codes.roll(1, 3))
    return result


@after("output_scales_decode", *ATTENTION)
def the_output_has_an_eighth_of_noise(args: Args, result: Any) -> Any:
    values = output_values(args)
    noise = (torch.arange(values.shape[-1]) * 2654435761 % 1000) / 1000 - 0.5
    recast(args, values * (1 + noise * 2.0**-3))
    return result


@before("rounding_direction", *ATTENTION, batch="4q1s300_1q9s140")
def the_sink_is_a_little_too_large(args: Args) -> None:
    args["attn_sink"] = args["attn_sink"] + 2.0**-7


@after("padding_tokens", DECODE, batch="3q1s200", padding_tokens=2)
def padding_tokens_are_left_unwritten(args: Args, result: Any) -> Any:
    codes_of(args)[-1] = 0x41
    return result


# ---- projections and memory ----------------------------------------------------------------------


@before("wo_a_einsum", EINSUM)
def a_group_uses_the_next_groups_weight(args: Args) -> None:
    args["w"] = tuple(part.roll(1, 0) for part in args["w"])


@before("wo_a_einsum", EINSUM)
def the_activation_scale_spans_128_columns(args: Args) -> None:
    data, scale = args["x"]
    first = (scale & 0xFF).contiguous()
    args["x"] = data, first | (first << 8) | (first << 16) | (first << 24)


@after("wo_a_einsum", EINSUM)
def the_einsum_accumulates_in_bf16(args: Args, result: None) -> None:
    (data, scale), (weight, weight_scale) = args["x"], args["w"]
    x = dequantize_mxfp8(data.view(torch.uint8), scale.contiguous().view(torch.uint8))
    w = dequantize_mxfp8(weight.view(torch.uint8), weight_scale.contiguous().view(torch.uint8))
    total = torch.zeros_like(args["out"])
    for part in range(0, x.shape[-1], 128):
        columns = slice(part, part + 128)
        total += torch.einsum("bhr,hdr->bhd", x[..., columns], w[..., columns]).bfloat16()
    args["out"].copy_(total)


class WrongSecondLinear:
    """wq_b right, wo_b one token late."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, args: Args, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return out if self.calls % 2 else out.roll(1, 0)


FAULTS.append(Fault("wo_b_is_a_token_late", "wo_b_linear", (LINEAR,), after=WrongSecondLinear()))


@after("holed_lists", DECODE, batch="3q1s300")
def a_row_past_the_step_gets_scales(args: Args, result: Any) -> Any:
    scale = args["out_sf"]
    past = scale.as_strided((1,), (1,), scale.storage_offset() + len(scale))
    past.fill_(0x69696969)
    return result


@after("inputs_unchanged", DECODE)
def the_query_is_rotated_in_place(args: Args, result: Any) -> Any:
    args["q"].mul_(0.5)
    return result


@after("inputs_unchanged", INSERT_COMPRESSED)
def an_input_of_the_step_is_modified(args: Args, result: None) -> None:
    args["latent"].neg_()


class Counting:
    """A result that depends on how often the op has run."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, args: Args, result: Any) -> Any:
        self.calls += 1
        lse = result[2].clone()
        lse[0, 0] += self.calls * 2.0**-20
        return [*result[:2], lse]


FAULTS.append(
    Fault("a_result_drifts_from_launch_to_launch", "repeatable", (DECODE,), after=Counting())
)
