"""Rooflines: the least time an op could take, and how near a measurement comes to it.

The floor is max(compute, memory): e4m3 products at the fp8 matmul rate where the device has one,
all other FLOPs at the best other matmul rate, compulsory bytes at the best streaming bandwidth; in
the warm column, where the bytes fit the L2, at the L2's. Two floors are kept: against the ceilings
measured in the run, and against the datasheet.

A time below what the datasheet allows cannot be true: the row is an error. What an L2 may hold is
taken off first: everything of a warm op, and of a cold one what it writes, which may lie there
when the clock stops. Below a measured ceiling, or on a CPU, whose caches the floor does not know,
it is a note.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megabench.bench.work import Work
from megabench.results import Ceilings
from megabench.results.schema import Column

Bound = Literal["compute", "memory", "none"]
_STREAMS = ("read", "write", "copy")
_MATMULS = ("bf16_matmul", "fp32_matmul")


@dataclass(frozen=True)
class Rates:
    """Limits that floors are made of; None where there is no figure."""

    bytes_per_s: float | None
    flops: float | None
    fp8_flops: float | None

    def floor_us(self, work: Work) -> tuple[float | None, Bound]:
        """The least time of `work`, and its larger side."""
        compute, memory = self.compute_us(work), self.memory_us(work)
        if compute is None or memory is None or not (work.flops or work.bytes_compulsory):
            return None, "none"
        return max(compute, memory), "compute" if compute > memory else "memory"

    def compute_us(self, work: Work) -> float | None:
        """Time of the FLOPs alone."""
        if self.flops is None:
            return None
        fp8 = max(self.fp8_flops or 0.0, self.flops)
        seconds = (work.flops - work.flops_fp8) / self.flops + work.flops_fp8 / fp8
        return seconds * 1e6

    def memory_us(self, work: Work) -> float | None:
        """Time of the compulsory bytes alone."""
        return work.bytes_compulsory / self.bytes_per_s * 1e6 if self.bytes_per_s else None


@dataclass(frozen=True)
class Placement:
    """A measurement on the roofline."""

    bound: Bound
    floor_us: float | None
    fraction: float | None
    datasheet_floor_us: float | None
    datasheet_fraction: float | None
    problem: str | None
    note: str


def measured_rates(ceilings: Ceilings, *, in_l2: bool) -> Rates:
    """Rates measured in the run; `in_l2` when the op's bytes stay in the L2 between samples."""
    streams = [v for n in _STREAMS if (v := ceilings.value(n)) is not None]
    l2 = ceilings.value("l2")
    if in_l2 and l2 is not None:
        streams.append(l2)
    matmuls = [v for n in _MATMULS if (v := ceilings.value(n)) is not None]
    return Rates(
        max(streams, default=None), max(matmuls, default=None), ceilings.value("fp8_matmul")
    )


def datasheet_rates(ceilings: Ceilings, *, in_l2: bool) -> Rates:
    """The vendor's rates. They give no L2 bandwidth: a warm op has no datasheet memory floor."""
    memory = None if in_l2 else ceilings.datasheet("read")
    matmuls = [v for n in _MATMULS if (v := ceilings.datasheet(n)) is not None]
    return Rates(memory, max(matmuls, default=None), ceilings.datasheet("fp8_matmul"))


def place(
    work: Work, median_us: float, column: Column, ceilings: Ceilings, l2_bytes: int | None
) -> Placement:
    """Where a median lies against both floors, and whether it can be true."""
    in_l2 = column in ("warm", "eager") and work.bytes_compulsory < (l2_bytes or 0)
    floor, bound = measured_rates(ceilings, in_l2=in_l2).floor_us(work)
    sheet = _datasheet_floor(work, datasheet_rates(ceilings, in_l2=in_l2))
    least = _least_us(work, column, ceilings, l2_bytes or 0)
    problem, note = None, ""
    if least is not None and median_us < least:
        problem = f"{median_us:.2f} us is below the datasheet floor of {least:.2f} us"
    elif floor is not None and median_us < floor:
        note = f"below the measured floor of {floor:.2f} us"
        if column == "cpu":
            note += " (CPU caches)"
    return Placement(
        bound=bound,
        floor_us=floor,
        fraction=floor / median_us if floor is not None and median_us > 0 else None,
        datasheet_floor_us=sheet,
        datasheet_fraction=sheet / median_us if sheet is not None and median_us > 0 else None,
        problem=problem,
        note=note,
    )


def _least_us(work: Work, column: Column, ceilings: Ceilings, l2_bytes: int) -> float | None:
    """The time no run of `work` can beat, by the datasheet; None without figures."""
    held = work.bytes_written if column == "cold" else work.bytes_compulsory
    moved = work.bytes_compulsory - min(held, l2_bytes)
    through_memory = replace(work, bytes_compulsory=moved)
    return _datasheet_floor(through_memory, datasheet_rates(ceilings, in_l2=False))


def _datasheet_floor(work: Work, rates: Rates) -> float | None:
    """The larger of the floors the datasheet has figures for."""
    known = [t for t in (rates.compute_us(work), rates.memory_us(work)) if t is not None]
    return max(known, default=None)
