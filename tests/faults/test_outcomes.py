"""What a trial says of a fault that is not simply killed, and the command around it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from megabench.backends import TorchBackend
from megabench.cases import load_suite
from megabench.cli import cli
from megabench.faults import CATALOGUE, Fault, Finding, Trials
from megabench.faults.base import Args, Wear, after, before, fault
from megabench.faults.isolated import IsolatedTrials
from megabench.faults.triggers import TWO
from megabench.validate.trace import DECODE, EINSUM

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def judge() -> Callable[..., Finding]:
    trials = Trials(load_suite("faults").cases, "torch", CPU)

    def of(wear: Wear, **more: Any) -> Finding:
        return trials.of(replace(Fault("X0", "a test's own", TWO, ("some",), wear), **more))

    return of


@after(DECODE)
def padded_heads_differ(args: Args, result: Any) -> Any:
    result[2][:, -1] = 7.0
    return result


@after(DECODE)
def nothing_at_all(args: Args, result: Any) -> Any:
    return result


@before(EINSUM)
def weights_are_doubled(args: Args) -> None:
    args["w"] = args["w"][0], args["w"][1] + 0x01010101


@before(DECODE)
def lengths_of_another_type(args: Args) -> None:
    args["topk_length"] = args["topk_length"].double()


def test_what_no_stage_notices_survives(judge: Callable[..., Finding]) -> None:
    finding = judge(padded_heads_differ)
    assert (finding.outcome, finding.found_by) == ("survived", [])
    assert len(finding.checks) > 15


def test_what_changes_no_byte_has_no_trigger(judge: Callable[..., Finding]) -> None:
    finding = judge(nothing_at_all)
    assert (finding.outcome, finding.reason) == ("missing trigger", f"{TWO} is the same with it")


def test_a_trigger_that_is_not_among_the_cases_is_missing(judge: Callable[..., Finding]) -> None:
    finding = judge(weights_are_doubled, case="r1-nvfp4-tp1-9q1s9")
    assert finding.outcome == "missing trigger"
    assert finding.reason == "no case r1-nvfp4-tp1-9q1s9 among those given"


def test_a_fault_that_is_caught_disproves_its_equivalence(judge: Callable[..., Finding]) -> None:
    finding = judge(weights_are_doubled, kills=(), equivalent="because I say so")
    assert (finding.outcome, finding.reason) == (
        "error",
        "it is said to be equivalent, and it is not",
    )


def test_what_a_backend_refuses_is_killed_by_its_own_check(judge: Callable[..., Finding]) -> None:
    finding = judge(lengths_of_another_type)
    assert (finding.outcome, finding.found_by) == ("killed", ["raised"])
    assert finding.reason.startswith("ValueError: topk_length: expected torch.int32")


class Wrong(TorchBackend):
    """Wrong without any fault."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        return super().linear(x, w, sw) * 2


def test_no_fault_is_killed_on_a_backend_that_is_wrong_by_itself() -> None:
    trials = Trials(load_suite("faults").cases, f"{__name__}:Wrong", CPU)
    finding = trials.of(CATALOGUE["R3"])
    assert finding.outcome == "error"
    assert "is wrong: wq_b_linear" in finding.reason


class Broken(TorchBackend):
    """Raises without any fault."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")


def test_no_fault_is_killed_on_a_backend_that_raises_by_itself() -> None:
    finding = Trials(load_suite("faults").cases, f"{__name__}:Broken", CPU).of(CATALOGUE["R3"])
    assert finding.outcome == "error"
    assert finding.reason.endswith("raises RuntimeError: no such instruction (in linear)")


def test_two_faults_cannot_have_one_id() -> None:
    with pytest.raises(ValueError, match="R3 is registered twice"):
        fault("R3", "again", TWO, "lse_decode")(nothing_at_all)


def test_a_child_process_says_what_this_one_would_and_is_replaced_once_it_ended() -> None:
    isolated = IsolatedTrials(load_suite("faults").cases, "torch", CPU)
    finding = isolated.of(CATALOGUE["R3"])
    assert (finding.fault, finding.outcome) == (CATALOGUE["R3"], "killed")
    assert "lse_decode" in finding.found_by
    assert isolated._child is None  # without a GPU no child counts as sound
    broken = IsolatedTrials([], "torch", CPU)
    broken._arguments = ([], "torch", "no such device")
    assert broken.of(CATALOGUE["R3"]).outcome == "error"


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["faults", "--device", "cpu", *words])
    return result.exit_code, result.output


def test_the_command_lists_a_fault_its_outcome_and_its_checks() -> None:
    code, text = run("--fault", "R3")
    assert code == 0
    first, second, *_ = text.splitlines()
    assert first.split(maxsplit=2) == ["R3", "killed", CATALOGUE["R3"].says]
    assert "lse_decode" in second
    assert text.splitlines()[-1] == "1 fault: 1 killed"


def test_the_command_gives_every_check_as_json() -> None:
    code, text = run("--fault", "Q[12]", "--json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert code == 0
    assert [row["id"] for row in rows] == ["Q1", "Q2"]
    assert rows[0]["checks"]["q_layout"] is True
    assert rows[0]["checks"]["swa_cache"] is False


def test_a_missing_trigger_is_exit_code_1() -> None:
    code, text = run("--cases", "clean", "--fault", "R3")
    assert code == 1
    assert "missing trigger" in text


def test_fault_given_again_adds_those_of_either_glob() -> None:
    code, text = run("--cases", "clean", "--fault", "R3", "--fault", "R2")
    assert code == 1
    assert re.findall(r"^(R\d)", text, re.M) == ["R2", "R3"]


def test_a_fault_that_does_not_exist_is_a_usage_error_with_the_nearest() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megabench", "faults", "--fault", "D11"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no fault matches 'D11'" in done.stderr
