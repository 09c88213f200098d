"""The sm90 backend: where it says it runs, and which calls it leaves to the inherited op."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_cases import HEADS, TOKENS, attention_arguments

from megabench.backends.sm90 import backend as module
from megabench.backends.sm90 import nvrtc
from megabench.backends.sm90.backend import Sm90Backend
from megabench.backends.sm90.decode_launch import Shape
from megabench.backends.triton.backend import TritonBackend
from megabench.formats import FP8, NVFP4, V4_FP8
from megabench.geometry import Geometry


def call(**changes: Any) -> dict[str, Any]:
    """Arguments of a decode call that the kernel serves."""
    arguments = attention_arguments() | {
        "kv": torch.zeros(4, 32, 1, FP8.nbytes, dtype=torch.uint8),
        "indices": torch.zeros(TOKENS, 128, dtype=torch.int32),
        "extra_kv": torch.zeros(2, 64, 1, NVFP4.nbytes, dtype=torch.uint8),
        "extra_indices": torch.zeros(TOKENS, 512, dtype=torch.int32),
        "extra_topk_length": None,
    }
    return arguments | changes


class FakeKernel:
    """Records the parameter block instead of launching."""

    def __init__(self) -> None:
        self.params: Any = None

    def shape_for(self, items: int, blocks: int) -> Shape:
        return Shape()

    def launch(self, params: Any, shape: Shape) -> None:
        self.params = params


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel()
    monkeypatch.setattr(module, "decode_kernel", lambda index, fp4: kernel)
    monkeypatch.setattr(
        TritonBackend,
        "decode",
        lambda self, arguments: ["inherited", arguments],
    )
    return kernel


def test_a_served_call_reaches_the_kernel_with_its_strides(launched: FakeKernel) -> None:
    out = Sm90Backend().fused_norm_rope_attn_rope_cast_decode(**call())
    assert [tuple(t.shape) for t in out] == [(TOKENS, 8, 4096), (TOKENS, 8, 32), (TOKENS, HEADS)]
    params = launched.params
    assert (params.items, params.head_tiles) == (TOKENS, 1)
    assert list(params.page) == [32, 64]
    assert list(params.page_stride) == [32 * 33, 64 * 18]
    assert list(params.slots) == [128, 128]
    assert (params.scale_word, params.scale_group) == (4, 128)
    assert params.lengths[1] is None


def test_each_head_tile_of_128_heads_is_an_item(launched: FakeKernel) -> None:
    wide = call(
        q=torch.zeros(TOKENS, 128, 512, dtype=torch.bfloat16),
        attn_sink=None,
        n_wv_group=16,
    )
    Sm90Backend().fused_norm_rope_attn_rope_cast_decode(**wide)
    assert (launched.params.items, launched.params.head_tiles) == (2 * TOKENS, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_q_norm": True},
        {"sm_scale": -1.0},
        {"kv": torch.zeros(0, 32, 1, FP8.nbytes, dtype=torch.uint8)},
        {"indices": torch.zeros(TOKENS, 256, dtype=torch.int32)[:, ::2]},
        {"topk_length": torch.ones(2 * TOKENS, dtype=torch.int32)[::2]},
    ],
    ids=["q norm", "negative scale", "empty pool", "strided indices", "strided lengths"],
)
def test_other_calls_go_to_the_inherited_op(launched: FakeKernel, changes: dict[str, Any]) -> None:
    out = Sm90Backend().fused_norm_rope_attn_rope_cast_decode(**call(**changes))
    assert out[0] == "inherited"
    assert launched.params is None


def test_page_split_goes_to_the_inherited_op(launched: FakeKernel) -> None:
    split = Sm90Backend("page_split").fused_norm_rope_attn_rope_cast_decode(**call())
    assert split[0] == "inherited"


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("live", [8, 64])
def test_the_kernel_serves_any_number_of_tokens_and_live_heads(
    launched: FakeKernel, tokens: int, live: int
) -> None:
    names = ("q", "indices", "topk_length", "extra_indices", "token_positions")
    changes = {name: call()[name][:tokens] for name in names}
    backend = Sm90Backend().for_live_heads(live)
    out = backend.fused_norm_rope_attn_rope_cast_decode(**call(**changes))
    assert isinstance(out[0], torch.Tensor)
    assert launched.params.items == tokens


def test_no_token_launches_nothing(launched: FakeKernel) -> None:
    names = ("q", "indices", "topk_length", "extra_indices", "token_positions")
    changes = {name: call()[name][:0] for name in names}
    out = Sm90Backend().fused_norm_rope_attn_rope_cast_decode(**call(**changes))
    assert out[0] == "inherited"


def test_a_misuse_is_named_before_anything_runs(launched: FakeKernel) -> None:
    with pytest.raises(ValueError, match="rope_dim"):
        Sm90Backend().fused_norm_rope_attn_rope_cast_decode(**call(rope_dim=32))
    assert launched.params is None


def test_it_says_why_it_does_not_run_here() -> None:
    geometry, cpu = Geometry.load(), torch.device("cpu")
    assert Sm90Backend().supports(geometry, cpu, FP8).reason
    assert V4_FP8.name in str(Sm90Backend().supports(geometry, cpu, V4_FP8).reason)


def test_a_missing_compiler_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(nvrtc.KernelBuildError, match="cuda-bindings"):
        nvrtc.bindings()


def test_a_failed_call_names_its_status() -> None:
    class Status(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    with pytest.raises(nvrtc.KernelBuildError, match="launch failed with CUDA_ERROR_INVALID_VALUE"):
        nvrtc.check((Status(1),), "launch")
    assert nvrtc.check((Status(0), 7), "launch") == 7


def test_line_tables_are_compiled_in_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Compiler:
        def nvrtcVersion(self) -> tuple[int, int, int]:  # noqa: N802 - the binding's name
            return 0, 13, 0

    def compiled(_entry: str, _files: dict[str, bytes], options: tuple[str, ...]) -> bytes:
        return repr(options).encode()

    monkeypatch.setattr(nvrtc, "bindings", lambda: (None, Compiler()))
    monkeypatch.setattr(nvrtc, "_compile", compiled)
    monkeypatch.setenv("MEGABENCH_CACHE", str(tmp_path))
    images = []
    for wanted in ("0", "1"):
        monkeypatch.setenv("MEGABENCH_LINE_INFO", wanted)
        images.append(nvrtc.cubin.__wrapped__("decode.cu"))
    assert [b"line-info" in image for image in images] == [False, True]
    assert len(list(tmp_path.iterdir())) == 2
