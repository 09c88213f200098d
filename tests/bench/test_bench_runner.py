"""A bench run writes one durable row a case and backend, and times only what is right."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabench.backends import TorchBackend
from megabench.bench import runner
from megabench.bench.arms import step_arms
from megabench.bench.ceilings import CACHE_FILE
from megabench.bench.measure import Arm
from megabench.bench.runner import BenchRun, Judge
from megabench.bench.sampling import Policy
from megabench.bench.telemetry import FakeProbe, Reading
from megabench.cases import Case
from megabench.results import Ceiling, Ceilings, RunFolder, StageResult, read_run

CPU = torch.device("cpu")
QUICK = Policy(min_samples=3, min_seconds=0.0, timeout=0.05, max_samples=6)
SMALL = {"num_attention_heads": 8, "o_groups": 1, "hidden_size": 64, "o_lora_rank": 32}


class Broken(TorchBackend):
    """Raises in the last op."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nwith a trace")


class Copying(TorchBackend):
    """Says what its attention times contain, as a binding to ops that allocate does."""

    timing_note = "each attention call includes one copy"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The default model with 8 heads and one group: head_dim, window and pages as ever."""
    packaged = Path(__file__).parents[2] / "megabench/data/deepseek-v4.1-flash.config.json"
    config = json.loads(packaged.read_text())
    inner = config.get("text_config", config)
    inner.update(SMALL, q_lora_rank=64)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., BenchRun]:
    """A bench run with ceilings at hand, so that none are measured."""

    def make(judge: Judge | None = None, policy: Policy = QUICK) -> BenchRun:
        folder = RunFolder.create(tmp_path / "reports", "bench")
        rows = [("read", 1e12, "B/s"), ("fp32_matmul", 1e13, "FLOP/s")]
        made = [
            Ceiling.model_validate(
                {"name": n, "value": v, "unit": u, "method": "given", "samples": 1}
            )
            for n, v, u in rows
        ]
        ceilings = Ceilings(device_name="given", ceilings=made, seconds=0.0)
        (folder.path / CACHE_FILE.format(device="cpu")).write_text(ceilings.model_dump_json())
        return BenchRun(
            folder, CPU, "test", judge=judge, policy=policy, repro=lambda c, b: f"{c.id} {b}"
        )

    return make


def right(case: Case, backend: str, device: torch.device) -> list[StageResult]:
    return [StageResult(name="lse", ok=True, checked=1, worst=0.5)]


def wrong(case: Case, backend: str, device: torch.device) -> list[StageResult]:
    return [StageResult(name="lse", ok=False, checked=1, worst=9.0, message="head 3")]


def test_two_backends_are_measured_op_by_op_and_compared(
    start: Callable[..., BenchRun], model: str
) -> None:
    run = start(right)
    names = ["torch", "megabench.backends:TorchBackend"]
    rows = run.run_case(Case(model=model, batch="1q1s40_1q3"), names)
    assert [row.backend for row in rows] == names
    for row in rows:
        assert (row.status, row.reason) == ("measured", "")
        assert [m.op for m in row.measurements] == [
            "wq_b",
            "pad_insert",
            "compressed_insert",
            "prefill",
            "global_topk",
            "decode_attention",
            "wo_a",
            "wo_b",
            "step",
        ]
        assert all(m.rechecked and m.problem is None for m in row.measurements)
        assert all(m.n == len(m.samples_us) >= 3 for m in row.measurements)
    stored = read_run(run.folder.path)
    assert stored.cases == rows
    assert stored.ceilings is not None
    assert {c.op for c in stored.comparisons} == {m.op for m in rows[0].measurements}
    assert all(c.backend == names[1] and c.baseline == "torch" for c in stored.comparisons)


def test_a_row_says_where_its_time_went(start: Callable[..., BenchRun], model: str) -> None:
    def slow(case: Case, backend: str, device: torch.device) -> list[StageResult]:
        time.sleep(0.2)
        return right(case, backend, device)

    (row,) = start(slow).run_case(Case(model=model, batch="1q1s40"), ["torch"])
    spent = row.phases
    assert spent is not None
    assert 0.2 <= spent.validate_s < 1
    assert spent.setup_s > 0
    assert spent.timed_s > sum(sum(m.samples_us) for m in row.measurements) * 1e-6
    assert 0 < spent.overhead_s < row.seconds - 0.2
    parts = spent.validate_s + spent.setup_s + spent.timed_s + spent.overhead_s
    assert row.seconds == pytest.approx(parts)


def test_the_last_sample_whose_outputs_are_looked_at_counts_as_the_others_do(
    start: Callable[..., BenchRun], model: str
) -> None:
    four = replace(QUICK, timeout=5.0, max_samples=4, target=0.0, block=1)
    (row,) = start(policy=four).run_case(Case(model=model, batch="1q1s40"), ["torch"])
    assert {m.n for m in row.measurements} == {4 + 1}


def test_checks_compare_with_the_samples_that_found_their_outputs_as_they_were(
    start: Callable[..., BenchRun], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisoned samples may be most of them, and honest where the others are not."""
    told: list[float] = []

    def check(*arguments: Any) -> tuple[None, str]:
        told.append(arguments[-1])
        return None, "when checked, it was slower"

    monkeypatch.setattr("megabench.bench.measure.last_round", lambda *_: ([1e9] * 99, None))
    monkeypatch.setattr("megabench.bench.measure.recheck", check)
    (row,) = start().run_case(Case(model=model, batch="1q1s40"), ["torch"])
    assert {m.median_us for m in row.measurements} == {1e9}
    assert len(told) == len(row.measurements)
    assert max(told) < 1e9
    assert all(m.note.endswith("when checked, it was slower") for m in row.measurements)


def test_what_a_backend_says_of_its_attention_times_stands_with_them(
    start: Callable[..., BenchRun], model: str
) -> None:
    (row,) = start(right).run_case(Case(model=model, batch="1q1s40_1q3"), [f"{__name__}:Copying"])
    told = {m.op for m in row.measurements if Copying.timing_note in m.note}
    assert told == {"prefill", "decode_attention", "step"}


def test_a_wrong_case_is_reported_and_not_timed(start: Callable[..., BenchRun], model: str) -> None:
    (row,) = start(wrong).run_case(Case(model=model, batch="1q1s40"), ["torch"])
    assert (row.status, row.reason) == ("failed", "lse: head 3")
    assert row.measurements == []
    assert row.stages


def test_a_stage_beside_the_verdict_does_not_fail_a_case(
    start: Callable[..., BenchRun], model: str
) -> None:
    def beside(case: Case, backend: str, device: torch.device) -> list[StageResult]:
        return [StageResult(name="chain", ok=False, checked=1, worst=9.0, verdict=False)]

    (row,) = start(beside).run_case(Case(model=model, batch="1q1s40"), ["torch"])
    assert row.status == "measured"


def test_an_unserved_topology_is_a_skipped_row_with_its_reason(
    start: Callable[..., BenchRun], model: str
) -> None:
    (row,) = start().run_case(Case(model=model, batch="1q1s40", tp=16), ["torch"])
    assert row.status == "skipped"
    assert "TP 16" in row.reason


def test_an_empty_step_is_checked_and_not_timed(start: Callable[..., BenchRun], model: str) -> None:
    case = Case(model=model, batch="0q1")
    (unchecked,) = start().run_case(case, ["torch"])
    assert unchecked.status == "skipped"
    (checked,) = start(right).run_case(case, ["torch"])
    assert (checked.status, checked.measurements) == ("passed", [])
    assert checked.stages


def test_a_backend_that_raises_is_an_error_row_and_the_run_goes_on(
    start: Callable[..., BenchRun], model: str
) -> None:
    broken = f"{__name__}:Broken"
    bench, cases = start(), [Case(model=model, batch=b) for b in ("1q1s40", "2q1s40")]
    rows = [row for case in cases for row in bench.run_case(case, [broken])]
    assert [row.status for row in rows] == ["error", "error"]
    assert rows[0].reason == "RuntimeError: no such kernel"


def test_a_backend_that_breaks_leaves_the_others_their_numbers(
    start: Callable[..., BenchRun], model: str
) -> None:
    broken = f"{__name__}:Broken"
    rows = start().run_case(Case(model=model, batch="1q1s40"), ["torch", broken])
    assert [row.status for row in rows] == ["measured", "error"]


@pytest.mark.parametrize(
    ("cheat", "op"), [("Forever", "wq_b"), ("ByPointer", "wq_b"), ("FirstOnly", "wo_a")]
)
def test_a_backend_that_does_not_do_its_work_again_is_caught(
    cheat: str, op: str, start: Callable[..., BenchRun], model: str
) -> None:
    (row,) = start().run_case(Case(model=model, batch="1q1s40"), [f"cheating_backends:{cheat}"])
    assert row.status == "error"
    assert {m.op: m.problem for m in row.measurements if m.problem}[op] == (
        "outputs do not change with a changed input"
    )


HOT, COOL = Reading(throttle_mask=0x40), Reading(throttle_mask=0x4)
"""A hardware thermal slowdown, and a software power cap."""


def under(run: BenchRun, readings: list[Reading]) -> BenchRun:
    """The run on a device that is read as `readings`, the last one for good."""
    run._bench = replace(run._bench, probe=FakeProbe(readings))
    return run


def test_a_device_that_stays_too_hot_gives_an_invalid_row_not_an_empty_one(
    start: Callable[..., BenchRun], model: str
) -> None:
    patient = replace(QUICK, timeout=0.15)  # time for three samples on a busy machine
    run = under(start(policy=patient), [HOT])
    (row,) = run.run_case(Case(model=model, batch="1q1s40"), ["torch"])
    assert row.status == "error"
    assert "INVALID: every sample fell under a hardware or thermal slowdown" in row.reason
    assert all(m.n == 0 and m.discarded >= 3 for m in row.measurements)


def test_too_few_samples_left_by_the_heat_are_a_problem_and_a_power_cap_is_none(
    start: Callable[..., BenchRun], model: str
) -> None:
    run = under(start(policy=replace(QUICK, timeout=5.0)), [HOT] * 30 + [COOL])
    (row,) = run.run_case(Case(model=model, batch="1q1s40"), ["torch"])
    first, *later = row.measurements
    assert first.discarded == 30
    assert first.problem is not None
    assert first.problem.endswith("fell under hardware thermal slowdown; too few are left")
    assert first.samples_us
    assert all(m.problem is None and not m.discarded for m in later)
    assert all(m.telemetry is not None and m.telemetry.throttle_mask == 0x4 for m in later)


def test_nothing_of_a_case_outlives_it(
    start: Callable[..., BenchRun], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hundreds of cases leave behind would not fit the device, cycles or not."""
    seen: list[weakref.ref[Any]] = []

    def watched(*args: Any) -> dict[str, Arm]:
        arms = step_arms(*args)
        for arm in arms.values():
            vars(arm.first)["loop"] = arm
        written = [t for arm in arms.values() for t in arm.first.targets]
        # The caches of a shard's first case stay with the layer that lends its weights.
        seen.extend(weakref.ref(t.tensor) for t in written if t.pages is None)
        seen.extend(weakref.ref(arm) for arm in arms.values())
        return arms

    monkeypatch.setattr(runner, "step_arms", watched)
    start().run_case(
        Case(model=model, batch="1q1s40"), ["torch", "megabench.backends:TorchBackend"]
    )
    assert len(seen) > 15
    assert not [ref for ref in seen if ref() is not None]


def test_what_dies_after_its_case_is_given_back_with_the_next(
    start: Callable[..., BenchRun], model: str
) -> None:
    class Loop:
        def __init__(self) -> None:
            self.loop = self

    run, held = start(), Loop()
    seen = weakref.ref(held)
    case = Case(model=model, batch="1q1s40")
    run.run_case(case, ["torch"])
    del held
    run.run_case(case, ["torch"])
    assert seen() is None


def test_rows_name_the_command_that_repeats_them(
    start: Callable[..., BenchRun], model: str
) -> None:
    run: Any = start()
    (row,) = run.run_case(Case(model=model, batch="1q1s40"), ["torch"])
    assert row.repro == f"{row.case_id} torch"
    assert row.case["batch"] == "1q1s40"
    assert row.tokens == 1
