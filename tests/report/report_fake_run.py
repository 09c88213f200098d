"""A small fake run for report tests: two backends, every status, made without running anything."""

from __future__ import annotations

import math
from pathlib import Path

from megabench.bench.sampling import summarise
from megabench.results import (
    CaseResult,
    Ceiling,
    Ceilings,
    Comparison,
    Environment,
    Interval,
    Measurement,
    Run,
    RunEnd,
    RunHeader,
    StageResult,
    Telemetry,
)

OPS = ("wq_b", "pad_insert", "global_topk", "decode_attention", "wo_a", "wo_b", "step")


def header(command: str = "bench", planned: int | None = None) -> RunHeader:
    environment = Environment(
        device="cuda:0",
        device_name="NVIDIA <H200>",
        memory_bytes=141 << 30,
        platform="Linux",
        cpu="a processor",
        cpu_count=4,
        torch_threads=4,
        python="3.12",
        packages={"torch": "2.11.0"},
    )
    return RunHeader(
        command=command,
        argv=[command, "--cases", "smoke"],
        started="2026-11-30T12:00:00+00:00",
        megabench_version="0.1.0",
        suite="smoke",
        planned=planned,
        environment=environment,
    )


def ceilings() -> Ceilings:
    rows = [
        ("read", 4.3e12, "B/s", 4.8e12),
        ("bf16_matmul", 790e12, "FLOP/s", 989e12),
        ("gather_528", 3e12, "B/s", None),
    ]
    made = [
        Ceiling.model_validate(
            {
                "name": name,
                "value": value,
                "unit": unit,
                "method": "best of 3",
                "samples": 3,
                "datasheet": sheet,
                "source": "a datasheet" if sheet else "",
            }
        )
        for name, value, unit, sheet in rows
    ]
    return Ceilings(device_name="NVIDIA <H200>", ceilings=made, seconds=1.0)


def measurement(op: str, us: float, column: str = "cold") -> Measurement:
    samples = [us * (1 + 0.01 * (i % 5)) for i in range(12)]
    s = summarise(samples)
    return Measurement.model_validate(
        {
            "op": op,
            "column": column,
            "method": "CUDA graph replay, event pair",
            "samples_us": samples,
            "n": s.n,
            "median_us": s.median,
            "mad_us": s.mad,
            "q1_us": s.q1,
            "q3_us": s.q3,
            "min_us": s.minimum,
            "ci_us": s.ci,
            "stop_reason": "target",
            "flops": 10**9,
            "bytes_compulsory": 10**7,
            "bytes_issued": 2 * 10**7,
            "flops_per_s": 1e15 / us,
            "bytes_per_s": 1e13 / us,
            "bound": "memory",
            "floor_us": 2.3,
            "roofline_fraction": 2.3 / us,
            "datasheet_fraction": 2.0 / us,
            "telemetry": Telemetry(source="nvml", sm_clock_mhz=1755, power_w=500),
        }
    )


def case(tokens: int, backend: str = "torch", **fields: object) -> CaseResult:
    batch = f"{tokens}q1s4k"
    row = {
        "suite": "smoke",
        "case_id": f"r1-nvfp4-tp1-{batch}",
        "case_hash": f"{tokens:016x}",
        "case": {
            "model": "deepseek-v4.1-flash",
            "tp": 1,
            "compress_ratio": 1,
            "kv_cache": "nvfp4_ds_mla",
            "page_layout": "interleaved",
            "batch": batch,
            "decode_threshold": 1,
        },
        "backend": backend,
        "status": "measured",
        "tokens": tokens,
        "repro": f"megabench bench --cases smoke --case r1-nvfp4-tp1-{batch} --backend {backend}",
    }
    return CaseResult.model_validate(row | fields)


def measured(tokens: int, backend: str, scale: float) -> CaseResult:
    times = [scale * (5 + tokens * 0.1) * (7 if op == "step" else 1) for op in OPS]
    stages = [
        StageResult(name="q_layout", ok=True, checked=10, worst=0.0),
        StageResult(name="output_values", ok=True, checked=99, worst=0.1 + tokens / 1000),
        StageResult(name="chain", ok=True, checked=9, worst=3.0, verdict=False),
    ]
    rows = [measurement(op, us) for op, us in zip(OPS, times, strict=True)]
    return case(tokens, backend, stages=stages, measurements=rows, seconds=1.5)


def bench_run() -> Run:
    """Six measured cases, one failed, one skipped, one in error."""
    run = Run(Path("."), header=header(planned=9), ceilings=ceilings())
    for backend, scale in (("torch", 4.0), ("triton", 1.0)):
        run.cases += [measured(tokens, backend, scale) for tokens in (1, 32, 512)]
    wrong = StageResult(name="lse", ok=False, checked=64, worst=math.inf, message="head 3 <off>")
    run.cases += [
        case(2, status="failed", reason="lse: head 3 <off>", stages=[wrong]),
        case(3, status="skipped", reason="8 wo_a groups do not divide by TP 16"),
        case(4, status="error", reason="RuntimeError: out of luck"),
    ]
    interval = Interval(low=0.24, high=0.26)
    run.comparisons.append(
        Comparison(
            suite="smoke",
            case_id=run.cases[0].case_id,
            op="step",
            column="cold",
            backend="triton",
            baseline="torch",
            ratio=0.25,
            ci=interval,
            pairs=8,
        )
    )
    run.end = RunEnd(finished="now", seconds=2.0, rows=9, exit_code=1)
    return run


def validate_run() -> Run:
    """Passed cases with stages and nothing timed."""
    run = Run(Path("."), header=header("validate", planned=2))
    for tokens in (1, 2):
        stages = [StageResult(name="lse", ok=True, checked=64, worst=0.25 * tokens)]
        run.cases.append(case(tokens, status="passed", stages=stages))
    run.end = RunEnd(finished="now", seconds=2.0, rows=2)
    return run
