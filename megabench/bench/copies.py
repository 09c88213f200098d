"""Pointer-distinct copies of an op, and what a check does with one: poison, flip a sign, look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import torch

from megabench.bench.ops import Target, bits_of, flip_, poison_
from megabench.bench.timers import Run


@dataclass
class Copy:
    """One pointer-distinct copy of an op: how to run it, and what to look at."""

    run: Run
    targets: list[Target] = field(default_factory=list)
    flippable: torch.Tensor | None = None
    """An input whose flipped bits decide the outputs, None where there is none."""
    sensitive: bool = False
    """Whether the outputs must change with that sign: no cancelling, no empty work."""
    inputs: frozenset[int] = frozenset()
    """Addresses of the arguments' storages: an op may hand an argument back, which must live."""

    def bits(self, returned: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a run wrote and returned, as integers."""
        return [target.bits() for target in self.targets] + [bits_of(t) for t in returned]

    def outputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returned tensors that are no argument handed back."""
        return [t for t in tensors if t.untyped_storage().data_ptr() not in self.inputs]

    @contextmanager
    def poisoned(self, returned: list[torch.Tensor]) -> Iterator[None]:
        """Begin with poison over the outputs; a cache is put back at the end, whatever happens."""
        for target in self.targets:
            target.poison()
        for tensor in self.outputs(returned):
            poison_(tensor)
        try:
            yield
        finally:
            for target in self.targets:
                target.restore()

    @contextmanager
    def flipped(self, halvings: int = 0) -> Iterator[None]:
        """With the input flipped, or its first columns alone, half as many with every halving."""
        if self.flippable is None:
            yield
            return
        part = self.flippable[..., : _width(self.flippable, halvings)]
        flip_(part)
        try:
            yield
        finally:
            flip_(part)

    def parts(self, halvings: int) -> tuple[bool, bool]:
        """Whether the columns that `flipped` flips, and the others, have a number in every row but
        0, whose sign is none; of a page table, part of which may name no page that is read,
        neither."""
        tensor = self.flippable
        if tensor is None or not tensor.is_floating_point():
            return False, False
        nonzero, size = tensor.float() != 0, _width(tensor, halvings)
        part, rest = nonzero[..., :size].any(-1), nonzero[..., size:].any(-1)
        return bool(part.all()), bool(rest.all())


def _width(tensor: torch.Tensor, halvings: int) -> int:
    return max(1, tensor.shape[-1] >> halvings)


def cloned(seen: list[torch.Tensor]) -> list[torch.Tensor]:
    """Bits to keep, whatever is written next."""
    return [bits.clone() for bits in seen]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Bitwise equality of two observations."""
    return not differ(first, second).item()


def differ(first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    """Whether two observations differ, as a tensor [] that nobody has waited for."""
    if [(t.shape, t.dtype) for t in first] != [(t.shape, t.dtype) for t in second]:
        return torch.tensor(True, device=second[0].device if second else None)
    found = []
    for pair in zip(first, second, strict=True):
        one, other = map(_words, pair)
        if (one.shape, one.dtype) != (other.shape, other.dtype):  # one of them is no row of words
            one, other = pair
        found.append((one != other).any())
    return reduce(or_, found) if found else torch.tensor(False)


def _words(bits: torch.Tensor) -> torch.Tensor:
    """The same memory as 8-byte integers, where it is a row of them: a GPU compares bytes at half
    the pace."""
    size = bits.element_size()
    odd = (bits.nbytes | bits.data_ptr() | int(bits.storage_offset()) * size) % 8
    return bits if odd or not bits.is_contiguous() else bits.view(-1).view(torch.int64)
