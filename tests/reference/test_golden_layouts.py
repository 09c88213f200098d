"""Fused layouts against the contract's index formulas."""

from __future__ import annotations

import pytest
import torch

from reference import layouts


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_wq_b_rows_and_their_scales_follow_the_formula(heads: int) -> None:
    row = torch.arange(heads * 512)
    w, s = layouts.fuse_wq_b(row[:, None].expand(-1, 4), row[:, None], heads)
    h, d = row // 512, row % 512
    target = (d // 16) * (heads * 16) + h * 16 + d % 16
    assert torch.equal(w[target], row[:, None].expand(-1, 4))
    assert torch.equal(s[target, 0], row)


def test_wo_a_columns_follow_the_formula_and_scales_move_as_chunks() -> None:
    column = torch.arange(4096)
    w, s = layouts.fuse_wo_a(column.expand(2, 3, -1), torch.arange(128).expand(2, 3, -1))
    h, c, j = column // 512, column % 512 // 32, column % 32
    assert torch.equal(w[1, 2, (c * 8 + h) * 32 + j], column)
    chunk = torch.arange(128)
    assert torch.equal(s[1, 2, (chunk % 16) * 8 + chunk // 16], chunk)


@pytest.mark.parametrize("heads", [8, 64])
def test_the_fused_q_gemm_output_unfolds_to_natural_heads(heads: int) -> None:
    natural = torch.arange(3 * heads * 512).view(3, heads, 512)
    rows, _ = layouts.fuse_wq_b(natural[1].reshape(-1, 1), torch.zeros(heads * 512, 1), heads)
    fused = layouts.fused_from_heads(natural)
    assert torch.equal(fused[1], rows[:, 0])
    assert torch.equal(layouts.heads_from_fused_q(fused, heads), natural)


@pytest.mark.parametrize(("live", "padded"), [(8, 64), (16, 64), (64, 64), (72, 128)])
def test_q_padding_goes_inside_every_chunk(live: int, padded: int) -> None:
    natural = torch.arange(1, 2 * live * 512 + 1).view(2, live, 512)
    kernel = layouts.pad_q(natural, padded)
    chunks = kernel.reshape(2, 32, padded, 16)
    for c in range(32):
        assert torch.equal(chunks[:, c, :live], natural[:, :, c * 16 : c * 16 + 16])
    assert (chunks[:, :, live:] == 0).all()
    assert torch.equal(layouts.heads_from_padded_q(kernel, live), natural)
    if live == padded:
        assert torch.equal(kernel.reshape(2, -1), layouts.fused_from_heads(natural))


@pytest.mark.parametrize(("tokens", "step"), [(1, 1), (3, 3), (4, 9), (5, None), (0, 4)])
def test_output_bytes_land_where_the_contract_says(tokens: int, step: int | None) -> None:
    generator = torch.Generator().manual_seed(tokens)
    shape = (tokens, 16, 512)
    codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    scales = torch.randint(0, 256, (tokens, 16, 16), generator=generator).to(torch.uint8)
    out, sf = layouts.output_from_meaning(codes, scales, step)
    stride = -(-(step or tokens) // 4) * 4
    assert sf.shape == (tokens, 2, 32)
    if tokens:
        assert sf.stride() == (1, 32 * stride, stride)
    for t in range(tokens):
        for h in range(16):
            for c in range(16):
                group, chunk = h // 8, c * 8 + h % 8
                piece = out[t, group, chunk * 32 : chunk * 32 + 32]
                assert torch.equal(piece, codes[t, h, c * 32 : c * 32 + 32])
                word = int(sf[t, group, chunk // 4]) & 0xFFFFFFFF
                assert word >> 8 * (chunk % 4) & 255 == scales[t, h, c]
    back = layouts.output_meaning(out, sf)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)


def test_output_may_be_read_as_a_float8_view() -> None:
    codes = torch.arange(8 * 512).view(1, 8, 512).to(torch.uint8)
    out, sf = layouts.output_from_meaning(codes, torch.zeros(1, 8, 16, dtype=torch.uint8))
    assert torch.equal(layouts.output_meaning(out.view(torch.float8_e4m3fn), sf)[0], codes)
