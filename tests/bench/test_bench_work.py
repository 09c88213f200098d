"""FLOPs and bytes come from the index lists; every count is compared with a loop over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.bench.calls import OpCall
from megabench.bench.work import Traffic, Work, op_work, step_work, traffic_of

HEADS, PADDED, ROW = 8, 64, 1024


def work(call: OpCall, heads: int | None = None) -> Work:
    return op_work([traffic_of(call, live_heads=heads)])


def decode_call(
    swa: torch.Tensor, swa_len: torch.Tensor, extra: torch.Tensor | None, nbytes: int = 288
) -> OpCall:
    """A decode over pools of 8 pages of 32 and 128 rows; lists as given."""
    tokens = swa.shape[0]
    kv = torch.zeros(8, 32, 1, 528, dtype=torch.uint8)
    extra_kv = None if extra is None else torch.zeros(8, 128, 1, nbytes, dtype=torch.uint8)
    lens = None if extra is None else (extra >= 0).sum(1, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "q": torch.zeros(tokens, PADDED, 512, dtype=torch.bfloat16),
        "kv": kv,
        "indices": swa,
        "sm_scale": 1.0,
        "d_v": 512,
        "attn_sink": torch.zeros(PADDED),
        "topk_length": swa_len,
        "extra_kv": extra_kv,
        "extra_indices": extra,
        "extra_topk_length": lens,
        "enable_q_norm": False,
        "rms_norm_eps": 0.0,
        "token_positions": torch.arange(tokens, dtype=torch.int32) % 3,
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": torch.zeros(8, 64),
        "n_wv_group": 8,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
    }
    return OpCall("fused_norm_rope_attn_rope_cast_decode", tuple(arguments.values()), {})


def lists(rows: list[list[int]], width: int = 128) -> torch.Tensor:
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32)


slots = st.lists(st.integers(-1, 300), max_size=12)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(slots, slots), min_size=1, max_size=4), st.sampled_from([288, 528]))
def test_decode_counts_what_a_loop_over_its_lists_counts(
    tokens: list[tuple[list[int], list[int]]], nbytes: int
) -> None:
    swa, extra = [list(a) for a, _ in tokens], [list(b) for _, b in tokens]
    length = torch.tensor([len(row) for row in swa], dtype=torch.int32)
    call = decode_call(lists(swa), length, lists(extra, 512), nbytes)
    live_swa = [s for row in swa for s in row if 0 <= s < 8 * 32]
    # The extra list's length is its count of non-negative entries, holes before it included.
    kept = [row[: sum(s >= 0 for s in row)] for row in extra]
    live_extra = [s for row in kept for s in row if 0 <= s < 8 * 128]
    got, n = work(call, HEADS), len(tokens)
    assert got.flops == 4 * HEADS * 512 * (len(live_swa) + len(live_extra))
    per_head = 1024 + 512 + 16 + 4
    positions = len({t % 3 for t in range(n)})
    fixed = 4 * HEADS + 4 * n + 256 * positions + n * HEADS * per_head + 8 * n
    lists_read = 4 * (len(live_swa) + len(live_extra))
    assert got.bytes_compulsory == fixed + lists_read + 528 * len(set(live_swa)) + nbytes * len(
        set(live_extra)
    )
    repeats = 256 * (n - positions) + n * (PADDED - HEADS) * per_head
    assert got.bytes_issued == fixed + lists_read + repeats + 528 * len(live_swa) + nbytes * len(
        live_extra
    )


def test_a_full_decode_token_costs_the_published_84_mflop_and_317_kb() -> None:
    """64 heads, 128 + 512 NVFP4 rows: 83.886 MFLOP, and 317,196 bytes beside lse and lengths."""
    swa = torch.arange(128, dtype=torch.int32).unsqueeze(0)
    extra = torch.arange(512, dtype=torch.int32).unsqueeze(0)
    got = work(decode_call(swa, torch.tensor([128], dtype=torch.int32), extra))
    assert got.flops == 83_886_080
    kv, q, out, scales, indices = 215_040, 65_536, 32_768, 1_024, 2_560
    small = 256 + 4 + 8 + 4 * 64 + 4 * 64  # table row, position, lengths, sinks, lse
    assert got.bytes_compulsory == kv + q + out + scales + indices + small


def test_duplicates_are_issued_twice_and_compulsory_once() -> None:
    length = torch.tensor([4], dtype=torch.int32)
    once = work(decode_call(lists([[1, 2, 3, 4]]), length, None))
    twice = work(decode_call(lists([[1, 1, 2, 2]]), length, None))
    assert once.flops == twice.flops
    assert once.bytes_issued == twice.bytes_issued
    assert once.bytes_compulsory - twice.bytes_compulsory == 2 * 528


def test_entries_past_the_length_cost_nothing() -> None:
    full = work(decode_call(lists([[1, 2, 3, 4]]), torch.tensor([4], dtype=torch.int32), None))
    half = work(decode_call(lists([[1, 2, 3, 4]]), torch.tensor([2], dtype=torch.int32), None))
    assert half.flops * 2 == full.flops


def test_a_linear_counts_its_weight_once_and_both_operands_as_fp8() -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    w, sw = torch.zeros(32, 64, dtype=torch.uint8), torch.zeros(32, 2, dtype=torch.uint8)
    got = work(OpCall("linear", (x, w, sw), {}))
    assert got.flops == got.flops_fp8 == 2 * 3 * 64 * 32
    assert got.bytes_compulsory == got.bytes_issued == 3 * 64 * 2 + 32 * 64 + 64 + 3 * 32 * 2
    assert got.bytes_written == 3 * 32 * 2


def test_a_gather_reads_each_request_to_its_length_through_its_table() -> None:
    out = torch.zeros(2, 10, 512, dtype=torch.bfloat16)
    cache = torch.zeros(6, 4, 528, dtype=torch.uint8)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    lens = torch.tensor([9, 3], dtype=torch.int32)
    gather_lens = torch.tensor([5, 3], dtype=torch.int32)
    call = OpCall("dequantize_and_gather_k_cache", (out, cache, lens, gather_lens, table, 4, 0), {})
    got = work(call)
    # Rows 4..8 of the first lie in pages 1 and 2, rows 0..2 of the second in page 0.
    assert got.bytes_compulsory == 8 * 528 + 8 * 1024 + 3 * 4 + 16
    assert got.bytes_written == 8 * 1024
    assert got.flops == 0


def test_an_insert_counts_written_rows_only() -> None:
    slots = torch.tensor([5, -1, 6], dtype=torch.int64)
    positions = torch.tensor([4, 4, 5])
    cache = torch.zeros(2, 32, 528, dtype=torch.uint8)
    q, kv = torch.zeros(3, 8, 512, dtype=torch.bfloat16), torch.zeros(3, 512, dtype=torch.bfloat16)
    call = OpCall(
        "pad_q_and_insert_kv", (q, kv, cache, slots, positions, torch.zeros(8, 64), 64), {}
    )
    got = work(call)
    q_bytes = 3 * (8 + 64) * 1024
    assert got.bytes_compulsory == 2 * 528 + 3 * 1024 + 3 * 16 + 2 * 256 + q_bytes
    assert got.bytes_issued == got.bytes_compulsory + 256
    assert got.bytes_written == 2 * 528 + 3 * 64 * 1024


def test_q_that_needs_no_padding_need_not_move() -> None:
    cache, slots = torch.zeros(2, 32, 528, dtype=torch.uint8), torch.tensor([5])
    kv, table = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(8, 64)

    def padding(heads: int) -> int:
        q = torch.zeros(1, heads, 512, dtype=torch.bfloat16)
        call = OpCall("pad_q_and_insert_kv", (q, kv, cache, slots, slots, table, 64), {})
        return work(call).bytes_compulsory

    assert padding(64) == 528 + 1024 + 16 + 256
    assert padding(32) == padding(64) + (32 + 64) * 1024


def test_only_rows_that_close_are_compressed_inserts() -> None:
    latent = torch.zeros(4, 512, dtype=torch.bfloat16)
    positions = torch.arange(4)
    slots = torch.tensor([-1, 7, -1, 8])
    cache = torch.zeros(2, 64, 288, dtype=torch.uint8)
    call = OpCall("insert_compressed", (latent, positions, torch.zeros(8, 64), cache, slots, 2), {})
    assert work(call).bytes_compulsory == 2 * 1024 + 2 * 288 + 4 * 16 + 2 * 256


def test_what_passes_between_ops_is_not_compulsory_for_the_step() -> None:
    parts = [
        Traffic(flops=10, external=100, internal=7, internal_out=7),
        Traffic(flops=20, external=50, internal=7, repeated=3, external_out=40),
    ]
    step = step_work(parts)
    assert (step.flops, step.bytes_compulsory, step.bytes_issued) == (30, 150, 167)
    assert op_work(parts[:1]).bytes_compulsory == 107
    assert (step.bytes_written, op_work(parts).bytes_written) == (40, 47)


def test_a_row_written_and_read_in_one_step_counts_once() -> None:
    cache = torch.zeros(8, 32, 528, dtype=torch.uint8)
    q = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    kv = torch.zeros(1, 512, dtype=torch.bfloat16)
    slot, position = torch.tensor([3]), torch.tensor([0])
    insert = OpCall(
        "pad_q_and_insert_kv", (q, kv, cache, slot, position, torch.zeros(1, 64), 64), {}
    )
    decode = decode_call(lists([[3]]), torch.tensor([1], dtype=torch.int32), None)
    args = list(decode.args)
    args[1] = cache.unsqueeze(-2)
    parts = [traffic_of(insert), traffic_of(OpCall(decode.op, tuple(args), {}))]
    apart = [traffic_of(insert), traffic_of(decode)]
    assert step_work(apart).bytes_compulsory - step_work(parts).bytes_compulsory == 528


@pytest.mark.parametrize("topk", [0, 512])
def test_combine_counts_the_lists_it_writes(topk: int) -> None:
    tokens, width = 5, 640 if topk else 128
    out = (torch.zeros(tokens, width, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32))
    indices = torch.zeros(tokens, 512, dtype=torch.int32)
    starts, lens = torch.tensor([0, 5]), torch.tensor([5])
    call = OpCall(
        "combine_topk_swa_indices", (indices, starts, lens, lens, 128, 1, topk, 10, 5, out), {}
    )
    assert work(call).bytes_compulsory == tokens * topk * 4 + 16 + 16 + 4 * tokens * (width + 1)
