"""One rounding too many: inside every bound, and caught where the result leaves no room for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import megabench.backends.eager_attention as eager
from megabench.backends import TorchBackend
from megabench.cases import Case
from megabench.quant import quantize_kv_mxfp8
from megabench.validate import Store, validate_case
from megabench.validate.stages.exact import _least_bit
from reference.cast import cast_output
from reference.codes import decode_e4m3, decode_ue8m0

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch
MakeCase = Callable[..., Case]

ONE_KEY = {"batch": "2q1", "compress_ratio": 0, "sink": "none"}
MANY_KEYS = {
    "batch": "1q1s32_1q1s128_1q1s16",
    "compress_ratio": 0,
    "sink": "none",
    "family": "equal_logits",
}
TIES = torch.tensor([[17.0, 19.0, 21.0, 23.0] * 8])
"""Halfway between e4m3 codes."""
rope, quantize = eager.rope, quantize_kv_mxfp8


def wrong_stages(case: Case, store: Store) -> list[str]:
    store.add_backend("patched", TorchBackend())
    stages = validate_case(case, "patched", CPU, store)
    return [stage.name for stage in stages if not stage.ok]


@pytest.mark.parametrize("axes", [ONE_KEY, MANY_KEYS], ids=["one key", "many keys"])
def test_the_contracts_own_result_is_exact(
    axes: dict[str, object], make_case: MakeCase, store: Store
) -> None:
    stages = {s.name: s for s in validate_case(make_case(**axes), "torch", CPU, store)}
    assert stages["exact_output"].ok
    assert stages["exact_output"].checked > 10000


def test_nothing_is_taken_as_exact_beside_a_finite_sink(make_case: MakeCase, store: Store) -> None:
    case = make_case(**{**MANY_KEYS, "sink": "matched"})
    stages = {s.name: s for s in validate_case(case, "torch", CPU, store)}
    assert stages["exact_output"].checked == 0


def rounded_before(x: torch.Tensor, table: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    return rope(x.bfloat16().float() if inverse else x, table, inverse)


def rounded_after(x: torch.Tensor, table: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    turned = rope(x, table, inverse)
    return turned.bfloat16().float() if inverse else turned


def rounded_table(x: torch.Tensor, table: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    return rope(x, table.bfloat16().float() if inverse else table, inverse)


@pytest.mark.parametrize("variant", [rounded_before, rounded_after, rounded_table])
def test_an_extra_bf16_rounding_is_caught_by_the_exact_output_alone(
    variant: Callable[..., torch.Tensor], make_case: MakeCase, store: Store, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(eager, "rope", variant)
    assert wrong_stages(make_case(**MANY_KEYS), store)[0] == "exact_output"


def truncated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantize(x)
    scaled = (x.double() / decode_ue8m0(scales).repeat_interleave(32, -1)).abs()
    over = decode_e4m3(codes).abs() > scaled
    return torch.where(over & ((codes & 0x7F) > 0), codes - 1, codes), scales


def test_a_truncating_cast_is_caught(make_case: MakeCase, store: Store, monkeypatch: Patch) -> None:
    monkeypatch.setattr(eager, "quantize_kv_mxfp8", truncated)
    assert "exact_output" in wrong_stages(make_case(**MANY_KEYS), store)


def test_either_side_of_a_tie_is_right_where_keys_were_combined(
    make_case: MakeCase, store: Store, monkeypatch: Patch
) -> None:
    """A combination in float32 may fall short by a hair, which on a tie decides the code."""

    def short(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize(x * (1 - 2.0**-23))

    assert not torch.equal(short(TIES)[0], quantize(TIES)[0])
    monkeypatch.setattr(eager, "quantize_kv_mxfp8", short)
    assert wrong_stages(make_case(**{**MANY_KEYS, "batch": "2q1s2"}), store) == []


def test_the_least_bit_is_that_of_the_significand() -> None:
    x = torch.tensor([1.0, 1.5, -0.75, 3.0, 2.0**-20, 255.0, 0.0], dtype=torch.float64)
    assert _least_bit(x).tolist() == [1.0, 0.5, 0.25, 1.0, 2.0**-20, 1.0, torch.inf]


def test_the_truncating_cast_of_these_tests_is_not_goldens() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantize(x)[0], cast_output(x)[0])
    assert not torch.equal(truncated(x)[0], cast_output(x)[0])
