"""The timed ops of a layer step, cut out of one recorded run of it.

| op | calls |
| --- | --- |
| wq_b | the first linear |
| pad_insert | `pad_q_and_insert_kv` |
| compressed_insert | `insert_compressed` |
| prefill | every chunk's gathers, index combine and attention, in order |
| prefill_gather, prefill_attention | the last chunk's alone (its workspace is still in place) |
| global_topk | `compute_global_topk_indices_and_lens` |
| decode_attention | the decode op |
| wo_a | `fp8_einsum` |
| wo_b | the last linear |
| step | the whole layer step |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megabench.bench.calls import OpCall, returned_tensors, tensors_of
from megabench.bench.work import Work, op_work, step_work, traffic_of
from megabench.results.names import OP_ORDER, PARTS

_GLOBAL = "compute_global_topk_indices_and_lens"
_SINGLE = {
    "pad_q_and_insert_kv": "pad_insert",
    "insert_compressed": "compressed_insert",
    _GLOBAL: "global_topk",
    "fused_norm_rope_attn_rope_cast_decode": "decode_attention",
    "fp8_einsum": "wo_a",
}
_GATHER = "dequantize_and_gather_k_cache"
_PREFILL = "fused_norm_rope_attn_rope_cast_fwd"
ATTENTION = frozenset({"fused_norm_rope_attn_rope_cast_decode", _PREFILL})
_PREFILL_CALLS = frozenset({_GATHER, "combine_topk_swa_indices", _PREFILL})
_WRITES = {
    "fused_norm_rope_attn_rope_cast_decode": ("out_fp8", "out_sf"),
    _PREFILL: ("out_fp8", "out_sf"),
    _GATHER: ("out",),
    "combine_topk_swa_indices": ("out",),
    "fp8_einsum": ("out",),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
POISON = 0x5A
"""A byte that makes finite values in every float type used here, and no zero."""
_INSERTS = {"pad_q_and_insert_kv": "swa_cache", "insert_compressed": "cache"}


@dataclass(frozen=True)
class StepOp:
    """One op of a step: the calls behind it and the work they do."""

    name: str
    calls: list[OpCall]
    work: Work
    note: str = ""
    live_heads: int | None = None
    """Heads before padding, where the step says."""


def split_step(calls: list[OpCall]) -> list[StepOp]:
    """The ops of a step's recorded calls, in `OP_ORDER` and without the step itself."""
    live = live_heads(calls)
    grouped = _group(calls)
    last = calls[-1] if calls else None
    notes = _notes(grouped)
    ops = []
    for name in OP_ORDER:
        if group := grouped.get(name):
            traffic = [traffic_of(c, live_heads=live, output=c is last) for c in group]
            ops.append(StepOp(name, group, op_work(traffic), notes.get(name, ""), live))
    return ops


def whole_step_work(calls: list[OpCall]) -> Work:
    """The work of the step these calls make up."""
    live = live_heads(calls)
    last = calls[-1] if calls else None
    return step_work([traffic_of(c, live_heads=live, output=c is last) for c in calls])


def live_heads(calls: list[OpCall]) -> int | None:
    """Heads before padding, from the pad op; None when the step has none."""
    for call in calls:
        if call.op == "pad_q_and_insert_kv":
            return int(call.arguments["q"].shape[1])
    return None


def _group(calls: list[OpCall]) -> dict[str, list[OpCall]]:
    """Calls by op. Tokens-free calls (an empty step) are left out: there is nothing to time."""
    grouped: dict[str, list[OpCall]] = {}
    chunk: list[OpCall] = []
    for call in calls:
        if _tokens(call) == 0:
            continue
        if call.op in _PREFILL_CALLS:
            grouped.setdefault("prefill", []).append(call)
            if chunk and chunk[-1].op == _PREFILL:
                chunk = []
            chunk.append(call)
        elif call.op == "linear":
            grouped.setdefault("wo_b" if "wo_a" in grouped else "wq_b", []).append(call)
        else:
            grouped.setdefault(_SINGLE[call.op], []).append(call)
    grouped["prefill_gather"] = [c for c in chunk if c.op == _GATHER]
    grouped["prefill_attention"] = [c for c in chunk if c.op == _PREFILL]
    return grouped


def _tokens(call: OpCall) -> int:
    first = call.args[0] if call.args else next(iter(call.arguments.values()))
    if call.op == "fp8_einsum":
        first = call.arguments["x"][0]
    return int(first.shape[0])


def _notes(grouped: dict[str, list[OpCall]]) -> dict[str, str]:
    chunks = sum(c.op == _PREFILL for c in grouped.get("prefill", []))
    if chunks <= 1:
        return {}
    return {name: f"last of {chunks} chunks" for name in PARTS}


@dataclass
class Target:
    """Memory an op writes that outlives the call, for poisoning and comparing.

    A cache is written in place and holds more than the op's rows: only the `pages` written to are
    poisoned, and `restore` puts them back.
    """

    tensor: torch.Tensor
    pages: torch.Tensor | None = None
    _saved: torch.Tensor | None = field(default=None, repr=False)

    def poison(self) -> None:
        """Overwrite with a finite value no op writes throughout."""
        if self.pages is None:
            poison_(self.tensor)
        else:
            self._saved = self.tensor[self.pages]
            self.tensor.index_fill_(0, self.pages, POISON)

    def bits(self) -> torch.Tensor:
        """What is there now, as integers: the memory itself, of a cache a copy of its pages."""
        return bits_of(self.tensor if self.pages is None else self.tensor[self.pages])

    def restore(self) -> None:
        if self.pages is not None and self._saved is not None:
            self.tensor[self.pages] = self._saved


def targets_of(calls: list[OpCall]) -> list[Target]:
    """What `calls` write into memory of their caller's."""
    targets: list[Target] = []
    for call in calls:
        arguments = call.arguments
        for name in _WRITES.get(call.op, ()):
            targets.extend(Target(tensor) for tensor in tensors_of(arguments[name]))
        if call.op in _INSERTS:
            cache = arguments[_INSERTS[call.op]]
            slots = arguments["slot_mapping"]
            pages = torch.unique(slots[slots >= 0] // cache.shape[1])
            targets.append(Target(cache, pages))
    return targets


def run_calls(
    calls: list[OpCall], backend: Any, live_heads: int | None = None
) -> Callable[[], list[torch.Tensor]]:
    """A closure that runs `calls` in order and gives the tensors they returned; of an attention's
    figures per head [s_q, heads] those of live heads, since it may leave the others unwritten."""

    def run() -> list[torch.Tensor]:
        return [
            tensor[:, :live_heads] if call.op in ATTENTION and tensor.dim() == 2 else tensor
            for call in calls
            for tensor in returned_tensors(call.op, call.run(backend))
        ]

    return run


def input_of(calls: list[OpCall]) -> torch.Tensor | None:
    """The tensor that `flip_` changes and the first call's output with it: floats, or the page
    table of the global top-k, which only computes with it. None for a gather."""
    for call in calls:
        if call.op == _GLOBAL:
            table: torch.Tensor = call.arguments["block_table"]
            return table
        first = next(tensors_of(call.args), None)
        if first is not None and first.is_floating_point() and call.op != _GATHER:
            return first
    return None


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers of its elements' size: equal where every bit is, NaN too."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def flip_(tensor: torch.Tensor) -> None:
    """Flip a bit of every element in place: a float's sign, an integer's lowest. Twice is the
    identity, NaN included."""
    bits = bits_of(tensor)
    sign = torch.iinfo(bits.dtype).min or 0x80
    bits.bitwise_xor_(sign if tensor.is_floating_point() else 1)


def names_rows(calls: list[OpCall]) -> bool:
    """Whether a global top-k among `calls` has a row to find the slot of."""
    return any(
        bool((call.arguments["topk_indices"] >= 0).any()) for call in calls if call.op == _GLOBAL
    )


def poison_(tensor: torch.Tensor) -> None:
    """Fill with `POISON` bytes."""
    bits_of(tensor).fill_(poison_word(tensor))


def poison_word(tensor: torch.Tensor) -> int:
    """An element of `POISON` bytes, as an integer."""
    return int.from_bytes(bytes([POISON]) * tensor.element_size(), "little")
