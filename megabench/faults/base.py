"""What a fault is, and the ways one is put on: around an op, inside attention, into the layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megabench.backends import Backend
from megabench.backends.base import for_live_heads
from megabench.quant import alloc_mega_attn_output

Args = dict[str, Any]
"""An op call's arguments by the protocol's parameter names, in its order."""
Right = Callable[[Args], Any]
"""The op as it should be."""
Op = Callable[[Args, Right], Any]
"""A faulty op: called in place of the right one, which it may use."""
PutOn = Callable[[Backend], AbstractContextManager[Backend]]
"""Gives the backend to run; patches of the layer last as long."""
Need = Literal["", "cuda"]


@dataclass(frozen=True)
class Wear:
    """How a fault is put on, and what it is put on: the same without the fault."""

    faulty: PutOn
    right: PutOn = nullcontext


@dataclass(frozen=True)
class Fault:
    """One deliberate mistake, the case that shows it and the stages that must notice."""

    id: str
    says: str
    """What is wrong, one sentence."""
    case: str
    """Id of the trigger case, without its model."""
    kills: tuple[str, ...]
    """Stages that must all find it there."""
    wear: Wear
    needs: Need = ""
    equivalent: str = ""
    """Why no result the contract fixes can differ; such a fault must change no byte."""

    @property
    def group(self) -> str:
        return GROUPS[self.id[0]]


GROUPS = {
    "Q": "Q layout and permutation",
    "R": "RoPE on Q",
    "K": "cache insertion",
    "G": "gather and indices",
    "D": "dequantization",
    "S": "softmax, sink and lse",
    "I": "inverse RoPE on the output",
    "C": "output cast",
    "V": "one rounding too many, or another one",
    "L": "scale layout",
    "A": "linears",
    "E": "wo_a einsum",
    "P": "prefill chunks and mixed steps",
    "W": "weight permutation and reload",
    "X": "runtime",
}
CATALOGUE: dict[str, Fault] = {}
"""Every fault by id, in the order of the stages."""


def fault(
    name: str, says: str, case: str, *kills: str, needs: Need = "", equivalent: str = ""
) -> Callable[[Wear], Wear]:
    """Register what is decorated as the fault `name`. ValueError when the id is taken."""

    def register(wear: Wear) -> Wear:
        if name in CATALOGUE:
            raise ValueError(f"fault {name} is registered twice")
        CATALOGUE[name] = Fault(name, says, case, kills, wear, needs, equivalent)
        return wear

    return register


class FaultyBackend:
    """A backend with some of its ops replaced; everything else is the wrapped one's."""

    def __init__(self, wrapped: Backend, ops: dict[str, Op]) -> None:
        self._wrapped = wrapped
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._wrapped, name)
        faulty = self._ops.get(name)
        return right if faulty is None else _bound(name, right, faulty)

    def for_live_heads(self, live_heads: int) -> FaultyBackend:
        return FaultyBackend(for_live_heads(self._wrapped, live_heads), self._ops)


def _bound(name: str, right: Callable[..., Any], faulty: Op) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Backend, name))

    def call(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(None, *positional, **named)
        bound.apply_defaults()
        args = {key: value for key, value in bound.arguments.items() if key != "self"}
        if args.get("out_fp8", right) is None:  # a fault changes what was written where
            pair = alloc_mega_attn_output(len(args["q"]), args["n_wv_group"], args["q"].device)
            args |= {"out_fp8": pair.data, "out_sf": pair.scale}
        return faulty(args, lambda args: right(*args.values()))

    return call


def rolled(tensor: Tensor, shift: int, dim: int) -> Tensor:
    """`tensor.roll(shift, dim)`, of e4m3 codes too, which CUDA does not roll."""
    if tensor.element_size() > 1:
        return tensor.roll(shift, dim)
    return tensor.view(torch.uint8).roll(shift, dim).view(tensor.dtype)


def wearing(backend: Backend, ops: dict[str, Op]) -> Backend:
    """`backend` with `ops` in place of its own."""
    return cast(Backend, FaultyBackend(backend, ops))


def instead(*names: str) -> Callable[[Op], Wear]:
    """The decorated function is called in place of the ops named."""

    def put_on(faulty: Op) -> Wear:
        return Wear(lambda backend: nullcontext(wearing(backend, dict.fromkeys(names, faulty))))

    return put_on


def before(*names: str) -> Callable[[Callable[[Args], None]], Wear]:
    """The decorated function changes what the ops named are given, in their dict of arguments."""

    def put_on(change: Callable[[Args], None]) -> Wear:
        def faulty(args: Args, right: Right) -> Any:
            change(args)
            return right(args)

        return instead(*names)(faulty)

    return put_on


def after(*names: str) -> Callable[[Callable[[Args, Any], Any]], Wear]:
    """The decorated function changes what the ops named wrote or gives back something else."""

    def put_on(change: Callable[[Args, Any], Any]) -> Wear:
        return instead(*names)(lambda args, right: change(args, right(args)))

    return put_on


def fresh(*names: str) -> Callable[[Callable[[], Op]], Wear]:
    """The decorated function makes a faulty op that remembers its calls, anew for each backend."""

    def put_on(make: Callable[[], Op]) -> Wear:
        return Wear(lambda backend: nullcontext(wearing(backend, dict.fromkeys(names, make()))))

    return put_on


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module or class replaced, put back at the end."""
    kept = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def patch(owner: Any, name: str) -> Callable[[Callable[[Any], Any]], Wear]:
    """The decorated function makes, from a module's or class's own function, the faulty one."""

    def put_on(make: Callable[[Any], Any]) -> Wear:
        @contextmanager
        def wear(backend: Backend) -> Iterator[Backend]:
            with replaced(owner, name, make(vars(owner)[name])):
                yield backend

        return Wear(wear)

    return put_on
