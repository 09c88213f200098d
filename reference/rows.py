"""Where attention's rows come from: a callable that gives the rows of a slice of tokens.

``rows(slice)`` returns values ``[t, n, 512]`` and ``valid`` bool ``[t, n]``; values of rows that
are not valid may be anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .records import HEAD_DIM, decode_slots

Rows = Callable[[slice], tuple[Tensor, Tensor]]

_DENSE_ROWS = 65536
_DECODE_STEP = 8192


class Paged(NamedTuple):
    """Rows named by slots of one paged cache.

    ``cache`` uint8 ``[blocks, page, (1,) bytes]``, ``slots [T, n]`` (-1 invalid, outside the pool
    dropped), ``lens [T]``: only the first so many columns count.
    """

    cache: Tensor
    slots: Tensor
    lens: Tensor
    layout: str = "interleaved"


def named_rows(slots: Tensor, lens: Tensor, limit: int) -> Tensor:
    """bool ``[T, n]``: entries within the first ``lens [T]`` columns that lie in [0, limit)."""
    column = torch.arange(slots.shape[1], device=slots.device)
    return (slots >= 0) & (slots < limit) & (column < lens[:, None])


def _gathered(table: Tensor, which: Tensor) -> Tensor:
    return table.index_select(0, which.reshape(-1)).view(*which.shape, HEAD_DIM)


def _one(part: Paged) -> Rows:
    valid = named_rows(part.slots, part.lens, part.cache.shape[0] * part.cache.shape[1])
    slots = torch.where(valid, part.slots.long(), 0)
    used = torch.unique(slots[valid])

    if len(used) > _DENSE_ROWS:

        def direct(tokens: slice) -> tuple[Tensor, Tensor]:
            return decode_slots(part.cache, slots[tokens], part.layout), valid[tokens]

        return direct

    # Tokens share rows, so each one is decoded once. The extra row stands for "not valid".
    dense = torch.zeros(len(used) + 1, HEAD_DIM, device=slots.device)
    for start in range(0, len(used), _DECODE_STEP):
        some = used[start : start + _DECODE_STEP]
        dense[start : start + len(some)] = decode_slots(part.cache, some, part.layout)
    which = torch.where(valid, torch.searchsorted(used, slots), len(used))

    def shared(tokens: slice) -> tuple[Tensor, Tensor]:
        return _gathered(dense, which[tokens]), valid[tokens]

    return shared


def paged_rows(parts: Sequence[Paged]) -> Rows:
    """Rows of several caches one after the other, e.g. the SWA window, then the top-k: fp32."""
    sources = [_one(part) for part in parts]

    def rows(tokens: slice) -> tuple[Tensor, Tensor]:
        values, valid = zip(*(source(tokens) for source in sources), strict=True)
        return torch.cat(values, dim=1), torch.cat(valid, dim=1)

    return sources[0] if len(sources) == 1 else rows


def workspace_rows(kv: Tensor, indices: Tensor, lens: Tensor | None = None) -> Rows:
    """Rows of a flat workspace ``kv [s_kv, 512]`` or ``[s_kv, 1, 512]`` (bf16): the prefill op's
    input.

    ``indices`` int ``[T, n]`` or ``[T, 1, n]``, entries outside [0, s_kv) skip; ``lens [T]``
    defaults to all columns.
    """
    kv, indices = kv.reshape(-1, HEAD_DIM), indices.reshape(len(indices), indices.shape[-1])
    if lens is None:
        lens = torch.full_like(indices[:, 0], indices.shape[1])
    valid = named_rows(indices, lens, len(kv))
    table = kv if len(kv) else kv.new_zeros(1, HEAD_DIM)
    which = torch.where(valid, indices.long(), 0)

    def rows(tokens: slice) -> tuple[Tensor, Tensor]:
        return _gathered(table, which[tokens]), valid[tokens]

    return rows
