"""Whole backends that cheat the clock of a CPU are caught, and leave the next one its own times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_suite import write_suite

from megabench.bench.ceilings import CACHE_FILE
from megabench.bench.pace import HostPace
from megabench.bench.runner import BenchRun
from megabench.bench.sampling import Policy
from megabench.cases import load_suite
from megabench.results import CaseResult, Ceilings, RunFolder

QUICK = Policy(min_samples=5, min_seconds=0.0, timeout=0.05, max_samples=8)
DONE = "the samples found their work done"
DEAF = "outputs do not change with a changed input"
Bench = Callable[..., list[CaseResult]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Times a decode step on backends of `cheating_backends`, unvalidated. The model is no larger
    than its work can be told from a look at it."""
    monkeypatch.setattr(time, "perf_counter_ns", time.perf_counter_ns)
    threads = torch.get_num_threads()
    folder = RunFolder.create(tmp_path / "reports", "bench")
    ceilings = Ceilings(device_name="given", ceilings=[], seconds=0.0)
    (folder.path / CACHE_FILE.format(device="cpu")).write_text(ceilings.model_dump_json())
    run = BenchRun(folder, torch.device("cpu"), "tiny", policy=QUICK)
    sizes = {"hidden_size": 2048, "q_lora_rank": 512, "o_lora_rank": 256}
    (case,) = load_suite(write_suite(tmp_path, ["3q1s40"], compress_ratio=1, **sizes)).cases
    yield lambda *names: run.run_case(case, [f"cheating_backends:{name}" for name in names])
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("cheat", "op", "expected"),
    [
        ("Forever", "wq_b", DEAF),
        ("FirstOnly", "wo_a", DEAF),
        ("Remembers", "wq_b", DONE),
        ("Remembers", "wo_b", DONE),
        ("LooksAtTheEnd", "wq_b", DEAF),
        ("HonestOnceWatched", "wq_b", DONE),
        ("UnlessPoisoned", "wo_a", DONE),
        ("KeptSlots", "global_topk", DEAF),
        ("MoreThreads", "wo_a", "it set torch's threads to"),
    ],
)
def test_a_cheat_is_an_error(
    cheat: str, op: str, expected: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostPace, "slowdown", lambda _: 1.0)
    (row,) = bench(cheat)
    assert row.status == "error"
    (problem,) = [m.problem for m in row.measurements if m.op == op]
    assert expected in (problem or "")


@pytest.mark.parametrize("cheat", ["Generator", "Later"])
def test_what_is_no_tensor_yet_is_an_error(cheat: str, bench: Bench) -> None:
    (row,) = bench(cheat)
    assert row.status == "error"
    assert "not plain tensors" in row.reason


@pytest.mark.parametrize("cheat", ["MoreThreads", "SlowClock"])
def test_who_is_timed_beside_a_cheat_is_timed_as_ever(cheat: str, bench: Bench) -> None:
    method = f"perf_counter_ns, {torch.get_num_threads()} threads"
    _, honest = bench(cheat, "TorchBackend")
    assert (honest.status, honest.reason) == ("measured", "")
    assert {m.method for m in honest.measurements} == {method}
    assert all(m.min_us > 1 for m in honest.measurements)
