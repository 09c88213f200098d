"""Faults of attention, of the projections after it, and of what a step may write."""

from __future__ import annotations

import math
from typing import Any

import torch
from faulty_backends import (
    ATTENTION,
    FAULTS,
    Args,
    Fault,
    after,
    before,
    codes_of,
    output_values,
    recast,
    with_scales,
)

from megabench.quant import dequantize_mxfp8
from megabench.validate.trace import (
    DECODE,
    EINSUM,
    INSERT_COMPRESSED,
    LINEAR,
    PREFILL,
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
