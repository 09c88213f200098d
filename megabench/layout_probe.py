"""Which page layout a reader or a writer of a paged cache really uses, told from one page of bytes.

Both layouts put the same bytes in one page, so a wrong guess raises nothing and gives rows of the
right size with the wrong scales. A ramp page is filled with bytes that are legal codes and legal
scales wherever they fall; a row read from it matches one layout only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megabench.backends.base import Backend
from megabench.formats import (
    FP8,
    HEAD_DIM,
    NVFP4,
    PAGE_LAYOUTS,
    QUANT_GROUP,
    ROPE_DIM,
    SWA_PAGE,
    WV_GROUP_SIZE,
    KVRecord,
    PageLayout,
    page_offsets,
)
from megabench.quant import (
    alloc_mega_attn_output,
    decode_e4m3,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_kv_mxfp8,
    ue8m0_to_float,
    unpack_scales,
)

Found = PageLayout | Literal["neither"]
HEADS = 64
SLOT = 5
"""The row that is read and written: far enough into the page for the layouts to be apart."""
PROBED: tuple[KVRecord, ...] = (FP8, NVFP4)
_UNTOUCHED = 0x11


class LayoutError(ValueError):
    """A writer and a reader that lay pages out differently; names both."""


@dataclass(frozen=True)
class Verdict:
    """What one op of a backend does with one record's pages."""

    backend: str
    op: str
    writes: bool
    record: str
    expected: PageLayout
    """The layout the backend was built for."""
    found: Found

    @property
    def ok(self) -> bool:
        return self.found == self.expected

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        said = "" if self.ok else f", not {self.expected} as it says"
        return f"{self.backend}.{self.op} {verb} {self.record} pages {self.found}{said}"


def ramp_page(record: KVRecord, device: torch.device, page: int = SWA_PAGE) -> torch.Tensor:
    """A one-page cache uint8 [1, page, bytes] whose every byte is a code, a scale and a sum of its
    place: bytes 0x70..0x7E, finite e4m3 values 128..448 and ue8m0 factors 2^-15..2^-1."""
    place = torch.arange(page * record.nbytes, device=device)
    # Neither width divides the periods, so no shift by a row or a scale maps the ramp on itself.
    ramp = (place * 7 + place // 15 * 4 + place // 211) % 15
    return (0x70 + ramp).to(torch.uint8).view(1, page, record.nbytes)


def row_of(cache: torch.Tensor, record: KVRecord, layout: PageLayout, slot: int) -> torch.Tensor:
    """float32 [512] of one row of a one-page cache, by that layout's offsets."""
    data_base, data_pitch, scale_base, scale_pitch = page_offsets(record, layout, cache.shape[1])
    raw = cache.reshape(-1)
    data = raw[data_base + slot * data_pitch :][: record.data_bytes]
    scale = raw[scale_base + slot * scale_pitch :][: record.scale_bytes]
    dequantize = dequantize_mxfp8 if record is FP8 else dequantize_nvfp4
    return dequantize(data.unsqueeze(0), scale.unsqueeze(0))[0]


def _matching(row: torch.Tensor, candidates: dict[PageLayout, torch.Tensor]) -> Found:
    for layout, candidate in candidates.items():
        if torch.equal(row.to(torch.float32), candidate):
            return layout
    return "neither"


# ---- readers --------------------------------------------------------------------


def _gathered(backend: Backend, cache: torch.Tensor) -> torch.Tensor:
    device = cache.device
    out = torch.zeros((1, SLOT + 1, HEAD_DIM), dtype=torch.bfloat16, device=device)
    seq_lens = torch.tensor([SLOT + 1], dtype=torch.int32, device=device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    backend.dequantize_and_gather_k_cache(out, cache, seq_lens, None, table, cache.shape[1], 0)
    return out[0, SLOT]


def _attended(backend: Backend, cache: torch.Tensor, record: KVRecord) -> torch.Tensor:
    """The one row a query sees is its output: probability 1, and at position 0 no rotation. Only
    the output's cast is between the two."""
    device = cache.device

    def ints(*values: int, columns: int = 0) -> torch.Tensor:
        row = torch.tensor(values, dtype=torch.int32, device=device)
        if not columns:
            return row
        wide = torch.full((1, columns), -1, dtype=torch.int32, device=device)
        wide[0, : len(values)] = row
        return wide

    main = cache if record is FP8 else ramp_page(FP8, device)
    extra = None if record is FP8 else cache
    table = torch.zeros((1, ROPE_DIM), dtype=torch.float32, device=device)
    table[:, : ROPE_DIM // 2] = 1.0
    out = alloc_mega_attn_output(1, HEADS // WV_GROUP_SIZE, device)
    backend.fused_norm_rope_attn_rope_cast_decode(
        torch.zeros((1, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device),
        main.unsqueeze(2),
        ints(SLOT, columns=128) if extra is None else ints(columns=128),
        HEAD_DIM**-0.5,
        HEAD_DIM,
        None,
        ints(1 if extra is None else 0),
        None if extra is None else extra.unsqueeze(2),
        None if extra is None else ints(SLOT, columns=64),
        None if extra is None else ints(1),
        False,
        0.0,
        ints(0),
        False,
        ROPE_DIM,
        table,
        HEADS // WV_GROUP_SIZE,
        QUANT_GROUP,
        True,
        True,
        True,
        out.data,
        out.scale,
    )
    # Head 0 of group 0: chunk c of its dims is chunk 8c of the output order.
    codes = out.data[0, 0].view(torch.uint8).view(-1, WV_GROUP_SIZE, QUANT_GROUP)[:, 0]
    scale = unpack_scales(out.scale)[0, 0].view(-1, WV_GROUP_SIZE)[:, 0]
    return (decode_e4m3(codes) * ue8m0_to_float(scale).unsqueeze(-1)).flatten()


def reader_verdicts(backend: Backend, device: torch.device) -> list[Verdict]:
    """What the backend's decode op and its gather take the two records' pages for."""
    verdicts = []
    for record in PROBED:
        cache = ramp_page(record, device)
        rows = {layout: row_of(cache, record, layout, SLOT) for layout in PAGE_LAYOUTS}
        cast = {layout: dequantize_mxfp8(*quantize_kv_mxfp8(row)) for layout, row in rows.items()}
        for op, row, candidates in (
            ("fused_norm_rope_attn_rope_cast_decode", _attended(backend, cache, record), cast),
            ("dequantize_and_gather_k_cache", _gathered(backend, cache), rows),
        ):
            found = _matching(row, candidates)
            verdicts.append(
                Verdict(backend.name, op, False, record.name, backend.page_layout, found)
            )
    return verdicts


# ---- writers --------------------------------------------------------------------


def _written(
    record: KVRecord, device: torch.device, write: Callable[[torch.Tensor], None]
) -> Found:
    """Which layout's bytes, and no others, a write of row SLOT changed."""
    cache = torch.full((1, SWA_PAGE, record.nbytes), _UNTOUCHED, dtype=torch.uint8, device=device)
    write(cache)
    touched = (cache.reshape(-1) != _UNTOUCHED).nonzero().flatten().tolist()
    for layout in PAGE_LAYOUTS:
        data_base, data_pitch, scale_base, scale_pitch = page_offsets(record, layout, SWA_PAGE)
        data, scale = data_base + SLOT * data_pitch, scale_base + SLOT * scale_pitch
        owned = [*range(data, data + record.data_bytes), *range(scale, scale + record.scale_bytes)]
        if touched == sorted(owned):
            return layout
    return "neither"


def writer_verdicts(backend: Backend, device: torch.device) -> list[Verdict]:
    """Where the backend's two insertions put a row of each record they write."""
    # A row whose every code and scale differs from the untouched byte, in both records.
    row = torch.full((1, HEAD_DIM), 3.0, dtype=torch.bfloat16, device=device)
    q = torch.zeros((1, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device)
    slot = torch.tensor([SLOT], dtype=torch.int64, device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    table = torch.zeros((1, ROPE_DIM), dtype=torch.float32, device=device)
    table[:, : ROPE_DIM // 2] = 1.0

    def insert_kv(cache: torch.Tensor) -> None:
        backend.pad_q_and_insert_kv(q, row, cache, slot, position, table, HEADS)

    def insert_compressed(cache: torch.Tensor) -> None:
        backend.insert_compressed(row, position, table, cache, slot, 1)

    found = [("pad_q_and_insert_kv", FP8, _written(FP8, device, insert_kv))]
    found += [
        ("insert_compressed", record, _written(record, device, insert_compressed))
        for record in PROBED
    ]
    return [
        Verdict(backend.name, op, True, record.name, backend.page_layout, layout)
        for op, record, layout in found
    ]


# ---- verdicts -------------------------------------------------------------------


def layout_verdicts(backend: Backend, device: torch.device) -> list[Verdict]:
    """Every reader and writer of the backend on `device`; raises what its ops raise."""
    return reader_verdicts(backend, device) + writer_verdicts(backend, device)


def check_layouts(writer: Backend, reader: Backend, device: torch.device) -> None:
    """LayoutError naming both when `reader` would misread what `writer` writes on `device`.

    They may be one backend; its own writers must then agree with its own readers.
    """
    for written in writer_verdicts(writer, device):
        for read in reader_verdicts(reader, device):
            if read.record == written.record and read.found != written.found:
                raise LayoutError(f"{written}, but {read}")
