"""Weight, Q and output layouts, each against the contract's index formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabench import layout

HEADS = st.sampled_from([8, 16, 64])


def one_byte(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@given(HEADS)
def test_wq_b_rows_and_their_scales_move_to_the_chunked_order(heads: int) -> None:
    weight, scale = one_byte(heads * 512, 2), one_byte(heads * 512, 1)
    fused, fused_scale = weight.clone(), scale.clone()
    layout.permute_wq_b_(fused, fused_scale, heads)
    for h, d in ((0, 0), (heads - 1, 511), (heads // 2, 17), (1, 448)):
        row = (d // 16) * (heads * 16) + h * 16 + d % 16
        assert torch.equal(fused[row], weight[h * 512 + d])
        assert torch.equal(fused_scale[row], scale[h * 512 + d])
    assert torch.equal(fused.sort(0).values, weight.sort(0).values)


def test_wo_a_columns_move_and_scales_move_as_whole_chunks() -> None:
    weight, scale = one_byte(2, 3, 4096), one_byte(2, 3, 128)
    fused, fused_scale = weight.clone(), scale.clone()
    layout.permute_wo_a_(fused, fused_scale, 8)
    for h, c, j in ((0, 0, 0), (7, 15, 31), (3, 1, 5), (1, 9, 30)):
        assert torch.equal(fused[..., (c * 8 + h) * 32 + j], weight[..., h * 512 + c * 32 + j])
        assert torch.equal(fused_scale[..., c * 8 + h], scale[..., h * 16 + c])


def test_permuting_activations_and_weights_alike_leaves_the_product_unchanged() -> None:
    weight, scale = one_byte(5, 4096), one_byte(5, 128)
    x = torch.randint(-8, 8, (3, 8, 512))
    standard = x.flatten(1).double() @ weight.double().t()
    layout.permute_wo_a_(weight, scale, 8)
    fused = layout.output_order(x).flatten(1).double() @ weight.double().t()
    assert torch.equal(standard, fused)


@pytest.mark.parametrize(
    ("weight", "scale", "named"),
    [
        (torch.zeros(4096, 4), torch.zeros(4096, 1, dtype=torch.uint8), "weight"),
        (one_byte(4096, 4), one_byte(4095, 1), "weight_scale"),
    ],
)
def test_a_wrong_weight_is_refused_before_anything_is_written(
    weight: torch.Tensor, scale: torch.Tensor, named: str
) -> None:
    before = weight.clone()
    with pytest.raises(ValueError, match=f"^{named}:"):
        layout.permute_wq_b_(weight, scale, 8)
    assert torch.equal(weight, before)


@given(st.sampled_from([(8, 64), (32, 64), (64, 64), (128, 128)]))
def test_q_padding_goes_inside_every_chunk(heads: tuple[int, int]) -> None:
    live, padded = heads
    q = torch.randn(2, live, 512).to(torch.bfloat16)
    out = layout.pad_q(q, padded).view(2, 32, padded, 16)
    assert torch.equal(out[:, :, :live], q.view(2, 32, live, 16))
    assert not out[:, :, live:].any()
    assert torch.equal(layout.heads_of(out.view(2, padded, 512))[:, :live], layout.heads_of(q))


def test_fused_q_rows_read_back_as_natural_heads() -> None:
    heads, rank = 8, 4
    weight = one_byte(heads * 512, rank)
    fused, scale = weight.clone(), one_byte(heads * 512, 1)
    layout.permute_wq_b_(fused, scale, heads)
    x = torch.randint(-4, 4, (3, rank)).double()
    q = (x @ fused.double().t()).view(3, heads, 512)
    assert torch.equal(layout.heads_of(q), (x @ weight.double().t()).view(3, heads, 512))
