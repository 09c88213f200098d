"""Watching a backend: every op call, its arguments, and copies of every byte it gave back.

A step reuses its memory (the workspace of a prefill chunk is the next chunk's), so what will be
judged is copied the moment it exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from megabench.backends.base import Backend, for_live_heads
from megabench.validate.device import check_launch
from megabench.validate.judgement import bits_of

DECODE = "fused_norm_rope_attn_rope_cast_decode"
PREFILL = "fused_norm_rope_attn_rope_cast_fwd"
PAD_AND_INSERT = "pad_q_and_insert_kv"
INSERT_COMPRESSED = "insert_compressed"
GATHER = "dequantize_and_gather_k_cache"
GLOBAL_TOPK = "compute_global_topk_indices_and_lens"
COMBINE = "combine_topk_swa_indices"
EINSUM = "fp8_einsum"
LINEAR = "linear"


@dataclass(frozen=True)
class _Op:
    """Which arguments of an op to copy as it sees them, and which it writes."""

    reads: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    """Written in place; their whole storage is copied, page padding included."""
    writes: tuple[str, ...] = ()
    """Written, perhaps a slice of a larger storage, whose other words are watched."""
    gives: int = 0
    """Tensors it returns."""


OPS: dict[str, _Op] = {
    LINEAR: _Op(gives=1),
    PAD_AND_INSERT: _Op(caches=("swa_cache",), gives=1),
    INSERT_COMPRESSED: _Op(caches=("cache",)),
    GATHER: _Op(),
    GLOBAL_TOPK: _Op(gives=2),
    COMBINE: _Op(gives=2),
    DECODE: _Op(
        reads=(
            "indices",
            "topk_length",
            "extra_indices",
            "extra_topk_length",
            "token_positions",
        ),
        writes=("out_fp8", "out_sf"),
        gives=3,
    ),
    PREFILL: _Op(
        reads=("kv", "indices", "topk_length", "token_positions"),
        writes=("out_fp8", "out_sf"),
        gives=4,
    ),
    EINSUM: _Op(writes=("out",)),
    "permute_q_b_proj": _Op(gives=2),
    "permute_wv_proj": _Op(gives=2),
}


@dataclass(frozen=True)
class Call:
    """One op call. `args` are the tensors themselves, by the protocol's parameter names."""

    op: str
    args: dict[str, Any]
    before: dict[str, Tensor] = field(default_factory=dict)
    """Copies of inputs that live in reused memory, taken before the call."""
    returned: tuple[Tensor, ...] = ()
    """What it returned, the tensors themselves."""
    results: tuple[Tensor, ...] = ()
    """Copies of what it returned."""
    after: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the buffers it wrote."""
    trespass: dict[str, Tensor] = field(default_factory=dict)
    """bool: what changed during the call and was not its to change: elements of the inputs in
    `before`, words of a storage beside the slice it was to write."""


def whole(tensor: Tensor) -> Tensor:
    """All elements of the storage behind a tensor, 1-D, sharing memory."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def snapshot(tensor: Tensor) -> Tensor:
    """A copy of a tensor with its storage, strides and offset: bytes between its elements too."""
    copied = whole(tensor).clone()
    return copied.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def unowned_words(tensor: Tensor) -> Tensor:
    """A copy, int32 [n], of the storage outside a tensor's elements; whole words there."""
    flat = whole(tensor)
    if tensor.is_contiguous():
        end = tensor.storage_offset() + tensor.numel()
        parts = [flat[: tensor.storage_offset()], flat[end:]]
    else:
        free = torch.ones_like(flat, dtype=torch.bool)
        free.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
        parts = [flat[free]]
    return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.int32)


def _copies(args: dict[str, Any], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: args[name].clone() for name in names if isinstance(args.get(name), Tensor)}


def _tensors(result: Any, count: int) -> tuple[Tensor, ...]:
    """What an op returned; TypeError unless it is `count` tensors, where any are due."""
    given = (result,) if isinstance(result, Tensor) or result is None else tuple(result)
    kinds = [type(part).__name__ for part in given]
    if count and not (len(given) == count and all(isinstance(part, Tensor) for part in given)):
        raise TypeError(f"returned {', '.join(kinds)}, expected {count} x Tensor")
    return given if count else ()


@contextmanager
def _named(op: str) -> Iterator[None]:
    """Say which op it was, of whatever is raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {op}")
        raise


class TracingBackend:
    """A backend that behaves like the one it wraps and records the ops called while `recording`."""

    def __init__(self, backend: Backend) -> None:
        self.wrapped = backend
        self._recordings: list[list[Call]] = []
        """The one in progress, if any; shared with what `for_live_heads` gave."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.wrapped, name)
        return self._recorded(name, found) if name in OPS else found

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Collect the calls made inside, in order."""
        calls: list[Call] = []
        self._recordings.append(calls)
        try:
            yield calls
        finally:
            self._recordings.pop()

    def for_live_heads(self, live_heads: int) -> TracingBackend:
        """One whose calls are collected with this one's."""
        narrowed = TracingBackend(for_live_heads(self.wrapped, live_heads))
        narrowed._recordings = self._recordings
        return narrowed

    def as_backend(self) -> Backend:
        """Itself, typed as what it stands in for."""
        return cast(Backend, self)

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(getattr(Backend, name))

        def call(*positional: Any, **named: Any) -> Any:
            if not self._recordings:
                with _named(name):
                    return method(*positional, **named)
            bound = signature.bind(self, *positional, **named)
            bound.apply_defaults()
            args = {key: value for key, value in bound.arguments.items() if key != "self"}
            op = OPS[name]
            before = _copies(args, op.reads)
            written = [n for n in op.writes if isinstance(args[n], Tensor)]
            beside = {n: unowned_words(args[n]) for n in written}
            with _named(name):
                result = method(*positional, **named)
                returned = _tensors(result, op.gives)
            check_launch(name, args)
            trespass = {n: bits_of(args[n]) != bits_of(then) for n, then in before.items()}
            trespass |= {n: unowned_words(args[n]) != then for n, then in beside.items()}
            after = _copies(args, op.writes)
            after |= {cache: snapshot(args[cache]) for cache in op.caches}
            results = tuple(t.clone() for t in returned)
            self._recordings[-1].append(
                Call(name, args, before, returned, results, after, trespass)
            )
            return result

        return call
