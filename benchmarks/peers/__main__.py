"""Our kernels beside public peers, in one run on one GPU.

    python -m benchmarks.peers [--only decode,prefill,einsum,step,compiled] [--sizes 1,32]
                               [--list] [--check] [--out DIR]

Every arm of a group computes the same values from the same tokens and indices, is checked against
float64 before it is timed, and is sampled in turns with the others. A package that is absent is
listed as such. Peers: FlashMLA's SM90 kernels (`pip install --no-deps sgl-flash-mla==1.0.0`),
DeepGEMM (installed, or inside vllm 0.33), torch. `--check` judges every arm and times none: several
such processes side by side compile what a timed run then finds in the caches.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.peers.arms import Group, Ratio, Row, check, make_flush, measure
from benchmarks.peers.attention import DECODE_BARS, PREFILL_BARS, decode_group, prefill_group
from benchmarks.peers.compiled import COMPILED_SIZES, compiled_group
from benchmarks.peers.einsum import BARS as EINSUM_BARS
from benchmarks.peers.einsum import DEEP_GEMM, einsum_group
from benchmarks.peers.flash import flash_problem, flash_version
from benchmarks.peers.layer_step import BATCH, step_group
from benchmarks.peers.report import Report
from benchmarks.peers.steps import Bench
from megabench.backends.flashmla.gemm import find_gemm
from megabench.bench.runner import describe
from megabench.results import capture_environment

Maker = Callable[[Bench], Group]
PARTS = ("decode", "prefill", "einsum", "step", "compiled")
"""Slow compilation last."""


def plan(only: list[str], sizes: list[str] | None = None) -> Iterator[tuple[str, str, Maker]]:
    """Part, size and maker of every group asked for, in the order of `PARTS`."""
    sized: dict[str, tuple[Iterable[int], Callable[[Bench, int], Group]]] = {
        "decode": (DECODE_BARS, decode_group),
        "prefill": (PREFILL_BARS, prefill_group),
        "einsum": (EINSUM_BARS, einsum_group),
        "compiled": (COMPILED_SIZES, compiled_group),
    }
    for part in PARTS:
        if part == "step" and part in only:
            yield part, BATCH, step_group
        elif part in only:
            known, make = sized[part]
            for size in known:
                if sizes is None or str(size) in sizes:
                    yield part, str(size), _at(make, size)


def _at(make: Callable[[Bench, int], Group], size: int) -> Maker:
    return lambda bench: make(bench, size)


def listing(device: torch.device) -> list[str]:
    """What would run here, a line a library or backend."""
    bench, gemm = Bench(device), find_gemm()
    deep_gemm = gemm.library.version if gemm.library else f"not installed: {gemm.reason}"
    flash = flash_problem() or f"installed, {flash_version()}"
    lines = [f"FlashMLA SM90 (attention only, unfused pipeline): {flash}"]
    lines.append(f"{DEEP_GEMM}: {deep_gemm}")
    lines.append(f"torch.bmm, torch.compile: torch {torch.__version__}")
    lines += [f"{name}: available" for name in bench.backends]
    lines += [f"{name}: {why}" for name, why in bench.absent.items()]
    return lines + [f"{part}: {size}" for part, size, _ in plan(list(PARTS))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma")
    parser.add_argument("--list", action="store_true", help="say what would run, and end")
    parser.add_argument("--out", type=Path, default=Path("reports/peers"), help="folder")
    parser.add_argument("--sizes", help="s_q or b, by comma (default: all)")
    parser.add_argument("--check", action="store_true", help="judge every arm, time none")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for new groups")
    args = parser.parse_args(argv)
    only, sizes = args.only.split(","), args.sizes.split(",") if args.sizes else None
    if unknown := sorted(set(only) - set(PARTS)):
        parser.error(f"--only: no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.list:
        print("\n".join(listing(device)))
        return 0
    if device.type != "cuda":
        parser.error("a CUDA device is needed to time anything; --list works without")
    groups = list(plan(only, sizes))
    return run(Report(args.out, capture_environment(device)), groups, args.check, args.budget)


def run(
    report: Report, groups: list[tuple[str, str, Maker]], check_only: bool, budget: float
) -> int:
    """Measure (or only check) the groups -> 0, or 1 when an arm was wrong or broke."""
    started, console = time.perf_counter(), Console(stderr=True, emoji=False)
    device = torch.device("cuda")
    bench, flush = Bench(device), make_flush(device)
    for part, size, make in groups:
        begun = time.perf_counter()
        if begun - started > budget:
            report.add([Row(part, size, "all", "NOT RUN", note="the time was used up")], [])
            continue
        try:
            report.add(*(_checked_rows if check_only else measure)(make(bench), flush))
        except Exception as error:
            report.add([Row(part, size, "all", "FAILED", note=describe(error))], [])
        gc.collect()
        torch.cuda.empty_cache()
        console.print(f"{part} {size}: {time.perf_counter() - begun:.1f} s")
    report.show(Console(emoji=False))
    print(report.page)
    return int(any(row.status in ("WRONG", "FAILED") for row in report.rows))


def _checked_rows(group: Group, flush: object) -> tuple[list[Row], list[Ratio]]:
    rows, right = check(group)
    return rows + [Row(group.part, group.size, arm.name, "right") for arm in right], []


if __name__ == "__main__":
    sys.exit(main())
