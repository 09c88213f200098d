"""The run folder keeps every finished row and never writes anything that is not strict JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.results import (
    CaseResult,
    RunEnd,
    RunFolder,
    StageResult,
    StoreError,
    capture_environment,
    make_header,
    read_run,
)

NOT_OF_ONE_SET = "minimum, quartiles and interval are not of one set of samples"


def case_row(worst: float | None = 0.5, **fields: object) -> CaseResult:
    row = {
        "suite": "smoke",
        "case_id": "r0-tp1-1q1s1",
        "case_hash": "0" * 16,
        "case": {"tp": 1},
        "backend": "torch",
        "status": "passed",
        "stages": [StageResult(name="lse", ok=True, checked=64, worst=worst)],
    }
    return CaseResult.model_validate(row | fields)


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    header = make_header("validate", ["validate"], capture_environment("cpu"), planned=1)
    with RunFolder.create(tmp_path, "validate") as folder:
        for row in (header, case_row(), RunEnd(finished="now", seconds=1.0, rows=1)):
            folder.append(row)
    run = read_run(folder.path)
    assert run.header == header
    assert run.cases == [case_row()]
    assert run.end is not None
    assert run.end.rows == folder.cases_written == 1
    assert not run.torn


def test_a_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "bench")
    folder.append(case_row())
    assert len(read_run(folder.path).cases) == 1  # the writer is still open
    folder.close()


@settings(deadline=None, max_examples=20)
@given(st.integers(min_value=1))
def test_a_torn_last_line_loses_only_itself(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name, RunFolder.create(name, "bench") as folder:
        folder.append(case_row())
        whole = folder.results.read_bytes()
        torn = whole + whole[: 1 + cut % (len(whole) - 2)]
        folder.results.write_bytes(torn)
        run = read_run(folder.path)
        assert run.torn
        assert run.cases == [case_row()]


def test_a_bad_line_in_the_middle_is_an_error_naming_it(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "bench") as folder:
        folder.append(case_row())
        whole = folder.results.read_text()
        folder.results.write_text(whole + "{broken\n" + whole)
    with pytest.raises(StoreError, match=r"results\.jsonl:2"):
        read_run(folder.path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_strict_json_and_come_back(tmp_path: Path, value: float) -> None:
    stage = StageResult(name="x", ok=False, checked=1, worst=value, detail={"deep": [value]})
    with RunFolder.create(tmp_path, "validate") as folder:
        folder.append(case_row(stages=[stage]))
    json.loads(folder.results.read_text(), parse_constant=refuse)
    back = read_run(folder.path).cases[0].stages[0].worst
    assert back is not None
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    paths = set()
    for _ in range(3):
        with RunFolder.create(tmp_path, "bench") as folder:
            paths.add(folder.path)
    assert len(paths) == 3


def test_an_out_that_is_a_file_is_one_line_and_nothing_written(tmp_path: Path) -> None:
    out = tmp_path / "taken"
    out.write_text("mine")
    with pytest.raises(StoreError, match=r"--out .*taken") as caught:
        RunFolder.create(out, "bench")
    assert "\n" not in str(caught.value)
    assert out.read_text() == "mine"


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="surprise"):
        case_row(surprise=1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"samples_us": [10.5, 11.0, 11.5]}, "step (cpu): median_us is 10, but the samples' is 11"),
        ({"median_us": 10.001}, "step (cpu): median_us is 10.001, but the samples' is 10"),
        ({"n": 4}, "step (cpu): n is 4, of another count of samples"),
        ({"samples_us": [], "n": 0}, "step (cpu): median_us is 10, of no samples"),
        ({"samples_us": [-9.5, 10.0, 10.5]}, "step (cpu): a sample is -9.5 us"),
        ({"q1_us": 11.0}, f"step (cpu): {NOT_OF_ONE_SET}"),
        ({"mad_us": -1.0}, f"step (cpu): {NOT_OF_ONE_SET}"),
    ],
)
def test_figures_that_the_samples_do_not_give_are_an_error_naming_the_line(
    change: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    timed = {
        "op": "step",
        "column": "cpu",
        "method": "perf_counter_ns",
        "samples_us": [9.5, 10.0, 10.5],
        "n": 3,
        "median_us": 10.0,
        "mad_us": 0.5,
        "q1_us": 9.75,
        "q3_us": 10.25,
        "min_us": 9.5,
        "ci_us": {"low": 9.5, "high": 10.5},
        "stop_reason": "target",
    }
    row = json.loads(case_row().model_dump_json())
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(row | {"measurements": [timed]}) + "\n")
    assert read_run(path).cases[0].measurements[0].median_us == 10.0
    path.write_text(json.dumps(row | {"measurements": [timed | change]}) + "\n")
    with pytest.raises(StoreError) as found:
        read_run(path)
    assert str(found.value) == f"{path}:1: case.measurements.0: {complaint}"
    path.write_text(json.dumps(row | {"measurements": [timed, timed]}) + "\n")
    with pytest.raises(StoreError, match=r":1: case: .* tells of step \(cpu\) twice"):
        read_run(path)


def test_a_file_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written = make_header("validate", ["validate"], capture_environment("cpu"), planned=1)
    header = json.loads(written.model_dump_json())
    path.write_text(json.dumps(header | {"schema_version": 2}) + "\n")
    with pytest.raises(StoreError, match="schema_version is 2: a later megabench wrote this"):
        read_run(path)


def test_the_environment_names_the_processor_and_the_libraries() -> None:
    environment = capture_environment("cpu")
    assert environment.device == "cpu"
    assert environment.device_name
    assert "torch" in environment.packages
    assert environment.cpu_count >= 1
