"""Intervals and verdicts: what a rounding allows is right, one step more is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabench.validate.judgement import (
    Judgement,
    bf16_interval,
    judge_bf16,
    judge_equal,
    judge_ratio,
    merge,
    outside,
    ratio_of,
)
from megabench.validate.stages.attention import SIGN_DEVIATIONS, Slice, judge_slice, sign_test
from reference.attention import Attended
from reference.cache import inserted_rows
from reference.cast import cast_output
from reference.codes import decode_e4m3, decode_ue8m0
from reference.records import pack, unpack, write_record
from reference.rope import cos_sin_table

AXES = ("token", "column")


@given(st.integers(0, 0x7F7F), st.booleans())
def test_a_bf16_owns_exactly_the_floats_that_round_to_it(magnitude: int, negative: bool) -> None:
    bits = magnitude - 0x8000 if negative else magnitude
    value = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)
    low, high = bf16_interval(value)
    for end, beyond in ((low, -math.inf), (high, math.inf)):
        if not math.isfinite(float(end)) or float(value) == 0:
            continue
        past = torch.nextafter(end, torch.tensor([beyond]))
        assert past.bfloat16() != value
        assert torch.nextafter(end, value.float()).bfloat16() == value


def test_a_bf16_that_is_not_finite_is_never_right() -> None:
    got = torch.tensor([[math.inf, -math.inf, math.nan]], dtype=torch.bfloat16)
    judged = judge_bf16("s", got, torch.zeros(1, 3), torch.full((1, 3), 1e30), AXES)
    assert judged.failed == 3


def test_a_value_outside_its_interval_by_less_than_the_bound_is_right() -> None:
    got = torch.tensor([[1.0]], dtype=torch.bfloat16)
    golden = torch.tensor([[1.0 + 2.0**-8 + 2.0**-12]])
    right = judge_bf16("s", got, golden, torch.full((1, 1), 2.0**-11), AXES)
    wrong = judge_bf16("s", got, golden, torch.full((1, 1), 2.0**-13), AXES)
    assert (right.ok, right.worst) == (True, 0.5)
    assert (wrong.ok, wrong.worst) == (False, 2.0)
    assert wrong.where["column"] == 0


def test_the_interval_below_a_power_of_two_is_half_as_wide() -> None:
    low, high = bf16_interval(torch.tensor([1.0, -1.0], dtype=torch.bfloat16))
    assert (low[0], high[0]) == (1 - 2.0**-9, 1 + 2.0**-8)
    assert (low[1], high[1]) == (-1 - 2.0**-8, -1 + 2.0**-9)


def test_nan_is_infinitely_wrong_and_a_zero_bound_allows_nothing() -> None:
    excess = torch.tensor([math.nan, 1e-30, 0.0])
    assert ratio_of(excess, torch.zeros(3)).tolist() == [math.inf, math.inf, 0.0]
    assert torch.isnan(outside(torch.tensor(math.nan), torch.tensor(0.0), torch.tensor(1.0)))


def test_equality_is_of_bits_and_names_the_first_difference() -> None:
    got = torch.tensor([[0.0, -0.0], [1.0, math.nan]])
    assert judge_equal("s", got, got.clone(), AXES).ok
    judged = judge_equal("s", got, torch.tensor([[0.0, 0.0], [1.0, math.nan]]), AXES, first=(7,))
    assert (judged.failed, judged.where["token"], judged.where["column"]) == (1, 7, 1)
    assert "1 of 4 wrong; worst at token 7, column 1" in judged.result().message


def test_a_shape_that_is_not_golden_is_a_problem_not_a_crash() -> None:
    assert judge_equal("s", torch.zeros(2, 3), torch.zeros(3, 2), AXES).problem


def test_masked_elements_are_neither_checked_nor_wrong() -> None:
    ratio = torch.tensor([[math.inf, 0.5], [0.25, math.inf]])
    mask = torch.tensor([[False, True], [True, False]])
    judged = judge_ratio("s", ratio, AXES, mask)
    assert (judged.ok, judged.checked, judged.worst) == (True, 2, 0.5)


def test_merging_adds_counts_and_keeps_the_worst_place() -> None:
    parts = (
        Judgement("a", 2, 0, 0.25, {"rank": 0}, {"ties": 1}),
        Judgement("b", 1),
        Judgement("a", 3, 1, 4.0, {"rank": 1}, {"ties": 2}),
    )
    a, b = merge(parts)
    assert (a.checked, a.failed, a.worst, a.where) == (5, 1, 4.0, {"rank": 1})
    assert (a.counts, b.ok, a.ok) == ({"ties": 3}, True, False)


# ---- output codes --------------------------------------------------------------------------------


def slice_of(codes: torch.Tensor, scales: torch.Tensor, o: torch.Tensor, bound: float) -> Slice:
    nothing = torch.zeros(o.shape[:2])
    golden = Attended(o, torch.full_like(o, bound), *(nothing for _ in range(4)))
    return Slice("decode", 0, codes, scales, None, None, golden, torch.ones(len(o)).bool(), 64)


def stages(part: Slice) -> dict[str, Judgement]:
    return {judgement.stage: judgement for judgement in merge(judge_slice(part))}


def random_output(tokens: int = 2) -> torch.Tensor:
    return torch.randn(tokens, 4, 512, generator=torch.Generator().manual_seed(0))


def test_golden_own_cast_is_right_with_no_bound_at_all() -> None:
    o = random_output()
    judged = stages(slice_of(*cast_output(o), o, 0.0))
    assert judged["output_codes_decode"].worst == 0
    assert judged["output_scales_decode"].ok
    assert judged["rounding_direction"].counts["differ"] == 0


def test_both_neighbours_of_a_tie_are_right_and_the_next_code_is_wrong() -> None:
    o = random_output()
    codes, scales = cast_output(o)
    step = decode_ue8m0(scales)[0, 0, 0]
    low, high = (decode_e4m3(torch.tensor(code, dtype=torch.uint8)) for code in (0x40, 0x41))
    o[0, 0, 0] = (low + high) / 2 * step
    for code, right in ((0x40, True), (0x41, True), (0x3F, False), (0x42, False)):
        codes[0, 0, 0] = code
        assert stages(slice_of(codes, scales, o, 0.0))["output_codes_decode"].ok is right


@pytest.mark.parametrize(("bound", "right"), [(0.03, False), (0.04, True)])
def test_a_code_off_by_one_is_right_only_within_the_bound(bound: float, right: bool) -> None:
    o = torch.ones(1, 8, 512)  # 1 = code 0x78 of 256 under 2^-8; 0x79 owns [1.0625, 1.1875]
    o[..., 0] = 1.75 - 1e-3
    o[0, 0, 1] = 1.03
    codes, scales = cast_output(o)
    assert codes[0, 0, 1] == 0x78
    codes[0, 0, 1] += 1
    judged = stages(slice_of(codes, scales, o, bound))["output_codes_decode"]
    assert judged.ok is right
    assert judged.worst == pytest.approx(0.0325 / bound, rel=1e-3)
    assert (judged.where["head"], judged.where["dim"]) == (0, 1)


def test_a_scale_byte_is_ambiguous_only_near_its_edge() -> None:
    o = torch.zeros(1, 1, 512)
    o[0, 0, ::32] = 448 * 2.0**-8 * (1 - 1e-4)
    codes, scales = cast_output(o)
    close = stages(slice_of(codes, scales + 1, o, 1e-3))["output_scales_decode"]
    far = stages(slice_of(codes, scales + 1, o, 1e-6))["output_scales_decode"]
    assert (close.ok, close.counts["ambiguous"]) == (True, 16)
    assert (far.ok, far.counts["ambiguous"]) == (False, 0)


def leaning(shares: torch.Tensor) -> Judgement:
    """The sign test of codes moved one step up in `shares` of a head's dims, down in the rest."""
    o = random_output(40)
    codes, scales = cast_output(o)
    up = torch.rand(o.shape, generator=torch.Generator().manual_seed(1)) < shares
    value = decode_e4m3(codes)
    moved = torch.where(up == (value > 0), codes + 1, codes - 1)
    odd = (torch.arange(512) % 3 == 0) & ((codes & 0x7F) > 8) & ((codes & 0x7F) < 0x7D)
    part = slice_of(torch.where(odd, moved, codes), scales, o, 1e9)
    return sign_test(stages(part)["rounding_direction"])


def test_codes_that_differ_evenly_pass_the_sign_test() -> None:
    judged = leaning(torch.full((40, 4, 1), 0.5))
    assert judged.ok
    assert judged.checked > 5000


def test_codes_that_lean_one_way_fail_the_sign_test() -> None:
    judged = leaning(torch.full((40, 4, 1), 0.8))
    assert not judged.ok
    assert judged.where == {"lean": "up"}


def test_heads_that_err_as_one_are_one_witness_each() -> None:
    choice = torch.rand(40, 4, 1, generator=torch.Generator().manual_seed(2))
    judged = leaning((choice < 0.6).float())
    counts = judged.counts
    assert abs(counts["up"]) / math.sqrt(counts["differ"]) > SIGN_DEVIATIONS
    assert judged.ok


def test_a_dim_that_errs_alike_in_every_head_is_one_witness() -> None:
    o = random_output(40)
    codes, scales = cast_output(o)
    codes[..., 8] += 1
    counts = stages(slice_of(codes, scales, o, 1e9))["rounding_direction"]
    assert counts.counts["outward"] > 150
    assert sign_test(counts).ok


# ---- cache bytes ---------------------------------------------------------------------------------


def test_a_code_may_flip_only_where_its_rotation_is_at_a_tie() -> None:
    from megabench.validate.stages.caches import judge_insertion

    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(20000, 512, generator=generator).bfloat16()
    positions = torch.randint(1, 4096, (len(kv),), generator=generator)
    expected = inserted_rows(kv, positions, cos_sin_table(4096, False), 528)
    token, dim = expected.may_differ.nonzero()[0].tolist()
    expected = inserted_rows(
        kv[token : token + 1], positions[token : token + 1], cos_sin_table(4096, False), 528
    )
    before, slots = torch.zeros(2, 32, 528, dtype=torch.uint8), torch.tensor([40])

    def judged(flipped: int, by: int) -> Judgement:
        codes, scales = unpack(expected.bytes)
        codes[0, flipped] += by
        after = before.clone()
        write_record(after, slots, pack(codes, scales, 528))
        return judge_insertion("swa_cache", "interleaved", after, before, slots, expected)

    flips = [judged(dim, by) for by in (-1, 0, 1)]
    assert flips[1].ok
    assert sorted(j.ok for j in flips) == [False, True, True]
    assert sum(j.counts["ties"] for j in flips) == 1
    sharp = int((~expected.may_differ[0]).nonzero()[-1])
    assert not judged(sharp, 1).ok
    assert not judged(0, 1).ok
