"""Every fault of the catalogue: its trigger shows it, and the stages that must notice do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megabench.cases import load_suite
from megabench.cases.case import DEFAULT_MODEL
from megabench.faults import CATALOGUE, GROUPS, Fault, Trials, runtime, selection
from megabench.faults.base import replaced
from megabench.faults.kernel import Kernel, kernel
from megabench.faults.triggers import MIXED, SPACED

CPU = torch.device("cpu")
ANY = list(CATALOGUE.values())
HERE = [fault for fault in ANY if not fault.needs]

PUBLISHED = {"Q": 6, "R": 6, "G": 8, "D": 11, "S": 10, "I": 4, "C": 8, "L": 6, "E": 7, "P": 7}
PUBLISHED |= {"W": 6, "X": 6}
"""How many failure patterns of each group were collected from public reports."""


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials(load_suite("faults").cases, "torch", CPU)


@pytest.mark.parametrize("fault", HERE, ids=lambda fault: fault.id)
def test_a_fault_changes_bytes_and_its_stages_notice(fault: Fault, trials: Trials) -> None:
    finding = trials.of(fault)
    if fault.equivalent:
        assert finding.outcome == "equivalent", finding
        return
    # A fault whose trigger's bytes stay what they were would be "missing trigger".
    assert finding.outcome == "killed", finding
    assert set(fault.kills) <= set(finding.found_by), finding.checks


@pytest.mark.parametrize("fault", [f for f in ANY if f.needs], ids=lambda fault: fault.id)
def test_what_needs_a_gpu_is_not_counted_as_killed_without_one(
    fault: Fault, trials: Trials
) -> None:
    finding = trials.of(fault)
    assert (finding.outcome, finding.reason) == (
        "not runnable here",
        "needs cuda, this is cpu",
    )


@pytest.mark.parametrize(
    ("name", "module", "limit", "value", "case"),
    [
        ("G6", selection, "INT32_END", 1 << 14, SPACED),
        ("X1b", runtime, "GRID", 1, MIXED),
    ],
    ids=["G6", "X1b"],
)
def test_a_fault_of_large_sizes_is_killed_where_its_limit_is_small(
    name: str,
    module: ModuleType,
    limit: str,
    value: int,
    case: str,
    trials: Trials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, limit, value)
    finding = trials.of(replace(CATALOGUE[name], needs="", case=case))
    assert finding.outcome == "killed"
    assert set(CATALOGUE[name].kills) <= set(finding.found_by)


@pytest.mark.parametrize("group", PUBLISHED)
def test_every_published_failure_pattern_has_a_fault(group: str) -> None:
    numbers = {int(m[1]) for name in CATALOGUE if (m := re.fullmatch(rf"{group}(\d+)[a-z]?", name))}
    assert set(range(1, PUBLISHED[group] + 1)) <= numbers


def test_every_fault_has_a_group_a_sentence_and_stages_or_a_proof() -> None:
    for fault in ANY:
        assert fault.group in GROUPS.values()
        assert len(fault.says) > 10
        assert bool(fault.kills) != bool(fault.equivalent), fault.id
        assert fault.needs or not fault.equivalent or len(fault.equivalent) > 80


def test_the_case_file_holds_the_triggers_and_nothing_else() -> None:
    cases = load_suite("faults").cases
    plain = [case.model_copy(update={"model": DEFAULT_MODEL}).id for case in cases]
    assert set(plain) == {fault.case for fault in ANY}


def test_the_documentation_counts_them_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "validation.md").read_text(encoding="utf-8")
    equal, other = sum(bool(f.equivalent) for f in ANY), sum(bool(f.needs) for f in ANY)
    killed = len(ANY) - equal - other
    assert (
        f"{len(ANY)} faults: {killed} killed, none survived, {equal} equivalent, "
        f"{other} for a GPU." in " ".join(page.split())
    )


def test_the_kernel_that_faults_are_made_of_is_right(trials: Trials) -> None:
    class Plain(Kernel):
        """As it stands."""

    for case in sorted({fault.case for fault in HERE}):
        same = Fault("S0", "nothing is wrong", case, (), kernel(Plain))
        assert trials.of(same).outcome == "missing trigger", case


def test_a_patched_function_is_put_back_whatever_happens() -> None:
    class Owner:
        value = 1

    def broken() -> None:
        with replaced(Owner, "value", 2):
            assert Owner.value == 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert Owner.value == 1
