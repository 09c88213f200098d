"""Processes of one run are told from a pile of runs, and what looks slower is run again once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from gate_runs import (
    BASE,
    DECODE,
    PREFILL,
    SLOWER,
    baseline,
    measurement,
    only,
    processes,
    ratio,
    row,
    run,
    write,
    write_all,
)

from megabench.cases import load_suite
from megabench.gate import GateError, Policy, compare, read_processes, read_rerun
from megabench.gate.launch import Processes, gate_processes, new_folder, write_cases
from megabench.results import CaseResult, Run


def test_a_run_folder_is_one_process_and_a_folder_of_them_several(tmp_path: Path) -> None:
    write_all(processes(BASE), tmp_path)
    assert len(read_processes(tmp_path)) == 5
    assert len(read_processes(next(tmp_path.iterdir()))) == 1


@pytest.mark.parametrize(
    ("fields", "wanted"), [({"driver": "590"}, "driver"), ({"cpu_count": 2}, "cpu_count")]
)
def test_runs_of_different_environments_are_not_pooled(
    tmp_path: Path, fields: dict[str, object], wanted: str
) -> None:
    write(run([row()]), tmp_path)
    write(run([row()], **fields), tmp_path)
    with pytest.raises(GateError, match=wanted):
        read_processes(tmp_path)


def test_runs_of_different_commits_are_not_pooled(tmp_path: Path) -> None:
    other = run([row()])
    assert other.header is not None
    other.header.git_commit = "def"
    write(run([row()]), tmp_path)
    write(other, tmp_path)
    with pytest.raises(GateError, match="git_commit def, not abc"):
        read_processes(tmp_path)


def test_runs_of_different_arguments_are_not_pooled(tmp_path: Path) -> None:
    other = run([row()])
    assert other.header is not None
    other.header.argv = ["bench", "--cases", "ci"]
    write(run([row()]), tmp_path)
    write(other, tmp_path)
    with pytest.raises(GateError, match=r"not a process of the run.*argv"):
        read_processes(tmp_path)


@pytest.mark.parametrize("field", ["git_commit", "driver"])
def test_a_re_run_of_other_code_or_on_another_machine_is_refused(field: str) -> None:
    again = processes(SLOWER)
    for other in again:
        assert other.header is not None
        other.header.argv = ["bench", "--cases", "rerun/h200.yaml"]
    compare(baseline(), processes(SLOWER), Policy(), again)
    header = again[-1].header
    assert header is not None
    setattr(header if field == "git_commit" else header.environment, field, "another")
    with pytest.raises(GateError, match=f"{field}.* another"):
        compare(baseline(), processes(SLOWER), Policy(), again)


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (run([row([measurement(us)]) for us in BASE]), "triton 5 times"),
        (run([row([measurement(20.0)])], [ratio()] * 2), "torch step cold 2 times"),
    ],
)
def test_a_process_that_tells_of_the_same_twice_does_not_count_twice(
    tmp_path: Path, made: Run, wanted: str
) -> None:
    with pytest.raises(GateError, match=wanted):
        read_processes(write(made, tmp_path))


def test_an_empty_folder_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="holds no run"):
        read_processes(tmp_path)


def test_a_case_file_written_for_a_rerun_makes_the_same_cases(tmp_path: Path) -> None:
    cases = [DECODE, PREFILL, DECODE.model_copy(update={"family": "ramp", "seed": 7})]
    runs = [run([row(case=case) for case in cases])]
    file = write_cases(runs, [(case.id, "triton") for case in cases[1:]], tmp_path)
    again = load_suite(file)
    assert again.name == "h200"
    assert [(c.id, c.hash) for c in again.cases] == [(c.id, c.hash) for c in cases[1:]]


class Launches:
    """Stands in for fresh processes: each writes the next of the given rows' runs."""

    def __init__(self, rows: Sequence[CaseResult], codes: Sequence[int] = ()) -> None:
        self.rows, self.codes = list(rows), list(codes)
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.calls.append(list(arguments))
        out = Path(arguments[arguments.index("--out") + 1])
        write(run([self.rows.pop(0)]), out)
        return self.codes.pop(0) if self.codes else 0


def bench(tmp_path: Path, launch: Launches) -> Processes:
    return Processes(
        folder=tmp_path / "x5",
        arguments=["--backend", "triton"],
        cases=["--cases", "h200", "--case", "*"],
        count=5,
        launch=launch,
    )


def rows(medians: Sequence[float]) -> list[CaseResult]:
    return [row([measurement(us)]) for us in medians]


def test_a_run_that_is_not_slower_is_not_run_again(tmp_path: Path) -> None:
    launch = Launches(rows(BASE))
    made = bench(tmp_path, launch)
    assert made.run() == 0
    assert gate_processes(made, baseline(), Policy()).exit_code == 0
    assert len(launch.calls) == 5
    assert launch.calls[0] == [
        *("bench", "--cases", "h200", "--case", "*"),
        *("--backend", "triton", "--out", str(tmp_path / "x5")),
    ]


def test_each_process_is_announced_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, Launches(rows(BASE))).run()
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"process {n} of 5" for n in range(1, 6)]
    assert said.out == ""


@pytest.mark.parametrize(
    ("again", "verdict", "code"), [(SLOWER, "SLOWER", 1), (BASE, "AMBIGUOUS", 3)]
)
def test_what_looks_slower_is_run_again_before_it_is_said(
    tmp_path: Path, again: tuple[float, ...], verdict: str, code: int
) -> None:
    launch = Launches(rows([*SLOWER, *again]))
    made = bench(tmp_path, launch)
    made.run()
    result = gate_processes(made, baseline(), Policy())
    assert only(result).decision.verdict == verdict
    assert result.exit_code == code
    assert len(launch.calls) == 10
    assert "--no-validate" in launch.calls[5]
    assert str(made.folder / "rerun" / "h200.yaml") in launch.calls[5]
    assert len(read_processes(made.folder)) == len(read_rerun(made.folder)) == 5


@pytest.mark.parametrize(("codes", "calls", "code"), [([2], 1, 2), ([0, 130], 2, 130)])
def test_a_process_that_cannot_run_ends_the_rest(
    tmp_path: Path, codes: list[int], calls: int, code: int
) -> None:
    launch = Launches(rows(BASE), codes)
    assert bench(tmp_path, launch).run() == code
    assert len(launch.calls) == calls


def test_a_wrong_case_does_not_end_the_rest(tmp_path: Path) -> None:
    launch = Launches(rows(BASE), [0, 1, 0, 0, 0])
    assert bench(tmp_path, launch).run() == 1
    assert len(launch.calls) == 5


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    first = new_folder(tmp_path, 5)
    first.mkdir()
    assert new_folder(tmp_path, 5) != first
