"""Whatever a backend does to its process, its case gets a row and the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_suite import ROOT, command, environment, write_suite

from megabench.cases import Case, Suite, load_suite
from megabench.faults import Trials
from megabench.isolate import Job, Pool, ValidateSetup, WorkerError, jobs_of, remaining
from megabench.isolate.pool import JobQueue
from megabench.isolate.process import TAIL_BYTES
from megabench.isolate.tasks import make_task
from megabench.results import CaseResult, Run, read_run
from megabench.runs import Request, RunError, check_workers

EVIL = "evil_backends:Evil"
LIMIT_S = 25
CAUSES = {
    1: None,
    2: "exit",
    3: "crash",
    4: "timeout",
    5: "output",
    6: "out_of_memory",
    7: "exit",
    8: "exit",
    9: None,
    10: "output",
    11: "output",
    12: None,
    13: None,
    14: None,
}
"""How a step of so many tokens ends on the evil backend."""
MUMBLES = 13
"""Tokens of a step whose op raises, which leaves the process sound."""


@pytest.fixture(scope="module")
def evil_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Run]:
    """Exit code and rows of a run whose backend does its worst, on two workers."""
    folder = tmp_path_factory.mktemp("evil")
    suite = write_suite(folder, [f"{tokens}q1s9" for tokens in CAUSES])
    words = ("validate", "--cases", suite, "--backend", EVIL, "--device", "cpu")
    words += ("--jobs", "2", "--timeout", str(LIMIT_S), "--out", "runs")
    done = subprocess.run(
        command(*words), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert "tiny.yaml" in done.stderr, done.stderr
    return done.returncode, read_run(folder / Path(done.stdout.strip()).parent)


def row_of(run: Run, tokens: int) -> CaseResult:
    (row,) = (row for row in run.cases if row.tokens == tokens)
    return row


def test_every_case_of_an_evil_backend_has_a_row_with_its_cause(
    evil_run: tuple[int, Run],
) -> None:
    code, run = evil_run
    assert code == 1
    assert run.end is not None
    assert run.end.rows == len(CAUSES)
    for tokens, cause in CAUSES.items():
        row = row_of(run, tokens)
        assert row.status == ("error" if cause or tokens == MUMBLES else "passed"), row.reason
        assert row.cause == cause, row.reason
        assert bool(row.stages) == (row.status == "passed")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (2, "the process left with exit code 0 in the middle of the case"),
        (3, "the process crashed: SIGSEGV, in string_at"),
        (4, f"no result after {LIMIT_S} s, in _refuse_to_end (evil_backends.py:"),
        (5, "more than 16 MiB written to stdout and stderr"),
        (6, "MemoryError: all of it"),
        (7, "the backend raised SystemExit: enough"),
        (8, "the backend raised KeyboardInterrupt"),
        (10, "what came for the rows is no row"),
        (11, "the rows that came are not the case's"),
        (13, r"RuntimeError: \udcff\x1b[31mword word"),
    ],
)
def test_the_reason_says_what_happened_and_where(
    evil_run: tuple[int, Run], tokens: int, said: str
) -> None:
    assert row_of(evil_run[1], tokens).reason.startswith(said)


def test_a_reason_is_one_line_that_a_person_can_read(evil_run: tuple[int, Run]) -> None:
    reason = row_of(evil_run[1], MUMBLES).reason
    assert reason.endswith("(in linear)")
    assert reason.isprintable()
    assert len(reason) < 2500


def test_a_row_keeps_the_end_of_what_its_process_wrote(evil_run: tuple[int, Run]) -> None:
    run = evil_run[1]
    assert "about to crash\nFatal Python error: Segmentation fault" in row_of(run, 3).output
    flood = row_of(run, 5).output
    assert flood.endswith("xxx")
    assert len(flood) <= TAIL_BYTES


def test_the_row_of_a_crash_can_be_made_again_from_itself(evil_run: tuple[int, Run]) -> None:
    row = row_of(evil_run[1], 3)
    case = Case.model_validate(row.case)
    assert (case.id, case.hash) == (row.case_id, row.case_hash)
    assert f"--case {row.case_id} --backend {EVIL} --device cpu" in row.repro


def jobs(folder: Path, *batches: str, backends: tuple[str, ...] = (EVIL,)) -> list[Job]:
    cases = load_suite(write_suite(folder, batches)).cases
    return [Job(case=case, backends=backends) for case in cases]


def setup() -> ValidateSetup:
    return ValidateSetup(device="cpu", source="tiny.yaml", threads=1)


def test_of_several_backends_in_one_job_only_the_one_at_fault_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests")
    (job,) = jobs(tmp_path, "2q1s9", backends=("torch", EVIL))
    with Pool([setup()], limit_s=60) as pool:
        rows = [row for row in pool.run([job]) if isinstance(row, CaseResult)]
    assert {row.backend: (row.status, row.cause) for row in rows} == {
        "torch": ("passed", None),
        EVIL: ("error", "exit"),
    }


def test_a_backend_that_only_the_parent_can_import_is_an_error_and_not_skipped(
    tmp_path: Path,
) -> None:
    with Pool([setup()], limit_s=60) as pool:
        (row,) = pool.run(jobs(tmp_path, "1q1s9", backends=("nowhere_at_all:Backend",)))
    assert isinstance(row, CaseResult)
    assert (row.status, row.cause) == ("error", None)
    assert "nowhere_at_all" in row.reason


def test_workers_that_cannot_start_end_the_run_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with (
        Pool([setup()], limit_s=60) as pool,
        pytest.raises(WorkerError, match=r"cpu cannot start: .* libcudart is missing"),
    ):
        list(pool.run(jobs(tmp_path, "1q1s9")))


def case(tp: int, batch: str = "1q1s9") -> Case:
    return Case(batch=batch, tp=tp)


def test_one_worker_takes_jobs_in_order_and_several_share_them_out_by_group() -> None:
    work = jobs_of("validate", [case(2), case(1), case(1, "2q1s9"), case(1, "3q1s9")], ["torch"])
    one, two = work[0].group, work[-1].group
    alone = JobQueue(work)
    assert [alone.take(None, set()) for _ in work] == work
    shared = JobQueue(work)
    assert shared.take(None, {one}) == work[3]
    assert shared.take(two, {one}) == work[0]  # its own group is done, so it helps
    assert shared.take(one, {two}) == work[1]
    shared.put_first([work[0]])
    assert [shared.take(one, set()) for _ in range(3)] == [work[0], work[2], None]


def test_workers_get_a_gpu_each_or_share_the_one_that_is_named_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    suite = Suite("s", "s", Path(), "", [], None)

    def devices(name: str, workers: int) -> list[str]:
        check_workers(workers, torch.device(name))
        asked = Request(
            "validate", suite, [], [], torch.device(name), "", None, False, workers=workers
        )
        return asked.devices

    assert devices("cuda", 2) == ["cuda:0", "cuda:1"]
    assert devices("cuda:1", 3) == ["cuda:1"] * 3
    assert devices("cpu", 2) == ["cpu", "cpu"]
    with pytest.raises(RunError, match="torch sees 2 CUDA devices; say --device cuda:0"):
        devices("cuda", 3)


def test_what_works_on_a_numbered_gpu_makes_it_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda", "cuda:1"):
        make_task(ValidateSetup(device=name, source="tiny.yaml"))
    Trials([], "torch", torch.device("cuda:2"))
    assert current == [torch.device("cuda:1"), torch.device("cuda:2")]


def test_a_bench_has_all_backends_in_one_job_and_a_validation_one() -> None:
    cases = [case(1), case(2)]
    assert [j.backends for j in jobs_of("bench", cases, ["a", "b"])] == [("a", "b")] * 2
    assert [j.backends[0] for j in jobs_of("validate", cases, ["a", "b"])] == ["a", "a", "b", "b"]


def test_what_remains_is_told_by_id_hash_and_backend() -> None:
    work = jobs_of("bench", [case(1), case(2)], ["a", "b"])
    first, second = work
    assert remaining(work, {first.keys[0], *second.keys}) == [Job(case=first.case, backends=("b",))]
    other = (first.case.id, "another hash", "a")
    assert remaining([first], {other}) == [first]
