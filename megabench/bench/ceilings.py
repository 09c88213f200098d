"""The device's measured limits: what a roofline fraction is a fraction of.

Each ceiling is the best of a few samples, since a limit is what the device can do. Bandwidths
count bytes read plus bytes written. Kept in the run folder, so that a run measures a device once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megabench.bench.peaks import Peak, find_peak
from megabench.bench.timers import Run, cpu_timer, graph_timer
from megabench.results import Ceiling, Ceilings
from megabench.results.environment import cpu_name

BUDGET_SECONDS = {"cuda": 20.0, "cpu": 6.0}
"""For all ceilings of a device; later ones get fewer samples when earlier ones were slow."""
ROW_BYTES = (528, 288)
CACHE_FILE = "ceilings-{device}.json"


@dataclass(frozen=True)
class Probe:
    """One limit to measure: what a run of `run` moves or computes."""

    name: str
    amount: float
    unit: Literal["B/s", "FLOP/s"]
    what: str
    run: Run


def load_ceilings(device: torch.device, folder: Path | None = None) -> Ceilings:
    """The ceilings of `device`: from `folder` when it has them, else measured and kept there."""
    cached = folder / CACHE_FILE.format(device=device.type) if folder else None
    if cached is not None and cached.exists():
        return Ceilings.model_validate_json(cached.read_bytes())
    ceilings = measure_ceilings(device)
    if cached is not None:
        cached.write_text(ceilings.model_dump_json(indent=1), encoding="utf-8")
    return ceilings


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure every limit the device has, within its budget."""
    started = time.perf_counter()
    budget = BUDGET_SECONDS[device.type]
    name = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    key, peak = find_peak(name)
    found = []
    for make in _MAKERS[device.type]:
        for probe in make(device):
            left = budget - (time.perf_counter() - started)
            found.append(_measure(probe, device, peak, left))
    return Ceilings(
        device_name=name,
        datasheet_key=key,
        ceilings=found,
        seconds=time.perf_counter() - started,
    )


def _measure(probe: Probe, device: torch.device, peak: Peak | None, left: float) -> Ceiling:
    timer = cpu_timer(probe.run) if device.type == "cpu" else graph_timer([probe.run], "")
    deadline = time.perf_counter() + max(left, 0.0) / 6
    samples = timer.take(3)
    while time.perf_counter() < deadline and len(samples) < 20:
        samples += timer.take(1)
    datasheet, source = peak.value(probe.name) if peak else (None, "")
    return Ceiling(
        name=probe.name,
        value=probe.amount / (min(samples) * 1e-6),
        unit=probe.unit,
        method=f"{probe.what}; best of {len(samples)}; {timer.method}",
        samples=len(samples),
        datasheet=datasheet,
        source=source,
    )


def _stream_bytes(device: torch.device) -> int:
    """Far beyond the last cache: 2 GiB on a GPU, 128 MiB on a CPU (a shared L3 may be larger than
    one core's share, and the row's method says the size)."""
    return (2 << 30) if device.type == "cuda" else (128 << 20)


def _streams(device: torch.device) -> Iterator[Probe]:
    size = _stream_bytes(device)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    mib = size >> 20
    yield Probe("read", size, "B/s", f"sum of {mib} MiB", lambda: [source.sum()])
    yield Probe("write", size, "B/s", f"fill of {mib} MiB", lambda: [target.fill_(2.0)])
    # A kernel, not copy_: that may go to the copy engine, which is slower than the SMs.
    yield Probe(
        "copy", 2 * size, "B/s", f"negation of {mib} MiB", lambda: [torch.neg(source, out=target)]
    )


def _gathers(device: torch.device) -> Iterator[Probe]:
    """Random whole rows of a pool far larger than the cache, written in order."""
    generator = torch.Generator().manual_seed(0)
    pool_bytes, moved = _stream_bytes(device), _stream_bytes(device) // 8
    for row in ROW_BYTES:
        pool = torch.zeros((pool_bytes // row, row // 8), dtype=torch.int64, device=device)
        rows = moved // row
        index = torch.randint(pool.shape[0], (rows,), generator=generator).to(device)
        what = f"{rows} random {row}-byte rows, written in order"
        yield Probe(f"gather_{row}", 2 * rows * row, "B/s", what, _gather(pool, index))


def _gather(pool: torch.Tensor, index: torch.Tensor) -> Run:
    out = pool.new_empty((index.shape[0], pool.shape[1]))
    if pool.device.type == "cpu":
        return lambda: [torch.index_select(pool, 0, index, out=out)]
    from megabench.bench.gather_kernel import gather_rows

    return lambda: [gather_rows(pool, index, out)]


def _l2(device: torch.device) -> Iterator[Probe]:
    """In-place add over a buffer of half the L2, many times in one graph."""
    size = torch.cuda.get_device_properties(device).L2_cache_size // 2
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    passes = 50

    def run() -> list[torch.Tensor]:
        for _ in range(passes):
            buffer.add_(1.0)
        return [buffer]

    what = f"{passes} in-place adds over {size >> 20} MiB"
    yield Probe("l2", 2.0 * passes * size, "B/s", what, run)


def _matmuls(device: torch.device) -> Iterator[Probe]:
    sizes = (
        {torch.bfloat16: 8192, torch.float32: 4096}
        if device.type == "cuda"
        else {torch.bfloat16: 512, torch.float32: 1024}
    )
    for dtype, n in sizes.items():
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        name = "bf16_matmul" if dtype == torch.bfloat16 else "fp32_matmul"
        yield Probe(name, 2.0 * n**3, "FLOP/s", f"{n}^3 matmul", _product(a, b))


def _product(a: torch.Tensor, b: torch.Tensor) -> Run:
    out = torch.empty_like(a)
    return lambda: [torch.matmul(a, b, out=out)]


def _fp8_matmul(device: torch.device) -> Iterator[Probe]:
    """e4m3 by e4m3 with per-tensor scales, where the device has it."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return
    n = 8192
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=device)

    def run() -> list[torch.Tensor]:
        return [torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)]

    yield Probe("fp8_matmul", 2.0 * n**3, "FLOP/s", f"{n}^3 _scaled_mm", run)


_MAKERS: dict[str, tuple[Callable[[torch.device], Iterator[Probe]], ...]] = {
    "cpu": (_streams, _gathers, _matmuls),
    "cuda": (_streams, _gathers, _l2, _matmuls, _fp8_matmul),
}
