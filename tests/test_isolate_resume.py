"""A run that is interrupted or killed loses nothing that was done, and goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_suite import NO_COMMIT, command, environment, write_suite

from megabench.cli import main
from megabench.results import Run, RunFolder, StoreError, capture_environment, make_header, read_run
from megabench.resume import reopen, rows_done

BATCHES = ("1q1s9", "2q1s9", "3q1s9")
TORN = b'{"kind":"case","schema_ver'


@dataclass
class Story:
    """A run started, interrupted, continued, killed, and continued to its end."""

    folder: Path
    """Of the run."""
    interrupted: Run
    interrupt_code: int
    partial_report: str
    killed: Run
    orphan_pids: list[int]
    """Workers of the killed parent that outlived it by more than a few seconds."""
    code: object
    done: Run


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("validate", *words),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(results: Iterator[Path], count: int, process: subprocess.Popen[str]) -> Path:
    """Until a run has `count` case rows -> its file."""
    for file in results:
        if file.exists() and file.read_bytes().count(b'{"kind":"case"') >= count:
            return file
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    raise AssertionError("no rows came")


def files_of(folder: Path) -> Iterator[Path]:
    """The run's file, again and again; one that does not exist until there is one."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        yield next(folder.glob("runs/*/results.jsonl"), folder / "none")


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


def outlive(pids: list[int], seconds: float) -> list[int]:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("resumed")
    suite = write_suite(folder, BATCHES)
    (folder / "hold").touch()
    slow = ("--backend", "evil_backends:Slow", "--device", "cpu", "--out", "runs")
    first = start(folder, "--cases", suite, *slow)
    results = wait_for_rows(files_of(folder), 1, first)
    first.send_signal(signal.SIGINT)
    interrupt_code = first.wait(60)
    interrupted = read_run(results)
    report = (results.parent / "report.html").read_text(encoding="utf-8")

    second = start(folder, "--resume", results.parent)
    wait_for_rows(files_of(folder), 2, second)
    while not (workers := children_of(second.pid)):
        time.sleep(0.05)
    second.kill()
    second.wait(60)
    orphans = outlive(workers, 10)
    with results.open("ab") as file:
        file.write(TORN)
    killed = read_run(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(NO_COMMIT.items())))
        words = ["validate", "--resume", str(results.parent), "--no-isolate"]
        patch.setattr(sys, "argv", ["megabench", *words])
        with pytest.raises(SystemExit) as stop:
            main()
    return Story(
        folder=results.parent,
        interrupted=interrupted,
        interrupt_code=interrupt_code,
        partial_report=report,
        killed=killed,
        orphan_pids=orphans,
        code=stop.value.code,
        done=read_run(results),
    )


def test_a_ctrl_c_keeps_what_is_done_and_writes_a_partial_report(story: Story) -> None:
    assert story.interrupt_code == 130
    assert story.interrupted.end is not None
    assert story.interrupted.end.exit_code == 130
    assert 1 <= len(story.interrupted.cases) < len(BATCHES)
    assert "Cut short" in story.partial_report


def test_a_killed_parent_takes_its_workers_along_and_leaves_every_finished_row(
    story: Story,
) -> None:
    assert story.orphan_pids == []
    assert story.killed.torn
    assert len(story.killed.cases) >= 2


def test_a_resumed_run_ends_with_every_case_once_and_the_torn_line_gone(story: Story) -> None:
    assert story.code == 0
    assert sorted(row.tokens for row in story.done.cases) == [1, 2, 3]
    assert {row.status for row in story.done.cases} == {"passed"}
    assert not story.done.torn
    assert TORN + b"\n" not in (story.folder / "results.jsonl").read_bytes()
    assert story.done.end is not None
    assert (story.done.end.rows, story.done.end.exit_code) == (3, 0)


def run_folder(tmp_path: Path, **header: object) -> Path:
    """A run with a header and nothing else."""
    with RunFolder.create(tmp_path, "validate") as folder:
        made = make_header("validate", ["validate"], capture_environment("cpu"))
        folder.append(made.model_copy(update=header))
    return folder.path


@pytest.mark.parametrize("cut", [1, 20, 21])
def test_a_torn_last_line_is_cut_off_and_a_whole_one_kept(tmp_path: Path, cut: int) -> None:
    path = run_folder(tmp_path)
    file = path / "results.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:cut])
    folder, run = RunFolder.reopen(path)
    folder.close()
    assert file.read_bytes() == whole
    assert run.header is not None
    file.write_bytes(whole.rstrip(b"\n"))  # killed between a row and its newline
    folder, run = RunFolder.reopen(path)
    folder.close()
    assert file.read_bytes() == whole


def test_a_run_that_is_being_written_cannot_be_resumed(tmp_path: Path) -> None:
    path = run_folder(tmp_path)
    code = (
        "import sys, time; from megabench.results import RunFolder\n"
        "held = RunFolder.reopen(sys.argv[1]); print('open', flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen(
        [*command()[:1], "-c", code, str(path)], env=environment(), stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match="another process is writing it"):
            RunFolder.reopen(path)
    finally:
        writer.kill()
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()


@pytest.mark.parametrize(
    ("command_name", "header", "said"),
    [
        ("bench", {}, "command validate -> bench"),
        ("validate", {"git_commit": "0123456789ab"}, "commit 0123456789ab -> "),
        ("validate", {"environment": "other"}, "packages.torch 0.1 -> "),
    ],
)
def test_a_run_is_only_continued_by_what_made_it(
    tmp_path: Path, command_name: str, header: dict[str, object], said: str
) -> None:
    here = capture_environment("cpu")
    if "environment" in header:
        header = {"environment": here.model_copy(update={"packages": {"torch": "0.1"}})}
    path = run_folder(tmp_path, **header)
    before = (path / "results.jsonl").read_bytes()
    with pytest.raises(StoreError, match=said):
        reopen(path, command_name, here)
    assert (path / "results.jsonl").read_bytes() == before


def test_a_case_that_changed_under_its_name_is_refused(story: Story) -> None:
    row = story.done.cases[0]
    same = (row.case_id, row.case_hash, row.backend)
    assert same in rows_done(story.done, [same, ("a new case", "1", "torch")])
    with pytest.raises(StoreError, match="is not what it was"):
        rows_done(story.done, [(row.case_id, "0" * 16, row.backend)])


def test_a_folder_that_holds_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        RunFolder.reopen(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_rows_of_a_resumed_run_are_one_line_each(story: Story) -> None:
    lines = (story.folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[0] == "run"
    assert kinds[-1] == "end"
    assert kinds.count("case") == len(BATCHES)
