"""The sm90 kernel without a GPU: it compiles, fits the chip and agrees with its launcher."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.backends.sm90 import launch
from megabench.backends.sm90.nvrtc import ARCH, SOURCE_DIR, sources

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
DECLARED_SPILL_BYTES = 128
"""Spills the schedule accepts: address registers of the epilogue, once an item."""

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler here")


def compile_cuda(source: Path, folder: Path, *options: str) -> str:
    """The compiler's messages; fails the test where it refuses the source."""
    command = [str(NVCC), f"-gencode=arch=compute_{ARCH[3:]},code={ARCH}", "-cubin", "-std=c++17"]
    command += ["-Xptxas", "-v", "-I", str(SOURCE_DIR), *options, "-o", str(folder / "out.cubin")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@needs_nvcc
@pytest.mark.parametrize("extra_fp4", [0, 1])
def test_the_kernel_compiles_without_undeclared_spills(tmp_path: Path, extra_fp4: int) -> None:
    log = compile_cuda(SOURCE_DIR / launch.ENTRY, tmp_path, f"-DEXTRA_FP4={extra_fp4}")
    assert launch.KERNEL in log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills, log
    assert max(spills) <= DECLARED_SPILL_BYTES, log
    registers = re.findall(r"Used (\d+) registers", log)
    assert [int(n) * launch.THREADS for n in registers] == [65536], log


@needs_nvcc
@pytest.mark.parametrize("extra_fp4", [0, 1])
def test_no_wgmma_is_serialised(tmp_path: Path, extra_fp4: int) -> None:
    log = compile_cuda(SOURCE_DIR / launch.ENTRY, tmp_path, f"-DEXTRA_FP4={extra_fp4}")
    assert not re.search(r"C75\d\d", log), log


@needs_nvcc
def test_the_launcher_and_the_kernel_lay_parameters_out_alike(tmp_path: Path) -> None:
    lines = ['#include "layout.cuh"', "#include <cstddef>"]
    lines.append(f"static_assert(sizeof(Params) == {ctypes.sizeof(launch.Params)});")
    for field in launch.Params._fields_:
        offset = getattr(launch.Params, field[0]).offset
        lines.append(f"static_assert(offsetof(Params, {field[0]}) == {offset});")
    lines.append(f"static_assert(kThreads == {launch.THREADS} && kHeads == {launch.HEAD_TILE});")
    lines.append(f"static_assert(kBlock == {launch.BLOCK_ROWS});")
    lines.append(f"static_assert(kSmemBytes <= {launch.SHARED_BYTES});")
    source = tmp_path / "layout_check.cu"
    source.write_text("\n".join(lines))
    compile_cuda(source, tmp_path)


def test_shared_memory_is_what_an_sm_gives_one_block() -> None:
    assert launch.SHARED_BYTES == 227 * 1024


def test_every_header_travels_with_the_entry_file() -> None:
    files = sources(launch.ENTRY)
    included = {
        name for text in files.values() for name in re.findall(r'#include "(\S+)"', text.decode())
    }
    assert included <= files.keys()


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_slot_divides_by_its_page_exactly(page: int, slot: int) -> None:
    magic, shift = launch.divisor(page)
    assert magic < 2**32
    assert slot * magic >> shift == slot // page


def kernel_with_room(clusters: dict[int, int]) -> launch.DecodeKernel:
    kernel = object.__new__(launch.DecodeKernel)
    kernel._clusters = clusters
    return kernel


H200 = {8: 15, 6: 20, 5: 24, 4: 30, 3: 42, 2: 66}


@pytest.mark.parametrize(
    ("items", "blocks", "split"),
    [(1, 10, 8), (15, 10, 8), (20, 10, 6), (24, 10, 5), (30, 10, 4), (32, 10, 3), (66, 10, 2)],
)
def test_few_items_are_split_over_the_largest_cluster_that_helps(
    items: int, blocks: int, split: int
) -> None:
    assert kernel_with_room(H200).split_for(items, blocks) == split


def test_many_items_and_single_blocks_are_not_split() -> None:
    kernel = kernel_with_room(H200)
    assert kernel.split_for(67, 10) == 1
    assert kernel.split_for(1, 1) == 1
    assert kernel.split_for(1, 2) == 2
