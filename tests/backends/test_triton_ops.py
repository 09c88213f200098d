"""The triton backend's cache, index, weight and product ops against the golden model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import POISON, latents, matmul_excess, paged_pool, table

import reference.cache
import reference.indices
import reference.layouts
import reference.linear
import reference.records
from megabench.backends import TorchBackend
from megabench.backends.triton import products
from megabench.backends.triton.backend import TritonBackend
from megabench.formats import FP8, NVFP4, V4_FP8
from megabench.geometry import Geometry
from megabench.quant import (
    alloc_mega_attn_output,
    dequantize_mxfp8,
    pack_mn_major,
    quantize_kv_mxfp8,
    unpack_scales,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("interleaved", "page_split")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def poisoned(blocks: int, page: int, nbytes: int, pad: int = 48) -> torch.Tensor:
    stride = page * nbytes + pad
    storage = torch.full((blocks * stride,), POISON, dtype=torch.uint8, device=DEVICE)
    return storage.as_strided((blocks, page, nbytes), (stride, nbytes, 1))


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    codes = torch.randint(0, 256, shape, generator=generator(seed), device=DEVICE)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


# ---- cache writes -----------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("live", [8, 64])
def test_q_is_padded_inside_every_chunk_and_swa_rows_are_golden(live: int, layout: Any) -> None:
    g = generator()
    heads = torch.randn(6, live, 512, generator=g, device=DEVICE).bfloat16()
    kv = latents(6, g).bfloat16()
    kv[0, :32], kv[1] = 0, -0.0
    slots = torch.tensor([5, 127, -1, 0, 10**6, 64], device=DEVICE)
    positions = torch.tensor([3, 1, 7, 4095, 0, 100], device=DEVICE)
    cache = poisoned(4, 32, 528)
    q = reference.layouts.fused_from_heads(heads).view(6, live, 512)
    padded = TritonBackend(layout).pad_q_and_insert_kv(
        q, kv, cache, slots, positions, table(DEVICE), 64
    )
    assert torch.equal(padded, reference.layouts.pad_q(heads, 64))
    written = torch.tensor([0, 1, 3, 5], device=DEVICE)
    want = reference.cache.inserted_rows(kv[written], positions[written], table(DEVICE), 528)
    actual = reference.records.read_record(cache, slots[written], layout)
    assert bool(reference.cache.accepts(want, actual).all())
    others = [s for s in range(128) if s not in (0, 5, 64, 127)]
    rest = reference.records.read_record(cache, torch.tensor(others, device=DEVICE), layout)
    assert bool((rest == POISON).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nbytes", [528, 288])
@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_rows_are_golden_where_one_closes_and_absent_elsewhere(
    ratio: int, nbytes: int, layout: Any
) -> None:
    kv = latents(8, generator(1)).bfloat16()
    positions = torch.arange(40, 48, device=DEVICE)
    slots = torch.arange(8, device=DEVICE) * 9
    slots[5] = -1
    cache = poisoned(3, 128 // ratio, nbytes)
    TritonBackend(layout).insert_compressed(kv, positions, table(DEVICE), cache, slots, ratio)
    closes = ((positions + 1) % ratio == 0) & (slots >= 0)
    want = reference.cache.inserted_rows(
        kv[closes], positions[closes], table(DEVICE), nbytes, ratio
    )
    actual = reference.records.read_record(cache, slots[closes], layout)
    assert bool(reference.cache.accepts(want, actual).all())
    skipped = reference.records.read_record(cache, slots[~closes & (slots >= 0)], layout)
    assert bool((skipped == POISON).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nbytes", [528, 288])
def test_gathered_rows_are_exact_and_rows_outside_stay_as_they_were(
    nbytes: int, layout: Any
) -> None:
    rows = latents(512, generator(2))
    used = torch.arange(512, device=DEVICE)
    cache = paged_pool(rows, used, 8, 64, nbytes, layout, 32)
    blocks = torch.tensor([[3, 1, 7], [0, 2, 6], [5, 4, 3]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([100, 0, 192], dtype=torch.int32, device=DEVICE)
    tails = torch.tensor([40, 0, 192], dtype=torch.int32, device=DEVICE)
    for gather in (None, tails):
        out = torch.full((3, 210, 512), 7.0, dtype=torch.bfloat16, device=DEVICE)
        TritonBackend(layout).dequantize_and_gather_k_cache(
            out, cache, lens, gather, blocks, 64, 10
        )
        for request in range(3):
            length = int((lens if gather is None else gather)[request])
            position = torch.arange(int(lens[request]) - length, int(lens[request]), device=DEVICE)
            slots = blocks[request].long()[position // 64] * 64 + position % 64
            want = reference.records.decode_slots(cache, slots, layout).bfloat16()
            assert torch.equal(out[request, 10 : 10 + length], want)
            assert bool((out[request, :10] == 7).all())
            assert bool((out[request, 10 + length :] == 7).all())


def test_a_block_size_that_is_not_the_page_is_refused() -> None:
    out = torch.empty(1, 8, 512, dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="block_size"):
        TritonBackend().dequantize_and_gather_k_cache(
            out, poisoned(2, 32, 528), one, None, one[None], 64, 0
        )


# ---- index lists ------------------------------------------------------------


@settings(max_examples=8)
@given(st.integers(0, 2**31), st.sampled_from([1, 5, 12]), st.sampled_from([8, 24]))
def test_global_topk_equals_golden_with_holes_in_place(seed: int, tokens: int, topk: int) -> None:
    g = generator(seed)
    rows = torch.randint(-1, 64, (tokens, topk), generator=g, device=DEVICE).int()
    request = torch.randint(0, 3, (tokens,), generator=g, device=DEVICE).int()
    blocks = torch.randperm(12, generator=g, device=DEVICE).view(3, 4).int()
    valid = torch.rand(tokens, generator=g, device=DEVICE) < 0.8
    slots, lens = TritonBackend().compute_global_topk_indices_and_lens(
        rows, request, blocks, 16, valid
    )
    want, want_lens = reference.indices.global_topk(rows, request, blocks, 16, valid)
    assert torch.equal(lens, want_lens.int())
    assert torch.equal(slots[valid], want[valid].int())


@settings(max_examples=8)
@given(
    st.integers(0, 2**31),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 300)), min_size=1, max_size=4),
    st.sampled_from([(0, 0), (1, 8), (2, 8)]),
)
def test_combined_prefill_lists_equal_golden(
    seed: int, requests: list[tuple[int, int]], kind: tuple[int, int]
) -> None:
    ratio, topk = kind
    queries = [query for query, _ in requests]
    seq_lens = torch.tensor([q + p for q, p in requests], dtype=torch.int32, device=DEVICE)
    tails = torch.tensor([q + min(p, 127) for q, p in requests], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([17, *queries], device=DEVICE).cumsum(0).int()
    rows = torch.randint(-1, 90, (sum(queries), 8), generator=generator(seed), device=DEVICE).int()
    arguments = (rows, start, seq_lens, tails, 128, ratio, topk, 600, 80)
    indices, lens = TritonBackend().combine_topk_swa_indices(*arguments)
    want, want_lens = reference.indices.prefill_combined(
        rows, start - start[0], seq_lens, tails, 128, ratio, topk, 600, 80
    )
    assert torch.equal(indices, want.int())
    assert torch.equal(lens, want_lens.int())


# ---- weights ----------------------------------------------------------------


def test_permuted_weights_and_their_packed_scales_equal_golden_order() -> None:
    scale = torch.randint(0, 255, (1, 16 * 512, 12), generator=generator(3), device=DEVICE)
    scale = scale.to(torch.uint8)
    w = fp8(16 * 512, 384)
    weight, packed = TritonBackend().permute_q_b_proj(w, pack_mn_major(scale)[0], 16, 512)
    want, want_scale = reference.layouts.fuse_wq_b(w.view(torch.uint8), scale[0], 16)
    assert torch.equal(weight.view(torch.uint8), want)
    assert torch.equal(unpack_scales(packed), want_scale)
    assert packed.stride(0) == 1

    scale = torch.randint(0, 255, (2, 5, 128), generator=generator(4), device=DEVICE)
    scale = scale.to(torch.uint8)
    w = fp8(2, 5, 4096)
    weight, packed = TritonBackend().permute_wv_proj(w, pack_mn_major(scale), 8, 512)
    want, want_scale = reference.layouts.fuse_wo_a(w.view(torch.uint8), scale)
    assert torch.equal(weight.view(torch.uint8), want)
    assert torch.equal(unpack_scales(packed), want_scale)
    assert packed.stride() == (128 * 2, 1, 8)


# ---- products ---------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5, 66])
@pytest.mark.parametrize("k", [1312, 2048])
def test_a_linear_stays_within_golden_bounds(tokens: int, k: int) -> None:
    g = generator(5)
    w, sw = quantize_kv_mxfp8(torch.randn(200, k, generator=g, device=DEVICE) * 0.1)
    x = latents(tokens * 4, g).flatten()[: tokens * k].view(tokens, k).bfloat16()
    x[0, :32] = 0
    got = TritonBackend().linear(x, w.view(torch.float8_e4m3fn), sw)
    assert matmul_excess(got, reference.linear.linear(x, w, sw)) <= 1


@pytest.mark.parametrize(("tokens", "groups"), [(1, 2), (5, 1), (66, 2)])
def test_the_einsum_reads_a_token_slice_and_live_groups_within_golden_bounds(
    tokens: int, groups: int
) -> None:
    g = generator(6)
    w, sw = quantize_kv_mxfp8(torch.randn(2, 96, 4096, generator=g, device=DEVICE) * 0.1)
    codes, scales = quantize_kv_mxfp8(torch.randn(tokens + 3, 2, 4096, generator=g, device=DEVICE))
    x = alloc_mega_attn_output(tokens + 3, 2, torch.device(DEVICE))
    x.data.copy_(codes.view(torch.float8_e4m3fn))
    x.scale.copy_(scales.view(torch.int32))
    whole = torch.full((tokens, 3, 96), 5.0, dtype=torch.bfloat16, device=DEVICE)
    out, part = whole[:, :groups], slice(2, 2 + tokens)
    TritonBackend().fp8_einsum(
        "bhr,hdr->bhd",
        (x.data[part, :groups], x.scale[part, :groups]),
        (w[:groups].view(torch.float8_e4m3fn), pack_mn_major(sw)[:groups]),
        out,
        (1, 1, 32),
    )
    for group in range(groups):
        a = dequantize_mxfp8(codes[part, group], scales[part, group]).double()
        b = dequantize_mxfp8(w[group], sw[group]).double()
        bound = reference.linear.gamma(4096) * (a.norm(dim=1)[:, None] * b.norm(dim=1)[None])
        want = reference.linear.Bounded(a @ b.T, bound)
        assert matmul_excess(out[:, group], want) <= 1
    assert bool((whole[:, groups:] == 5).all())


def test_a_kept_dense_weight_gives_what_the_quantized_one_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w, sw = quantize_kv_mxfp8(torch.randn(96, 1024, generator=generator(7), device=DEVICE))
    x = torch.randn(70, 1024, generator=generator(8), device=DEVICE).bfloat16()
    weight, dense = w.view(torch.float8_e4m3fn), dequantize_mxfp8(w, sw).bfloat16()
    monkeypatch.setattr(products, "DENSE_TOKENS", 1)
    got = products.linear(x, weight, sw, dense)
    assert matmul_excess(got, reference.linear.linear(x, w, sw)) <= 1


# ---- the backend ------------------------------------------------------------


def test_the_backend_refuses_v4_records_and_serves_v41_ones() -> None:
    backend, geometry, device = TritonBackend(), Geometry.load(), torch.device(DEVICE)
    assert backend.supports(geometry, device, FP8).ok
    assert backend.supports(geometry, device, NVFP4).ok
    refused = backend.supports(geometry, device, V4_FP8)
    assert not refused.ok
    assert refused.reason


def test_live_heads_must_be_whole_groups_and_leave_the_first_backend_alone() -> None:
    backend = TritonBackend()
    narrow = backend.for_live_heads(16)
    assert (backend.live_heads, narrow.live_heads) == (None, 16)
    assert isinstance(narrow, TorchBackend)
    with pytest.raises(ValueError, match="live_heads"):
        backend.for_live_heads(12)


def test_empty_steps_write_nothing() -> None:
    backend, cache = TritonBackend(), poisoned(2, 32, 528)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    kv = torch.empty(0, 512, dtype=torch.bfloat16, device=DEVICE)
    q = torch.empty(0, 8, 512, dtype=torch.bfloat16, device=DEVICE)
    padded = backend.pad_q_and_insert_kv(q, kv, cache, none, none, table(DEVICE), 64)
    backend.insert_compressed(kv, none, table(DEVICE), cache, none, 2)
    assert padded.shape == (0, 64, 512)
    assert bool((cache == POISON).all())
