"""What the report says of how a run was measured: its time, and the second clock."""

from __future__ import annotations

from report_fake_run import bench_run, case, measurement

from megabench.report.frames import measurements_frame
from megabench.report.html import render
from megabench.results import CrossCheck, Phases, Run

SPENT = Phases(validate_s=1.25, setup_s=2.5, timed_s=0.5, overhead_s=0.375)
AGREES = CrossCheck(method="spans", status="agrees", span_us=7.25, spans_us=[7.25])
FAILED = CrossCheck(method="spans", status="failed", message="no device work recorded")


def checked_run() -> Run:
    run = bench_run()
    rows = [
        measurement("wq_b", 8.0).model_copy(update={"cross_check": AGREES}),
        measurement("step", 9.0).model_copy(update={"cross_check": FAILED}),
    ]
    run.cases = [case(5, phases=SPENT, measurements=rows), case(6, phases=SPENT)]
    return run


def test_a_run_says_where_its_time_went_in_all_and_for_a_row() -> None:
    page = render(checked_run())
    assert "validation 1.25, set-up 2.50, timed runs 0.500, overhead 0.375" in page
    total, longest = '<td class="num">5.00</td>', '<td class="num">2.50</td>'
    assert f'<tr><th scope="row">set-up</th>{total}{longest}</tr>' in page
    assert "Where the time went" not in render(bench_run())


def test_spans_stand_in_a_column_of_their_own_and_failures_say_why() -> None:
    page = render(checked_run())
    assert "CUPTI span" in page
    assert "7.25" in page
    assert "failed: no device work recorded" in page
    assert "CUPTI span" not in render(bench_run())


def test_spans_are_columns_of_the_table() -> None:
    frame = measurements_frame(checked_run())
    assert frame["span_us"].to_list()[0] == 7.25
    assert frame["span_status"].to_list() == ["agrees", "failed"]
