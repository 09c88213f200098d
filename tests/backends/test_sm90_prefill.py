"""The sm90 prefill without a GPU: it compiles, fits its launcher, and which calls reach it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_cases import (
    HEADS,
    TOKENS,
    attention_arguments,
    check_resources,
    compile_cuda,
    mirror,
    needs_nvcc,
)

from megabench.backends.sm90 import prefill_launch as launch
from megabench.backends.sm90.backend import Sm90Backend
from megabench.backends.sm90.nvrtc import SOURCE_DIR, sources
from megabench.backends.triton.backend import TritonBackend

TOPK = 192
DECLARED_SPILL_BYTES = 32
"""Spills the schedule accepts: addresses of the loader, once an item."""


@needs_nvcc
def test_the_prefill_kernel_compiles_without_undeclared_spills_or_serialised_products(
    tmp_path: Path,
) -> None:
    log = compile_cuda(SOURCE_DIR / launch.ENTRY, tmp_path)
    check_resources(log, launch.KERNEL, launch.THREADS, DECLARED_SPILL_BYTES)
    assert not re.search(r"C75\d\d", log), log


@needs_nvcc
def test_the_launcher_and_the_prefill_kernel_lay_parameters_out_alike(tmp_path: Path) -> None:
    lines = ['#include "prefill_layout.cuh"', "#include <cstddef>"]
    lines += mirror(launch.PrefillParams, "Params")
    lines.append(f"static_assert(kThreads == {launch.THREADS} && kHeads == {launch.HEAD_TILE});")
    lines.append(f"static_assert(kSmemBytes <= {launch.SHARED_BYTES});")
    roles = "kLoaderRegisters + kScoreRegisters + 2 * kOutputRegisters"
    lines.append(f"static_assert(({roles}) * kRoleThreads <= 65536);")
    source = tmp_path / "layout_check.cu"
    source.write_text("\n".join(lines))
    compile_cuda(source, tmp_path)


def test_every_header_travels_with_the_prefill_source() -> None:
    files = sources(launch.ENTRY)
    included = {
        name for text in files.values() for name in re.findall(r'#include "(\S+)"', text.decode())
    }
    assert included <= files.keys()


def call(**changes: Any) -> dict[str, Any]:
    """Arguments of a prefill call that the kernel serves."""
    arguments = attention_arguments() | {
        "kv": torch.zeros(40, 1, 512, dtype=torch.bfloat16),
        "indices": torch.zeros(TOKENS, 1, TOPK, dtype=torch.int32),
    }
    return arguments | changes


class FakeKernel:
    """Records the parameter block instead of launching."""

    def __init__(self) -> None:
        self.params: Any = None

    def launch(self, params: Any) -> None:
        self.params = params


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel()
    monkeypatch.setattr(launch, "launch", lambda params, index: kernel.launch(params))
    monkeypatch.setattr(TritonBackend, "prefill", lambda self, arguments: ["inherited"])
    return kernel


def test_a_served_prefill_reaches_the_kernel_with_its_strides(launched: FakeKernel) -> None:
    out = Sm90Backend().fused_norm_rope_attn_rope_cast_fwd(**call())
    shapes = [(TOKENS, 8, 4096), (TOKENS, 8, 32), (TOKENS, HEADS), (TOKENS, HEADS)]
    assert [tuple(t.shape) for t in out] == shapes
    params = launched.params
    assert (params.items, params.head_tiles, params.s_kv, params.topk) == (TOKENS, 1, 40, TOPK)
    assert (params.q_stride, params.index_stride) == (HEADS * 512, TOPK)
    assert (params.scale_word, params.scale_group) == (4, 128)
    assert (params.max_logits, params.lse) == (out[2].data_ptr(), out[3].data_ptr())


def test_a_prefill_slice_of_a_step_keeps_the_steps_strides(launched: FakeKernel) -> None:
    data = torch.zeros(8, 8, 4096, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(8, 32, 12, dtype=torch.int32).permute(2, 0, 1)[:8]
    part = call(out_fp8=data[2:5], out_sf=scale[2:5])
    Sm90Backend().fused_norm_rope_attn_rope_cast_fwd(**part)
    params = launched.params
    assert (params.out, params.scales) == (data[2:].data_ptr(), scale[2:].data_ptr())
    assert (params.scale_word, params.scale_group) == (12, 32 * 12)


def test_each_head_tile_of_a_128_head_prefill_is_an_item(launched: FakeKernel) -> None:
    q = torch.zeros(TOKENS, 128, 512, dtype=torch.bfloat16)
    wide = call(q=q, attn_sink=None, n_wv_group=16)
    Sm90Backend().fused_norm_rope_attn_rope_cast_fwd(**wide)
    assert (launched.params.items, launched.params.head_tiles) == (2 * TOKENS, 2)
    assert launched.params.sink is None


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_q_norm": True},
        {"sm_scale": -1.0},
        {"kv": torch.zeros(0, 1, 512, dtype=torch.bfloat16)},
        {"indices": torch.zeros(TOKENS, 1, 256, dtype=torch.int32)[..., ::2]},
        {"topk_length": torch.ones(2 * TOKENS, dtype=torch.int32)[::2]},
        {"kv": torch.zeros(41 * 512, dtype=torch.bfloat16)[4 : 4 + 40 * 512].view(40, 1, 512)},
    ],
    ids=[
        "q norm",
        "negative scale",
        "no rows",
        "strided indices",
        "strided lengths",
        "unaligned rows",
    ],
)
def test_other_prefills_go_to_the_inherited_op(
    launched: FakeKernel, changes: dict[str, Any]
) -> None:
    out = Sm90Backend().fused_norm_rope_attn_rope_cast_fwd(**call(**changes))
    assert out == ["inherited"]
    assert launched.params is None


def test_no_tokens_go_to_the_inherited_op(launched: FakeKernel) -> None:
    none = call(
        q=torch.zeros(0, HEADS, 512, dtype=torch.bfloat16),
        indices=torch.zeros(0, 1, TOPK, dtype=torch.int32),
        topk_length=None,
        token_positions=torch.zeros(0, dtype=torch.int32),
    )
    assert Sm90Backend().fused_norm_rope_attn_rope_cast_fwd(**none) == ["inherited"]


@pytest.mark.parametrize("live", [8, 64])
def test_any_number_of_live_heads_is_served(launched: FakeKernel, live: int) -> None:
    out = Sm90Backend().for_live_heads(live).fused_norm_rope_attn_rope_cast_fwd(**call())
    assert isinstance(out[0], torch.Tensor)
    assert launched.params.items == TOKENS
