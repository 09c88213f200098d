"""Page pools: pages shuffled over a poisoned pool, block tables, slots, and rows written into them.

Only pages that a step may legitimately touch exist; every other block-table entry points at the
null page 0, which, like everything that no request owns, is filled with poison bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megabench.formats import KVRecord, PageLayout, page_offsets
from megabench.hashing import Stream, permutation

_ROWS_AT_A_TIME = 16384
_SPARE_PAGES = 3
"""Poisoned pages mixed into the pool beside the null page."""

RowBytes = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(chunk number, rows) -> data and scale bytes of that chunk's rows."""


@dataclass(frozen=True)
class Rows:
    """A ragged set of (request, row) pairs, int64 [n] each, on one device."""

    request: torch.Tensor
    row: torch.Tensor

    def unique_pages(self, page: int, width: int) -> Rows:
        """The distinct (request, page number) pairs of the rows, sorted; `width` pages at most."""
        keys = torch.unique(self.request * width + self.row // page)
        return Rows(keys // width, keys % width)

    def to(self, device: torch.device) -> Rows:
        return Rows(self.request.to(device), self.row.to(device))

    def where(self, keep: torch.Tensor) -> Rows:
        return Rows(self.request[keep], self.row[keep])


def ranges(starts: torch.Tensor, ends: torch.Tensor) -> Rows:
    """All rows of [starts[r], ends[r]) of every request r; empty ranges give none."""
    device = starts.device
    counts = (ends - starts).clamp_min(0)
    request = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    first = torch.cumsum(counts, 0) - counts
    row = torch.arange(len(request), device=device) - first[request] + starts[request]
    return Rows(request, row)


def concatenate(*parts: Rows) -> Rows:
    return Rows(torch.cat([p.request for p in parts]), torch.cat([p.row for p in parts]))


@dataclass(frozen=True)
class Pool:
    """One paged cache and the block table of a step's requests.

    cache: uint8 [blocks, page, record bytes], page stride (page + padding) * record bytes.
    table: int32 [requests, pages]; where it lies, slots are computed.
    """

    cache: torch.Tensor
    table: torch.Tensor
    page: int
    record: KVRecord
    layout: PageLayout

    def slots(self, rows: Rows) -> torch.Tensor:
        """int64 [n] slot ids, block * page + offset, of rows on the table's device."""
        block = self.table[rows.request, rows.row // self.page].to(torch.int64)
        return block * self.page + rows.row % self.page

    def write(self, rows: Rows, row_bytes: RowBytes) -> None:
        """Fill the rows with record bytes, in the pool's page layout."""
        data_base, data_pitch, scale_base, scale_pitch = page_offsets(
            self.record, self.layout, self.page
        )
        data = self._view(data_base, data_pitch, self.record.data_bytes)
        scales = self._view(scale_base, scale_pitch, self.record.scale_bytes)
        for chunk, slot in enumerate(torch.split(self.slots(rows), _ROWS_AT_A_TIME)):
            data_bytes, scale_bytes = row_bytes(chunk, len(slot))
            at = (slot // self.page).to(data.device), (slot % self.page).to(data.device)
            data[at] = data_bytes
            scales[at] = scale_bytes

    def _view(self, base: int, pitch: int, width: int) -> torch.Tensor:
        """uint8 [blocks, page, width] of each row's data or scale bytes."""
        shape = (self.cache.shape[0], self.page, width)
        start = self.cache.storage_offset() + base
        return self.cache.as_strided(shape, (self.cache.stride(0), pitch, 1), start)


def striped(count: int, fills: tuple[int, ...], width: int, device: torch.device) -> torch.Tensor:
    """uint8 [count]: `width` bytes of each of `fills` in turn."""
    rows = -(-count // width)
    fill = torch.tensor(fills, dtype=torch.uint8, device=device)
    turn = torch.arange(rows, device=device) % len(fills)
    return fill[turn][:, None].expand(rows, width).reshape(-1)[:count]


def build_pool(
    owned: Rows,
    requests: int,
    width: int,
    page: int,
    record: KVRecord,
    layout: PageLayout,
    padding: int,
    poison: tuple[int, ...],
    stream: Stream,
    device: torch.device,
) -> Pool:
    """A poisoned pool with one page for each `owned` (request, page number) pair.

    `width` is the block table's; `padding` is in records after each page; records take the bytes
    of `poison` in turn. A page nobody owns lies before the pool and one after it, as another
    layer's cache would: the pool begins inside its storage.
    """
    blocks = 1 + len(owned.row) + _SPARE_PAGES
    physical = 1 + permutation(stream, blocks - 1)[: len(owned.row)]
    table = torch.zeros((requests, width), dtype=torch.int32, device=device)
    table[owned.request, owned.row] = physical.to(device, torch.int32)
    stride = (page + padding) * record.nbytes
    storage = striped((blocks + 2) * stride, poison, record.nbytes, device)
    pages = storage.as_strided((blocks + 2, page, record.nbytes), (stride, record.nbytes, 1))
    return Pool(pages[1:-1], table, page, record, layout)
