"""KV-cache records and page layouts as data: widths and offsets, no arithmetic on values.

Sources: vLLM 0.33.0 (`fp8_ds_mla`, `nvfp4_ds_mla`), FlashMLA's 2026.09.30 release (interleaved
pages), earlier V4.1 builds and V4 (page_split).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PageLayout = Literal["interleaved", "page_split"]
PAGE_LAYOUTS: tuple[PageLayout, ...] = get_args(PageLayout)

HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM
WV_GROUP_SIZE = 8
"""Heads per wo_a group, the number the kernel's output layout is built on."""
QUANT_GROUP = 32
"""Dims under one ue8m0 scale, in activations, weights, the 528-byte record and the output."""
Q_CHUNK = 16
"""Dims of one head that lie together in the kernel's Q layout."""
SWA_PAGE = 32
"""Tokens in a page of the sliding-window cache."""
COMPRESSED_BLOCK = 128
"""Tokens a block of the compressed cache covers; its page has COMPRESSED_BLOCK / ratio rows."""
PREFILL_CHUNK_SIZE = 4
"""Requests the prefill workspace is sized for."""
COMBINED_TOPK_MULTIPLE = 128
"""Columns of a prefill token's index list are a multiple of this."""
PADDED_HEADS = (64, 128)
"""Head counts the kernel is built for; live heads are padded up to one of them."""


@dataclass(frozen=True)
class KVRecord:
    """One cached token: `data_bytes` of codes, then `scale_bytes` of scales.

    In an interleaved page the two follow each other; in a page_split page all data of the page
    comes first, then all scales.
    """

    name: str
    data_bytes: int
    scale_bytes: int
    group: int
    """Dims under one scale."""

    @property
    def nbytes(self) -> int:
        return self.data_bytes + self.scale_bytes


FP8 = KVRecord("fp8_ds_mla", data_bytes=512, scale_bytes=16, group=32)
NVFP4 = KVRecord("nvfp4_ds_mla", data_bytes=256, scale_bytes=32, group=16)
V4_FP8 = KVRecord("v4_fp8_ds_mla", data_bytes=576, scale_bytes=8, group=64)
"""Legacy: 448 e4m3, 64 bf16, then 7 ue8m0 and a pad byte; always page_split."""
RECORDS: tuple[KVRecord, ...] = (FP8, NVFP4, V4_FP8)

CacheDType = Literal["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"]


def record_of(nbytes: int) -> KVRecord:
    """The record type of a cache whose last dim is `nbytes`; ValueError for any other width."""
    for record in RECORDS:
        if record.nbytes == nbytes:
            return record
    known = ", ".join(f"{r.nbytes} ({r.name})" for r in RECORDS)
    raise ValueError(f"last dim {nbytes} is no known record; expected {known}")


def page_offsets(record: KVRecord, layout: PageLayout, page_size: int) -> tuple[int, int, int, int]:
    """Bytes (data base, data pitch, scale base, scale pitch) of row i of a page: base + i*pitch."""
    if layout == "interleaved" and record is not V4_FP8:
        return 0, record.nbytes, record.data_bytes, record.nbytes
    return 0, record.data_bytes, page_size * record.data_bytes, record.scale_bytes


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple
