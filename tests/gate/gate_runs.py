"""Runs made up for gate tests: rows as a bench writes them, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabench.cases import Case
from megabench.gate.baseline import Baseline, baseline_of
from megabench.gate.findings import Finding, GateResult
from megabench.results import (
    CaseResult,
    Comparison,
    Environment,
    Interval,
    Measurement,
    Run,
    RunEnd,
    RunFolder,
    RunHeader,
    StageResult,
    Telemetry,
)

DECODE = Case(batch="32q1s4k", tp=8, suite="h200")
PREFILL = Case(batch="2q64s200", tp=8, suite="h200")
CLOCK = 1755.0
BASE = (20.0, 20.1, 19.9, 20.05, 19.95)
"""Medians of five processes that agree, us."""
SLOWER = tuple(1.05 * t for t in BASE)


def environment(**fields: Any) -> Environment:
    made = {
        "device": "cuda:0",
        "device_name": "NVIDIA H200",
        "compute_capability": "9.0",
        "sm_count": 132,
        "memory_bytes": 141 << 30,
        "driver": "580.1",
        "cuda": "12.9",
        "platform": "Linux",
        "cpu": "a processor",
        "cpu_count": 16,
        "torch_threads": 16,
        "python": "3.12.1",
        "packages": {"torch": "2.11.0", "triton": "3.6.0"},
    }
    return Environment.model_validate(made | fields)


def measurement(
    us: float, op: str = "step", column: str = "cold", clock: float | None = CLOCK, **fields: Any
) -> Measurement:
    nvml = Telemetry(source="none" if clock is None else "nvml", sm_clock_mhz=clock)
    made = {
        "op": op,
        "column": column,
        "method": "cuda-graph replay, event pair",
        "samples_us": [us] * 3,
        "n": 3,
        "median_us": us,
        "mad_us": 0.0,
        "q1_us": us,
        "q3_us": us,
        "min_us": us,
        "ci_us": Interval(low=us, high=us),
        "stop_reason": "target",
        "rechecked": True,
        "telemetry": nvml,
    }
    return Measurement.model_validate(made | fields)


def row(
    measurements: Sequence[Measurement] = (),
    case: Case = DECODE,
    backend: str = "triton",
    worst: float | None = 0.4,
    **fields: Any,
) -> CaseResult:
    stages = [] if worst is None else [StageResult(name="out", ok=True, checked=9, worst=worst)]
    made = {
        "suite": "h200",
        "case_id": case.id,
        "case_hash": case.hash,
        "case": case.model_dump(mode="json"),
        "backend": backend,
        "status": "measured",
        "tokens": case.num_tokens,
        "stages": stages,
        "measurements": list(measurements),
    }
    return CaseResult.model_validate(made | fields)


def ratio(value: float = 0.5, pairs: int = 12) -> Comparison:
    """The decode case's step on triton against torch."""
    return Comparison(
        suite="h200",
        case_id=DECODE.id,
        op="step",
        column="cold",
        backend="triton",
        baseline="torch",
        ratio=value,
        ci=Interval(low=value * 0.998, high=value * 1.002),
        pairs=pairs,
    )


def run(
    rows: Sequence[CaseResult],
    comparisons: Sequence[Comparison] = (),
    ended: bool = True,
    path: Path = Path("run"),
    **fields: Any,
) -> Run:
    """One process; `fields` go into its environment."""
    header = RunHeader(
        command="bench",
        argv=["bench"],
        started="2026-11-30T12:00:00+00:00",
        megabench_version="0.1.0",
        git_commit="abc",
        suite="h200",
        environment=environment(**fields),
    )
    end = RunEnd(finished="now", seconds=1.0, rows=len(rows)) if ended else None
    return Run(path, header, None, list(rows), list(comparisons), end)


def processes(medians: Sequence[float], **fields: Any) -> list[Run]:
    """A process a median of the decode case's step; `fields` go to `measurement`."""
    return [run([row([measurement(us, **fields)])]) for us in medians]


def baseline(medians: Sequence[float] = (20.0, 20.1, 19.9, 20.05, 19.95), **f: Any) -> Baseline:
    return baseline_of(processes(medians, **f))


def times_of(result: GateResult) -> list[Finding]:
    return [f for f in result.findings if f.column in ("cold", "warm", "eager", "cpu")]


def only(result: GateResult, column: str = "cold") -> Finding:
    """The one finding of a column."""
    (finding,) = [f for f in result.findings if f.column == column]
    return finding


def write(made: Run, out: Path) -> Path:
    """A run written as its process would have -> its folder."""
    assert made.header is not None
    with RunFolder.create(out, "bench") as folder:
        folder.append(made.header)
        for case in made.cases:
            folder.append(case)
        for comparison in made.comparisons:
            folder.append(comparison)
        if made.end is not None:
            folder.append(made.end)
    return folder.path


def write_all(runs: Sequence[Run], out: Path) -> Path:
    for made in runs:
        write(made, out)
    return out


def times(n: int, rows: list[CaseResult], **fields: str) -> list[Run]:
    return [run(rows, **fields) for _ in range(n)]


def codes(result: GateResult) -> set[tuple[str, str]]:
    return {(f.decision.verdict, f.decision.code) for f in result.findings}
