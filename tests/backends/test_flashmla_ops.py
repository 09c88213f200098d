"""Our kernels under `torch.ops._flashmla_C`: results, order of loading, undoing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

import flashmla_c
from loading import on_path, vllm_ops
from standin_backend import StandinBackend

import megabench
from megabench.backends import BackendError, Support, TorchBackend
from megabench.backends.flashmla import ownership
from megabench.backends.flashmla.schemas import DECODE, PERMUTE_Q_B, PERMUTE_WV, PREFILL, SCHEMAS
from megabench.flashmla_ops import FlashmlaOpsWarning

STANDINS = Path(__file__).parents[1] / "standins"
OPS = torch.ops._flashmla_C


def permute() -> list[torch.Tensor]:
    """A call of the smallest op through torch.ops."""
    weight = torch.zeros(8 * 512, 128).to(torch.float8_e4m3fn)
    scale = torch.zeros(1, 8 * 512, dtype=torch.int32).t()
    result: list[torch.Tensor] = OPS.permute_q_b_proj(weight, scale, 8, 512)
    return result


class Marked(TorchBackend):
    """Answers a permute with a mark instead of a weight."""

    def permute_q_b_proj(self, *_: object) -> list[torch.Tensor]:
        return [torch.tensor(42)]


class Unsupported(TorchBackend):
    def supports(self, *_: object) -> Support:
        return Support(False, "no such silicon")


MARKED = f"{__name__}:Marked"


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_an_engines_calls_give_the_golden_result(backend: str) -> None:
    """In a process of its own, over no library and over the vendor's."""
    root = STANDINS.parents[1]
    path = os.pathsep.join([str(root), str(STANDINS), os.environ.get("PYTHONPATH", "")])
    # Without the interpreter that other tests of this folder ask for: an engine would not set it.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(STANDINS / "vllm_style.py"), backend],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "golden through torch.ops by torch" in done.stdout


def test_the_registered_schemas_are_the_vendors() -> None:
    with vllm_ops():
        vendor = {name: str(getattr(OPS, name).default._schema) for name in SCHEMAS}
    with megabench.register_flashmla_ops("torch"):
        assert {name: str(getattr(OPS, name).default._schema) for name in SCHEMAS} == vendor


def test_undoing_gives_the_vendors_kernels_back() -> None:
    with vllm_ops():
        vendor = permute()
        registration = megabench.register_flashmla_ops(MARKED)
        assert permute()[0].item() == 42
        registration.undo()
        registration.undo()
        assert not registration.active
        assert torch.equal(permute()[0].view(torch.uint8), vendor[0].view(torch.uint8))


def test_the_ops_stay_when_the_registration_is_dropped() -> None:
    """A plugin's function ends, and with it every name it gave."""
    megabench.register_flashmla_ops(MARKED)
    gc.collect()
    try:
        assert permute()[0].item() == 42
    finally:
        for library in ownership._claims:
            library._destroy()
        ownership.release()


def test_without_a_library_undoing_removes_the_ops() -> None:
    with megabench.register_flashmla_ops(MARKED):
        assert permute()[0].item() == 42
    assert not hasattr(OPS, PERMUTE_Q_B)
    with vllm_ops():
        assert len(permute()) == 2


def test_registering_twice_is_an_error_that_says_so() -> None:
    with (
        megabench.register_flashmla_ops("torch"),
        pytest.raises(RuntimeError, match=r"registered already; undo\(\)"),
    ):
        megabench.register_flashmla_ops("torch")


def test_a_vendor_library_after_ours_fails_to_load_and_before_it_does_not() -> None:
    with megabench.register_flashmla_ops("torch"), pytest.raises(RuntimeError, match="_flashmla_C"):
        flashmla_c.register()
    with vllm_ops(), warnings.catch_warnings():
        warnings.simplefilter("error")
        megabench.register_flashmla_ops("torch").undo()


def test_an_installed_vllm_that_is_not_loaded_yet_is_loaded_first_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('never imported')")
    (tmp_path / "vllm" / "_flashmla_C.abi3.so").write_text("")
    loaded: list[torch.library.Library] = []
    monkeypatch.setattr(
        torch.ops, "load_library", lambda path: loaded.append(flashmla_c.register())
    )
    with on_path(tmp_path):
        with pytest.warns(FlashmlaOpsWarning, match="after importing vllm's attention ops"):
            registration = megabench.register_flashmla_ops(MARKED)
        assert permute()[0].item() == 42
        registration.undo()
        assert len(permute()) == 2
    loaded[0]._destroy()


def test_a_vllm_that_does_not_load_is_said_to_stay_unloadable(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "_flashmla_C.abi3.so").write_text("not a library")
    with on_path(tmp_path):
        with pytest.warns(FlashmlaOpsWarning, match=r"does not load .* loading it later .* fails"):
            registration = megabench.register_flashmla_ops(MARKED)
        assert permute()[0].item() == 42
        registration.undo()


def test_where_the_vendors_kernels_run_nothing_is_done_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megabench.flashmla_ops._vendor_runs_here", lambda: True)
    with vllm_ops():
        with pytest.warns(FlashmlaOpsWarning, match="vendor's own kernels run on this device"):
            registration = megabench.register_flashmla_ops(MARKED)
        assert not registration.active
        assert registration.backends == {}
        assert len(permute()) == 2


def test_an_old_build_gets_the_ops_it_lacks() -> None:
    with vllm_ops(names=[DECODE, PREFILL]):
        with megabench.register_flashmla_ops(MARKED):
            assert permute()[0].item() == 42
            assert hasattr(OPS, PERMUTE_WV)
        assert not hasattr(OPS, PERMUTE_Q_B)
        assert hasattr(OPS, DECODE)


def test_a_vendor_op_with_an_unknown_schema_is_not_replaced() -> None:
    changed = flashmla_c.SCHEMAS[PREFILL].replace("int d_v", "int head_dim_v")
    with (
        vllm_ops(schemas={PREFILL: changed}),
        pytest.raises(RuntimeError, match=r"unknown schema.*ours cannot take its place"),
    ):
        megabench.register_flashmla_ops(MARKED)
    assert not hasattr(OPS, PERMUTE_Q_B)


def test_a_backend_that_runs_nowhere_is_named_and_nothing_stays_behind() -> None:
    with pytest.raises(BackendError, match="no such silicon"):
        megabench.register_flashmla_ops(f"{__name__}:Unsupported")
    with pytest.raises(BackendError, match="no such backend"):
        megabench.register_flashmla_ops("tritton")
    assert not hasattr(OPS, PERMUTE_Q_B)


@pytest.mark.parametrize("vendor", [vllm_ops, nullcontext])
def test_the_flashmla_backend_never_takes_our_kernels_for_the_vendors(
    vendor: Callable[[], AbstractContextManager[None]],
) -> None:
    with vendor(), megabench.register_flashmla_ops("torch"):
        backend = StandinBackend()
        assert backend.version is None
        with pytest.raises(RuntimeError, match="holds megabench's own kernels"):
            backend.permute_q_b_proj(torch.empty(0), torch.empty(0), 8, 512)
