"""Faults of dequantization, in the decode op's rows and in those a prefill gathers."""

from __future__ import annotations

import torch
from torch import Tensor

from megabench.faults.base import fault
from megabench.faults.kernel import Kernel, kernel
from megabench.faults.triggers import MIXED, ODD, SPLIT, TINY, TWO
from megabench.formats import FP8, NOPE_DIM, NVFP4, KVRecord, PageLayout
from megabench.quant import decode_e2m1, decode_e4m3, ue8m0_to_float
from megabench.validate.trace import snapshot

BOTH = ("gathered_rows", "lse_decode")


def _e2m1(data: Tensor, scale: Tensor, change: list[tuple[int, float]]) -> Tensor:
    """Dequantized NVFP4 rows with some of the sixteen codes' values changed."""
    device = data.device
    table = decode_e2m1(torch.arange(8, dtype=torch.uint8, device=device) * 0x22 + 0x10)
    for code, value in change:
        table[code] = value
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    blocks = torch.unflatten(table[codes], -1, (-1, NVFP4.group))
    return (blocks * decode_e4m3(scale)[..., None]).flatten(-2)


@fault("D1", "block b is scaled by block b ^ 1", MIXED, *BOTH)
@kernel
class SwappedScales(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        order = torch.arange(scale.shape[-1], device=scale.device) ^ 1
        return super().values(record, data, scale[..., order])


@fault("D2", "the even element of a pair is read from the high nibble", MIXED, *BOTH)
@kernel
class SwappedNibbles(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        swapped = (data >> 4) | (data << 4) if record is NVFP4 else data
        return super().values(record, swapped, scale)


@fault("D3a", "e2m1 code 7 is read as 8", MIXED, *BOTH)
@kernel
class SevenIsEight(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        if record is NVFP4:
            return _e2m1(data, scale, [(7, 8.0), (15, -8.0)])
        return super().values(record, data, scale)


@fault("D3b", "e2m1 code 5 is read as 2.5", MIXED, *BOTH)
@kernel
class FiveIsTwoAndAHalf(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        if record is NVFP4:
            return _e2m1(data, scale, [(5, 2.5), (13, -2.5)])
        return super().values(record, data, scale)


@fault("D4a", "the sign of e2m1 codes 8 to 15 is dropped", MIXED, *BOTH)
@kernel
class NoSign(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        return super().values(record, data & 0x77 if record is NVFP4 else data, scale)


@fault("D4b", "e2m1 code 8 is read as +0", MIXED, "gathered_rows")
@kernel
class PositiveZero(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        return (
            _e2m1(data, scale, [(8, 0.0)])
            if record is NVFP4
            else super().values(record, data, scale)
        )


@fault("D5", "a scale of 16 dims is used for 32", MIXED, *BOTH)
@kernel
class ScaleOfThirtyTwo(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        if record is NVFP4:
            scale = scale[..., 0::2].repeat_interleave(2, -1)
        return super().values(record, data, scale)


@fault("D6", "an e4m3 scale is read as ue8m0", MIXED, *BOTH)
@kernel
class ScaleOfExponents(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        if record is not NVFP4:
            return super().values(record, data, scale)
        blocks = torch.unflatten(decode_e2m1(data), -1, (-1, NVFP4.group))
        return (blocks * ue8m0_to_float(scale)[..., None]).flatten(-2)


class Moved(Kernel):
    """Reads records some bytes after where they are."""

    late = 16

    def read(self, cache: Tensor, slots: Tensor) -> Tensor:
        moved = snapshot(cache)
        raw = moved.as_strided((moved.untyped_storage().nbytes(),), (1,), 0)
        raw.copy_(raw.roll(-self.late))
        return super().read(moved, slots)


@fault("D7", "a record is read 16 bytes late: the scales are the next token's data", MIXED, *BOTH)
@kernel
class SixteenBytesLate(Moved):
    pass


@fault("D8", "a page of data, then scales is read as interleaved records", SPLIT, *BOTH)
@kernel
class OtherLayout(Kernel):
    def __init__(self, page_layout: PageLayout) -> None:
        super().__init__("interleaved" if page_layout == "page_split" else "page_split")


@fault("D9", "the last 64 dims are read as bf16, as V4's records have them", MIXED, *BOTH)
@kernel
class Bf16Rope(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        values = super().values(record, data, scale)
        if record is FP8:
            rope = data[..., -64:].contiguous().view(torch.bfloat16).float()
            values[..., NOPE_DIM:] = rope.repeat_interleave(2, -1)
        return values


@fault(
    "D10",
    "rows that do not count are multiplied by a probability of zero, NaN or not",
    TWO,
    "output_codes_decode",
)
@kernel
class NotCleared(Kernel):
    def cleared(self, rows: Tensor, valid: Tensor) -> Tensor:
        return rows


@fault(
    "D11a",
    "dequantized rows are rounded to e4m3 instead of bf16",
    TINY,
    "gathered_rows",
    "output_codes_decode",
)
@kernel
class RowsOfFp8(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        values = super().values(record, data, scale)
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@fault(
    "D11b",
    "dequantized rows are rounded to bf16 a second time",
    ODD,
    equivalent="A row is e4m3 times a power of two, or e2m1 times e4m3: at most 6 significant "
    "bits, so that it is a bf16 already and rounding to bf16 gives it back.",
)
@kernel
class RowsOfBf16(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        return super().values(record, data, scale).bfloat16().float()


@fault("D12", "scale bytes are taken from the row before", MIXED, *BOTH)
@kernel
class ScalesOfTheRowBefore(Kernel):
    def values(self, record: KVRecord, data: Tensor, scale: Tensor) -> Tensor:
        return super().values(record, data, scale.roll(1, -2))
