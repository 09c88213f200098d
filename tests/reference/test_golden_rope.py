"""RoPE tables and rotations, and the geometry they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from reference import rope
from reference.model import Model, from_config

CONFIG: dict[str, Any] = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "index_topk": 512,
}


@pytest.mark.parametrize("config", [CONFIG, {"text_config": CONFIG, "hidden_size": 1}])
def test_the_default_geometry_is_what_its_config_says(config: dict[str, Any]) -> None:
    assert from_config(config) == Model()


def test_softmax_scale_and_pages_follow_from_the_geometry() -> None:
    assert Model().softmax_scale == 512**-0.5
    assert [Model().compressed_page(r) for r in (1, 2)] == [128, 64]


def test_plain_frequencies_are_powers_of_the_base() -> None:
    frequency = rope.inverse_frequencies(Model(), compressed=False)
    assert frequency.tolist() == [torch.tensor(10000 ** (-i / 32)).item() for i in range(32)]


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_ramps_between() -> None:
    frequency = rope.inverse_frequencies(Model(), compressed=True).double()
    plain = torch.tensor([160000 ** (-i / 32) for i in range(32)], dtype=torch.float64)
    # d(32) = 64 ln(65536 / 64π) / (2 ln 160000) = 15.45, d(1) = 24.70
    low, high = 15, 25
    ratio = frequency / plain
    torch.testing.assert_close(ratio[: low + 1], torch.ones(low + 1).double(), rtol=1e-7, atol=0)
    torch.testing.assert_close(ratio[high:], torch.full((7,), 1 / 16).double(), rtol=1e-7, atol=0)
    for i in range(low, high + 1):
        ramp = (i - low) / (high - low)
        assert ratio[i].item() == pytest.approx(1 - ramp + ramp / 16, rel=1e-6)


@pytest.mark.parametrize("compressed", [False, True])
def test_the_table_is_cos_and_sin_of_the_float32_angle_within_an_ulp(compressed: bool) -> None:
    positions = torch.tensor([0, 1, 127, 128, 4095, 65535, 65536, 1048575])
    table = rope.cos_sin_table(positions, compressed)
    frequency = rope.inverse_frequencies(Model(), compressed)
    for row, position in zip(table, positions.tolist(), strict=True):
        for i in range(32):
            angle = (torch.tensor(float(position)) * frequency[i]).item()
            for got, exact in ((row[i], math.cos(angle)), (row[32 + i], math.sin(angle))):
                nearest = torch.tensor(exact)
                ulp = (torch.nextafter(nearest.abs(), torch.tensor(2.0)) - nearest.abs()).item()
                assert abs(got.item() - exact) <= ulp
    assert table.dtype == torch.float32


def test_a_table_by_length_holds_positions_in_order() -> None:
    assert torch.equal(rope.cos_sin_table(50, True), rope.cos_sin_table(torch.arange(50), True))


@pytest.mark.parametrize("pair", [0, 3, 31])
def test_a_rotation_stays_inside_its_adjacent_pair(pair: int) -> None:
    row = rope.cos_sin_table(torch.tensor([9]), compressed=False)[0]
    x = torch.zeros(64)
    x[2 * pair] = 1
    turned = rope.rotate(x, row)
    assert turned[2 * pair] == row[pair]
    assert turned[2 * pair + 1] == row[32 + pair]
    assert turned.count_nonzero() == 2
    x = torch.zeros(64)
    x[2 * pair + 1] = 1
    turned = rope.rotate(x, row)
    assert turned[2 * pair] == -row[32 + pair]
    assert turned[2 * pair + 1] == row[pair]


def test_unrotate_is_the_inverse_and_rotations_keep_length() -> None:
    x = torch.randn(7, 64, dtype=torch.float64)
    rows = rope.cos_sin_table(torch.arange(7) * 501, compressed=True)
    turned = rope.rotate(x, rows)
    torch.testing.assert_close(rope.unrotate(turned, rows), x, rtol=0, atol=1e-6)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    assert not torch.allclose(turned[1:], x[1:])


def test_a_rotated_bound_covers_every_sign_of_the_error() -> None:
    rows = rope.cos_sin_table(torch.arange(50), compressed=False)
    error = torch.rand(50, 64, dtype=torch.float64)
    sign = torch.randint(0, 2, (50, 64)) * 2 - 1
    covered = rope.rotated_magnitude(error, rows) + 1e-12
    assert (rope.rotate(error * sign, rows).abs() <= covered).all()
    assert (rope.unrotate(error * sign, rows).abs() <= covered).all()


def test_float32_rotations_stay_within_the_slack() -> None:
    x = torch.randn(500, 64).bfloat16()
    rows = rope.cos_sin_table(torch.arange(500) * 7, compressed=True)
    exact = rope.rotate(x.double(), rows)
    error = (rope.rotate(x.float(), rows).double() - exact).abs()
    assert (error <= rope.FP32_SLACK * rope.rotated_magnitude(x.double(), rows)).all()
