"""Geometry from config files, shards, availability, RoPE tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megabench.geometry import (
    Geometry,
    GeometryError,
    cos_sin_cache,
    shard,
    topology_problem,
)

PACKAGED = json.loads(
    (Path(__file__).parents[1] / "megabench/data/deepseek-v4.1-flash.config.json").read_text()
)


def config(**changes: object) -> dict[str, object]:
    return PACKAGED["text_config"] | changes


def test_the_packaged_default_is_deepseek_v4_1_flash() -> None:
    geometry = Geometry.load()
    assert (geometry.hidden_size, geometry.num_heads, geometry.q_lora_rank) == (5120, 64, 1280)
    assert (geometry.o_groups, geometry.o_lora_rank, geometry.index_topk) == (8, 1024, 512)
    assert geometry.window_size == 128
    assert geometry.compress_ratios[:3] == (0, 0, 2)
    assert geometry.softmax_scale == 512**-0.5


def test_a_flat_config_reads_like_a_nested_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()))
    assert Geometry.load(path).yarn == Geometry.load().yarn


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "object at its top"),
        (json.dumps({"hidden_size": 1}), "rope_scaling is missing"),
        (json.dumps(config(head_dim=576)), "head_dim is 576"),
        (json.dumps(config(o_groups=0)), "o_groups is 0"),
        (json.dumps(config(num_attention_heads="many")), "num_attention_heads is 'many'"),
        (json.dumps(config(num_attention_heads=64.5)), r"num_attention_heads is 64\.5"),
        (json.dumps(config(hidden_size=math.inf)), "hidden_size is inf"),
        (json.dumps(config(sliding_window=-1)), "sliding_window is -1"),
        (json.dumps(config(index_topk=True)), "index_topk is True"),
        (json.dumps(config(compress_ratios="012")), "compress_ratios must be a list"),
        (json.dumps(config(rope_scaling=None)), "rope_scaling must be an object"),
        (json.dumps({"text_config": [1]}), "text_config must be an object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_unreadable_config_is_one_line_naming_file_and_key(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(GeometryError, match=said) as raised:
        Geometry.load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_null_text_config_reads_as_a_flat_config() -> None:
    assert Geometry.load(config(text_config=None)).num_heads == 64


def test_a_config_that_is_no_text_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(GeometryError, match=r"config\.json: cannot be read"):
        Geometry.load(tmp_path / "config.json")


def test_a_missing_config_names_the_file() -> None:
    with pytest.raises(GeometryError, match=r"nowhere\.json"):
        Geometry.load("nowhere.json")


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_64_heads_are_served_up_to_tp8_and_padded_to_64(tp: int) -> None:
    local = shard(Geometry.load(), tp)
    assert (local.n_local_heads, local.n_local_groups) == (64 // tp, 8 // tp)
    assert (local.padded_heads, local.n_wv_group) == (64, 8)


def test_a_128_head_model_pads_to_128() -> None:
    geometry = Geometry.load(config(num_attention_heads=128, o_groups=16))
    assert (shard(geometry, 1).padded_heads, shard(geometry, 1).n_wv_group) == (128, 16)
    assert shard(geometry, 2).padded_heads == 64


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "said"),
    [
        (64, 8, 16, "groups do not divide"),
        (64, 16, 16, "multiple of 8"),
        (64, 8, 3, "heads do not divide"),
        (64, 8, 0, "not a size"),
        (64, 4, 1, "8 heads per wo_a group"),
    ],
)
def test_an_unsupported_topology_has_a_reason(heads: int, groups: int, tp: int, said: str) -> None:
    geometry = Geometry.load(config(num_attention_heads=heads, o_groups=groups))
    assert said in (topology_problem(geometry, tp) or "")
    with pytest.raises(ValueError, match=said):
        shard(geometry, tp)


def test_the_plain_table_holds_cosines_then_sines_of_position_times_frequency() -> None:
    table = cos_sin_cache(Geometry.load(), 300, compressed=False)
    assert table.shape == (300, 64)
    for position, i in ((0, 0), (1, 0), (299, 31), (128, 7)):
        frequency = torch.tensor(10000.0 ** (-2 * i / 64), dtype=torch.float32)
        angle = (torch.tensor(float(position)) * frequency).item()
        assert table[position, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert table[position, 32 + i].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_yarn_keeps_high_frequencies_and_divides_low_ones_by_the_factor() -> None:
    table = cos_sin_cache(Geometry.load(), 2, compressed=True)
    angle = torch.atan2(table[1, 32:].double(), table[1, :32].double())
    plain = torch.tensor([160000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    ratio = angle / plain
    assert ratio[0] == pytest.approx(1.0, abs=1e-6)
    assert ratio[-1] == pytest.approx(1 / 16, rel=1e-4)
    assert (ratio.diff() <= 1e-6).all()
