"""Finding the vendor's libraries: the order, the checks, and what is said when one is no good."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

import flashmla_c
from loading import PACKAGES, on_path, vllm_ops
from standin_backend import StandinBackend

from megabench.backends import Backend, BackendError, choose_backend, get_backend
from megabench.backends.flashmla import FlashmlaBackend, library_versions
from megabench.backends.flashmla.binding import find_attention
from megabench.backends.flashmla.gemm import compiler_problem, find_gemm
from megabench.backends.flashmla.schemas import DECODE, PERMUTE_Q_B, PREFILL, SCHEMAS
from megabench.cases import load_suite
from megabench.formats import NVFP4
from megabench.geometry import Geometry
from megabench.runs import backend_infos, resolve_backends

CPU = torch.device("cpu")


def package(folder: Path, name: str, source: str) -> Path:
    """A package `name` under `folder` whose __init__ is `source`; returns `folder`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder


def reason(backend: FlashmlaBackend | StandinBackend, device: torch.device = CPU) -> str:
    support = backend.supports(Geometry.load(), device, NVFP4)
    assert not support.ok
    assert support.reason is not None
    return support.reason


def test_the_known_schemas_are_the_protocols_methods() -> None:
    for name, schema in SCHEMAS.items():
        parameters = [*inspect.signature(getattr(Backend, name)).parameters][1:]
        assert [a.name for a in torch._C.parse_schema(schema).arguments] == parameters


def test_the_known_schemas_are_those_the_wheels_library_prints() -> None:
    assert {name: name + text for name, text in flashmla_c.SCHEMAS.items()} == SCHEMAS


def test_without_any_library_each_is_named_with_what_to_install() -> None:
    backend = FlashmlaBackend()
    assert backend.version is None
    assert "vllm is not installed" in reason(backend)
    assert "flash_mla is not installed; pip install --no-deps" in reason(backend)
    with pytest.raises(RuntimeError, match="flash_mla is not installed"):
        backend.permute_q_b_proj(torch.empty(0), torch.empty(0), 64, 512)
    with pytest.raises(RuntimeError, match="deep_gemm is not installed"):
        backend.fp8_einsum("bhr,hdr->bhd", (), (), torch.empty(0), (1, 1, 32))


def test_vllms_ops_are_taken_before_the_package() -> None:
    with on_path(PACKAGES), vllm_ops():
        library = find_attention("interleaved").library
        assert library is not None
        assert (library.name, library.in_place) == ("vllm _flashmla_C", True)
        assert StandinBackend().timing_note is None


def test_the_package_is_taken_without_vllm_and_its_copy_is_told() -> None:
    with on_path(PACKAGES):
        backend = StandinBackend()
        assert backend.supports(Geometry.load(), CPU, NVFP4).ok
        assert backend.timing_note is not None
        assert "one copy" in backend.timing_note
        assert library_versions() == {
            "flash_mla": "1.0.0+standin",
            "deep_gemm": "0.2.5+standin",
        }
        assert backend.version == "flash_mla 1.0.0+standin; deep_gemm 0.2.5+standin"


def test_libraries_alone_do_not_make_a_cpu_supported() -> None:
    with on_path(PACKAGES):
        assert reason(FlashmlaBackend()) == "FlashMLA mega attention requires a CUDA device."


@pytest.mark.parametrize(("capability", "ok"), [((10, 0), True), ((10, 3), True), ((9, 0), False)])
def test_only_device_family_10_is_supported(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], ok: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", sys.executable)
    with on_path(PACKAGES):
        support = FlashmlaBackend().supports(Geometry.load(), torch.device("cuda"), NVFP4)
    assert support.ok is ok
    if not ok:
        assert support.reason == "FlashMLA mega attention requires sm_10x GPUs; cuda is sm_90."


def test_an_sm100_without_a_compiler_is_told_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr("megabench.backends.flashmla.backend.compiler_problem", lambda: "no nvcc")
    with on_path(PACKAGES):
        assert reason(FlashmlaBackend(), torch.device("cuda")) == "no nvcc"
    with vllm_ops(names=[DECODE, PREFILL]):
        assert "predates" in reason(FlashmlaBackend(), torch.device("cuda"))


def test_nvcc_is_looked_for_where_deep_gemm_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("DG_JIT_NVCC_COMPILER", "JIT_NVCC_COMPILER", "CUDA_PATH", "DG_JIT_USE_NVRTC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert "set CUDA_HOME" in (compiler_problem() or "")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert compiler_problem() is None


def test_ops_without_mega_attention_are_too_old() -> None:
    with vllm_ops(names=[PERMUTE_Q_B]):
        # The namespace is the vendor's, whatever it holds.
        assert "built without the mega attention ops" in reason(StandinBackend())


def test_ops_without_the_permutes_are_too_old() -> None:
    with vllm_ops(names=[DECODE, PREFILL]):
        assert "predates the mega attention weight permutes" in reason(StandinBackend())


def test_an_op_with_an_unknown_schema_is_refused_and_the_package_taken() -> None:
    changed = flashmla_c.SCHEMAS[PREFILL].replace("int d_v", "int d_v, int page_layout")
    with vllm_ops(schemas={PREFILL: changed}):
        text = reason(StandinBackend())
        assert f"_flashmla_C.{PREFILL} has an unknown schema" in text
        assert "int page_layout" in text
        with on_path(PACKAGES):
            library = find_attention("interleaved").library
            assert library is not None
            assert library.name == "flash_mla"


def test_an_op_without_the_overload_we_call_is_refused() -> None:
    library = torch.library.Library("_flashmla_C", "DEF")
    try:
        for name, schema in flashmla_c.SCHEMAS.items():
            library.define(name + (".v2" if name == PREFILL else "") + schema)
        assert f"{PREFILL} has unknown overloads: ['v2']" in reason(StandinBackend())
    finally:
        library._destroy()


def test_a_vllm_whose_library_does_not_load_is_named(tmp_path: Path) -> None:
    package(tmp_path, "vllm", "raise AssertionError('vllm itself is never imported')")
    (tmp_path / "vllm" / "_flashmla_C.abi3.so").write_text("not a library")
    with on_path(tmp_path):
        text = reason(StandinBackend())
    assert "_flashmla_C.abi3.so does not load" in text
    assert "install the build for this torch and CUDA" in text


def test_a_vllm_built_without_flashmla_is_named(tmp_path: Path) -> None:
    with on_path(package(tmp_path, "vllm", "")):
        assert "was built without _flashmla_C" in reason(StandinBackend())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise OSError('libtorch_cuda.so: cannot open')", "does not load (libtorch_cuda.so"),
        ("import missing_dependency", "does not import (No module named 'missing_dependency')"),
        ("", "has no fused_norm_rope_attn_rope_cast: too old, or the empty PyPI package"),
        (
            "class fused_norm_rope_attn_rope_cast: decode = prefill = print",
            "predates the weight permutes",
        ),
        (
            "class fused_norm_rope_attn_rope_cast:\n"
            "    decode = prefill = permute_q_b_proj = permute_wv_proj = lambda q, kv: None",
            "decode has unknown arguments ('q', 'kv')",
        ),
        (
            "class fused_norm_rope_attn_rope_cast:\n"
            "    decode = prefill = permute_q_b_proj = permute_wv_proj = range",
            "decode has unknown arguments ()",
        ),
        ("import sys; sys.exit('no GPU')", "does not load (no GPU)"),
    ],
)
def test_a_bad_flash_mla_is_named_with_its_fault(tmp_path: Path, source: str, text: str) -> None:
    with on_path(package(tmp_path, "flash_mla", source)):
        assert text in reason(StandinBackend())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise OSError('libnvrtc.so.13: cannot open')", "OSError: libnvrtc.so.13: cannot open"),
        ("assert None is not None", "set CUDA_HOME"),
        ("import sys; sys.exit('no GPU')", "SystemExit: no GPU"),
        ("def fp8_einsum(): ...", "has no fp8_gemm_nt"),
    ],
)
def test_a_bad_deep_gemm_is_named_with_its_fault(tmp_path: Path, source: str, text: str) -> None:
    with on_path(package(tmp_path, "deep_gemm", source)):
        search = find_gemm()
        assert search.library is None
        assert text in search.reason
        with vllm_ops():
            assert text in reason(StandinBackend())


def test_vllms_bundled_deep_gemm_is_the_second_choice(tmp_path: Path) -> None:
    package(tmp_path, "vllm", "")
    (tmp_path / "vllm" / "third_party").mkdir()
    bundled = "__version__ = '2.8.1'\nfp8_einsum = fp8_gemm_nt = print"
    package(tmp_path / "vllm" / "third_party", "deep_gemm", bundled)
    with on_path(tmp_path):
        library = find_gemm().library
        assert library is not None
        assert (library.name, library.version) == ("vllm.third_party.deep_gemm", "2.8.1")


def test_page_split_caches_need_the_packages_legacy_kernels() -> None:
    with on_path(PACKAGES), vllm_ops():
        text = reason(StandinBackend("page_split"))
    assert "reads interleaved pages only" in text
    assert "no legacy kernels to read page_split" in text


def test_auto_goes_on_to_the_next_backend_and_says_why() -> None:
    name, refused = choose_backend(Geometry.load(), CPU, NVFP4)
    assert name != "flashmla"
    assert "flash_mla is not installed" in refused["flashmla"]
    assert get_backend("flashmla").name == "flashmla"


def test_a_run_that_names_the_backend_stops_and_one_that_says_auto_goes_on() -> None:
    cases = load_suite("smoke").cases
    with pytest.raises(BackendError, match=r"flashmla on cpu: .*flash_mla is not installed"):
        resolve_backends(["flashmla"], cases, CPU)
    (chosen,) = resolve_backends(["auto"], cases, CPU)
    assert chosen != "flashmla"


def test_a_run_records_the_libraries_it_used() -> None:
    with on_path(PACKAGES), vllm_ops():
        (info,) = backend_infos(["standin_backend:StandinBackend"], CPU)
    assert info.supported
    assert info.version is not None
    assert re.fullmatch(r"vllm _flashmla_C .+; deep_gemm 0\.2\.5\+standin", info.version)
