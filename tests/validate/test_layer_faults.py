"""Mistakes of the layer itself: its weights, sinks, slices and positions, with a right backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megabench.layer.attention as attention_module
import megabench.layer.prefill as prefill_module
import megabench.layer.state as state_module
from megabench.cases import Case
from megabench.geometry import cos_sin_cache
from megabench.layer.decode import DecodePath
from megabench.layer.prefill import PrefillPath
from megabench.layer.state import LayerState
from megabench.layout import permute_wo_a_, permute_wq_b_
from megabench.metadata import DeepseekSparseSWAMetadata
from megabench.quant import alloc_mega_attn_output
from megabench.validate import Store, validate_case

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch
MakeCase = Callable[..., Case]


def first_wrong(case: Case) -> tuple[str, str]:
    """Name and message of the first stage that is wrong, judged with layers of its own."""
    stages = [s for s in validate_case(case, "torch", CPU, Store(CPU)) if not s.ok]
    assert stages, "nothing was noticed"
    return stages[0].name, stages[0].message


def test_wq_b_scales_left_behind_are_noticed(make_case: MakeCase, monkeypatch: Patch) -> None:
    def weights_only(weight: torch.Tensor, scale: torch.Tensor, heads: int) -> None:
        permute_wq_b_(weight, scale.clone(), heads)

    monkeypatch.setattr(state_module, "permute_wq_b_", weights_only)
    name, message = first_wrong(make_case())
    assert name == "weights"
    assert "tensor wq_b scale" in message


def test_wo_a_scales_left_behind_are_noticed(make_case: MakeCase, monkeypatch: Patch) -> None:
    def weights_only(weight: torch.Tensor, scale: torch.Tensor, heads: int) -> None:
        permute_wo_a_(weight, scale.clone(), heads)

    monkeypatch.setattr(state_module, "permute_wo_a_", weights_only)
    name, message = first_wrong(make_case())
    assert name == "weights"
    assert "tensor wo_a scale" in message


def test_weights_permuted_twice_are_noticed(make_case: MakeCase, monkeypatch: Patch) -> None:
    def twice(weight: torch.Tensor, scale: torch.Tensor, heads: int) -> None:
        permute_wq_b_(weight, scale, heads)
        permute_wq_b_(weight, scale, heads)

    monkeypatch.setattr(state_module, "permute_wq_b_", twice)
    assert first_wrong(make_case())[0] == "weights"


def test_weights_that_change_after_a_right_case_are_noticed(make_case: MakeCase) -> None:
    store, case = Store(CPU), make_case()
    assert all(stage.ok for stage in validate_case(case, "torch", CPU, store))
    layer = store._layers["torch", 0]
    permute_wo_a_(layer.wo_a.weight, layer.wo_a.weight_scale, 8)
    wrong = [stage.name for stage in validate_case(case, "torch", CPU, store) if not stage.ok]
    assert wrong[0] == "weights"


def test_the_next_ranks_sinks_are_noticed(make_case: MakeCase, monkeypatch: Patch) -> None:
    right = LayerState._local_sink

    def shifted(self: LayerState, sink: torch.Tensor) -> torch.Tensor:
        return right(self, sink.roll(self.n_local_heads))

    monkeypatch.setattr(LayerState, "_local_sink", shifted)
    name, message = first_wrong(make_case(tp=2))
    assert name == "attn_sink"
    assert "rank" in message


def test_the_rope_base_of_another_layer_kind_is_noticed(
    make_case: MakeCase, monkeypatch: Patch
) -> None:
    def plain(geometry: Any, positions: int, compressed: bool) -> torch.Tensor:
        return cos_sin_cache(geometry, positions, False)

    monkeypatch.setattr(state_module, "cos_sin_cache", plain)
    assert first_wrong(make_case())[0] == "rope_table"


def test_a_wrong_position_passed_to_attention_is_noticed(
    make_case: MakeCase, monkeypatch: Patch
) -> None:
    right = DecodePath._forward_decode_mega

    def early(self: DecodePath, q: torch.Tensor, positions: torch.Tensor, *rest: Any) -> None:
        right(self, q, positions - 1, *rest)

    monkeypatch.setattr(DecodePath, "_forward_decode_mega", early)
    assert first_wrong(make_case())[0] == "lse_decode"


def test_a_prefill_slice_without_the_decode_offset_is_noticed(
    make_case: MakeCase, monkeypatch: Patch
) -> None:
    right = PrefillPath._forward_prefill_mega

    def from_zero(self: PrefillPath, *args: Any) -> None:
        moved = prefill_module._token_slice

        def without_base(out: Any, start: int, end: int) -> Any:
            return moved(out, start - args[-1], end - args[-1])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill_module, "_token_slice", without_base)
            right(self, *args)

    monkeypatch.setattr(PrefillPath, "_forward_prefill_mega", from_zero)
    assert first_wrong(make_case())[0] == "output_scales_prefill"


def test_a_chunk_that_is_never_attended_is_noticed(make_case: MakeCase, monkeypatch: Patch) -> None:
    right = DeepseekSparseSWAMetadata.get_prefill_chunk_plan

    def shortened(self: DeepseekSparseSWAMetadata, *args: Any, **named: Any) -> Any:
        return right(self, *args, **named)[:-1]

    monkeypatch.setattr(DeepseekSparseSWAMetadata, "get_prefill_chunk_plan", shortened)
    name, message = first_wrong(make_case(batch="12q2s200"))
    assert name == "indices_prefill"
    assert "expected" in message


def test_a_scale_buffer_strided_by_tokens_is_noticed(
    make_case: MakeCase, monkeypatch: Patch
) -> None:
    def packed(self: Any, num_tokens: int, hidden: torch.Tensor) -> Any:
        return alloc_mega_attn_output(num_tokens, self.n_wv_group, hidden.device)

    def forgetful(self: Any, q: Any, kv: Any, positions: Any, output: Any) -> None:
        own = packed(self, len(q), q)
        right(self, q, kv, positions, own)
        output.data.copy_(own.data)

    right = attention_module.DeepseekV4MegaAttnAttention.forward_mqa
    monkeypatch.setattr(attention_module.DeepseekV4MegaAttnAttention, "forward_mqa", forgetful)
    assert first_wrong(make_case())[0] == "output_scales_decode"


def test_a_layer_that_returns_something_else_is_noticed(
    make_case: MakeCase, monkeypatch: Patch
) -> None:
    layer = attention_module.DeepseekV4MegaAttnAttention
    right = layer._o_proj

    def halved(self: Any, *args: Any) -> torch.Tensor:
        return right(self, *args) / 2

    monkeypatch.setattr(layer, "_o_proj", halved)
    assert first_wrong(make_case())[0] == "layer_output"
