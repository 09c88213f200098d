"""Linears against plain sums of table values, and their bounds against ways to accumulate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference import bounds, cast, codes, layouts, linear, quantize


def quantized(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 0x60, shape, generator=g) | torch.randint(0, 2, shape, generator=g) << 7
    scale = torch.randint(110, 120, (*shape[:-1], shape[-1] // 32), generator=g)
    return code.to(torch.uint8), scale.to(torch.uint8)


def values_of(code: Tensor, scale: Tensor) -> Tensor:
    return codes.E4M3[code.long()].double() * torch.exp2(
        scale.double().repeat_interleave(32, -1) - 127
    )


def activations(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(5)).bfloat16()


def test_a_linear_quantizes_its_input_and_sums_products() -> None:
    w, s = quantized(0, 48, 256)
    x = activations(5, 256)
    amax = x.float().view(5, 8, 32).abs().amax(-1)
    t = amax * torch.tensor(1 / 448)
    mantissa, exponent = torch.frexp(t)
    step = torch.exp2((exponent - (mantissa == 0.5).int()).double())[..., None]
    a = codes.E4M3[codes.round_e4m3(x.double().view(5, 8, 32) / step).long()].double() * step
    expected = a.view(5, 256) @ values_of(w, s).T
    result = linear.linear(x, w, s, torch.float64)
    torch.testing.assert_close(result.value, expected, rtol=1e-12, atol=1e-12)


def test_a_prepared_weight_gives_the_same_result() -> None:
    w, s = quantized(1, 64, 128)
    x = activations(3, 128)
    once = linear.linear(x, w, s, torch.float64)
    again = linear.linear(x, linear.dequantize_weight(w, s, torch.float64))
    assert torch.equal(once.value, again.value)
    assert torch.equal(once.bound, again.bound)


def test_codes_without_scales_are_refused() -> None:
    w, _ = quantized(1, 64, 128)
    with pytest.raises(ValueError, match="scales"):
        linear.linear(activations(3, 128), w)


def test_wo_a_sums_eight_heads_of_each_group() -> None:
    code, scale = quantized(2, 3, 16, 512)
    w, s = quantized(3, 2, 24, 4096)
    result = linear.wo_a(code, scale, w, s, torch.float64)
    heads, weight = values_of(code, scale), values_of(w, s)
    for group in range(2):
        flat = heads[:, group * 8 : group * 8 + 8].reshape(3, 4096)
        torch.testing.assert_close(result.value[:, group], flat @ weight[group].T)


def test_wo_a_equals_the_einsum_of_fused_output_and_fused_weight() -> None:
    code, scale = cast.cast_output(torch.randn(3, 16, 512))
    w, s = quantized(4, 2, 24, 4096)
    out, sf = layouts.output_from_meaning(code, scale)
    fused_w, fused_s = layouts.fuse_wo_a(w, s)
    chunk_scale = torch.stack([sf >> 8 * b & 255 for b in range(4)], dim=-1).flatten(-2)
    einsum = torch.einsum("bhr,hdr->bhd", values_of(out, chunk_scale), values_of(fused_w, fused_s))
    torch.testing.assert_close(linear.wo_a(code, scale, w, s, torch.float64).value, einsum)


@pytest.mark.parametrize("width", [1280, 4096])
@pytest.mark.parametrize("family", ["random", "one sign", "cancelling"])
def test_float32_sums_stay_within_the_bound_and_bf16_sums_do_not(width: int, family: str) -> None:
    w, s = quantized(6, 32, width)
    x = activations(4, width)
    if family == "one sign":
        w, x = w & 0x7F, x.abs()
    elif family == "cancelling":
        x[:, width // 2 :] = -x[:, : width // 2]
        w[:, width // 2 :], s[:, width // 64 :] = w[:, : width // 2], s[:, : width // 64]
    golden = linear.linear(x, w, s, torch.float64)
    weight = linear.dequantize_weight(w, s)
    a = quantize.dequantize_mxfp8(*quantize.activation_mxfp8(x))
    one_by_one, low = torch.zeros(4, 32), torch.zeros(4, 32).bfloat16()
    for k in range(width):
        term = a[:, k, None] * weight.value[None, :, k]
        one_by_one += term
        low = (low.float() + term).bfloat16()
    for sums in (one_by_one, a @ weight.value.T):
        assert ((sums.double() - golden.value).abs() <= golden.bound).all()
    assert ((low.double() - golden.value).abs() > golden.bound).any()


def test_float32_golden_carries_its_own_error_in_the_bound() -> None:
    w, s = quantized(7, 16, 512)
    x = activations(2, 512)
    exact, rough = linear.linear(x, w, s, torch.float64), linear.linear(x, w, s, torch.float32)
    torch.testing.assert_close(rough.bound, 2 * exact.bound)
    assert ((rough.value.double() - exact.value).abs() <= exact.bound).all()


def test_block_norms_bound_the_sum_of_magnitudes() -> None:
    a, b = torch.randn(5, 256), torch.randn(7, 256)
    covered = bounds.block_norms(a) @ bounds.block_norms(b).T
    exact = a.abs() @ b.abs().T
    assert (covered >= exact).all()
    assert (covered <= 2 * exact).all()
