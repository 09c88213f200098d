"""Index lists against their definition, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import indices

WINDOW = 128


@pytest.mark.parametrize(
    ("position", "first", "count"),
    [(0, 0, 1), (1, 0, 2), (126, 0, 127), (127, 0, 128), (128, 1, 128), (1000, 873, 128)],
)
def test_the_window_is_the_last_128_positions(position: int, first: int, count: int) -> None:
    table = torch.arange(40).flip(0)[None]
    slots, lens = indices.decode_swa(torch.tensor([position]), table, torch.tensor([0]), 32)
    expected = [(39 - p // 32) * 32 + p % 32 for p in range(first, position + 1)]
    assert slots[0].tolist() == expected + [-1] * (128 - count)
    assert lens.tolist() == [count]
    assert slots.dtype == lens.dtype == torch.int32


def test_padding_tokens_have_an_empty_window_and_no_topk() -> None:
    table, request = torch.arange(8)[None], torch.zeros(2, dtype=torch.long)
    valid = torch.tensor([True, False])
    _, lens = indices.decode_swa(torch.tensor([5, 5]), table, request, 32, valid=valid)
    assert lens.tolist() == [6, 0]
    topk = torch.tensor([[3, 1], [3, 1]], dtype=torch.int32)
    slots, lens = indices.global_topk(topk, request, table, 64, valid)
    assert lens.tolist() == [2, 0]
    assert slots[0].tolist() == [3, 1]


def test_topk_goes_through_its_requests_table_with_holes_in_place() -> None:
    table = torch.tensor([[4, 5], [9, 2]], dtype=torch.int32)
    topk = torch.tensor([[0, 65, -1, 127], [64, -1, -1, -1]], dtype=torch.int32)
    slots, lens = indices.global_topk(topk, torch.tensor([1, 0]), table, 64)
    assert slots.tolist() == [[9 * 64, 2 * 64 + 1, -1, 2 * 64 + 63], [5 * 64, -1, -1, -1]]
    assert lens.tolist() == [3, 1]


def test_slots_beyond_two_to_the_31_bytes_are_exact() -> None:
    table = torch.tensor([[30_000_000]], dtype=torch.int32)
    slots, _ = indices.global_topk(torch.tensor([[63]]), torch.tensor([0]), table, 64)
    assert slots.item() == 30_000_000 * 64 + 63


REQUEST = st.tuples(st.integers(1, 6), st.integers(0, 300))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(REQUEST, min_size=1, max_size=4),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 2**31),
    st.integers(0, 50),
)
def test_combined_prefill_rows_follow_the_definition(
    shapes: list[tuple[int, int]], ratio: int, seed: int, offset: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = [q for q, _ in shapes]
    seq = [q + prefix for q, prefix in shapes]
    gather = [q + min(prefix, WINDOW - 1) for q, prefix in shapes]
    topk = 20 if ratio else 0
    N = max(s // ratio if ratio else 0 for s in seq)
    M = N + max(gather)
    start = torch.tensor([offset, *query]).cumsum(0)
    count = sum(query)
    chosen = torch.randint(-2, N + 3, (count, max(topk, 1)), generator=generator).int()
    got, lens = indices.prefill_combined(
        chosen, start, torch.tensor(seq), torch.tensor(gather), WINDOW, ratio, topk, M, N
    )
    width = -(-(topk + WINDOW) // 128) * 128
    t = 0
    for r in range(len(shapes)):
        gather_start = seq[r] - gather[r]
        for i in range(query[r]):
            position = seq[r] - query[r] + i
            k = max(0, min((position + 1) // ratio, topk)) if ratio else 0
            row = [int(x) + M * r if 0 <= x < N else -1 for x in chosen[t, :k]]
            first = max(0, position - WINDOW + 1, gather_start)
            row += [M * r + N + p - gather_start for p in range(first, position + 1)]
            assert lens[t] == len(row)
            assert got[t].tolist() == row + [-1] * (width - len(row))
            t += 1
    assert got.shape == (count, width)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), max_size=12),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 400),
)
def test_prefill_chunks_cover_requests_in_order_and_fill_the_limit(
    shapes: list[tuple[int, int]], ratio: int, batched: int
) -> None:
    seq = [q + prefix for q, prefix in shapes]
    gather = [q + min(prefix, WINDOW - 1) for q, prefix in shapes]
    plan = indices.prefill_plan(seq, gather, ratio, 500, WINDOW, batched)
    limit = 4 * ((-(-500 // ratio) if ratio else 0) + WINDOW + batched)

    def rows(start: int, end: int) -> int:
        compressed = max(s // ratio if ratio else 0 for s in seq[start:end])
        return (end - start) * (compressed + max(gather[start:end]))

    assert [c.start for c in plan] + [len(seq)] == [0] + [c.end for c in plan]
    for chunk in plan:
        assert rows(chunk.start, chunk.end) <= limit or chunk.end == chunk.start + 1
        assert chunk.end == len(seq) or rows(chunk.start, chunk.end + 1) > limit
        assert rows(chunk.start, chunk.end) == (chunk.end - chunk.start) * chunk.M
        assert max(s // ratio if ratio else 0 for s in seq[chunk.start : chunk.end]) == chunk.N
