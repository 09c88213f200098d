"""The report is one well-formed file that needs no network and tells every kind of run."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_fake_gate import gated_page
from report_fake_run import bench_run, case, header, measured, measurement, validate_run

from megabench.gate import GateError
from megabench.report import SUMMARY, TABLE, build, write_report
from megabench.report.frames import cases_frame, measurements_frame, primary
from megabench.report.html import render
from megabench.report.published import beside
from megabench.report.summary import summarise
from megabench.results import Run, RunEnd, RunFolder

VOID = {"meta", "br", "input", "link", "img", "hr", "path", "use", "rect", "circle", "line"}


class Tags(HTMLParser):
    """Checks nesting and collects ids, references and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name == "href" and value:
                self.links.append(value)
            if name in ("src", "href", "xlink:href", "action") and value and value[0] != "#":
                self.outside.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    return tags


def empty_run() -> Run:
    return Run(Path("."), header=header(planned=3))


PAGES = {
    "bench": lambda: render(bench_run()),
    "validate": lambda: render(validate_run()),
    "empty": lambda: render(empty_run()),
    "no header": lambda: render(Run(Path("."), torn=True)),
    "gated": gated_page,
    "gated elsewhere": lambda: gated_page(driver="590"),
}


@pytest.mark.parametrize("name", PAGES)
def test_every_kind_of_run_makes_a_well_formed_page_without_outside_references(name: str) -> None:
    page = PAGES[name]()
    tags = parse(page)
    assert tags.open == []
    assert tags.outside == []
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert "@import" not in page
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", page)


@pytest.mark.parametrize("name", ["bench", "gated"])
def test_ids_are_unique_and_every_link_has_its_target(name: str) -> None:
    tags = parse(PAGES[name]())
    assert len(tags.ids) == len(set(tags.ids))
    assert {link[1:] for link in tags.links} <= set(tags.ids)


def test_text_from_a_run_cannot_become_markup() -> None:
    page = render(bench_run())
    assert "head 3 <off>" not in page
    assert "head 3 &lt;off&gt;" in page
    assert "NVIDIA &lt;H200&gt;" in page


def test_the_first_screen_counts_every_status_and_names_the_extremes() -> None:
    summary = summarise(bench_run())
    assert summary.headline == "2 of 8 cases wrong"
    assert summary.tone == "bad"
    assert summary.counts == {"passed": 0, "measured": 6, "failed": 1, "error": 1, "skipped": 1}
    assert summary.reasons == [("8 wo_a groups do not divide by TP 16", 1)]
    assert summary.worst_ratio is not None
    assert summary.worst_ratio.case.case_id.endswith("2q1s4k")
    assert summary.best_fraction is not None
    assert summary.worst_fraction is not None
    assert summary.best_fraction.case.backend == "triton"
    assert summary.worst_fraction.case.backend == "torch"
    assert [case for _, case, _ in summary.problems] == [
        "r1-nvfp4-tp1-2q1s4k on torch",
        "r1-nvfp4-tp1-4q1s4k on torch",
    ]


def test_rows_that_never_ran_are_said() -> None:
    run = bench_run()
    run.cases = run.cases[:4]
    summary = summarise(run)
    assert summary.missing == 5
    assert (summary.tone, summary.headline) == ("warn", "Cut short: 4 cases right, 5 never ran")


def test_a_run_that_checked_nothing_does_not_say_right() -> None:
    run = Run(Path("."), cases=[measured(1, "torch", 1.0)])
    assert summarise(run).headline == "The case is right"
    run.cases[0].stages = []
    assert (summarise(run).tone, summarise(run).headline) == (
        "warn",
        "1 case measured, none checked",
    )


def test_a_stage_beside_the_verdict_never_is_the_worst_ratio() -> None:
    summary = summarise(Run(Path("."), cases=[measured(1, "torch", 1.0)]))
    assert summary.worst_ratio is not None
    assert summary.worst_ratio.label == "output_values"


def test_a_fraction_that_cannot_be_true_is_no_best_fraction() -> None:
    run = Run(Path("."), cases=[measured(1, "torch", 1.0)])
    for row in run.cases[0].measurements:
        row.problem = "below the datasheet floor"
    assert summarise(run).best_fraction is None


def test_an_op_is_represented_by_its_cold_column() -> None:
    row = case(1, measurements=[measurement("step", 5.0, "warm"), measurement("step", 9.0)])
    chosen = primary(row, "step")
    assert chosen is not None
    assert chosen.column == "cold"


def test_every_case_shows_its_repro_command() -> None:
    run = bench_run()
    text = " ".join(parse(render(run)).text)
    for row in run.cases:
        assert row.repro in text


def test_figures_appear_only_with_something_to_show() -> None:
    assert render(bench_run()).count("<svg") == 4
    assert render(validate_run()).count("<svg") == 0


def test_published_figures_stand_beside_a_run_on_their_device_alone() -> None:
    run = bench_run()
    assert "FlashMLA SM90" in render(run)
    assert "from elsewhere and not measured in this run" in render(run)
    assert run.header is not None
    run.header.environment.device_name = "a processor"
    assert "FlashMLA SM90" not in render(run)


def test_times_stand_beside_those_from_elsewhere_where_the_work_is_the_same() -> None:
    run = bench_run()
    decodes = [row for row in beside(run) if row.series.op == "decode_attention"]
    assert decodes
    for row in decodes:
        assert row.published_us == dict(row.series.points)[row.tokens]
        assert row.ratio == row.median_us / row.published_us


def test_a_case_of_other_work_has_no_figure_from_elsewhere_beside_it() -> None:
    run = bench_run()
    for tokens, tp, found in ((32, 1, 1), (5, 1, 0), (32, 2, 0)):
        run.cases = [case(tokens, measurements=[measurement("decode_attention", 40.0)])]
        run.cases[0].case["tp"] = tp
        assert len(beside(run)) == found


def test_the_same_run_gives_the_same_bytes() -> None:
    assert render(bench_run()) == render(bench_run())


def test_figures_take_their_neutral_colours_from_the_page() -> None:
    page = render(bench_run())
    assert "var(--ink)" in page
    assert "#010203" not in page


def test_frames_have_their_columns_without_rows() -> None:
    assert list(cases_frame(empty_run()).columns) == list(cases_frame(bench_run()).columns)
    assert list(measurements_frame(empty_run()).columns) == list(
        measurements_frame(bench_run()).columns
    )


def test_the_kind_of_a_step_comes_from_its_batch() -> None:
    run = Run(Path("."))
    for batch in ("2q1s4k", "1q64", "2q1s4k_1q64"):
        row = case(1)
        row.case["batch"] = batch
        run.cases.append(row)
    assert list(cases_frame(run)["kind"]) == ["decode", "prefill", "mixed"]


def test_a_run_folder_gets_report_table_and_summary(tmp_path: Path) -> None:
    run = bench_run()
    with RunFolder.create(tmp_path, "bench") as folder:
        assert run.header is not None
        assert run.ceilings is not None
        for row in (run.header, run.ceilings, *run.cases, *run.comparisons):
            folder.append(row)
        folder.append(RunEnd(finished="now", seconds=1.0, rows=9))
    path = build(folder.path)
    assert path == folder.path / "report.html"
    with (folder.path / TABLE).open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == sum(len(c.measurements) for c in run.cases)
    assert float(table[0]["median_us"]) == run.cases[0].measurements[0].median_us
    summary = (folder.path / SUMMARY).read_text()
    assert "2 of 8 cases wrong" in summary
    assert "r1-nvfp4-tp1-512q1s4k" in summary


def test_a_validate_run_exports_its_cases(tmp_path: Path) -> None:
    write_report(validate_run(), tmp_path / "report.html")
    with (tmp_path / TABLE).open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["passed", "passed"]


def test_a_folder_without_a_run_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=re.escape(f"{tmp_path}: holds no run")):
        build(tmp_path)


def test_a_column_without_a_figure_in_any_row_is_left_out() -> None:
    run = Run(Path("."), cases=[measured(1, "torch", 1.0)])
    assert ">datasheet<" in render(run)
    for row in run.cases[0].measurements:
        row.datasheet_fraction = None
    assert ">datasheet<" not in render(run)


def test_markers_are_explained_where_series_are_too_many_to_name_them() -> None:
    few = Run(Path("."), cases=[measured(tokens, "torch", 1.0) for tokens in (1, 2)])
    assert ">decode</text>" not in render(few)
    many = Run(Path("."))
    for tp in range(1, 11):
        row = measured(1, "torch", 1.0)
        row.case["tp"], row.case_id = tp, f"r1-nvfp4-tp{tp}-1q1s4k"
        many.cases.append(row)
    assert ">decode</text>" in render(many)


def test_token_counts_whose_labels_would_run_into_each_other_share_one() -> None:
    rows = [measured(tokens, "torch", 1.0) for tokens in (512, 1024, 1056, 4096)]
    page = render(Run(Path("."), cases=rows))
    assert all(f">{label}</text>" in page for label in ("512", "1,024", "4,096"))
    assert ">1,056</text>" not in page


def test_a_run_that_timed_nothing_has_no_tiles_for_times() -> None:
    assert "roofline fraction" in render(bench_run())
    assert "roofline fraction" not in render(validate_run())
