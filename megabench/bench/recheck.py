"""Outputs are compared after timing: a number stands only for work that was done.

Before each check the outputs are poisoned. Two checks: the timed form, run once more, writes bit
for bit what the untimed run wrote; and with the sign of an input flipped it writes what an untimed
run of the flipped input writes, and something new where the op must. The second catches an output
that is kept, not computed.

An untimed run's outputs are read when the device is idle, a timed one's as soon as the clock has
stopped: work on a stream that the clock does not wait for is missing from them. Memory that comes
new from the allocator may hold an earlier run's right answer, though; so after one more run poison
is laid over its outputs, and nobody may write there until the device is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch

from megabench.bench.ops import Target, bits_of, flip_sign_, poison_, poison_word
from megabench.bench.timers import HostTimer, Run, Timer

Seen = TypeVar("Seen")


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
    """The bits of an untimed run's outputs, by `run` in place of the copy's own; every stream is
    waited for."""
    untimed = run or copy.run

    def settled() -> list[torch.Tensor]:
        fresh = untimed()
        _wait()
        return fresh

    return _observed(copy, settled, [], lambda seen: [bits.clone() for bits in seen])


def _observed(
    copy: Copy, run: Run, returned: list[torch.Tensor], look: Callable[[list[torch.Tensor]], Seen]
) -> Seen:
    """Poison, run once, and `look` at every output's bits, targets first, then returned tensors.
    `returned` are tensors that a graph returns to each time, poisoned too."""
    with _poisoned(copy, returned):
        return look(_bits(copy, run()))


@contextmanager
def _poisoned(copy: Copy, returned: list[torch.Tensor]) -> Iterator[None]:
    """Begin with poison over the outputs; a cache is put back at the end, whatever happens."""
    for target in copy.targets:
        target.poison()
    for tensor in _outputs(copy, returned):
        poison_(tensor)
    try:
        yield
    finally:
        for target in copy.targets:
            target.restore()


def _bits(copy: Copy, returned: list[torch.Tensor]) -> list[torch.Tensor]:
    return [target.bits() for target in copy.targets] + [bits_of(t) for t in returned]


def _outputs(copy: Copy, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returned tensors that are no argument handed back."""
    return [t for t in tensors if t.untyped_storage().data_ptr() not in copy.inputs]


def _written_late(copy: Copy, run: Run) -> bool:
    """Whether outputs are written after a run has ended for its clock: poison laid over them there
    must last until the device is idle.

    Twice, for the first time loads the kernels that poison, and a load may wait for the device.
    """
    return any([_overwritten(copy, run()) for _ in range(2)])


def _overwritten(copy: Copy, fresh: list[torch.Tensor]) -> bool:
    with _poisoned(copy, fresh):
        _wait()
        laid = _bits(copy, _outputs(copy, fresh))
        return any(bool((bits != poison_word(bits)).any()) for bits in laid)


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Bitwise equality of two observations."""
    return not _differ(first, second).item()


def _differ(first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    """Whether two observations differ, as a tensor [] that nobody has waited for."""
    if [(t.shape, t.dtype) for t in first] != [(t.shape, t.dtype) for t in second]:
        return torch.tensor(True, device=second[0].device if second else None)
    found = [(one != other).any() for one, other in zip(first, second, strict=True)]
    return torch.stack(found).any() if found else torch.tensor(False)


def recheck(
    copies: list[Copy], timer: Timer, expected: Expected, *, flip: bool = True
) -> str | None:
    """None when every copy of `timer` still does its work, else what is wrong with it. The first
    stands for all in what takes longer: late writes and, with `flip`, a changed input."""

    def differs(index: int, wanted: list[torch.Tensor]) -> torch.Tensor:
        kept = timer.returned(index) or []
        return _observed(
            copies[index], lambda: timer.replay(index), kept, lambda seen: _differ(seen, wanted)
        )

    found = torch.stack([differs(index, expected.plain) for index in range(len(copies))])
    for index, wrong in enumerate(found.tolist()):
        if wrong:
            where = f"copy {index}: " if len(copies) > 1 else ""
            return f"{where}outputs after timing differ from the untimed run's"
    first = copies[0]
    if not isinstance(timer, HostTimer) and _written_late(first, lambda: timer.replay(0)):
        return "outputs are still written when the clock has stopped"
    if first.flippable is None or not flip:
        return None
    untimed = expected.flipped
    flip_sign_(first.flippable)
    try:
        deaf = differs(0, untimed)
    finally:
        flip_sign_(first.flippable)
    if deaf:
        return "the timed form does not follow a changed input"
    if first.sensitive and same(untimed, expected.plain):
        return "outputs do not change with a changed input"
    return None
