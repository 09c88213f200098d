"""The eager cache, index, permute and matrix ops against the golden model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference.cache
import reference.indices
import reference.layouts
import reference.linear
import reference.quantize
import reference.records
from megabench.backends import TorchBackend
from megabench.formats import FP8, NVFP4, KVRecord, PageLayout
from megabench.geometry import Geometry, cos_sin_cache
from megabench.quant import alloc_mega_attn_output, pack_mn_major, unpack_scales

TABLE = cos_sin_cache(Geometry.load(), 512, compressed=True)
LAYOUTS = st.sampled_from(["interleaved", "page_split"])
SEEDS = st.integers(0, 2**16)


def poisoned_pool(record: KVRecord, blocks: int, page: int, pad: int) -> torch.Tensor:
    stride = page * record.nbytes + pad
    storage = torch.full((blocks * stride,), 0xA5, dtype=torch.uint8)
    return storage.as_strided((blocks, page, record.nbytes), (stride, record.nbytes, 1))


def whole(cache: torch.Tensor) -> torch.Tensor:
    """Every byte of a pool, page pads included."""
    return cache.as_strided((cache.shape[0] * cache.stride(0),), (1,))


@given(LAYOUTS, st.sampled_from([0, 48]), SEEDS)
def test_swa_rows_land_in_their_slots_and_no_other_byte_changes(
    layout: PageLayout, pad: int, seed: int
) -> None:
    torch.manual_seed(seed)
    cache = poisoned_pool(FP8, 3, 32, pad)
    kv = torch.randn(5, 512).to(torch.bfloat16)
    positions = torch.randint(0, 512, (5,))
    slots = torch.tensor([70, -1, 3, 31, -1])
    q = torch.randn(5, 8, 512).to(torch.bfloat16)
    padded = TorchBackend(layout).pad_q_and_insert_kv(q, kv, cache, slots, positions, TABLE, 64)

    live = slots >= 0
    expected = reference.cache.inserted_rows(kv, positions, TABLE, FP8.nbytes)
    written = reference.records.read_record(cache, slots[live], layout)
    accepted = torch.zeros(5, dtype=torch.bool)
    full = expected.bytes.clone()
    full[live] = written
    accepted = reference.cache.accepts(expected, full)
    assert accepted.all()
    blank = poisoned_pool(FP8, 3, 32, pad)
    reference.records.write_record(blank, slots[live], written, layout)
    assert torch.equal(whole(cache), whole(blank))
    natural = reference.layouts.heads_from_fused_q(q.view(5, -1), 8)
    assert torch.equal(padded, reference.layouts.pad_q(natural, 64))


@given(LAYOUTS, st.sampled_from([FP8, NVFP4]), st.sampled_from([1, 2]), SEEDS)
def test_compressed_rows_are_written_where_they_close_and_roped_at_their_first_token(
    layout: PageLayout, record: KVRecord, ratio: int, seed: int
) -> None:
    torch.manual_seed(seed)
    page = 128 // ratio
    cache = poisoned_pool(record, 2, page, 96)
    latent = torch.randn(6, 512).to(torch.bfloat16)
    positions = torch.arange(37, 43)
    rows = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
    TorchBackend(layout).insert_compressed(latent, positions, TABLE, cache, rows, ratio)
    closing = rows >= 0
    expected = reference.cache.inserted_rows(latent, positions, TABLE, record.nbytes, ratio)
    full = expected.bytes.clone()
    full[closing] = reference.records.read_record(cache, rows[closing], layout)
    assert reference.cache.accepts(expected, full).all()
    blank = poisoned_pool(record, 2, page, 96)
    reference.records.write_record(blank, rows[closing], full[closing], layout)
    assert torch.equal(whole(cache), whole(blank))


def test_a_step_that_writes_nothing_leaves_the_pool_alone() -> None:
    cache = poisoned_pool(FP8, 1, 32, 0)
    none = torch.full((2,), -1)
    q, kv = torch.zeros(2, 8, 512), torch.ones(2, 512)
    TorchBackend().pad_q_and_insert_kv(
        q.bfloat16(), kv.bfloat16(), cache, none, torch.zeros(2, dtype=torch.int64), TABLE, 64
    )
    assert (whole(cache) == 0xA5).all()


@given(LAYOUTS, st.sampled_from([FP8, NVFP4]), SEEDS)
def test_gathered_rows_are_the_last_ones_of_each_request_and_nothing_else_is_written(
    layout: PageLayout, record: KVRecord, seed: int
) -> None:
    torch.manual_seed(seed)
    page = 32
    cache = poisoned_pool(record, 6, page, 0)
    rows = torch.randn(6 * page, 512)
    slots = torch.arange(6 * page)
    reference.records.write_record(
        cache, slots, reference.records.encode_rows(rows, record.nbytes), layout
    )
    table = torch.randperm(6).view(2, 3).to(torch.int32)
    seq_lens = torch.tensor([70, 5], dtype=torch.int32)
    gather_lens = torch.tensor([40, 5], dtype=torch.int32)
    out = torch.full((2, 60, 512), torch.nan, dtype=torch.bfloat16)
    TorchBackend(layout).dequantize_and_gather_k_cache(
        out, cache, seq_lens, gather_lens, table, page, 7
    )
    for request in range(2):
        n, length = int(gather_lens[request]), int(seq_lens[request])
        position = torch.arange(length - n, length)
        wanted = table[request].long()[position // page] * page + position % page
        golden = reference.records.decode_slots(cache, wanted, layout)
        assert torch.equal(out[request, 7 : 7 + n].float(), golden)
        assert out[request, :7].isnan().all()
        assert out[request, 7 + n :].isnan().all()


@given(st.integers(1, 9), SEEDS)
def test_global_top_k_keeps_holes_in_place_and_zeroes_padding_lengths(
    tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    topk = torch.randint(-1, 4 * 64, (tokens, 16), dtype=torch.int32)
    request = torch.randint(0, 3, (tokens,), dtype=torch.int32)
    table = torch.randint(0, 2**20, (3, 4), dtype=torch.int32)
    valid = torch.rand(tokens) < 0.7
    indices, lens = TorchBackend().compute_global_topk_indices_and_lens(
        topk, request, table, 64, valid
    )
    golden, golden_lens = reference.indices.global_topk(topk, request, table, 64, valid)
    assert torch.equal(indices[valid], golden[valid])
    assert torch.equal(lens, golden_lens)
    assert indices.dtype == lens.dtype == torch.int32


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 300)), min_size=1, max_size=4),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 50),
    SEEDS,
)
def test_combined_prefill_lists_put_the_window_directly_after_the_top_k(
    requests: list[tuple[int, int]], ratio: int, base: int, seed: int
) -> None:
    torch.manual_seed(seed)
    topk = 64 if ratio else 0
    query = torch.tensor([q for q, _ in requests])
    seq = query + torch.tensor([prefix for _, prefix in requests])
    gather = query + (seq - query).clamp_max(127)
    start = base + torch.cat((torch.zeros(1, dtype=torch.long), query.cumsum(0)))
    N = int((seq // ratio).max()) if ratio else 0
    M = N + int(gather.max())
    rows = torch.randint(-1, N + 3, (int(query.sum()), topk), dtype=torch.int32)
    args = (rows, *(t.to(torch.int32) for t in (start, seq, gather)), 128, ratio, topk, M, N)
    indices, lens = TorchBackend().combine_topk_swa_indices(*args)
    golden, golden_lens = reference.indices.prefill_combined(*args)
    assert torch.equal(indices, golden)
    assert torch.equal(lens, golden_lens)
    out = (torch.full_like(indices, 77), torch.full_like(lens, 77))
    assert TorchBackend().combine_topk_swa_indices(*args, out=out)[0] is out[0]
    assert torch.equal(out[0], golden)


def test_vendor_permutes_move_packed_scales_with_their_weights() -> None:
    heads = 8
    weight = torch.randint(0, 0x7E, (heads * 512, 128), dtype=torch.uint8)
    scale = torch.randint(0, 255, (heads * 512, 4), dtype=torch.uint8)
    packed = pack_mn_major(scale.unsqueeze(0)).squeeze(0)
    fused, fused_scale = TorchBackend().permute_q_b_proj(
        weight.view(torch.float8_e4m3fn), packed, heads, 512
    )
    golden, golden_scale = reference.layouts.fuse_wq_b(weight, scale, heads)
    assert torch.equal(fused.view(torch.uint8), golden)
    assert torch.equal(unpack_scales(fused_scale), golden_scale)
    assert fused_scale.stride(0) == 1

    weight = torch.randint(0, 0x7E, (2, 5, 4096), dtype=torch.uint8)
    scale = torch.randint(0, 255, (2, 5, 128), dtype=torch.uint8)
    fused, fused_scale = TorchBackend().permute_wv_proj(
        weight.view(torch.float8_e4m3fn), pack_mn_major(scale), 8, 512
    )
    golden, golden_scale = reference.layouts.fuse_wo_a(weight, scale)
    assert torch.equal(fused.view(torch.uint8), golden)
    assert torch.equal(unpack_scales(fused_scale), golden_scale)
    assert fused_scale.stride(1) == 1


def test_linear_is_within_the_golden_bound_and_prepared_weights_change_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 256).to(torch.bfloat16)
    x[2, 32:64] = 0
    w = torch.randint(0, 0x70, (48, 256), dtype=torch.uint8)
    sw = torch.randint(110, 120, (48, 8), dtype=torch.uint8)
    backend, weight = TorchBackend(), w.view(torch.float8_e4m3fn)
    out = backend.linear(x, weight, sw)
    golden = reference.linear.linear(x, w, sw, torch.float64)
    half_ulp = golden.value.abs() * 2.0**-8
    assert ((out.double() - golden.value).abs() <= golden.bound + half_ulp).all()
    backend.prepare(weight, sw)
    assert torch.equal(backend.linear(x, weight, sw), out)


def test_a_weight_written_to_after_prepare_is_never_served_stale() -> None:
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    weight = torch.full((1, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 127, dtype=torch.uint8)
    backend = TorchBackend()
    backend.prepare(weight, scale)
    assert backend.linear(x, weight, scale).item() == 32.0
    scale.fill_(128)
    assert backend.linear(x, weight, scale).item() == 64.0
    weight.view(torch.uint8).fill_(0x40)
    assert backend.linear(x, weight, scale).item() == 128.0


def test_a_weight_that_comes_with_another_scale_is_never_served_stale() -> None:
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    weight = torch.full((1, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale, other = (torch.full((1, 1), byte, dtype=torch.uint8) for byte in (127, 128))
    assert scale._version == other._version
    backend = TorchBackend()
    backend.prepare(weight, scale)
    assert backend.linear(x, weight, other).item() == 64.0
    assert backend.linear(x, weight, scale).item() == 32.0


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_the_einsum_reads_live_groups_of_the_kernels_own_buffer(tokens: int) -> None:
    torch.manual_seed(tokens)
    out = alloc_mega_attn_output(tokens, 8, torch.device("cpu"))
    out.data.copy_(torch.randn(tokens, 8, 4096).to(torch.float8_e4m3fn))
    out.scale.fill_(0x7A7B7C7D)
    out.data[:, 2:] = torch.nan
    w = torch.randint(0, 0x70, (2, 32, 4096), dtype=torch.uint8)
    sw = torch.randint(110, 120, (2, 32, 128), dtype=torch.uint8)
    fused, fused_scale = reference.layouts.fuse_wo_a(w, sw)
    z = torch.empty(tokens, 2, 32, dtype=torch.bfloat16)
    TorchBackend().fp8_einsum(
        "bhr,hdr->bhd",
        (out.data[:, :2], out.scale[:, :2]),
        (fused.view(torch.float8_e4m3fn), pack_mn_major(fused_scale)),
        z,
        (1, 1, 32),
    )
    codes, scales = reference.layouts.output_meaning(out.data[:, :2], out.scale[:, :2])
    golden = reference.linear.wo_a(codes, scales, w, sw, torch.float64)
    half_ulp = golden.value.abs() * 2.0**-8
    assert ((z.double() - golden.value).abs() <= golden.bound + half_ulp).all()


def test_an_unknown_equation_or_recipe_is_refused() -> None:
    none = torch.empty(0)
    with pytest.raises(ValueError, match="equation:"):
        TorchBackend().fp8_einsum("ij,jk->ik", (none, none), (none, none), none, (1, 1, 32))
    with pytest.raises(ValueError, match="recipe:"):
        TorchBackend().fp8_einsum("bhr,hdr->bhd", (none, none), (none, none), none, (1, 128, 128))
