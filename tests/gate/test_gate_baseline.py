"""Baselines are small, sorted, honest files: read back as written, changed only when asked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from gate_runs import (
    BASE,
    DECODE,
    PREFILL,
    baseline,
    measurement,
    processes,
    row,
    run,
    write_all,
)

from megabench.gate import GateError, baseline_of, find_baseline
from megabench.gate.baseline import TimeEntry, entry_key, read_shard, shard_path
from megabench.gate.update import describe, plan_update
from megabench.results import Run


def both(us: float) -> Run:
    return run([row([measurement(us)]), row([measurement(2 * us)], case=PREFILL)])


def test_a_shard_reads_back_as_it_was_written(tmp_path: Path) -> None:
    planned = plan_update([both(us) for us in BASE], tmp_path)
    planned.write()
    assert planned.path == tmp_path / "nvidia-h200" / "h200.jsonl"
    assert read_shard(planned.path) == planned.new
    assert list(planned.path.parent.iterdir()) == [planned.path]


def test_an_error_that_is_no_number_reads_back_as_it_was(tmp_path: Path) -> None:
    runs = [run([row([measurement(us)], worst=math.inf)]) for us in BASE]
    plan = plan_update(runs, tmp_path)
    plan.write()
    assert read_shard(plan.path).entries == plan.new.entries


def test_a_shard_is_an_environment_line_then_sorted_facts(tmp_path: Path) -> None:
    planned = plan_update([both(us) for us in BASE], tmp_path)
    lines = [json.loads(line) for line in planned.new.text().splitlines()]
    assert lines[0]["kind"] == "baseline"
    assert lines[0]["environment"]["driver"] == "580.1"
    assert lines[0]["processes"] == 5
    keys = [entry_key(entry) for entry in planned.new.entries]
    assert keys == sorted(keys)
    assert len({line["kind"] for line in lines[1:]}) == 2  # correctness and time
    assert lines[-1]["case_hash"] in (DECODE.hash, PREFILL.hash)


def test_a_time_has_five_digits_and_whole_nanoseconds_in_a_shard() -> None:
    runs = processes((43142.52671, 20.000499, 4.70312, 0.123456, 1000.0499))
    (time,) = [e for e in baseline_of(runs).entries if isinstance(e, TimeEntry)]
    assert time.medians_us == [43143.0, 20.0, 4.703, 0.123, 1000.0]


def test_the_same_run_taken_twice_changes_nothing(tmp_path: Path) -> None:
    plan_update(processes(BASE), tmp_path).write()
    again = plan_update(processes(BASE), tmp_path)
    before = again.path.read_bytes()
    assert (again.added, again.changed, again.removed) == ([], [], [])
    again.write()
    assert again.path.read_bytes() == before


def test_the_order_of_a_run_does_not_change_its_shard() -> None:
    one = run([row([measurement(20.0)]), row([measurement(40.0)], case=PREFILL)])
    other = run([row([measurement(40.0)], case=PREFILL), row([measurement(20.0)])])
    assert baseline_of([one]).text() == baseline_of([other]).text()


def test_planning_writes_nothing_and_tells_every_change(tmp_path: Path) -> None:
    plan_update([both(us) for us in BASE], tmp_path).write()
    before = next(tmp_path.rglob("*.jsonl")).read_text()
    slower = plan_update(processes([22.0] * 5), tmp_path)
    text = "\n".join(describe(slower))
    assert f"~ {DECODE.id} triton step cold  20.00 us of 5 -> 22.00 us of 5 (+10.00 %)" in text
    assert "0 added, 1 changed, 0 removed, 2 of other cases kept" in text
    assert next(tmp_path.rglob("*.jsonl")).read_text() == before


def test_pruning_drops_cases_that_the_run_does_not_have(tmp_path: Path) -> None:
    plan_update([both(us) for us in BASE], tmp_path).write()
    pruned = plan_update(processes(BASE), tmp_path, prune=True)
    assert {entry.case_id for entry in pruned.new.entries} == {DECODE.id}
    assert {entry.case_id for entry in pruned.removed} == {PREFILL.id}


def test_an_op_that_is_gone_leaves_with_its_case(tmp_path: Path) -> None:
    extra = [run([row([measurement(us), measurement(us, op="wo_a")])]) for us in BASE]
    plan_update(extra, tmp_path).write()
    (removed,) = plan_update(processes(BASE), tmp_path).removed
    assert removed.op == "wo_a"


def test_another_environment_replaces_the_whole_shard_and_says_so(tmp_path: Path) -> None:
    plan_update([both(us) for us in BASE], tmp_path).write()
    newer = [run([row([measurement(us)])], driver="590.2") for us in BASE]
    planned = plan_update(newer, tmp_path)
    assert {entry.case_id for entry in planned.removed} == {PREFILL.id}
    assert "driver 580.1 -> 590.2" in "\n".join(describe(planned))


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        ([run([row(status="failed", reason="out: wrong")])], "out: wrong"),
        ([run([row(status="error", reason="RuntimeError: no")])], "RuntimeError: no"),
        (processes(BASE, problem="too fast to be true"), "too fast to be true"),
        ([run([row([measurement(20.0)])], ended=False)], "cut short"),
    ],
)
def test_a_wrong_or_unfinished_run_is_no_baseline(
    runs: list[Run], wanted: str, tmp_path: Path
) -> None:
    with pytest.raises(GateError, match=wanted):
        plan_update(runs, tmp_path)


def test_a_baseline_is_found_as_a_shard_a_folder_or_a_run(tmp_path: Path) -> None:
    shards, runs = tmp_path / "baselines", tmp_path / "run"
    planned = plan_update(processes(BASE), shards)
    planned.write()
    write_all(processes(BASE), runs)
    for path in (planned.path, shards, runs):
        assert find_baseline(path, "NVIDIA H200", "h200").entries == planned.new.entries
    one = next(runs.iterdir())
    for path in (one, one / "results.jsonl"):
        assert find_baseline(path, "NVIDIA H200", "h200").header.processes == 1


def test_a_folder_without_the_devices_shard_names_the_nearest(tmp_path: Path) -> None:
    plan_update(processes(BASE), tmp_path).write()
    with pytest.raises(GateError, match=r"nvidia-h100/h200.*nvidia-h200/h200"):
        find_baseline(tmp_path, "NVIDIA H100", "h200")
    with pytest.raises(GateError, match="no such baseline"):
        find_baseline(tmp_path / "gone", "NVIDIA H200", "h200")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "is empty"),
        ('{"kind":"run"}\n', "shard.jsonl:1"),
        ("{HEADER}\n{broken\n", "shard.jsonl:2"),
        ('{HEADER}\n{"kind":"time","surprise":1}\n', "shard.jsonl:2"),
        ("{HEADER}\n<<<<<<< HEAD\n", "shard.jsonl:2: Invalid JSON"),
        ("{HEADER}\n{TIME}\n{TIME}\n", "shard.jsonl:3: tells of the same as line 2"),
        ("{HEADER}\n{NOT_A_TIME}\n", "shard.jsonl:2: time.medians_us.0"),
        ("{HEADER}\n{NO_TIME}\n", "shard.jsonl:2: time.medians_us.0"),
    ],
)
def test_a_bad_shard_is_one_line_that_names_the_line(
    tmp_path: Path, text: str, wanted: str
) -> None:
    file = tmp_path / "shard.jsonl"
    made = baseline()
    time = made.entries[-1].model_dump_json()
    for name, line in (
        ("{HEADER}", made.header.model_dump_json()),
        ("{TIME}", time),
        ("{NOT_A_TIME}", time.replace("[20.0,", '["NaN",')),
        ("{NO_TIME}", time.replace("[20.0,", "[0.0,")),
    ):
        text = text.replace(name, line)
    file.write_text(text)
    with pytest.raises(GateError, match=wanted) as caught:
        read_shard(file)
    assert "\n" not in str(caught.value)


def test_a_shard_with_clocks_for_some_processes_alone_is_refused(tmp_path: Path) -> None:
    shard = tmp_path / "h200.jsonl"
    made = baseline().text()
    text = made.replace('"clocks_mhz":[1755.0,', '"clocks_mhz":[')
    assert text != made
    shard.write_text(text)
    with pytest.raises(GateError, match="4 clocks for 5 medians"):
        read_shard(shard)


def test_shards_of_two_devices_do_not_collide(tmp_path: Path) -> None:
    paths = {
        shard_path(tmp_path, name, "ci")
        for name in ("NVIDIA H200", "NVIDIA H200 NVL", "AMD EPYC 7763 64-Core Processor")
    }
    assert len(paths) == 3
    assert all(path.parent.parent == tmp_path for path in paths)
