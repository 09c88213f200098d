"""Number formats against brute force in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import codes


def nearest_even(x: Tensor, table: Tensor) -> Tensor:
    """Code of the nearest non-negative table entry, by exhaustive distance; ties to even."""
    table = table.double()
    distance = (x.double().abs()[:, None] - table).abs()
    best = distance.amin(-1, keepdim=True)
    numbers = torch.arange(len(table))
    # Saturation can tie only in exact arithmetic beyond the top, where the distance is unique.
    order = torch.where(distance == best, numbers % 2 * 1000 + numbers, 10**6)
    return order.argmin(-1)


def samples(seed: int, spread: float = 6.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4096, generator=generator)
    return x * torch.exp(spread * torch.randn(4096, generator=generator))


def test_every_e4m3_code_has_the_value_of_its_bits() -> None:
    for code, value in enumerate(codes.E4M3.tolist()):
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
            continue
        field, mantissa = (code >> 3) & 15, code & 7
        size = math.ldexp(mantissa, -9) if field == 0 else math.ldexp(1 + mantissa / 8, field - 7)
        assert value == math.copysign(size, -1 if code & 0x80 else 1)
        assert math.copysign(1, value) == (-1 if code & 0x80 else 1)


def test_e4m3_agrees_with_torchs_own_type_on_all_codes() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    theirs = every.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(codes.decode_e4m3(every), theirs, rtol=0, atol=0, equal_nan=True)


def test_e2m1_is_the_contracts_list() -> None:
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert codes.E2M1.tolist() == positive + [-v for v in positive]
    assert codes.E2M1[8:].signbit().all()


def test_ue8m0_covers_the_exponent_range() -> None:
    assert codes.UE8M0[127] == 1
    assert codes.UE8M0[0] == 2.0**-127
    assert codes.UE8M0[254] == 2.0**127
    assert codes.UE8M0[255].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_finite_code_rounds_to_itself(dtype: torch.dtype) -> None:
    e4m3 = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(codes.round_e4m3(codes.decode_e4m3(e4m3, dtype)), e4m3)
    e2m1 = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(codes.round_e2m1(codes.decode_e2m1(e2m1, dtype)), e2m1)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_rounding_takes_the_nearest_code_and_ties_to_even(seed: int, dtype: torch.dtype) -> None:
    x = samples(seed).to(dtype)
    sign = x.signbit().long()
    assert torch.equal(codes.round_e4m3(x).long(), nearest_even(x, codes.E4M3[:127]) + 128 * sign)
    assert torch.equal(codes.round_e2m1(x).long(), nearest_even(x, codes.E2M1[:8]) + 8 * sign)


@pytest.mark.parametrize(
    ("table", "rounded"),
    [(codes.E4M3[:127], codes.round_e4m3), (codes.E2M1[:8], codes.round_e2m1)],
)
def test_all_midpoints_go_to_even_and_their_neighbours_do_not(
    table: Tensor, rounded: object
) -> None:
    assert callable(rounded)
    number = torch.arange(len(table) - 1)
    middle = (table[:-1] + table[1:]) / 2
    assert torch.equal(rounded(middle).long(), number + number % 2)
    assert torch.equal(rounded(torch.nextafter(middle, torch.tensor(0.0))).long(), number)
    assert torch.equal(rounded(torch.nextafter(middle, torch.tensor(math.inf))).long(), number + 1)


def test_rounding_saturates_keeps_signed_zero_and_marks_nan() -> None:
    x = torch.tensor([1e9, -1e9, math.inf, -math.inf, 464.0, 0.0, -0.0, math.nan, 1e-30, -1e-30])
    assert codes.round_e4m3(x).tolist() == [126, 254, 126, 254, 126, 0, 128, 127, 0, 128]
    assert codes.round_e2m1(x[:7]).tolist() == [7, 15, 7, 15, 7, 0, 8]


def test_float64_is_rounded_once() -> None:
    just_above = 1.0625 + 2.0**-40  # a tie in float32, above it in float64
    assert codes.round_e4m3(torch.tensor([just_above], dtype=torch.float64)).item() == 0x39
    assert codes.round_e4m3(torch.tensor([just_above]).float()).item() == 0x38
    above_bf16_tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert codes.round_bf16(above_bf16_tie).item() == 1 + 2.0**-7


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31))
def test_bf16_rounding_of_float64_agrees_with_float32_where_both_are_exact(seed: int) -> None:
    x = samples(seed)
    assert torch.equal(codes.round_bf16(x.double()), codes.round_bf16(x).double())


def test_an_interval_holds_exactly_the_values_that_round_to_its_code() -> None:
    code = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    low, high = codes.e4m3_interval(code)
    top = codes.decode_e4m3(code).abs() == 448
    assert torch.equal((high.isinf() | low.isinf()), top)
    inside = torch.stack([low, high]).clamp(-1e6, 1e6)
    middle = inside.mean(0)
    assert torch.equal(codes.round_e4m3(middle), code)
    outward_high = torch.nextafter(high, torch.tensor(math.inf))
    outward_low = torch.nextafter(low, torch.tensor(-math.inf))
    finite = ~top
    assert (codes.round_e4m3(outward_high)[finite] != code[finite]).all()
    assert (codes.round_e4m3(outward_low)[finite] != code[finite]).all()
    for end, towards in ((high, low), (low, high)):
        just_inside = torch.nextafter(end, towards)[finite]
        assert torch.equal(codes.round_e4m3(just_inside), code[finite])


def test_below_a_power_of_two_the_interval_is_half_as_wide() -> None:
    low, high = codes.e4m3_interval(torch.tensor([0x38], dtype=torch.uint8))  # 1.0
    assert (high - 1).item() == 2 * (1 - low).item() == 2.0**-4


def test_nan_codes_have_no_interval() -> None:
    low, high = codes.e4m3_interval(torch.tensor([0x7F, 0xFF], dtype=torch.uint8))
    assert low.isnan().all()
    assert high.isnan().all()


def test_codes_wider_than_a_byte_are_refused() -> None:
    with pytest.raises(ValueError, match="one byte"):
        codes.decode_e4m3(torch.zeros(3, dtype=torch.int16))
