"""Outputs are compared after timing: a number stands only for work that was done.

Before each check the outputs are poisoned. Two checks: the timed form, run once more, writes bit
for bit what the untimed run wrote; and with the sign of an input flipped it writes what an untimed
run of the flipped input writes, and something new where the op must. The second catches an output
that is kept, not computed.

An untimed run's outputs are read when the device is idle, a timed one's as soon as the clock has
stopped: work on a stream that the clock does not wait for is missing from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from megabench.bench.ops import Target, as_bytes, flip_sign_, poison_
from megabench.bench.timers import Run, Timer


@dataclass
class Copy:
    """One pointer-distinct copy of an op: how to run it, and what to look at."""

    run: Run
    targets: list[Target] = field(default_factory=list)
    flippable: torch.Tensor | None = None
    """An input whose sign decides the outputs, None where there is none."""
    sensitive: bool = False
    """Whether the outputs must change with that sign: no cancelling, no empty work."""
    inputs: frozenset[int] = frozenset()
    """Addresses of the arguments' storages: an op may hand an argument back, which must live."""


class Expected:
    """What an untimed run writes, as its inputs are and with a sign flipped: each is found once for
    all the ways an op is timed."""

    def __init__(self, copy: Copy, run: Run | None = None) -> None:
        self._copy = copy
        self.plain = observe(copy, run)

    @cached_property
    def flipped(self) -> list[torch.Tensor]:
        assert self._copy.flippable is not None
        flip_sign_(self._copy.flippable)
        try:
            return observe(self._copy)
        finally:
            flip_sign_(self._copy.flippable)


def observe(copy: Copy, run: Run | None = None) -> list[torch.Tensor]:
    """An untimed run's outputs, by `run` in place of the copy's own; every stream is waited for."""
    untimed = run or copy.run

    def settled() -> list[torch.Tensor]:
        fresh = untimed()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return fresh

    return _observed(copy, settled, [])


def _observed(copy: Copy, run: Run, returned: list[torch.Tensor]) -> list[torch.Tensor]:
    """Poison, run once, and give every output's bytes: targets first, then returned tensors.

    `returned` are tensors a graph returns to each time, poisoned too. A cache is put back.
    """
    for target in copy.targets:
        target.poison()
    for tensor in returned:
        if tensor.untyped_storage().data_ptr() not in copy.inputs:
            poison_(tensor)
    fresh = run()
    seen = [target.read() for target in copy.targets] + [as_bytes(t) for t in fresh]
    for target in copy.targets:
        target.restore()
    return seen


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Bitwise equality of two observations."""
    return len(first) == len(second) and all(map(torch.equal, first, second))


def recheck(
    copy: Copy, timer: Timer, index: int, expected: Expected, *, flip: bool = True
) -> str | None:
    """None when copy `index` of `timer` still does its work, else what is wrong with it."""

    def replay() -> list[torch.Tensor]:
        return timer.replay(index)

    kept = timer.returned(index) or []
    if not same(_observed(copy, replay, kept), expected.plain):
        return "outputs after timing differ from the untimed run's"
    if copy.flippable is None or not flip:
        return None
    untimed = expected.flipped
    flip_sign_(copy.flippable)
    try:
        timed = _observed(copy, replay, kept)
    finally:
        flip_sign_(copy.flippable)
    if not same(timed, untimed):
        return "the timed form does not follow a changed input"
    if copy.sensitive and same(timed, expected.plain):
        return "outputs do not change with a changed input"
    return None
