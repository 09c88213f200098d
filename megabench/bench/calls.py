"""Backend calls as data: recorded from a layer step, cloned with their aliasing, run again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megabench.backends.base import Backend

SETUP = frozenset({"supports", "prepare", "permute_q_b_proj", "permute_wv_proj"})
"""Backend methods that belong to loading, not to a step."""
SIGNATURES: dict[str, inspect.Signature] = {
    name: inspect.signature(method)
    for name, method in vars(Backend).items()
    if callable(method) and not name.startswith("_") and name not in SETUP
}
"""Every op a step may call, with the contract's argument names and order."""


@dataclass(frozen=True)
class OpCall:
    """One call of a backend op, tensors by reference."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by the contract's names, defaults filled in."""
        bound = SIGNATURES[self.op].bind(None, *self.args, **self.kwargs)
        bound.apply_defaults()
        return {k: v for k, v in bound.arguments.items() if k != "self"}

    def run(self, backend: Any) -> Any:
        """Call the op on `backend` and return what it returns."""
        return getattr(backend, self.op)(*self.args, **self.kwargs)


class Recorder:
    """Stands in for a backend: passes everything through and keeps each op call, in order."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.calls: list[OpCall] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        return self._recording(name, found) if name in SIGNATURES else found

    def _recording(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(OpCall(name, args, kwargs))
            return method(*args, **kwargs)

        return call


def record_step(layer: Any, step: Callable[[], Any]) -> list[OpCall]:
    """The op calls of one `step` of `layer`, whose backend is put back even on an error."""
    backend = layer.backend
    recorder = Recorder(backend)
    layer.backend = recorder
    try:
        step()
    finally:
        layer.backend = backend
    return recorder.calls


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))


def returned_tensors(op: str, value: Any) -> Iterator[torch.Tensor]:
    """The tensors an op returned. TypeError for what may stand for one that is yet to be computed:
    a subclass with a mind of its own, or an object that is no tensor at all."""
    if type(value) is torch.Tensor:
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from returned_tensors(op, item)
    elif value is not None:
        raise TypeError(f"{op} returned a {type(value).__name__}, not plain tensors")


def clone_calls(calls: list[OpCall]) -> list[OpCall]:
    """The calls on memory of their own: same values, strides and offsets, and tensors that shared
    memory among the calls share it again. One tensor object stays one object."""
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, torch.Tensor] = {}

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in tensors:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in storages:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                storages[key] = whole.clone().untyped_storage()
            fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensors[id(tensor)] = fresh.set_(
                storages[key], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        return tensors[id(tensor)]

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return clone(value)
        if isinstance(value, tuple | list):
            return type(value)(walk(item) for item in value)
        if isinstance(value, Mapping):
            return {key: walk(item) for key, item in value.items()}
        return value

    return [OpCall(call.op, walk(call.args), walk(call.kwargs)) for call in calls]


def prepare_weights(calls: list[OpCall], backend: Any) -> None:
    """Tell `backend` of the weights in `calls`, so that it derives its forms outside the timing."""
    for call in calls:
        arguments = call.arguments
        if call.op == "linear":
            backend.prepare(arguments["w"], arguments["sw"])
        elif call.op == "fp8_einsum":
            backend.prepare(*arguments["w"])
