"""The fused attention kernels against the golden model, under the interpreter or on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import replace

import pytest
import torch
from triton_cases import (
    POISON,
    Call,
    decode_excess,
    output_excess,
    prefill_excess,
)

import reference.layouts
import reference.quantize
import reference.records
from megabench.backends.arguments import DecodeArguments
from megabench.backends.triton import attention, prefill_sm90
from megabench.backends.triton.attention import split_count
from megabench.backends.triton.backend import TritonBackend
from megabench.backends.triton.target import Target, target_of
from megabench.formats import FP8, NVFP4, KVRecord
from megabench.quant import alloc_mega_attn_output

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


def call(**changes: object) -> Call:
    sizes: dict[str, object] = {"topk": 72, "extra": 96, "slots": 256, "device": DEVICE}
    return Call(**(sizes | changes))  # type: ignore[arg-type]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality; float8 has no equality of its own."""
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b)


def decode(one: Call, splits: int | None = None) -> list[torch.Tensor]:
    """The decode op; with `splits`, its launcher with that many shares a token."""
    if splits is None:
        return one.decode(TritonBackend(one.layout))  # type: ignore[arg-type]
    arguments = DecodeArguments(
        one.q,
        one.kv,
        one.indices,
        512**-0.5,
        512,
        one.sinks,
        one.length,
        one.extra_kv,
        one.extra_indices,
        one.extra_length,
        one.q_norm_eps is not None,
        one.q_norm_eps or 0.0,
        one.positions,
        False,
        64,
        one.cos_sin,
        one.heads // 8,
        32,
        True,
        True,
        True,
    )
    return attention.decode(arguments, one.layout, splits=splits)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["interleaved", "page_split"])
@pytest.mark.parametrize("extra_bytes", [528, 288])
def test_decode_stays_within_golden_bounds(extra_bytes: int, layout: str) -> None:
    one = call(extra_bytes=extra_bytes, layout=layout, lens=(72, 5, 64), extra_lens=(65, 96, 3))
    assert decode_excess(one, decode(one)) <= 1


@pytest.mark.parametrize("pattern", ["leading", "middle", "trailing", "alternating"])
def test_holes_anywhere_in_an_index_row_count_as_absent(pattern: str) -> None:
    one = call(s_q=2, pattern=pattern, extra_bytes=288)
    assert decode_excess(one, decode(one)) <= 1


@pytest.mark.parametrize("splits", [2, 3])
def test_a_split_decode_stays_within_golden_bounds(splits: int) -> None:
    one = call(s_q=2, lens=(72, 0), extra_lens=(96, 1), extra_bytes=288)
    assert decode_excess(one, decode(one, splits)) <= 1


def test_a_swa_only_decode_and_every_short_length() -> None:
    one = call(s_q=5, topk=64, extra=0, lens=(0, 1, 3, 4, 64))
    assert decode_excess(one, decode(one)) <= 1


def test_33_tokens_take_turns_with_lengths_and_stay_within_bounds() -> None:
    one = call(s_q=33, topk=8, extra=16, lens=(0, 1, 3, 8), extra_lens=(16, 0, 5))
    assert decode_excess(one, decode(one)) <= 1


def test_128_heads_and_the_q_norm() -> None:
    one = call(s_q=2, heads=128, q_norm_eps=1e-6)
    assert decode_excess(one, decode(one)) <= 1


def test_a_token_without_a_valid_row_is_zero_bytes_under_scale_105() -> None:
    one = call(s_q=2, pattern="none")
    data, scale, lse = decode(one)
    assert bool((data.view(torch.uint8) == 0).all())
    assert bool((reference.layouts.output_meaning(data, scale)[1] == 105).all())
    assert bool((lse == INF).all())


def test_sinks_scale_the_output_and_never_the_lse() -> None:
    sinks = torch.tensor([-INF, INF, 1e3, -1e3, 3e38, -3e38, 0.0, 5.0]).repeat(8).to(DEVICE)
    one = call(s_q=2, sinks=sinks)
    assert decode_excess(one, decode(one)) <= 1
    without = copy(one)
    without.sinks = torch.full((64,), -INF, device=DEVICE)
    assert torch.equal(decode(one)[2], decode(without)[2])


def test_slots_beyond_the_pool_are_dropped() -> None:
    one = call(s_q=2)
    dropped, kept = copy(one), copy(one)
    dropped.indices, kept.indices = one.indices.clone(), one.indices.clone()
    dropped.indices[:, ::3] = -1
    kept.indices[:, ::6], kept.indices[:, 3::6] = one.slots, 2**31 - 1
    for a, b in zip(decode(dropped), decode(kept), strict=True):
        assert same(a, b)


def test_a_duplicate_counts_twice() -> None:
    one = call(s_q=1, topk=8, extra=0)
    one.indices[0, 4:] = one.indices[0, :4]
    half = copy(one)
    half.indices = one.indices[:, :4].contiguous()
    half.length = torch.full_like(one.length, 4)
    assert decode_excess(one, decode(one)) <= 1
    difference = decode(one)[2] - decode(half)[2]
    torch.testing.assert_close(
        difference, torch.full_like(difference, 0.6931472), rtol=0, atol=1e-5
    )


def test_a_slice_of_a_steps_output_is_written_and_nothing_else() -> None:
    one = call(s_q=3)
    whole = one.output(before=3, after=2)
    part = replace(whole, data=whole.data[3:6], scale=whole.scale[3:6])
    got = one.decode(TritonBackend(), part)
    assert got[0].data_ptr() == part.data.data_ptr()
    assert output_excess(part.data, part.scale, one.golden()) <= 1
    outside = torch.cat((whole.data[:3], whole.data[6:])).view(torch.uint8)
    assert bool((outside == POISON).all())
    assert bool((torch.cat((whole.scale[:3], whole.scale[6:])) == -1).all())


def test_no_tokens_give_empty_results() -> None:
    one = call(s_q=0)
    assert [len(t) for t in decode(one)] == [0, 0, 0]
    assert [len(t) for t in one.prefill(TritonBackend(), one.workspace())] == [0, 0, 0, 0]


def test_an_empty_extra_pool_adds_nothing() -> None:
    one = call(s_q=1)
    assert one.extra_kv is not None
    assert one.extra_indices is not None
    empty, without = copy(one), copy(one)
    without.extra_kv = without.extra_indices = without.extra_length = None
    empty.extra_kv = one.extra_kv[:0]
    for a, b in zip(decode(empty), decode(without), strict=True):
        assert same(a, b)


@pytest.mark.parametrize(
    ("tokens", "live", "record", "heads"),
    [
        (1, 64, FP8, 16),
        (512, 16, FP8, 16),
        (64, 16, NVFP4, 16),
        (128, 16, NVFP4, 64),
        (32, 32, FP8, 32),
        (32, 32, NVFP4, 64),
        (64, 32, FP8, 64),
        (16, 64, FP8, 64),
    ],
)
def test_hopper_tiles_widen_where_measurements_say_so(
    tokens: int, live: int, record: KVRecord, heads: int
) -> None:
    hopper = Target(emulate=False, fp8_cvt=True, capability=90, multiprocessors=132)
    assert attention.decode_tile(tokens, live, record, hopper).heads == heads


@pytest.mark.parametrize("live", [8, 16, 32])
def test_live_heads_equal_the_padded_call_and_leave_other_heads_alone(live: int) -> None:
    one = call(s_q=2)
    out = one.output()
    got = one.decode(TritonBackend().for_live_heads(live), out)
    assert decode_excess(one, got, live) <= 1
    tile = attention.decode_tile(2, live, FP8, target_of(torch.device(DEVICE))).heads
    untouched = out.data[:, max(tile, live) // 8 :].view(torch.uint8)
    assert bool((untouched == POISON).all())


@pytest.mark.parametrize(
    "changes",
    [
        {"topk": 128, "lens": (128, 5, 0)},
        {"topk": 128, "pattern": "middle"},
        {"topk": 128, "pattern": "leading", "s_q": 2},
        {"topk": 128, "pattern": "none", "s_q": 1},
        {"topk": 128, "heads": 128, "s_q": 1, "q_norm_eps": 1e-6},
        {"topk": 8, "s_q": 33, "lens": (8, 3)},
    ],
)
def test_prefill_stays_within_golden_bounds(changes: dict[str, object]) -> None:
    one = call(extra=0, **changes)
    workspace = one.workspace()
    got = one.prefill(TritonBackend(), workspace)
    assert prefill_excess(one, workspace, got) <= 1


def test_prefill_entries_outside_the_workspace_skip() -> None:
    one = call(s_q=2, topk=128, extra=0)
    workspace = one.workspace()
    dropped, kept = copy(one), copy(one)
    dropped.indices, kept.indices = one.indices.clone(), one.indices.clone()
    dropped.indices[:, ::5] = -1
    kept.indices[:, ::5] = len(workspace)
    results = [some.prefill(TritonBackend(), workspace) for some in (dropped, kept)]
    for a, b in zip(*results, strict=True):
        assert same(a, b)


def test_one_key_gives_its_own_bytes() -> None:
    """A single row has probability exactly 1: NoPE output is the row, bit for bit."""
    one = call(s_q=1, topk=4, extra=0, lens=(1,), sinks=torch.full((64,), -INF, device=DEVICE))
    data, scale, _ = decode(one)
    codes, scales = reference.layouts.output_meaning(data, scale)
    slot = one.indices[0, :1].long()
    row = reference.records.read_record(one.kv, slot, one.layout)[0]
    value = reference.records.decode_rows(row[None])[0]
    want_codes, want_scales = reference.quantize.kv_mxfp8(value[:448])
    assert torch.equal(codes[0, 0, :448], want_codes)
    assert torch.equal(scales[0, 0, :14], want_scales)


def test_splits_fill_the_device_and_stay_balanced() -> None:
    big = replace(target_of(torch.device(DEVICE)), multiprocessors=132)
    assert [split_count(tokens, 10, 1, big) for tokens in (1, 13, 20, 33, 64, 67, 500)] == [
        10,
        10,
        5,
        4,
        2,
        1,
        1,
    ]
    assert split_count(66, 20, 2, big) == 4


def test_output_buffers_are_allocated_when_none_are_given() -> None:
    one = call(s_q=2)
    data, scale, _ = decode(one)
    like = alloc_mega_attn_output(2, 8, torch.device(DEVICE))
    assert data.shape == like.data.shape
    assert scale.stride() == like.scale.stride()


def test_hoppers_prefill_gets_its_arguments_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel runs on no CPU, so the launch is bound to the kernel's parameters instead."""
    seen: dict[str, object] = {}
    kernel = prefill_sm90.prefill_sm90_kernel

    class Recorder:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            def launch(*args: object, num_warps: int, maxnreg: int, **constants: object) -> None:
                seen.update(inspect.signature(kernel.fn).bind(*args, **constants).arguments)
                seen["grid"] = grid

            return launch

    hopper = replace(target_of(torch.device(DEVICE)), emulate=False, capability=90)
    monkeypatch.setattr(attention, "target_of", lambda _: hopper)
    monkeypatch.setattr(prefill_sm90, "prefill_sm90_kernel", Recorder())
    one = call(s_q=3, topk=128, extra=0, heads=128)
    workspace = one.workspace()
    data, scale, max_logits, lse = one.prefill(TritonBackend(), workspace)
    assert seen["grid"] == (3, 2)
    assert seen["s_kv"] == len(workspace)
    assert seen["topk"] == 128
    assert seen["HEADS"] == 128
    assert (seen["max_ptr"] is max_logits, seen["lse_ptr"] is lse) == (True, True)
    assert seen["sf_ptr"] is scale
    assert (seen["sf_stride_group"], seen["sf_stride_word"]) == scale.stride()[1:]
    assert seen["len_ptr"] is one.length
    assert seen["sink_ptr"] is one.sinks
    assert data.shape == (3, 16, 4096)
