"""The contract probe: what it accepts, what it calls a fault, and how doctor shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

from loading import PACKAGES, on_path, vllm_ops

from megabench.backends import TorchBackend
from megabench.backends.flashmla import probe
from megabench.backends.flashmla.schemas import DECODE, PERMUTE_Q_B, SCHEMAS
from megabench.cli import cli

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
REFUSED = {"ran": False, "equal": False, "error": "... is only supported on SM100f architectures."}


def child(output: str, code: int = 0) -> subprocess.Popen[str]:
    """A process that prints what a probed call would have printed."""
    source = f"import sys; print({output!r}); sys.exit({code})"
    return subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("source", ["vllm", "flash_mla"])
@pytest.mark.parametrize("name", [*SCHEMAS, *probe.GEMM_CALLS])
def test_the_calls_pass_every_precondition_and_are_exact(source: str, name: str) -> None:
    with on_path(PACKAGES), vllm_ops():
        assert probe.call(source, name, CPU) == probe.Called(True, True, "")


def test_a_differing_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(self: TorchBackend, *args: torch.Tensor) -> list[torch.Tensor]:
        return [args[0], args[1] ^ 1]

    monkeypatch.setattr(TorchBackend, PERMUTE_Q_B, flipped)
    with on_path(PACKAGES), vllm_ops():
        called = probe.call("vllm", PERMUTE_Q_B, CPU)
    assert (called.ran, called.equal) == (True, False)


@pytest.mark.parametrize(
    ("error", "capability", "ok"),
    [
        ("decode is only supported on SM100f architectures.", (9, 0), True),
        ("CUDA error: no kernel image is available for execution", (9, 0), True),
        ("Assertion error (layout.hpp:62): Unknown SF transformation", (9, 0), True),
        ("decode is only supported on SM100f architectures.", (10, 0), False),
        ("q must have shape (s_q, h_q, d_qk)", (9, 0), False),
        ("expected at most 21 argument(s) but received 23", (9, 0), False),
    ],
)
def test_a_refusal_counts_only_where_the_architecture_is_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: str, capability: tuple[int, int], ok: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    holds, said = probe._verdict(child(json.dumps(REFUSED | {"error": error})), CUDA)
    assert holds is ok
    assert ("refused for the architecture alone" in said) is ok
    assert ok or error in said


def test_a_call_that_ran_must_be_equal() -> None:
    for equal in (True, False):
        called = json.dumps({"ran": True, "equal": equal, "error": ""})
        assert probe._verdict(child(called), CPU)[0] is equal


def test_a_process_that_dies_is_a_fault_with_its_exit_code() -> None:
    assert probe._verdict(child("Segmentation fault", 139), CPU) == (
        False,
        "the process ended with 139: no output",
    )


def test_each_call_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    standins = [str(PACKAGES), str(PACKAGES.parent), str(PACKAGES.parents[2])]
    monkeypatch.setenv("PYTHONPATH", ":".join(standins))
    monkeypatch.setattr(probe, "SCHEMAS", {DECODE: SCHEMAS[DECODE]})
    monkeypatch.setattr(probe, "GEMM_CALLS", ("linear",))
    with on_path(PACKAGES):
        checks = {what: (ok, said) for what, ok, said in probe.probe_flashmla(CPU)}
    assert checks["flash_mla: call of " + DECODE] == (True, "ran, as eager torch")
    assert checks["deep_gemm: call of linear"][0]
    assert checks["flash_mla: library and schemas"][0]
    assert not checks["vllm: library and schemas"][0]


def test_without_a_gpu_the_ops_are_not_called_and_that_is_no_success() -> None:
    with on_path(PACKAGES):
        calls = [c for c in probe.probe_flashmla() if "call of" in c[0]]
    if not torch.cuda.is_available():
        assert [(ok, said) for _, ok, said in calls] == [(False, "not called: no CUDA device")] * (
            len(SCHEMAS) + len(probe.GEMM_CALLS)
        )


def test_the_compiler_that_is_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in ({"DG_JIT_USE_NVRTC": "1"}, {"DG_JIT_NVCC_COMPILER": sys.executable}):
        monkeypatch.delenv("DG_JIT_USE_NVRTC", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        (found,) = [c for c in probe.probe_flashmla(CPU) if c[0].endswith(": compiler")]
        named = "NVRTC" if "DG_JIT_USE_NVRTC" in environment else sys.executable
        assert found[1]
        assert found[2].startswith(named)


def test_doctor_prints_the_verdicts_and_fails_on_a_bad_one() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--probe", "layout", "--probe", "flashmla"])
    assert "torch on cpu: 7 readers and writers use interleaved pages" in done.output
    assert "BAD  vllm: library and schemas: vllm is not installed" in done.output
    assert done.exit_code == 1
    done = CliRunner().invoke(cli, ["doctor", "--probe", "layout", "--json"])
    assert done.exit_code == 0
    assert all(ok for _, ok, _ in json.loads(done.output)["probes"]["layout"])
