"""A policy file says what it means or is refused in one line that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabench.cases import CaseError
from megabench.gate.policy import Policy, load_policy
from megabench.results.names import OP_ORDER

NAMES = {"case": "r1-nvfp4-tp8-32q1s4k", "op": "wo_a", "backend": "triton", "column": "cold"}


def loaded(tmp_path: Path, text: str) -> Policy:
    file = tmp_path / "gate.yaml"
    file.write_text(text)
    return load_policy(file)


def test_the_default_is_five_processes_two_and_a_half_percent_and_a_third_of_a_microsecond() -> (
    None
):
    policy = load_policy(None)
    rule = policy.rule(**NAMES)
    assert policy.processes == 5
    assert (rule.relative, rule.absolute_us) == (0.025, 0.3)
    assert "eager" not in policy.columns


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert loaded(tmp_path, "") == Policy()


def test_a_later_matching_rule_overrides_what_it_names_and_inherits_the_rest(
    tmp_path: Path,
) -> None:
    policy = loaded(
        tmp_path,
        "time: {absolute_us: 0.4}\n"
        "rules:\n"
        "  - {op: 'wo_*', relative: 0.05}\n"
        "  - {case: '*-tp8-*', relative: 0.04, gated: false}\n"
        "  - {backend: torch, relative: 0.5}\n",
    )
    rule = policy.rule(**NAMES)
    assert (rule.relative, rule.absolute_us, rule.gated) == (0.04, 0.4, False)
    other = policy.rule(**NAMES | {"case": "r1-nvfp4-tp1-1q1s9"})
    assert (other.relative, other.gated) == (0.05, True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("procesess: 5\n", "gate.yaml:1: procesess: unknown key 'procesess'; did you mean 'proc"),
        ("time:\n  relativ: 0.1\n", "gate.yaml:2: time.relativ: unknown key 'relativ'; did you"),
        (
            "rules:\n  - {op: wo_a}\n  - {opp: wo_a}\n",
            "gate.yaml:3: rules.1.opp: unknown key 'opp'; did you mean 'op'?",
        ),
        (
            "correctness: {grow: 2}\n",
            "gate.yaml:1: correctness.grow: unknown key 'grow'; did you mean 'growth'?",
        ),
        ("columns: [cold, wram]\n", "unknown value 'wram'; did you mean 'warm'?"),
        ("missing: ignored\n", "unknown value 'ignored'; did you mean 'ignore'?"),
        ("time: {relative: 2.5}\n", "time.relative: must be"),
        ("processes: 3\n", "level 0.92 is out of reach of 3 processes"),
        ("rules: [{level: 0.99}]\n", "level 0.99 is out of reach of 5 processes"),
        ("- 1\n", "gate.yaml:1"),
        ("a: [\n", "not YAML"),
        ("time: {relative: 0.1}\ntime: {relative: 0.2}\n", "given twice"),
    ],
)
def test_a_bad_policy_is_one_line_that_names_file_line_key_and_the_nearest_name(
    tmp_path: Path, text: str, wanted: str
) -> None:
    with pytest.raises(CaseError) as caught:
        loaded(tmp_path, text)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_three_processes_are_enough_at_a_level_they_reach(tmp_path: Path) -> None:
    assert loaded(tmp_path, "processes: 3\ntime: {level: 0.7}\n").processes == 3


def test_rules_that_match_nothing_are_told() -> None:
    policy = Policy.model_validate({"rules": [{"op": "wo_a"}, {"op": "wo_z", "case": "r9-*"}]})
    (note,) = policy.idle_rules([("r1", "wo_a", "triton", "cold")])
    assert note == "rules.1 (case r9-*, op wo_z) matches nothing in this run"


def test_the_projects_own_policy_names_ops_and_columns_that_exist() -> None:
    policy = load_policy(Path(__file__).parents[2] / "reports" / "baselines" / "gate.yaml")
    times = [("case", op, "triton", column) for op in OP_ORDER for column in policy.columns]
    assert policy.idle_rules(times) == []
