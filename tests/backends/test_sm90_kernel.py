"""The sm90 kernel without a GPU: it compiles, fits the chip and agrees with its launcher."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm90_cases import check_resources, compile_cuda, mirror, needs_nvcc

from megabench.backends.sm90 import decode_launch as launch
from megabench.backends.sm90.kernel import Kernel
from megabench.backends.sm90.nvrtc import SOURCE_DIR, sources

DECLARED_SPILL_BYTES = 128
"""Spills the schedule accepts: address registers of the epilogue, once an item."""


BUILDS = pytest.mark.parametrize(
    "options",
    [
        (f"-DEXTRA_FP4={extra_fp4}", f"-DCLUSTERED={clustered}")
        for extra_fp4 in (0, 1)
        for clustered in (0, 1)
    ],
    ids=" ".join,
)
LOADED_CODE_BYTES = 72 << 10
"""About 64 KB of a kernel are there when it starts; what is behind comes from memory when it is
reached. The converters come last, which with one block a CTA do not run. On an H200, NVFP4's 71 KB
took no longer after other kernels than 66 KB had; 75 KB took up to 1 us longer, 78 KB up to 3."""


@needs_nvcc
@BUILDS
def test_the_kernel_compiles_without_undeclared_spills(
    tmp_path: Path, options: tuple[str, str]
) -> None:
    log = compile_cuda(SOURCE_DIR / launch.ENTRY, tmp_path, *options)
    check_resources(log, launch.KERNEL, launch.THREADS, DECLARED_SPILL_BYTES)


@needs_nvcc
@BUILDS
def test_no_wgmma_is_serialised(tmp_path: Path, options: tuple[str, str]) -> None:
    log = compile_cuda(SOURCE_DIR / launch.ENTRY, tmp_path, *options)
    assert not re.search(r"C75\d\d", log), log


def code_bytes(cubin: bytes, kernel: str) -> int:
    """The size of a kernel's code in an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    wanted = {
        section[5]
        for section in sections
        if cubin[sections[names][4] + section[0] :].startswith(f".text.{kernel}\0".encode())
    }
    (found,) = wanted
    return int(found)


@needs_nvcc
@pytest.mark.parametrize("extra_fp4", [0, 1])
def test_all_code_of_clusters_is_there_when_they_start(tmp_path: Path, extra_fp4: int) -> None:
    options = (f"-DEXTRA_FP4={extra_fp4}", "-DCLUSTERED=1")
    compile_cuda(SOURCE_DIR / launch.ENTRY, tmp_path, *options)
    assert code_bytes((tmp_path / "out.cubin").read_bytes(), launch.KERNEL) <= LOADED_CODE_BYTES


@needs_nvcc
def test_the_launcher_and_the_kernel_lay_parameters_out_alike(tmp_path: Path) -> None:
    lines = ['#include "layout.cuh"', "#include <cstddef>"]
    lines += mirror(launch.Params, "Params")
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


H200 = {10: 7, 8: 15, 6: 17, 5: 22, 4: 30, 3: 39, 2: 66}
"""Clusters of each size that an H200 runs at once."""


@pytest.mark.parametrize(
    ("items", "shape"),
    [
        (1, (10, 4)),
        (2, (10, 2)),
        (3, (10, 2)),
        (4, (5, 4)),
        (8, (5, 2)),
        (16, (5, 1)),
        (26, (4, 1)),
        (32, (2, 2)),
        (39, (3, 1)),
        (66, (2, 1)),
        (67, (1, 1)),
    ],
)
def test_few_items_take_the_shape_that_was_fastest(items: int, shape: tuple[int, int]) -> None:
    assert launch.shape_for(items, 10, H200) == shape


class FakeBuild:
    """Records what a build of the kernel is launched with."""

    multiprocessors = 132

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int], int]] = []

    def allow_large_clusters(self) -> None:
        pass

    def clusters_at_once(self, size: int, threads: int) -> int:
        return H200[size]

    def launch(
        self, params: launch.Params, grid: tuple[int, int], threads: int, cluster: int = 1
    ) -> None:
        assert threads == launch.THREADS
        self.launches.append((grid, cluster))


def test_a_cluster_is_a_row_of_the_grid_and_an_items_replicas_are_neighbours() -> None:
    clustered, persistent = FakeBuild(), FakeBuild()
    kernel = launch.DecodeKernel(cast(Kernel, clustered), cast(Kernel, persistent))
    params = launch.Params(items=3)
    kernel.launch(params, launch.Shape(10, 2))
    assert (clustered.launches, persistent.launches) == ([((10, 6), 10)], [])
    assert (params.split, params.replicas) == (10, 2)
    kernel.launch(launch.Params(items=500), launch.Shape())
    assert persistent.launches == [((132, 1), 1)]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 100), st.integers(1, 40))
def test_every_shape_runs_at_once_and_fits_shared_memory(items: int, blocks: int) -> None:
    split, replicas = launch.shape_for(items, blocks, H200)
    if split == 1:
        assert replicas == 1
        return
    assert split <= blocks
    assert items * replicas <= H200[split]
    units = 64 // replicas  # of 2 KB a rank, in a power of two of places (layout.cuh)
    places = 1 << (-(-units // split) - 1).bit_length()
    assert places * 2 * split <= 192


def test_a_single_block_is_not_split() -> None:
    assert launch.shape_for(1, 1, H200) == (1, 1)
