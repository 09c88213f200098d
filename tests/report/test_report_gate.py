"""The gate's verdicts in the report: read from what the gate kept, never judged again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from report_fake_gate import SPREAD, base_rows, gated_page, now_rows, process, processes, verdicts
from report_fake_run import case, header, measured, measurement

from megabench.report import SUMMARY, build, write_report
from megabench.report.html import render
from megabench.report.pooled import pooled
from megabench.report.verdict import gate_view
from megabench.results import Comparison, Interval, Run, RunFolder
from megabench.runs import latest_run


def table_row(page: str, case_id: str, op: str, column: str) -> str:
    """The text of one row of the gate's table, tags taken out."""
    table = page[page.index('id="gate-table"') :]
    rows = re.findall(r"<tr data-verdict=.*?</tr>", table, re.S)
    for row in rows:
        text = " ".join(re.sub(r"<[^>]*>", " ", row).split())
        if case_id in text and f" {op} {column} " in text:
            return text
    raise AssertionError(f"no row of {case_id} {op} {column}")


def test_a_run_that_was_not_gated_has_no_gate_section() -> None:
    assert 'id="gate"' not in render(pooled(processes(now_rows)), None, 5)


def test_every_finding_is_a_row_with_both_sides_ratio_interval_and_cycles() -> None:
    page = gated_page()
    kept = verdicts(processes(now_rows))
    assert page.count("<tr data-verdict=") == len(kept.findings)
    slow = table_row(page, "-2q1s4k", "step", "cold")
    assert slow.startswith("▲ SLOWER")
    for wanted in ("40.6 µs", "42.6 µs", "1.050", "slower", "cycles +5.00 %"):
        assert wanted in slow
    found = next(f for f in kept.findings if f.verdict == "SLOWER" and f.op == "step")
    assert found.ratio_low is not None
    assert found.ratio_high is not None
    assert found.ratio_low < 1.05 < found.ratio_high
    assert f"{found.ratio_low:.3f} … {found.ratio_high:.3f}" in slow


def test_kernels_and_correctness_have_rows_of_their_own() -> None:
    page = gated_page()
    assert "3 4 – – kernels : 3 → 4 kernels" in table_row(page, "-5q1s4k", "step", "kernels")
    grown = table_row(page, "-5q1s4k", "all", "correctness")
    assert grown.startswith("✗ BROKEN")
    assert "0.2 0.8" in grown


def test_evidence_stands_in_the_page_with_every_process() -> None:
    kept = verdicts(processes(now_rows))
    page = gated_page()
    evidence = [line for f in kept.findings for line in f.evidence]
    assert any("medians" in line for line in evidence)
    for line in evidence:
        assert line.replace("->", "→").replace("<", "&lt;") in page


def test_verdicts_are_told_apart_without_colour() -> None:
    counts = gate_view(verdicts(processes(now_rows)), pooled(processes(now_rows)), 40).counts
    assert len({c.mark for c in counts}) == len(counts) == 8


def test_the_first_screen_has_the_outcome_its_counts_and_its_exit_code() -> None:
    page = gated_page()
    top = page[: page.index("<main")]
    badge = " ".join(re.sub(r"<[^>]*>", " ", top[top.index('class="badge') :]).split())
    assert "Slower or broken ✗ 2 BROKEN ▲ 3 SLOWER" in badge
    assert "exit 1" in badge


def test_another_environment_is_said_first_and_field_by_field() -> None:
    page = gated_page(driver="590")
    assert "Not the baseline's environment: driver 580 → 590" in page[: page.index("<main")]
    assert "<td>580</td><td>590</td>" in page
    assert "environments differ" not in gated_page()


def test_a_run_that_grew_after_it_was_judged_says_so() -> None:
    runs = processes(now_rows)
    kept = verdicts(runs)
    assert not gate_view(kept, pooled(runs), kept.header.rows).grown
    assert "no longer those that were judged" in render(
        pooled(runs), gate_view(kept, pooled(runs), kept.header.rows + 1), 5
    )


def test_the_summary_lists_what_is_not_the_same(tmp_path: Path) -> None:
    runs = processes(now_rows)
    kept = verdicts(runs)
    write_report(pooled(runs), tmp_path / "report.html", gate_view(kept, pooled(runs), 0), 5)
    text = (tmp_path / SUMMARY).read_text()
    assert "## Gate: Slower or broken (exit 1)" in text
    listed = [line for line in text.splitlines() if line.startswith("| SLOWER |")]
    assert len(listed) == 3
    assert "| SAME |" not in text


# ---- several processes -------------------------------------------------------


def test_each_time_of_a_pooled_run_is_the_whole_measurement_of_the_middle_process() -> None:
    runs = processes(base_rows)
    middle = SPREAD.index(1.0)
    shown, chosen = pooled(runs).cases[0], runs[middle].cases[0]
    assert shown.measurements == chosen.measurements
    assert runs[0].cases[0].measurements != runs[1].cases[0].measurements


def test_a_case_that_is_wrong_in_one_process_is_wrong_in_the_pooled_run() -> None:
    runs = processes(base_rows)
    runs[3].cases[2] = case(3, status="failed", reason="lse")
    assert [c.status for c in pooled(runs).cases].count("failed") == 1


def test_a_measurement_that_does_not_stand_is_never_the_middle_one() -> None:
    runs = [process([case(1, measurements=[measurement("step", us)])]) for us in (10, 30, 20)]
    runs[2].cases[0].measurements[0].problem = "throttled"
    assert pooled(runs).cases[0].measurements[0].problem is None


def test_of_the_ratios_of_several_processes_the_middle_one_is_shown() -> None:
    runs = [process([measured(1, "triton", 1.0)]) for _ in range(3)]
    for run, ratio in zip(runs, (0.3, 0.1, 0.2), strict=True):
        run.comparisons = [
            Comparison(
                suite="smoke",
                case_id="c",
                op="step",
                column="cold",
                backend="triton",
                baseline="torch",
                ratio=ratio,
                ci=Interval(low=ratio, high=ratio),
                pairs=8,
            )
        ]
    assert [c.ratio for c in pooled(runs).comparisons] == [0.2]


def test_a_pooled_run_ended_only_if_every_process_did() -> None:
    runs = processes(base_rows)
    assert pooled(runs).end is not None
    runs[1].end = None
    assert pooled(runs).end is None


def written(run: Run, out: Path) -> Path:
    with RunFolder.create(out, "bench") as folder:
        for row in (run.header, *run.cases, run.end):
            if row is not None:
                folder.append(row)
    return folder.path


def test_a_folder_of_processes_gets_one_report(tmp_path: Path) -> None:
    for run in processes(base_rows):
        written(run, tmp_path)
    page = build(tmp_path).read_text()
    assert "5 processes" in page
    assert page.count('<details id="case-') == len(base_rows(1.0))


@pytest.mark.parametrize("rows", [None, []])
def test_a_run_with_nothing_but_its_start_gets_a_report(
    tmp_path: Path, rows: list[None] | None
) -> None:
    run = Run(Path("."), header=None if rows is None else header(planned=3))
    page = build(written(run, tmp_path)).read_text()
    assert "Nothing ran" in page
    assert "did not end" in page or rows is None


def test_a_report_is_made_from_the_rows_file_too(tmp_path: Path) -> None:
    folder = written(process(base_rows(1.0)), tmp_path)
    assert build(folder / "results.jsonl") == folder / "report.html"


def test_the_latest_run_may_be_one_of_several_processes(tmp_path: Path) -> None:
    alone = written(process(base_rows(1.0)), tmp_path)
    assert latest_run(tmp_path) == alone
    several = tmp_path / "bench-x5"
    for run in processes(base_rows):
        newest = written(run, several)
    os.utime(newest / "results.jsonl", (2e9, 2e9))
    assert latest_run(tmp_path) == several
