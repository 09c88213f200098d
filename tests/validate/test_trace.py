"""The tracing backend: transparent, complete, and holding bytes as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megabench.backends import Backend, TorchBackend
from megabench.backends.base import for_live_heads
from megabench.backends.registry import _op_names
from megabench.faults.base import wearing
from megabench.faults.witness import Witness
from megabench.validate.trace import OPS, TracingBackend, snapshot, whole


def linear_arguments() -> tuple[torch.Tensor, ...]:
    x = torch.randn(3, 64).bfloat16()
    w = torch.randn(32, 64).to(torch.float8_e4m3fn)
    return x, w, torch.full((32, 2), 127, dtype=torch.uint8)


def test_every_op_of_the_protocol_is_watched() -> None:
    assert set(OPS) == set(_op_names()) - {"supports", "prepare"}


def test_it_is_the_backend_it_wraps_in_name_layout_and_results() -> None:
    backend = TorchBackend("page_split")
    tracing = TracingBackend(backend)
    assert isinstance(tracing, Backend)
    assert (tracing.name, tracing.page_layout) == ("torch", "page_split")
    arguments = linear_arguments()
    with tracing.recording():
        assert torch.equal(tracing.linear(*arguments), backend.linear(*arguments))
    with pytest.raises(AttributeError):
        _ = tracing.no_such_op


def test_calls_are_recorded_in_order_and_only_while_recording() -> None:
    tracing = TracingBackend(TorchBackend())
    x, w, sw = linear_arguments()
    tracing.linear(x, w, sw)
    with tracing.recording() as calls:
        tracing.linear(x, w, sw=sw)
        tracing.linear(x=x[:1], w=w, sw=sw)
    tracing.linear(x, w, sw)
    assert [call.op for call in calls] == ["linear", "linear"]
    assert calls[0].args.keys() == {"x", "w", "sw"}
    assert calls[0].args["sw"] is sw
    assert len(calls[1].args["x"]) == 1


class Narrowing(TorchBackend):
    live = 64

    def for_live_heads(self, live_heads: int) -> Narrowing:
        narrowed = Narrowing(self.page_layout)
        narrowed.live = live_heads
        return narrowed


@pytest.mark.parametrize("wrap", [TracingBackend, Witness, lambda wrapped: wearing(wrapped, {})])
def test_wrappers_pass_the_number_of_live_heads_on(wrap: Callable[[Backend], Any]) -> None:
    narrowed = for_live_heads(wrap(Narrowing()), 8)
    assert not isinstance(narrowed, Narrowing)
    assert narrowed.live == 8  # type: ignore[attr-defined]


def test_calls_of_a_backend_for_few_live_heads_are_recorded_with_the_others() -> None:
    tracing = TracingBackend(TorchBackend())
    with tracing.recording() as calls:
        tracing.for_live_heads(8).linear(*linear_arguments())
    assert [call.op for call in calls] == ["linear"]


def test_recorded_results_survive_later_writes() -> None:
    tracing = TracingBackend(TorchBackend())
    with tracing.recording() as calls:
        result = tracing.linear(*linear_arguments())
    kept = result.clone()
    result.zero_()
    assert torch.equal(calls[0].results[0], kept)
    assert calls[0].returned[0] is result


def test_a_written_cache_is_kept_with_the_bytes_between_its_pages() -> None:
    tracing = TracingBackend(TorchBackend())
    storage = torch.arange(2 * (32 * 528 + 528) % 251).repeat(300)[: 2 * 33 * 528].to(torch.uint8)
    cache = storage.as_strided((2, 32, 528), (33 * 528, 528, 1))
    q, kv = torch.randn(1, 8, 512).bfloat16(), torch.randn(1, 512).bfloat16()
    slot, position, table = torch.tensor([33]), torch.tensor([0]), torch.ones(1, 64)
    with tracing.recording() as calls:
        tracing.pad_q_and_insert_kv(q, kv, cache, slot, position, table, 64)
    after = calls[0].after["swa_cache"]
    assert torch.equal(whole(after), storage)
    storage.zero_()
    assert whole(after).any()
    assert (after.stride(), after.shape) == (cache.stride(), cache.shape)


def test_a_snapshot_shares_no_memory_and_keeps_offset_and_strides() -> None:
    base = torch.arange(24, dtype=torch.int32).view(4, 6)
    view = base[1:, ::2]
    kept = snapshot(view)
    base.zero_()
    assert kept.tolist() == [[6, 8, 10], [12, 14, 16], [18, 20, 22]]
    assert kept.stride() == view.stride()


class Short(TorchBackend):
    """Gives nothing back."""

    def linear(self, *args: Any) -> Any:
        return None


def test_an_op_that_gives_back_too_little_is_named() -> None:
    tracing = TracingBackend(Short())
    with tracing.recording(), pytest.raises(TypeError, match="returned NoneType") as raised:
        tracing.linear(*linear_arguments())
    assert raised.value.__notes__ == ["in linear"]
