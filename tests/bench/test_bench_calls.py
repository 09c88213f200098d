"""Recorded calls run again on memory of their own, aliasing and strides kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megabench.bench.calls import OpCall, Recorder, clone_calls, record_step
from megabench.bench.ops import live_heads, poison_, run_calls, split_step, targets_of


class Echo:
    """A stand-in backend: `linear` doubles, the rest records its being called."""

    name = "echo"

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        return x * 2

    def fp8_einsum(self, *args: Any) -> None:
        args[3].fill_(1.0)

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        raise AssertionError("a step does not load")


class Layer:
    def __init__(self, fail: bool = False) -> None:
        self.backend: Any = Echo()
        self.fail = fail

    def step(self) -> torch.Tensor:
        x, w = torch.ones(2, 4), torch.ones(3, 4)
        y = self.backend.linear(x, w, sw=w)
        if self.fail:
            raise RuntimeError("broken")
        self.backend.fp8_einsum("e", (y, y), (w, w), torch.empty(2, 1), (1, 1, 32))
        return self.backend.linear(y, w, w)


def test_a_step_is_recorded_in_order_and_its_backend_put_back() -> None:
    layer = Layer()
    calls = record_step(layer, layer.step)
    assert [c.op for c in calls] == ["linear", "fp8_einsum", "linear"]
    assert isinstance(layer.backend, Echo)
    assert list(calls[0].arguments) == ["x", "w", "sw"]


def test_the_backend_is_put_back_after_a_failing_step() -> None:
    layer = Layer(fail=True)
    with pytest.raises(RuntimeError, match="broken"):
        record_step(layer, layer.step)
    assert isinstance(layer.backend, Echo)


def test_a_recorder_passes_attributes_through() -> None:
    recorder = Recorder(Echo())
    assert recorder.name == "echo"
    assert recorder.calls == []


def test_the_linear_before_the_einsum_is_wq_b_and_the_one_after_it_wo_b() -> None:
    layer = Layer()
    ops = {op.name: op.calls for op in split_step(record_step(layer, layer.step))}
    assert list(ops) == ["wq_b", "wo_a", "wo_b"]
    assert torch.equal(ops["wo_b"][0].args[0], torch.full((2, 4), 2.0))


def test_clones_have_other_addresses_and_the_same_aliasing() -> None:
    pool = torch.arange(24.0)
    head, tail, odd = pool[:8], pool[4:12], pool.view(4, 6).t()[1:]
    call = OpCall("linear", (head, tail), {"sw": odd})
    (clone,) = clone_calls([call])
    a, b, c = (*clone.args, clone.kwargs["sw"])
    assert torch.equal(a, head)
    assert torch.equal(c, odd)
    assert c.stride() == odd.stride()
    a[4] = -1.0
    assert b[0] == -1.0
    assert pool[4] == 4.0


def test_a_tensor_named_by_two_calls_stays_one_object() -> None:
    weight = torch.ones(2)
    first, second = clone_calls([OpCall("linear", (weight,), {}), OpCall("linear", (weight,), {})])
    assert first.args[0] is second.args[0]
    assert first.args[0] is not weight


def test_poison_reaches_every_element_of_an_mn_major_scale() -> None:
    scale = torch.zeros((8, 3, 4), dtype=torch.int32).permute(2, 0, 1)
    poison_(scale)
    assert (scale == 0x5A5A5A5A).all()


def test_an_insert_s_target_is_the_pages_it_writes() -> None:
    cache = torch.zeros(4, 32, 528, dtype=torch.uint8)
    q, kv = torch.zeros(3, 8, 512), torch.zeros(3, 512)
    slots = torch.tensor([33, -1, 40])
    call = OpCall("pad_q_and_insert_kv", (q, kv, cache, slots, slots, torch.zeros(1, 64), 64), {})
    (target,) = targets_of([call])
    assert target.pages is not None
    assert target.pages.tolist() == [1]
    assert live_heads([call]) == 8


def test_figures_of_padded_heads_are_nobodys_and_left_out_of_what_is_compared() -> None:
    class Attention:
        def fused_norm_rope_attn_rope_cast_decode(self) -> list[torch.Tensor]:
            return [torch.zeros(8, 3, 4), torch.zeros(8, 3, 1), torch.arange(192.0).view(3, 64)]

    call = OpCall("fused_norm_rope_attn_rope_cast_decode", (), {})
    data, scale, lse = run_calls([call], Attention(), 8)()
    assert (data.shape, scale.shape) == ((8, 3, 4), (8, 3, 1))
    assert torch.equal(lse, torch.arange(192.0).view(3, 64)[:, :8])
    assert run_calls([call], Attention())()[2].shape == (3, 64)
