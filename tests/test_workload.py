"""A workload is deterministic, names only rows that exist, and poisons everything else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.backends.torch_eager import TorchBackend
from megabench.cases import FAMILIES, Case, load_suite
from megabench.formats import FP8, SWA_PAGE
from megabench.geometry import Geometry
from megabench.metadata import forward_context
from megabench.workload import (
    Workload,
    build_weights,
    build_workload,
    clone_pages,
    make_layer,
    needed_bytes,
    obstacle,
)

CPU = torch.device("cpu")
WINDOW, TOPK = 128, 512
MIXED = Case(batch="2q1s300_1q3s140_1q2", kv_cache="nvfp4_ds_mla")


def tensors_of(workload: Workload) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(workload).items() if isinstance(v, torch.Tensor)}


def storage_of(cache: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, page stride]: pages with the bytes between them."""
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))


def owned_bytes(case: Case, name: str) -> torch.Tensor:
    """bool [blocks, page stride]: what does not follow the poison."""
    first, second = (build_workload(case, CPU, poison) for poison in (0xFF, 0x7F))
    a, b = (storage_of(getattr(w, name)) for w in (first, second))
    return a == b


def history_bytes(workload: Workload, name: str) -> torch.Tensor:
    """bool [blocks, page stride] by plain loops: the bytes of rows written before the step that
    some token of the step may read."""
    case = workload.case
    ratio = case.compress_ratio
    swa = name == "swa_cache"
    cache: torch.Tensor = getattr(workload, name)
    table = workload.swa_block_table if swa else workload.compressed_block_table
    assert table is not None
    page, nbytes = cache.shape[1:]
    record = FP8 if swa else case.record
    owned = torch.zeros_like(storage_of(cache), dtype=torch.bool)
    token = 0
    for r, request in enumerate(case.requests):
        rows: set[int] = set()
        for position in range(request.prefix_len, request.seq_len):
            if swa:
                rows |= set(range(max(0, position - WINDOW + 1), position + 1))
            elif request.is_decode:
                assert workload.topk_indices is not None
                rows |= set(workload.topk_indices[token].tolist()) - {-1}
            token += 1
        if not swa and not request.is_decode:
            rows = set(range(request.seq_len // ratio))
        for row in rows:
            if row >= (request.prefix_len if swa else request.prefix_len // ratio):
                continue
            block, i = int(table[r, row // page]), row % page
            if case.page_layout == "interleaved":
                owned[block, i * nbytes : (i + 1) * nbytes] = True
            else:
                data, scales = record.data_bytes, record.scale_bytes
                owned[block, i * data : (i + 1) * data] = True
                start = page * data + i * scales
                owned[block, start : start + scales] = True
    return owned


def test_the_same_case_gives_the_same_bytes_and_another_seed_others() -> None:
    a, b = (tensors_of(build_workload(MIXED, CPU)) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    other = tensors_of(build_workload(MIXED.model_copy(update={"seed": 1}), CPU))
    for name in ("qr", "kv", "latent", "topk_indices", "swa_cache", "compressed_cache"):
        assert not torch.equal(a[name], other[name]), name


@pytest.mark.parametrize(
    "change",
    [{"tp": 8}, {"page_layout": "page_split"}, {"page_padding": 4}, {"sink": "none"}],
)
def test_how_a_step_is_stored_or_split_does_not_change_its_values(
    change: dict[str, object],
) -> None:
    a, b = (build_workload(c, CPU) for c in (MIXED, MIXED.model_copy(update=change)))
    for name in ("qr", "kv", "latent", "topk_indices", "positions", "swa_block_table"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_padding_tokens_leave_the_real_ones_as_they_are() -> None:
    case = Case(batch="3q1s200", compress_ratio=2)
    plain = build_workload(case, CPU)
    padded = build_workload(case.model_copy(update={"padding_tokens": 2}), CPU)
    for name in ("qr", "kv", "latent", "topk_indices", "positions"):
        assert torch.equal(getattr(padded, name)[:3], getattr(plain, name)), name
    step = padded.swa_metadata
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (3, 5, 0)
    assert step.query_start_loc.tolist() == [0, 1, 2, 3]
    assert step.is_valid_token.tolist() == [True] * 3 + [False] * 2
    assert step.slot_mapping[3:].tolist() == [-1, -1]
    assert step.decode_swa_lens is not None
    assert step.decode_swa_lens.tolist() == [128] * 3 + [0] * 2
    assert padded.compressed_metadata is not None
    assert padded.compressed_metadata.slot_mapping[3:].tolist() == [-1, -1]


@pytest.mark.parametrize("layout", ["interleaved", "page_split"])
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_exactly_the_readable_history_is_valid_and_all_else_is_poison(
    ratio: int, cache: str, layout: str
) -> None:
    case = Case.model_validate(
        {
            "batch": "2q1s700_1q3s140_1q2",
            "kv_cache": cache,
            "compress_ratio": ratio,
            "page_layout": layout,
            "page_padding": 1,
        }
    )
    workload = build_workload(case, CPU)
    for name in ("swa_cache", "compressed_cache"):
        assert torch.equal(owned_bytes(case, name), history_bytes(workload, name)), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_history_rows_hold_no_nan_code_and_no_forbidden_scale(family: str, cache: str) -> None:
    case = Case.model_validate(
        {"batch": "1q3s300", "kv_cache": cache, "family": family, "page_layout": "interleaved"}
    )
    workload = build_workload(case, CPU)
    for name, record in (("swa_cache", FP8), ("compressed_cache", case.record)):
        rows = storage_of(getattr(workload, name))[history_bytes(workload, name)]
        data, scales = rows.view(-1, record.nbytes).split(
            [record.data_bytes, record.scale_bytes], 1
        )
        assert len(data)
        if record is FP8:
            assert not ((data & 0x7F) == 0x7F).any()
            assert not torch.isin(scales, torch.tensor([0, 255], dtype=torch.uint8)).any()
        else:
            assert not ((scales & 0x7F) == 0x7F).any()


def test_random_history_varies_its_scales_and_has_keys_close_to_unit_variance() -> None:
    workload = build_workload(Case(batch="1q2s2k", kv_cache="fp8_ds_mla"), CPU)
    owned = history_bytes(workload, "compressed_cache")
    assert workload.compressed_cache is not None
    rows = storage_of(workload.compressed_cache)[owned].view(-1, FP8.nbytes)
    codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    scales = 2.0 ** (rows[:, 512:].to(torch.float64) - 127)
    values = codes * scales.repeat_interleave(32, 1)
    assert 0.8 < values.std() < 1.6
    assert len(rows[:, 512:].unique()) == 4


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.one_of(st.integers(0, 40), st.integers(480, 1300))),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
)
def test_top_k_rows_are_distinct_closed_rows_of_the_request_with_a_tail_of_minus_one(
    parts: list[tuple[int, int]], ratio: int, threshold: int
) -> None:
    batch = "_".join(f"1q{q}s{q + prefix}" for q, prefix in parts)
    case = Case.model_validate(
        {"batch": batch, "compress_ratio": ratio, "decode_threshold": threshold}
    )
    workload = build_workload(case, CPU)
    assert workload.topk_indices is not None
    assert workload.topk_indices.shape == (case.num_tokens, TOPK)
    for position, row in zip(
        workload.positions.tolist(), workload.topk_indices.tolist(), strict=True
    ):
        closed = (position + 1) // ratio
        count = min(closed, TOPK)
        assert len(set(row[:count])) == count
        assert all(0 <= i < closed for i in row[:count])
        assert set(row[count:]) <= {-1}


def test_top_k_rows_are_shuffled_and_reach_the_whole_context() -> None:
    workload = build_workload(Case(batch="1q1s64k"), CPU)
    assert workload.topk_indices is not None
    rows = workload.topk_indices[0]
    assert not torch.equal(rows, rows.sort().values)
    strata = rows.sort().values // 128
    assert strata.tolist() == list(range(TOPK))


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_metadata_agrees_with_plain_loops_over_the_requests(ratio: int) -> None:
    case = Case.model_validate(
        {
            "batch": "1q1s300_2q3s129_1q4s40_1q5_1q2s131",
            "compress_ratio": ratio,
            "decode_threshold": 3,
        }
    )
    workload = build_workload(case, CPU)
    step, compressed = workload.swa_metadata, workload.compressed_metadata
    assert (step.num_decodes, step.num_decode_tokens) == (4, 9)
    assert (step.num_prefills, step.num_prefill_tokens) == (2, 9)
    assert step.query_start_loc_cpu.tolist() == [0, 1, 4, 7, 9, 13, 18]
    assert step.prefill_seq_lens_cpu == [40, 5]
    assert step.prefill_gather_lens_cpu == [40, 5]
    assert step.decode_swa_indices is not None
    assert step.decode_swa_lens is not None
    token = 0
    for r, request in enumerate(case.requests):
        for position in range(request.prefix_len, request.seq_len):
            table = step.block_table[r]

            def slot(p: int, table: torch.Tensor = table) -> int:
                return int(table[p // SWA_PAGE]) * SWA_PAGE + p % SWA_PAGE

            assert workload.positions[token] == position
            assert workload.token_to_req[token] == r
            assert step.slot_mapping[token] == slot(position)
            if request.is_decode:
                window = [slot(p) for p in range(max(0, position - WINDOW + 1), position + 1)]
                assert step.decode_swa_lens[token] == len(window)
                padded = window + [-1] * (WINDOW - len(window))
                assert step.decode_swa_indices[token].tolist() == padded
            if ratio:
                assert compressed is not None
                page = 128 // ratio
                row = position // ratio
                wanted = -1
                if (position + 1) % ratio == 0:
                    wanted = int(compressed.block_table[r, row // page]) * page + row % page
                assert compressed.slot_mapping[token] == wanted
            token += 1


def test_no_two_rows_share_a_slot_and_no_page_lies_on_the_null_page() -> None:
    for seed in range(12):
        workload = build_workload(Case(batch="9q2s200", seed=seed), CPU)
        table = workload.swa_block_table
        used = table[table > 0]
        assert len(used.unique()) == len(used) == 9 * 5  # rows 71..199 lie on pages 2..6
        slots = workload.swa_metadata.slot_mapping
        assert len(slots.unique()) == len(slots)
        assert workload.compressed_cache is not None
        for cache in (workload.swa_cache, workload.compressed_cache):
            assert (storage_of(cache)[0] == 0xFF).all()


def test_a_step_of_no_requests_has_empty_tensors() -> None:
    workload = build_workload(Case(batch="0q1"), CPU)
    assert workload.qr.shape == (0, 1280)
    assert workload.swa_metadata.num_decodes == workload.swa_metadata.num_prefills == 0
    assert workload.swa_metadata.decode_swa_indices is None
    assert workload.swa_metadata.prefill_seq_lens is None


def test_a_far_decode_materialises_only_the_pages_it_names() -> None:
    workload = build_workload(Case(batch="1q1s1024k"), CPU)
    assert workload.compressed_cache is not None
    assert workload.compressed_cache.shape[0] <= TOPK + 5
    assert workload.swa_cache.shape[0] <= 5 + 4


def test_ci_has_steps_whose_prefills_need_two_and_three_chunks() -> None:
    chunks = set()
    for case in load_suite("ci").select("*12q2s200") + load_suite("ci").select("*5q2s200"):
        step = build_workload(case, CPU).swa_metadata
        ratio = case.compress_ratio
        chunks.add(len(step.get_prefill_chunk_plan(ratio, 4, ratio != 0)))
    assert {2, 3} <= chunks


def test_matched_sinks_lie_at_the_log_of_the_keys_and_differ_by_head() -> None:
    sink = build_workload(Case(batch="4q1s4k"), CPU).attn_sink
    assert len(sink.unique()) == 64
    assert abs(sink.mean() - math.log(WINDOW + TOPK)) < 0.5
    assert 0.7 < sink.std() < 1.4


def test_other_sinks_are_what_their_name_says() -> None:
    def sinks(kind: str) -> torch.Tensor:
        return build_workload(Case.model_validate({"batch": "1q1s9", "sink": kind}), CPU).attn_sink

    assert (sinks("none") == -math.inf).all()
    assert (sinks("zero") == 0).all()
    mixed = sinks("inf")
    assert (mixed == math.inf).sum() == (mixed == -math.inf).sum() == 16
    assert sinks("large").max() == 1e4


def test_a_copied_cache_keeps_its_page_stride_and_the_bytes_between_pages() -> None:
    cache = build_workload(MIXED.model_copy(update={"page_padding": 4}), CPU).swa_cache
    copied = clone_pages(cache)
    assert copied.stride() == cache.stride()
    assert torch.equal(storage_of(copied), storage_of(cache))
    copied[0, 0, 0] ^= 1
    assert not torch.equal(copied, cache)


def test_weights_are_blocks_of_different_scales_and_linears_of_unit_gain() -> None:
    geometry = Geometry.load()
    weights = build_weights(geometry, 0, CPU)
    assert weights["wq_b.weight"].shape == (64 * 512, 1280)
    assert weights["wo_a.scale"].shape == (8 * 1024 // 32, 4096 // 32)
    for name, gain in (("wq_b", 1.0), ("wo_a", 16.0), ("wo_b", 1.0)):
        codes, scale = weights[f"{name}.weight"][:512], weights[f"{name}.scale"][:16]
        assert len(scale.unique()) == 3
        expanded = (2.0 ** (scale.to(torch.float32) - 127)).repeat_interleave(32, 0)
        dense = codes.to(torch.float32) * expanded.repeat_interleave(32, 1)
        assert 0.5 < dense.std() * math.sqrt(dense.shape[1]) / gain < 2.0


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return build_weights(Geometry.load(), 0, CPU)


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_the_layer_never_sees_the_poison(ratio: int, weights: dict[str, torch.Tensor]) -> None:
    case = Case.model_validate(
        {"batch": "2q1s300_1q3s140_1q2", "tp": 8, "compress_ratio": ratio, "page_padding": 1}
    )
    outputs = []
    for poison in (0xFF, 0x01):
        workload = build_workload(case, CPU, poison)
        layer = make_layer(workload, TorchBackend(), weights, tp_rank=3)
        step = workload.step_metadata(layer.swa_cache_layer.prefix, layer.compressed_cache_prefix)
        with forward_context(step):
            out = layer.forward(workload.qr, workload.kv, workload.positions, workload.latent)
        outputs.append(out)
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])


def test_what_cannot_run_says_why() -> None:
    backend = TorchBackend()
    assert obstacle(Case(batch="1q1s9", tp=8), backend, CPU) is None
    assert "16" in (obstacle(Case(batch="1q1s9", tp=16), backend, CPU) or "")
    assert "1048576 positions" in (obstacle(Case(batch="1q1s2048k"), backend, CPU) or "")
    huge = Case(batch="1q1s9", page_padding=1 << 30)
    assert "GiB" in (obstacle(huge, backend, CPU) or "")


def test_the_memory_estimate_bounds_the_caches_it_will_make() -> None:
    for case in load_suite("smoke").cases:
        workload = build_workload(case, CPU)
        caches = [c for c in (workload.swa_cache, workload.compressed_cache) if c is not None]
        assert sum(storage_of(c).numel() for c in caches) * 3 < needed_bytes(case)
