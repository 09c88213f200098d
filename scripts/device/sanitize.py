"""compute-sanitizer over small launches of every kernel: one line for each distinct finding.

    PYTHONPATH=.:tests/backends python scripts/device/sanitize.py [CHECK ...] [--only SUBSTRING]
        [--processes 3] [--seconds 300] [--each 100] [--keep FOLDER]

Each check runs a process for each group of launches. racecheck is of the kernels as they are
(analysed by the tool: hundreds of thousands of hazards take minutes to print) and, as
racecheck-lanes, with every lane arriving.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sanitizer_log import Report, line_table, read_log

HERE = Path(__file__).parent
CHECKS = ("memcheck", "synccheck", "initcheck", "racecheck", "racecheck-lanes")
SM90 = {
    "decode-fp8": ("decode-fp8-10x1", "decode-fp8-2x4", "decode-fp8-3x1"),
    "decode-fp4": ("decode-fp4-10x1", "decode-fp4-2x4", "decode-fp4-3x1"),
    "decode-early": ("decode-fp8-4x8", "decode-fp4-4x8"),
    "decode-persistent": ("decode-fp8-persistent", "decode-fp4-persistent"),
    "prefill": ("prefill", "einsum-1", "einsum-9", "einsum-257"),
    "einsum-17": ("einsum-2", "einsum-3", "einsum-17", "linear"),
    "einsum-33": ("einsum-5", "einsum-33"),
    "einsum-65": ("einsum-65",),
}
TRITON = {
    "triton-decode": ("triton-decode-fp8", "triton-decode-fp4"),
    "triton-prefill": ("triton-prefill",),
    "triton-ops": ("triton-ops", "triton-products"),
}
TRITON_KERNELS = (
    *("combine_kernel", "decode_kernel", "dequantize_kernel", "gather_kernel", "matmul_kernel"),
    *("global_topk_kernel", "pad_q_and_insert_kv_kernel", "insert_compressed_kernel"),
    *("permute_rows_kernel", "permute_columns_kernel", "permute_scale_columns_kernel"),
    *("prefill_kernel", "prefill_sm90_kernel", "reduce_kernel", "round_trip_kernel"),
)
"""Filters on whole names: what torch launches beside ours is not looked at."""
FILTERS = {
    "sm90": "kernel_substring=sm90_",
    "triton": ",".join(f"kernel_name={name}" for name in TRITON_KERNELS),
}
OPTIONS = {
    "memcheck": ("--report-api-errors", "no"),
    "synccheck": (),
    "initcheck": ("--check-api-memory-access", "no"),
    "racecheck": (),
}


@dataclass(frozen=True)
class Job:
    """One process under the tool: launches of a backend."""

    check: str
    backend: str
    name: str
    launches: tuple[str, ...]

    @property
    def tool(self) -> str:
        return self.check.removesuffix("-lanes")


def jobs(checks: list[str]) -> Iterator[Job]:
    for check in checks:
        for backend, groups in (("sm90", SM90), ("triton", TRITON)):
            if check == "racecheck-lanes" and backend == "triton":
                continue
            for name, launches in groups.items():
                yield Job(check, backend, name, launches)


def command_of(job: Job, log: Path) -> list[str]:
    command = ["compute-sanitizer", "--tool", job.tool, "--log-file", str(log)]
    command += ["--print-limit", "0", "--show-backtrace", "no", *OPTIONS[job.tool]]
    if job.tool != "initcheck":  # which has to see what others write
        command += ["--kernel-name", FILTERS[job.backend]]
    if job.tool == "racecheck":
        report = "hazard" if job.check == "racecheck-lanes" else "analysis"
        command += ["--racecheck-detect-level", "warn", "--print-level", "warn"]
        command += ["--racecheck-report", report]
    command += [sys.executable, str(HERE / "small_launches.py"), *job.launches]
    return command + ["--every-lane"] * (job.check == "racecheck-lanes")


def run(job: Job, chosen: argparse.Namespace, until: float) -> None:
    """The tool's log stays in the folder; its findings are printed."""
    folder = chosen.keep / f"{job.check}-{job.name}"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    cache = folder / "cubins"
    environment = os.environ | {"MEGABENCH_LINE_INFO": "1", "MEGABENCH_CACHE": str(cache)}
    start = time.monotonic()
    if until - start < 1:
        print(f"== {job.check} {job.name}: NOT RUN", flush=True)
        return
    limit = min(until - start, chosen.each)
    with (folder / "output.txt").open("w") as output:
        ran = subprocess.run(
            ["timeout", f"{limit:.0f}", *command_of(job, log)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    seconds = time.monotonic() - start
    table = line_table(nvdisasm(), cache.glob("*.cubin"))
    report = read_log(log.read_text(errors="replace").splitlines() if log.exists() else [], table)
    state = {0: "", 124: ", CUT OFF"}.get(ran.returncode, f", EXIT {ran.returncode}")
    text = "\n".join(described(report))
    print(f"== {job.check} {job.name}: {seconds:.0f} s{state}\n{text}", flush=True)
    if ran.returncode:
        print("\n".join((folder / "output.txt").read_text().splitlines()[-8:]), flush=True)


def nvdisasm() -> Path:
    """The one that ships with Triton."""
    triton = find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    return Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"


def described(report: Report) -> Iterator[str]:
    """The findings, the most frequent first, then what the tool concludes."""
    for finding, extent in sorted(report.findings.items(), key=lambda item: -item[1].count):
        span = "" if extent.low is None else f"  0x{extent.low:x}..0x{extent.high:x}"
        yield f"{extent.count:8} {finding.title}{span}"
        yield from (f"             {place}" for place in finding.places)
    yield from (f"{count:8} note: {note[:300]}" for note, count in report.notes.items())
    yield from report.summaries or ["no summary"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checks", nargs="*", default=list(CHECKS), help=", ".join(CHECKS))
    parser.add_argument("--only", default="", help="jobs whose `check name` has this")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=300, help="limit of everything")
    parser.add_argument("--each", type=int, default=100, help="limit of one process")
    parser.add_argument("--keep", type=Path, default=Path("build/sanitize"))
    chosen = parser.parse_args()
    wanted = [job for job in jobs(chosen.checks) if chosen.only in f"{job.check} {job.name}"]
    until = time.monotonic() + chosen.seconds
    with ThreadPoolExecutor(chosen.processes) as pool:
        list(pool.map(lambda job: run(job, chosen, until), wanted))


if __name__ == "__main__":
    main()
