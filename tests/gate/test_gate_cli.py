"""The gate's commands: exit codes a CI job can trust, one-line errors, nothing written in vain."""

from __future__ import annotations

import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from gate_runs import (
    BASE,
    DECODE,
    SLOWER,
    measurement,
    processes,
    row,
    run,
    write_all,
)

from megabench.cli import main
from megabench.gate import Policy, compare
from megabench.gate.baseline import baseline_of
from megabench.gate.junit import write_junit
from megabench.gate.render import show
from megabench.results import Run

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """(exit code, stdout, stderr) of the command line."""

    def run_command(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megabench", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run_command


@pytest.fixture
def shards(tmp_path: Path, call: Call) -> Path:
    """A folder of baselines with one shard, accepted by the command."""
    folder, runs = tmp_path / "baselines", write_all(processes(BASE), tmp_path / "base")
    assert call("baseline", "update", runs, "--accept", "--dir", folder)[0] == 0
    return folder


def failing() -> list[Run]:
    return [run([row(status="failed", reason="out: <3> of 9 wrong\x00")]) for _ in BASE]


@pytest.mark.parametrize(
    ("runs", "code", "verdict"),
    [
        (processes(BASE), 0, "SAME"),
        (processes([0.9 * t for t in BASE]), 0, "FASTER"),
        (processes(SLOWER), 1, "SLOWER"),
        (failing(), 1, "BROKEN"),
        (processes(BASE[:1]), 3, "AMBIGUOUS"),
        (processes(BASE, problem="too fast"), 3, "INVALID"),
        ([run([row([measurement(t)])], driver="590") for t in BASE], 3, "INVALID"),
    ],
)
def test_exit_codes_tell_good_wrong_and_undecided(
    call: Call, shards: Path, tmp_path: Path, runs: list[Run], code: int, verdict: str
) -> None:
    folder = write_all(runs, tmp_path / "now")
    found, out, err = call("gate", folder, "--baseline", shards)
    assert (found, err) == (code, "")
    assert verdict in out
    assert out.splitlines()[-1].endswith(f"(exit {code})")


def test_the_table_shows_the_whole_line_and_leaves_out_what_is_the_same(
    call: Call, shards: Path, tmp_path: Path
) -> None:
    rows = [row([measurement(t), measurement(t, op="wo_a")]) for t in BASE]
    _, out, _ = call(
        "gate", write_all([run([r]) for r in rows], tmp_path / "n"), "--baseline", shards
    )
    assert "wo_a" in out
    assert "NEW" in out
    assert "step" not in out


@pytest.mark.parametrize(("columns", "lines"), [(100, 3), (200, 1)])
def test_a_narrow_terminal_s_columns_go_to_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, lines: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    base, now = processes(BASE), processes(SLOWER)
    show(compare(baseline_of(base), now, Policy()))
    table = capsys.readouterr().out.split("\n1 SLOWER")[0].splitlines()
    assert ("baseline" in table[0]) == (columns == 200)
    assert len(table) <= 1 + lines


def test_explain_prints_medians_intervals_clocks_and_thresholds(
    call: Call, shards: Path, tmp_path: Path
) -> None:
    now = write_all(processes(SLOWER), tmp_path / "now")
    _, out, _ = call("gate", now, "--baseline", shards, "--explain")
    for wanted in (
        "medians 20.000 20.100 19.900 20.050 19.950",
        "of 5 processes, CV 0.40 %, SM clock 1755 MHz",
        "intervals apart",
        "cycles    +5.00 %",
        "rule      2.5 % and 0.3 us, intervals at 0.92",
    ):
        assert wanted in out


def test_the_policy_file_decides(call: Call, shards: Path, tmp_path: Path) -> None:
    now = write_all(processes(SLOWER), tmp_path / "now")
    lax = tmp_path / "gate.yaml"
    lax.write_text("time: {relative: 0.1}\n")
    assert call("gate", now, "--baseline", shards, "--policy", lax)[0] == 0


def test_without_accept_the_diff_is_printed_and_nothing_written(call: Call, tmp_path: Path) -> None:
    runs = write_all(processes(BASE), tmp_path / "base")
    folder = tmp_path / "baselines"
    code, out, err = call("baseline", "update", runs, "--dir", folder)
    assert code == 0
    assert f"+ {DECODE.id} triton step cold  20.00 us of 5" in out
    assert "nothing written" in err
    assert not folder.exists()


def test_a_baseline_of_too_few_processes_is_warned_of(call: Call, tmp_path: Path) -> None:
    runs = write_all(processes(BASE[:2]), tmp_path / "base")
    _, _, err = call("baseline", "update", runs, "--dir", tmp_path / "b")
    assert "2 of 5 processes" in err


def test_a_baseline_of_an_uncommitted_tree_is_told_of(call: Call, tmp_path: Path) -> None:
    runs = processes(BASE)
    for made in runs:
        assert made.header is not None
        made.header.git_commit = "abc+dirty"
    folder = write_all(runs, tmp_path / "base")
    assert "(abc+dirty)" in call("baseline", "update", folder, "--dir", tmp_path / "b")[2]


def test_a_run_carried_from_another_machine_is_a_baseline_and_gates_itself(
    call: Call, tmp_path: Path
) -> None:
    there = write_all(processes(BASE), tmp_path / "gpu" / "runs" / "bench-x5")
    here = shutil.move(there, tmp_path / "bench-x5")
    shards = tmp_path / "baselines"
    assert call("baseline", "update", here, "--accept", "--dir", shards)[0] == 0
    assert (shards / "nvidia-h200" / "h200.jsonl").is_file()
    assert call("gate", here, "--baseline", shards)[0] == 0
    slower = write_all(processes(SLOWER), tmp_path / "slower")
    assert call("gate", slower, "--baseline", shards)[0] == 1


def test_a_baseline_too_noisy_to_be_gated_by_is_told_of(call: Call, tmp_path: Path) -> None:
    quiet = write_all(processes(BASE), tmp_path / "quiet")
    assert "noise" not in call("baseline", "update", quiet, "--dir", tmp_path / "b")[2]
    noisy = write_all(processes((20.0, 22.0, 18.0, 21.0, 19.0)), tmp_path / "noisy")
    _, _, err = call("baseline", "update", noisy, "--dir", tmp_path / "b")
    assert (
        f"noise keeps 1 of the times from ever being SAME by the default policy, {DECODE.id}" in err
    )


def test_a_bad_request_is_one_line_exit_2_and_nothing_written(
    call: Call, tmp_path: Path, shards: Path
) -> None:
    now = write_all(processes(BASE), tmp_path / "now")
    bad = tmp_path / "bad.yaml"
    bad.write_text("proceses: 5\n")
    junit = tmp_path / "out.xml"
    for args, wanted in (
        (("gate", tmp_path / "gone"), "gone: holds no run"),
        (("gate", now, "--baseline", tmp_path / "gone"), "no such baseline"),
        (("gate", now, "--baseline", shards, "--policy", bad), "did you mean 'processes'"),
        (("baseline", "update", tmp_path / "gone", "--accept"), "holds no run"),
        (("baseline", "update", now, "--acept"), "--acept"),
        (
            ("bench", "--backend", "torch", "--device", "cpu", "--gate", tmp_path / "gone"),
            "no such baseline",
        ),
        (("bench", "--processes", "0"), "--processes"),
    ):
        code, out, err = call(*args, *(["--junit", junit] if args[0] == "gate" else []))
        assert (code, out) == (2, "")
        assert wanted in err
        assert err.count("\n") == 1
    assert not junit.exists()


def test_junit_fails_what_is_wrong_and_errs_what_is_undecided(
    call: Call, shards: Path, tmp_path: Path
) -> None:
    junit = tmp_path / "deep" / "gate.xml"
    now = write_all(processes(SLOWER), tmp_path / "now")
    call("gate", now, "--baseline", shards, "--junit", junit)
    suite = ET.parse(junit).getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    failure = suite.find("testcase[@name='step cold']/failure")
    assert failure is not None
    assert failure.get("type") == "slower"
    assert "+5.00 %" in (failure.get("message") or "")
    evidence = suite.findtext("testcase[@name='step cold']/system-out")
    assert "medians" in (evidence or "")


def test_junit_holds_any_message_and_stays_xml(tmp_path: Path) -> None:
    from gate_runs import baseline

    result = compare(baseline(), failing(), Policy())
    write_junit(result, "h200", tmp_path / "gate.xml")
    failure = ET.parse(tmp_path / "gate.xml").getroot().find(".//failure")
    assert failure is not None
    assert "<3> of 9 wrong\ufffd" in (failure.get("message") or "")


def test_a_verdict_that_is_not_gated_is_skipped_in_junit(tmp_path: Path) -> None:
    from gate_runs import baseline

    policy = Policy.model_validate({"rules": [{"gated": False}]})
    write_junit(compare(baseline(), processes(SLOWER), policy), "h200", tmp_path / "g.xml")
    root = ET.parse(tmp_path / "g.xml").getroot()
    assert root.find(".//failure") is None
    assert root.find(".//skipped") is not None


@pytest.mark.parametrize("command", [(), ("baseline",)])
def test_a_command_without_what_it_needs_prints_its_help_on_lines_of_its_own(
    call: Call, command: tuple[str, ...]
) -> None:
    code, out, err = call(*command)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")
    assert err.count("\n") > 5


def test_fresh_processes_are_told_of_every_glob(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []

    def launcher(as_json: bool) -> Callable[[list[str]], int]:
        return lambda words: told.append(words) or 2

    monkeypatch.setattr("megabench.gate.launch.fresh_process", launcher)
    globs = ("--case", "r0-*", "--case", "r1-*")
    words = ("bench", "--cases", "smoke", *globs, "--processes", "2", "--device", "cpu")
    assert call(*words, "--backend", "torch", "--out", tmp_path)[0] == 2
    assert told[0][: 3 + len(globs)] == ["bench", "--cases", "smoke", *globs]
