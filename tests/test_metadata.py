"""The prefill chunk plan, the workspace and the forward context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabench.metadata import (
    DeepseekSparseSWAMetadata,
    PrefillChunk,
    Workspace,
    forward_context,
    get_forward_context,
    prefill_workspace_rows,
)

WINDOW = 128


def metadata(
    seq_lens: list[int], queries: list[int], max_model_len: int, batched: int
) -> DeepseekSparseSWAMetadata:
    none = torch.empty(0)
    gathers = [q + min(s - q, WINDOW - 1) for s, q in zip(seq_lens, queries, strict=True)]
    return DeepseekSparseSWAMetadata(
        num_decodes=0,
        num_decode_tokens=0,
        num_prefills=len(seq_lens),
        num_prefill_tokens=sum(queries),
        query_start_loc=none,
        query_start_loc_cpu=none,
        block_table=none,
        block_size=32,
        slot_mapping=none,
        token_to_req_indices=none,
        is_valid_token=none,
        decode_swa_indices=None,
        decode_swa_lens=None,
        prefill_seq_lens=none,
        prefill_gather_lens=none,
        prefill_seq_lens_cpu=seq_lens,
        prefill_gather_lens_cpu=gathers,
        max_model_len=max_model_len,
        max_num_batched_tokens=batched,
        window_size=WINDOW,
    )


def test_a_chunk_closes_when_the_next_request_would_pass_the_limit() -> None:
    # limit = 4 * (1000 + 128 + 72) = 4800; each request of length 1000 needs 1000 + 100 + 127 rows.
    step = metadata([1000] * 5, [100] * 5, max_model_len=1000, batched=72)
    plan = step.get_prefill_chunk_plan(1, 4, has_compressed=True)
    assert plan == [PrefillChunk(0, 3, 1000, 1227), PrefillChunk(3, 5, 1000, 1227)]


def test_swa_only_chunks_have_no_compressed_rows() -> None:
    step = metadata([50, 70], [50, 70], max_model_len=70, batched=120)
    plan = step.get_prefill_chunk_plan(0, 4, has_compressed=False)
    assert plan == [PrefillChunk(0, 2, 0, 70)]


def test_no_prefills_plan_no_chunks() -> None:
    assert metadata([], [], 10, 10).get_prefill_chunk_plan(1, 4, has_compressed=True) == []


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=12),
    st.sampled_from([0, 1, 2]),
)
def test_every_plan_covers_the_requests_in_order_and_fits_the_reservation(
    requests: list[tuple[int, int]], ratio: int
) -> None:
    queries = [q for q, _ in requests]
    seq_lens = [q + prefix for q, prefix in requests]
    step = metadata(seq_lens, queries, max(seq_lens), sum(queries))
    plan = step.get_prefill_chunk_plan(ratio, 4, has_compressed=ratio != 0)
    assert [i for chunk in plan for i in range(chunk.start, chunk.end)] == list(
        range(len(requests))
    )
    reserved = 4 * prefill_workspace_rows(max(seq_lens), ratio, WINDOW, sum(queries))
    for chunk in plan:
        rows = [seq_lens[i] // ratio if ratio else 0 for i in range(chunk.start, chunk.end)]
        gathers = step.prefill_gather_lens_cpu[chunk.start : chunk.end]
        assert (max(rows), max(rows) + max(gathers)) == (chunk.N, chunk.M)
        assert (chunk.end - chunk.start) * chunk.M <= reserved


def test_workspace_tensors_are_disjoint_and_share_one_buffer() -> None:
    workspace = Workspace(torch.device("cpu"))
    a, b = workspace.get_simultaneous(((3, 5), torch.bfloat16), ((7,), torch.int32))
    a.fill_(1)
    b.fill_(2)
    assert (a == 1).all()
    assert (b == 2).all()
    (again,) = workspace.get_simultaneous(((3, 5), torch.bfloat16))
    assert again.data_ptr() == a.data_ptr()


def test_a_locked_workspace_serves_what_fits_and_refuses_to_grow() -> None:
    workspace = Workspace(torch.device("cpu"))
    workspace.get_simultaneous(((64,), torch.float32))
    workspace.lock()
    workspace.get_simultaneous(((8,), torch.float32))
    with pytest.raises(RuntimeError, match="must not grow"):
        workspace.get_simultaneous(((65,), torch.float32))


def test_the_forward_context_ends_with_its_block() -> None:
    with forward_context({}):
        assert get_forward_context().attn_metadata == {}
        with forward_context(None):
            assert get_forward_context().attn_metadata is None
        assert get_forward_context().attn_metadata == {}
    with pytest.raises(LookupError):
        get_forward_context()
