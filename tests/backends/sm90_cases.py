"""What the tests of the sm90 kernels share: compiling, parameter blocks, arguments of attention."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megabench.backends.sm90.nvrtc import ARCH, SOURCE_DIR

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
REGISTERS = 65_536
"""Of a multiprocessor, which one CTA of each kernel takes whole."""
TOKENS, HEADS = 3, 64

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler here")


def compile_cuda(source: Path, folder: Path, *options: str) -> str:
    """The compiler's messages; fails the test where it refuses the source."""
    command = [str(NVCC), f"-gencode=arch=compute_{ARCH[3:]},code={ARCH}", "-cubin", "-std=c++17"]
    command += ["-Xptxas", "-v", "-I", str(SOURCE_DIR), *options, "-o", str(folder / "out.cubin")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def mirror(structure: type[ctypes.Structure], name: str) -> list[str]:
    """Assertions that a C++ structure is laid out like its mirror."""
    lines = [f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});"]
    for field in structure._fields_:
        offset = getattr(structure, field[0]).offset
        lines.append(f"static_assert(offsetof({name}, {field[0]}) == {offset});")
    return lines


def check_resources(log: str, kernel: str, threads: int, spill_bytes: int) -> None:
    """That the compiler's messages are of `kernel`, with all registers and no undeclared spills."""
    assert kernel in log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills, log
    assert max(spills) <= spill_bytes, log
    registers = re.findall(r"Used (\d+) registers", log)
    assert [int(n) * threads for n in registers] == [REGISTERS], log


def attention_arguments() -> dict[str, Any]:
    """The arguments that decode and prefill calls of the kernels have in common."""
    return {
        "q": torch.zeros(TOKENS, HEADS, 512, dtype=torch.bfloat16),
        "sm_scale": 512**-0.5,
        "d_v": 512,
        "attn_sink": torch.zeros(HEADS),
        "topk_length": torch.ones(TOKENS, dtype=torch.int32),
        "enable_q_norm": False,
        "rms_norm_eps": 1e-6,
        "token_positions": torch.zeros(TOKENS, dtype=torch.int32),
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": torch.zeros(16, 64),
        "n_wv_group": HEADS // 8,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
    }
