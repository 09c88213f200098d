"""What a gate leaves with the run: verdicts that read back whole, and a report that shows them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from gate_runs import (
    BASE,
    DECODE,
    SLOWER,
    baseline,
    measurement,
    processes,
    row,
    run,
    write_all,
)

from megabench.cli import main
from megabench.gate import GateError, Policy, compare
from megabench.gate.kept import VERDICTS, read_verdicts, verdicts_of, write_verdicts
from megabench.gate.pool import Change


def gate(now: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["megabench", "gate", str(now), "--baseline", str(base)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("worst", [0.4, math.nan, math.inf])
def test_verdicts_read_back_as_they_were_kept(tmp_path: Path, worst: float) -> None:
    now = [run([row([measurement(us)], worst=worst)]) for us in SLOWER]
    kept = verdicts_of(compare(baseline(), now, Policy()), Path("reports/baselines"))
    write_verdicts(kept, tmp_path)
    assert read_verdicts(tmp_path) == kept
    lines = (tmp_path / VERDICTS).read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines[:2]] == ["gate", "finding"]


def test_a_kept_time_has_its_medians_ratio_interval_and_cycles() -> None:
    kept = verdicts_of(compare(baseline(), processes(SLOWER), Policy()), Path("b"))
    (slow,) = [f for f in kept.findings if f.verdict == "SLOWER"]
    assert (slow.base_us, slow.run_us) == (20.0, 21.0)
    assert slow.ratio == pytest.approx(1.05)
    assert slow.cycles == pytest.approx(1.05)
    assert slow.ratio_low is not None
    assert slow.ratio_high is not None
    assert slow.ratio_low < 1.05 < slow.ratio_high
    assert (kept.header.exit_code, kept.header.processes, kept.header.rows) == (1, 5, 5)


def test_with_too_few_processes_there_is_a_ratio_and_no_interval() -> None:
    kept = verdicts_of(compare(baseline(), processes([21.0]), Policy()), Path("b"))
    (found,) = [f for f in kept.findings if f.column == "cold"]
    assert found.ratio == pytest.approx(1.05)
    assert (found.ratio_low, found.ratio_high, found.cycles) == (None, None, None)


def test_the_interval_of_a_ratio_is_symmetric_in_its_logarithm() -> None:
    change = Change(base_us=20, run_us=21, relative=0.05, apart=True, room=0.08)
    low, high = change.ratio_interval
    assert low * high == pytest.approx(change.ratio**2)
    assert high == pytest.approx(1.08)


def test_a_run_that_was_never_gated_has_no_verdicts(tmp_path: Path) -> None:
    assert read_verdicts(tmp_path) is None


def test_a_damaged_file_of_verdicts_is_one_line_that_says_how_to_mend_it(tmp_path: Path) -> None:
    kept = verdicts_of(compare(baseline(), processes(BASE), Policy()), Path("b"))
    write_verdicts(kept, tmp_path)
    file = tmp_path / VERDICTS
    file.write_text(file.read_text()[:-20])
    with pytest.raises(GateError, match=r"gate.jsonl:\d+: .*megabench gate RUN writes it anew"):
        read_verdicts(tmp_path)


def test_the_gate_leaves_verdicts_and_a_report_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_all(processes(BASE), tmp_path / "base")
    now = write_all(processes(SLOWER), tmp_path / "now")
    assert gate(now, base, monkeypatch) == 1
    kept = read_verdicts(now)
    assert kept is not None
    assert kept.header.baseline.path == str(base)
    assert f"report: {now / 'report.html'}" in capsys.readouterr().out
    page = (now / "report.html").read_text()
    assert "▲" in page
    assert DECODE.id in page
    assert not (base / VERDICTS).exists()


def test_gating_again_replaces_the_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_all(processes(BASE), tmp_path / "base")
    now = write_all(processes(SLOWER), tmp_path / "now")
    assert gate(now, base, monkeypatch) == 1
    assert gate(now, now, monkeypatch) == 0
    kept = read_verdicts(now)
    assert kept is not None
    assert kept.header.exit_code == 0
    assert "1 SLOWER" not in (now / "report.html").read_text()


def test_a_run_that_cannot_be_written_is_judged_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = write_all(processes(SLOWER), tmp_path / "now")
    (now / VERDICTS).with_suffix(".tmp").mkdir()  # in the way, for root, too
    assert gate(now, write_all(processes(BASE), tmp_path / "base"), monkeypatch) == 1
    assert "verdicts are not kept" in capsys.readouterr().err
