"""Case files and the batch grammar: strict, stable, and errors a person can act on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megabench.cases import (
    Case,
    CaseError,
    Request,
    at_seeds,
    load_suite,
    packaged_suites,
    parse_batch,
)

PACKAGED = [path.stem for path in packaged_suites()]


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


# ---- batch grammar ----------------------------------------------------------


def test_the_issue_example_is_decodes_then_prefills() -> None:
    requests = parse_batch("32q1s4k_2q2k")
    assert requests == [Request(1, 4096, True)] * 32 + [Request(2048, 2048, False)] * 2


def test_decodes_come_first_and_each_kind_keeps_its_order() -> None:
    requests = parse_batch("q3_1q1s9_q1_2q1s8")
    assert [(r.query_len, r.seq_len) for r in requests] == [(1, 9), (1, 8), (1, 8), (3, 3), (1, 1)]


@pytest.mark.parametrize(
    ("text", "threshold", "decode"),
    [("3q4s1k", 1, False), ("3q4s1k", 4, True), ("3q5s1k", 4, False), ("q4", 4, False)],
)
def test_a_decode_is_short_and_has_a_prefix(text: str, threshold: int, decode: bool) -> None:
    assert all(r.is_decode is decode for r in parse_batch(text, threshold))


def test_a_count_of_zero_is_the_empty_step() -> None:
    assert parse_batch("0q1") == []
    assert Case(batch="0q1").num_tokens == 0


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 8),
)
def test_every_written_batch_parses_to_what_was_written(
    parts: list[tuple[int, int, int, bool]], threshold: int
) -> None:
    text = "_".join(
        f"{n}q{q}k" + (f"s{q + extra}k" if extra or full else "") for n, q, extra, full in parts
    )
    wanted = sorted((q * 1024, (q + extra) * 1024) for n, q, extra, _ in parts for _ in range(n))
    requests = parse_batch(text, threshold)
    assert sorted((r.query_len, r.seq_len) for r in requests) == wanted


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1q8s4", "'1q8s4'.*below"),
        ("2q1s9_1q", "'1q'"),
        ("1q0", "at least one query"),
        ("", "''"),
        ("1q1_", "''"),
        ("1q1s2m", "'1q1s2m'"),
        ("-1q1", "'-1q1'"),
        ("1q1s5 ", "'1q1s5 '"),
        ("999999999q1", "'999999999q1'.*at most"),
        ("1q1_1048576q1", "'1048576q1'.*at most"),
    ],
)
def test_a_bad_batch_names_its_part(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_batch(text)


# ---- cases ------------------------------------------------------------------


def test_ids_name_what_differs_from_the_defaults() -> None:
    plain = Case(batch="32q1s4k", kv_cache="nvfp4_ds_mla")
    assert plain.id == "r1-nvfp4-tp1-32q1s4k"
    odd = plain.model_copy(update={"seed": 3, "sink": "inf", "page_layout": "page_split"})
    assert odd.id == "r1-nvfp4-tp1-32q1s4k-split-sink.inf-seed3"


def test_the_hash_ignores_key_order_suite_and_path_of_the_model(tmp_path: Path) -> None:
    first = Case(batch="1q1s9", tp=2, seed=1, suite="a")
    second = Case(suite="b", seed=1, tp=2, batch="1q1s9")
    copied = tmp_path / "elsewhere.json"
    packaged = Path(sys.modules["megabench.cases.case"].__file__ or "").parent.parent / "data"
    copied.write_text((packaged / "deepseek-v4.1-flash.config.json").read_text())
    third = first.model_copy(update={"model": str(copied)})
    assert first.hash == second.hash == third.hash
    assert first.hash != first.model_copy(update={"seed": 2}).hash


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "from megabench.cases import Case; print(Case(batch='2q1s300_1q4', tp=4).hash)"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parent.parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert runs == {Case(batch="2q1s300_1q4", tp=4).hash + "\n"}


def test_padding_tokens_need_a_batch_of_decodes() -> None:
    assert Case(batch="2q1s9", padding_tokens=3).num_tokens == 5
    for batch in ("2q1s9_1q4", "0q1"):
        with pytest.raises(ValidationError, match="decodes only"):
            Case(batch=batch, padding_tokens=3)


# ---- case files -------------------------------------------------------------


@pytest.mark.parametrize("name", PACKAGED)
def test_every_packaged_file_loads_with_unique_ids_and_hashes_within_its_budget(name: str) -> None:
    suite = load_suite(name)
    assert len({case.id for case in suite.cases}) == len(suite.cases)
    assert len({case.hash for case in suite.cases}) == len(suite.cases)
    assert suite.num_tokens <= (suite.token_budget or 300_000)


def test_ci_covers_what_it_must_within_its_budget() -> None:
    suite = load_suite("ci")
    cases = suite.cases
    assert len(cases) >= 200
    assert suite.num_tokens <= 20_000
    assert {c.tp for c in cases} >= {1, 2, 4, 8, 16}
    assert {(c.compress_ratio, c.record.name, c.page_layout) for c in cases} >= {
        (r, kv, layout)
        for r in (0, 1, 2)
        for kv in ("fp8_ds_mla", "nvfp4_ds_mla")
        for layout in ("interleaved", "page_split")
    }
    kinds = {
        (any(r.is_decode for r in c.requests), any(not r.is_decode for r in c.requests))
        for c in cases
    }
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}
    assert {"matched", "none", "inf", "large"} <= {c.sink for c in cases}
    lengths = {r.seq_len for c in cases for r in c.requests if r.is_decode}
    assert lengths >= {127, 128, 129, 511, 512, 513, 1023, 1024, 1025}
    assert any(r.is_decode and r.query_len > 1 for c in cases for r in c.requests)
    assert any(c.page_padding for c in cases)
    assert any(c.padding_tokens for c in cases)


def test_smoke_has_each_ratio_with_both_records_and_both_tp_ends() -> None:
    cases = load_suite("smoke").cases
    assert len(cases) >= 12
    assert len({(c.compress_ratio, c.record) for c in cases}) == 6
    assert {c.tp for c in cases} == {1, 8}
    assert any(not c.requests for c in cases)


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_the_device_files_have_the_published_grid(device: str) -> None:
    cases = load_suite(device).cases
    grid = {(c.batch, c.tp) for c in cases if c.record.name == "nvfp4_ds_mla"}
    batches = [f"{n}q1s4k" for n in (1, 32, 128, 256, 512)]
    assert grid >= {(batch, tp) for batch in batches for tp in (1, 2, 4, 8)}


@pytest.mark.parametrize("name", ["smoke", "smoke.yaml", "cases/smoke.yaml"])
def test_a_packaged_file_is_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_suite(name).name == "smoke"


def test_axes_are_crossed_excluded_and_included_over_the_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        defaults: {sink: none, tp: 8}
        axes:
          compress_ratio: [1, 2]
          batch: [1q1s9, q4]
        exclude:
          - {compress_ratio: 2, batch: q4}
        include:
          - {batch: q5, tp: [1, 2]}
        """,
    )
    cases = load_suite(path).cases
    assert [(c.compress_ratio, c.batch, c.tp, c.sink) for c in cases] == [
        (1, "1q1s9", 8, "none"),
        (1, "q4", 8, "none"),
        (2, "1q1s9", 8, "none"),
        (1, "q5", 1, "none"),
        (1, "q5", 2, "none"),
    ]


def test_a_model_is_read_relative_to_its_case_file() -> None:
    assert {case.requests[0].seq_len for case in load_suite("wide").cases} == {300, 600}
    assert all("128-heads" in case.id for case in load_suite("wide").cases)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("axess: {batch: 1q1}", ":1: axess: unknown key 'axess'; did you mean 'axes'?"),
        ("axes:\n  batch: 1q1\n  kv_cach: auto", ":3: axes.kv_cach: .*did you mean 'kv_cache'"),
        ("axes:\n  batch: 1q1\n  kv_cache:\n  - auto\n  - nvfp8_ds_mla", ":5: .*'nvfp4_ds_mla'"),
        ("defaults:\n  sink: nome\naxes: {batch: 1q1}", ":2: defaults.sink: .*'none'"),
        ("axes:\n  batch: [1q1, 4q8s4]", r":2: axes\.batch\.1: part '4q8s4'"),
        ("axes: {tp: 1}", ":1: axes: no batch"),
        ("axes: {batch: 1q1, tp: '8'}", ":1: axes.tp.0: must be a valid integer, not '8'"),
        ("axes: {batch: 1q1, tp: 0}", "greater than or equal to 1, not 0"),
        ("\nmodel: deepsek\naxes: {batch: 1q1}", ":2: model: .*did you mean 'deepseek-v4.1-flash'"),
        ("axes: {batch: 1q1, batch: 2q1}", ":1: key 'batch' is given twice"),
        ("axes: {batch: [1q1, 1q1]}", "r1-auto-tp1-1q1 is listed twice"),
        ("token_budget: 3\naxes: {batch: q4}", ":1: token_budget: the cases have 4 tokens"),
        ("axes: [1", ":1: not YAML"),
        ("a: &a [*a]", "nested too deeply"),
        ("- 1", ":1: must be a valid dictionary, not a list"),
        ("", ":1: no case is left"),
    ],
)
def test_a_bad_file_gives_one_line_with_file_line_and_key(
    text: str, wanted: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(CaseError, match=wanted) as caught:
        load_suite(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_an_unreadable_model_config_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    path = write(tmp_path, "axes: {batch: 1q1}\nmodel: broken.json")
    with pytest.raises(CaseError, match=r"mine\.yaml:2: model: .*broken\.json is not JSON"):
        load_suite(path)


def test_a_model_config_nested_without_end_is_an_error_of_the_case_file(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(CaseError, match=r":2: model: .*deep\.json is not JSON"):
        load_suite(write(tmp_path, "axes: {batch: 1q1}\nmodel: deep.json"))


def test_a_missing_file_names_the_nearest_one() -> None:
    with pytest.raises(CaseError, match="'smok' does not exist; did you mean 'smoke'"):
        load_suite("smok")


def test_a_folder_in_place_of_a_case_file_is_told_with_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path, "axes: {batch: 1q1}")
    with pytest.raises(CaseError, match=r"is a folder, not a case file; it holds mine\.yaml"):
        load_suite(tmp_path)


def test_a_glob_that_matches_nothing_names_the_nearest_case() -> None:
    suite = load_suite("smoke")
    assert len(suite.select("r0-*")) == 3
    with pytest.raises(CaseError, match="did you mean 'r1-nvfp4-tp1-1q4'"):
        suite.select("r1-nvfp4-tp1-1q4x")


def test_several_globs_choose_what_any_of_them_matches_once() -> None:
    suite = load_suite("smoke")
    both = suite.select("r0-*", "r1-*", "r0-fp8-*")
    assert both == [*suite.select("r0-*"), *suite.select("r1-*")]
    assert suite.select() == suite.cases
    with pytest.raises(CaseError, match="no case matches 'r9-"):
        suite.select("r0-*", "r9-*")


def test_a_case_is_repeated_at_its_own_seed_and_the_next_ones_once(tmp_path: Path) -> None:
    text = "axes: {batch: [q1, q2], seed: [0, 1]}\n"
    cases = at_seeds(load_suite(write(tmp_path, text)).cases, 2)
    assert [case.id for case in cases] == [
        f"r1-auto-tp1-{batch}{seed}" for batch in ("q1", "q2") for seed in ("", "-seed1", "-seed2")
    ]


def test_an_id_with_a_seed_names_a_listed_case_at_that_seed(tmp_path: Path) -> None:
    suite = load_suite(write(tmp_path, "axes: {batch: [q1, q2]}\n"))
    (found,) = suite.select("r1-auto-tp1-q2-seed7")
    assert found == suite.cases[1].model_copy(update={"seed": 7})
    with pytest.raises(CaseError, match="no case matches"):
        suite.select("r1-auto-tp1-q3-seed7")
