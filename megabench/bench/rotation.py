"""Cold caches: how many pointer-distinct copies of an op's arguments to rotate, and the L2 sweep.

A copy comes round again only after all others, so what the rotation touches must exceed the L2
several times over. Ops that would need more than `MAX_SETS` copies get a few and a sweep, a read of
a buffer larger than the L2 before each sample, outside its event pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megabench.bench.calls import OpCall, tensors_of

MAX_SETS = 64
SWEPT_SETS = 8
"""Sets where even `MAX_SETS` would not exceed the L2 enough: the sweep does what they cannot."""
L2_MULTIPLE = 5
SWEEP_MULTIPLE = 2
MEMORY_SHARE = 0.25
"""Of the free device memory, for the copies of one op."""


@dataclass(frozen=True)
class Rotation:
    """How a cold measurement is kept cold."""

    sets: int
    bytes_rotated: int
    """What all sets touch: sets * the op's distinct bytes."""
    sweep: bool
    """Whether an L2 sweep must help, since the sets alone do not exceed the L2 enough."""


def plan_rotation(
    touched: int, copy_bytes: int, l2_bytes: int, free_bytes: int, max_sets: int = MAX_SETS
) -> Rotation:
    """Sets for an op that touches `touched` bytes and takes `copy_bytes` of memory a copy."""
    wanted = math.ceil(L2_MULTIPLE * l2_bytes / max(touched, 1)) + 1
    affordable = int(free_bytes * MEMORY_SHARE) // max(copy_bytes, 1)
    sets = max(1, min(wanted if wanted <= max_sets else SWEPT_SETS, affordable))
    rotated = sets * touched
    return Rotation(sets, rotated, sweep=rotated <= L2_MULTIPLE * l2_bytes or sets == 1)


def turn_problem(counts: list[int]) -> str | None:
    """What is wrong when copies replayed `counts` times were not taken in turn; None when they
    were: then none came round again before all others, and a copy was warm only if all are."""
    if max(counts) - min(counts) <= 1:
        return None
    return f"the copies were not replayed in turn, but {min(counts)} to {max(counts)} times"


def storages(calls: list[OpCall]) -> dict[int, int]:
    """Address and size in bytes of every storage behind these calls' arguments.

    The sizes add up to the memory one copy of the calls takes.
    """
    found = {}
    for call in calls:
        for tensor in tensors_of([call.args, call.kwargs]):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def make_sweep(l2_bytes: int, device: torch.device) -> Callable[[], object]:
    """A function that enqueues a read of a buffer twice the L2, which leaves clean lines behind."""
    buffer = torch.ones(SWEEP_MULTIPLE * l2_bytes // 4, dtype=torch.float32, device=device)
    total = torch.empty((), dtype=torch.float32, device=device)

    def sweep() -> None:
        torch.sum(buffer, dim=0, out=total)

    return sweep
