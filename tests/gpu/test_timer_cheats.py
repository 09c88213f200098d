"""Whole backends that cheat the clock on a GPU are caught by the outputs; honest ones are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cheating_backends import SPIN_CYCLES
from tiny_suite import write_suite

from megabench.bench.ceilings import CACHE_FILE
from megabench.bench.runner import BenchRun
from megabench.bench.sampling import Policy
from megabench.cases import load_suite
from megabench.results import CaseResult, Ceilings, RunFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QUICK = Policy(min_samples=3, min_seconds=0.0, timeout=0.05, max_samples=6)
LATE = "outputs after timing differ from the untimed run's"
BUSY = "outputs are still written when the clock has stopped"
DEAF = "the timed form does not follow a changed input"
KEPT = "outputs do not change with a changed input"
Bench = Callable[[str], CaseResult]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Times a small decode step on a backend of `cheating_backends`, unvalidated."""
    folder = RunFolder.create(tmp_path / "reports", "bench")
    ceilings = Ceilings(device_name="given", ceilings=[], seconds=0.0)
    cached = folder.path / CACHE_FILE.format(device="cuda")
    cached.write_text(ceilings.model_dump_json())
    run = BenchRun(folder, torch.device("cuda"), "tiny", policy=QUICK)
    (case,) = load_suite(write_suite(tmp_path, ["3q1s40"])).cases

    def timed(name: str) -> CaseResult:
        (row,) = run.run_case(case, [f"cheating_backends:{name}"])
        return row

    return timed


def problems(row: CaseResult, op: str) -> dict[str, str | None]:
    """What is wrong with an op, by column."""
    return {m.column: m.problem for m in row.measurements if m.op == op}


@pytest.mark.parametrize(
    ("cheat", "op", "expected"),
    [
        ("Forever", "wq_b", {KEPT}),
        ("ByPointer", "wq_b", {KEPT}),
        ("FirstOnly", "wo_a", {KEPT}),
        ("NotInGraphs", "wo_a", {LATE, DEAF}),
        ("OtherStream", "wq_b", {LATE, DEAF}),
    ],
)
def test_a_cheat_is_an_error_in_both_columns_that_replay(
    cheat: str, op: str, expected: set[str], bench: Bench
) -> None:
    row = bench(cheat)
    assert row.status == "error", row.reason
    found = problems(row, op)
    for column in ("cold", "warm"):
        assert (found[column] or "").split(": ")[-1] in expected, found


def test_work_left_on_a_stream_is_found_unless_the_clock_waits_for_it(bench: Bench) -> None:
    """Without a graph the driver decides: of 27 runs on an H200 the clock waited in one, whose
    times were right."""
    row = bench("OtherStreamUngraphed")
    timed = [m for m in row.measurements if m.op == "wq_b" and m.column != "eager"]
    assert {(m.problem or "").split(": ")[-1] for m in timed} <= {"", LATE, DEAF, BUSY}
    if row.status != "error":
        assert min(m.median_us for m in timed) >= least_spin_us(), timed


def least_spin_us() -> float:
    """What the cheat's spin takes at the device's highest clock."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    return SPIN_CYCLES / float(pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM))


@pytest.mark.parametrize("honest", ["ForkAndJoin", "TorchBackend"])
def test_an_honest_backend_is_measured(honest: str, bench: Bench) -> None:
    row = bench(honest)
    assert (row.status, row.reason) == ("measured", "")
    assert all(m.rechecked for m in row.measurements)
    assert all("graph replay" in m.method for m in row.measurements if m.column != "eager")
