"""The sm90 products without a GPU: they compile, agree with their launchers, serve their calls."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_cases import compile_cuda, mirror, needs_nvcc

from megabench.backends.sm90 import (
    dense_launch,
    product_launch,
    products,
    quantize_launch,
    skinny_launch,
)
from megabench.backends.sm90.backend import Sm90Backend
from megabench.backends.sm90.nvrtc import SOURCE_DIR, sources
from megabench.backends.sm90.operands import operands
from megabench.backends.triton.backend import TritonBackend
from megabench.quant import alloc_mega_attn_output, pack_mn_major

STREAMED = [
    product_launch.Build(width, split)
    for width in product_launch.WIDTHS
    for split in (1, *product_launch.SPLITS)
]
EINSUM = ("bhr,hdr->bhd", (1, 1, 32))
BUILDS = [
    *(("product.cu", build.defines) for build in STREAMED),
    *(("skinny.cu", (f"TOKENS={room}",)) for room in skinny_launch.TOKENS),
    *(("single.cu", (f"TILES={tiles}",)) for tiles in skinny_launch.SINGLE_TILES),
    ("dense.cu", ()),
    ("activation.cu", ()),
]


@needs_nvcc
@pytest.mark.parametrize(("entry", "defines"), BUILDS)
def test_the_kernels_compile_without_spills_or_serialised_wgmma(
    tmp_path: Path, entry: str, defines: tuple[str, ...]
) -> None:
    log = compile_cuda(SOURCE_DIR / entry, tmp_path, *(f"-D{name}" for name in defines))
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills, log
    assert max(spills) == 0, log
    assert not re.search(r"C75\d\d", log), log


@needs_nvcc
@pytest.mark.parametrize(
    ("entry", "structure", "facts"),
    [
        (
            "product.cu",
            product_launch.Params,
            f"kSmemBytes <= 232448 && kRows == {product_launch.ROWS} && "
            f"kBoxRows == {product_launch.BOX_ROWS}",
        ),
        (
            "skinny.cu",
            skinny_launch.Params,
            f"kRows == {skinny_launch.ROWS} && kThreads == {skinny_launch.THREADS} && "
            f"kWarps == {skinny_launch.WARPS} && kPieceWords == {skinny_launch.PIECE_WORDS} && "
            f"4 * kSum == {skinny_launch.sums_bytes(8)}",
        ),
        (
            "single.cu",
            skinny_launch.Params,
            f"kTileRows == {skinny_launch.SINGLE_ROWS} && kThreads == {skinny_launch.THREADS} && "
            f"kWarps * kPieceColumns == {skinny_launch.SINGLE_COLUMNS} && kTiles == 8",
        ),
        ("dense.cu", dense_launch.Params, "kTokens == 128 && kWidth == 256 && kThreads == 384"),
        ("activation.cu", quantize_launch.Params, "kThreads * kEach == 1024"),
    ],
)
def test_the_launchers_and_the_kernels_lay_parameters_out_alike(
    tmp_path: Path, entry: str, structure: type[ctypes.Structure], facts: str
) -> None:
    lines = [f'#include "{entry}"', "#include <cstddef>", *mirror(structure, "Params")]
    if entry == "product.cu":
        lines += mirror(product_launch.Operands, "Operands")
    lines.append(f"static_assert({facts});")
    source = tmp_path / "layout_check.cu"
    source.write_text("\n".join(lines))
    defines = {"skinny.cu": ["-DTOKENS=8"], "single.cu": ["-DTILES=8"]}
    compile_cuda(source, tmp_path, *defines.get(entry, []))


@needs_nvcc
@pytest.mark.parametrize("build", [build for build in STREAMED if build.split == 2])
def test_a_build_has_the_threads_its_kernel_expects(
    tmp_path: Path, build: product_launch.Build
) -> None:
    source = tmp_path / "threads.cu"
    source.write_text(f'#include "product.cuh"\nstatic_assert(kThreads == {build.threads});')
    compile_cuda(source, tmp_path, *(f"-D{name}" for name in build.defines))


def test_every_header_travels_with_the_entry_files() -> None:
    for entry, _ in BUILDS:
        files = sources(entry)
        included = {
            name
            for text in files.values()
            for name in re.findall(r'#include "(\S+)"', text.decode())
        }
        assert included <= files.keys()


@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 16), (16, 16), (17, 32), (33, 64), (65, 128), (4096, 128)]
)
def test_tiles_are_as_wide_as_the_tokens_need(tokens: int, width: int) -> None:
    assert product_launch.width_for(tokens) == width


@pytest.mark.parametrize(
    ("tiles", "words", "split"),
    [(8, 32, 8), (16, 32, 4), (64, 32, 2), (128, 32, 1), (8, 1, 1), (8, 3, 2)],
)
def test_few_tiles_are_split_over_clusters_that_fit(tiles: int, words: int, split: int) -> None:
    assert product_launch.split_for(tiles, words, {8: 15, 4: 30, 2: 66}) == split


def test_pieces_hold_every_weight_where_the_tensor_core_reads_it() -> None:
    dense = torch.arange(2 * 256 * 128, dtype=torch.float32).view(1, 512, 128)
    pieces = dense_launch.operand_pieces(dense)
    assert pieces.shape == (1, 2, 2, 256, 64)
    flat = pieces[0, 1, 1].flatten()
    for row, column in [(0, 0), (7, 5), (77, 33), (255, 63), (130, 18)]:
        n = row // 32 * 32 + row % 8 // 2 * 8 + row % 32 // 8 * 2 + row % 2  # 8i + 2c + e
        lane, word = column % 16 // 4, column % 4
        place = column // 16 * 16 + 8 * (word % 2) + 2 * lane + word // 2
        byte = n * 128 + 2 * place
        byte ^= (byte >> 7 & 7) << 4  # the 128-byte swizzle
        assert flat[byte // 2] == dense[0, 256 + row, 64 + column]


class Launches:
    """Stands in for the launchers and notes what they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, Any]] = []
        modules = {"skinny": skinny_launch, "stream": product_launch, "dense": dense_launch}
        for name, module in modules.items():
            monkeypatch.setattr(module, "launch", lambda *a, name=name: self.made.append((name, a)))
        for name in ("checked_einsum", "checked_linear"):
            monkeypatch.setattr(TritonBackend, name, self.inherited)

    def inherited(self, *arguments: Any) -> None:
        self.made.append(("inherited", arguments))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def weight(rows: int = 256, groups: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(groups, rows, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, pack_mn_major(torch.full((groups, rows, 128), 127, dtype=torch.uint8))


def einsum(backend: Sm90Backend, tokens: int, w: Any, groups: int = 2) -> None:
    pair = alloc_mega_attn_output(tokens, 8, torch.device("cpu"))
    out = torch.empty(tokens, groups, w[0].shape[1], dtype=torch.bfloat16)
    backend.fp8_einsum(
        EINSUM[0], (pair.data[:, :groups], pair.scale[:, :groups]), w, out, EINSUM[1]
    )


@pytest.mark.parametrize(("groups", "few"), [(8, 256), (4, 512), (2, 1024), (1, 2048)])
def test_tokens_whose_tiles_run_at_once_stream_the_weight_and_more_read_its_pieces(
    launches: Launches, groups: int, few: int
) -> None:
    w = torch.empty(groups, 1024, 4096, dtype=torch.float8_e4m3fn, device="meta")
    pieces = torch.empty(groups, 4, 64, 256, 64, dtype=torch.bfloat16, device="meta")
    for tokens in (0, 1, 8, 9, few, few + 1):
        x = torch.empty(tokens, groups, 4096, dtype=torch.float8_e4m3fn, device="meta")
        out = torch.empty(tokens, groups, 1024, dtype=torch.bfloat16, device="meta")
        scale = torch.empty(0, device="meta")
        products.einsum((x, scale), (w, scale), out, pieces)
    assert [name for name, _ in launches.made] == ["skinny"] * 2 + ["stream"] * 2 + ["dense"]


def test_a_handful_of_tokens_stream_the_weight_however_many_groups_have_pieces(
    launches: Launches,
) -> None:
    w = torch.empty(32, 1024, 4096, dtype=torch.float8_e4m3fn, device="meta")
    pieces = torch.empty(32, 4, 64, 256, 64, dtype=torch.bfloat16, device="meta")
    x = torch.empty(8, 32, 4096, dtype=torch.float8_e4m3fn, device="meta")
    out = torch.empty(8, 32, 1024, dtype=torch.bfloat16, device="meta")
    scale = torch.empty(0, device="meta")
    products.einsum((x, scale), (w, scale), out, pieces)
    assert [name for name, _ in launches.made] == ["skinny"]


def test_without_pieces_many_tokens_stream_the_weight(launches: Launches) -> None:
    backend, w = Sm90Backend(), weight()
    einsum(backend, 6000, w)
    backend._pieces.prepare(*w)
    einsum(backend, 6000, w)
    w[0].view(torch.uint8).zero_()  # written to since
    einsum(backend, 6000, w)
    assert [name for name, _ in launches.made] == ["stream", "dense", "stream"]


def test_rows_that_fill_no_tile_go_to_the_inherited_op(launches: Launches) -> None:
    einsum(Sm90Backend(), 4, weight(rows=192))
    einsum(Sm90Backend(), 4, weight(rows=384))
    assert [name for name, _ in launches.made] == ["inherited", "skinny"]


def test_unaligned_activations_go_to_the_inherited_op(launches: Launches) -> None:
    w, out = weight(), torch.empty(3, 2, 256, dtype=torch.bfloat16)
    storage = torch.zeros(3 * 2 * 4096 + 8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(3, 2, 32, dtype=torch.int32)
    for offset in (8, 0):
        x = storage[offset : offset + 3 * 2 * 4096].view(3, 2, 4096)
        Sm90Backend().fp8_einsum(EINSUM[0], (x, scale), w, out, EINSUM[1])
    assert [name for name, _ in launches.made] == ["inherited", "skinny"]


def test_activations_or_weights_that_are_expanded_go_to_the_inherited_op(
    launches: Launches,
) -> None:
    (w, w_scale), out = weight(), torch.empty(9, 2, 256, dtype=torch.bfloat16)
    x = torch.zeros(9, 2, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(9, 2, 32, dtype=torch.int32)
    for codes, rows in ((x[:1], w), (x[:, :1], w), (x, w[:1]), (x, w)):
        pair, one = (codes.expand_as(x), scale), (rows.expand_as(w), w_scale)
        Sm90Backend().fp8_einsum(EINSUM[0], pair, one, out, EINSUM[1])
    assert [name for name, _ in launches.made] == ["inherited"] * 3 + ["stream"]


def test_a_product_of_no_rows_launches_nothing(launches: Launches) -> None:
    backend, w = Sm90Backend(), torch.zeros(0, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    einsum(backend, 4, weight(rows=0))
    einsum(backend, 4, weight(groups=0), groups=0)
    backend.linear(torch.zeros(2, 512, dtype=torch.bfloat16), w, torch.zeros(0, 16).byte())
    assert launches.made == []


def test_a_linear_whose_scales_are_no_words_goes_to_the_inherited_op(launches: Launches) -> None:
    w = torch.zeros(128, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    sw = torch.zeros(128 * 4 + 1, dtype=torch.uint8)[1:].view(128, 4)
    Sm90Backend().linear(torch.zeros(2, 128, dtype=torch.bfloat16), w, sw)
    assert [name for name, _ in launches.made] == ["inherited"]


def test_only_an_einsums_whole_pieces_are_prepared() -> None:
    packed = torch.empty(0, dtype=torch.int32)
    assert products.can_prepare(torch.empty(8, 1024, 4096), packed)
    assert not products.can_prepare(torch.empty(8, 384, 4096), packed)
    assert not products.can_prepare(torch.empty(8, 256, 64), packed)
    assert not products.can_prepare(torch.empty(5120, 8192), torch.empty(0, dtype=torch.uint8))


def test_a_handful_of_rows_of_a_linear_are_quantized_and_multiplied(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(torch.float8_e4m3fn), torch.zeros(x.shape[0], x.shape[1] // 128).int()

    monkeypatch.setattr(products, "quantize", quantized)
    w = torch.zeros(256, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    sw = torch.zeros(256, 16, dtype=torch.uint8)
    for tokens in (0, 8, 9):
        Sm90Backend().linear(torch.zeros(tokens, 512, dtype=torch.bfloat16), w, sw)
    Sm90Backend().linear(torch.zeros(2, 512, dtype=torch.bfloat16), w[:192], sw[:192])
    assert [name for name, _ in launches.made] == ["skinny", "inherited", "inherited"]
    x, x_scale, weight_, scale, out = launches.made[0][1]
    assert (x.shape, x_scale.shape, out.shape) == ((8, 1, 512), (8, 1, 4), (8, 1, 256))
    assert (weight_.shape, scale.shape, scale.dtype) == ((1, 256, 512), (1, 256, 4), torch.int32)


def test_a_handful_of_tokens_out_of_reach_of_the_skinny_kernel_stream_the_weight(
    launches: Launches,
) -> None:
    w = weight()
    far = torch.empty_strided((3, 2, 256), (2**31, 256, 1), dtype=torch.bfloat16, device="meta")
    words = torch.empty_strided((3, 2, 32), (2**31, 32, 1), dtype=torch.int32, device="meta")
    pair = alloc_mega_attn_output(3, 8, torch.device("cpu"))
    x, out = (pair.data[:, :2], pair.scale[:, :2]), torch.empty(3, 2, 256, device="meta")
    for scale, into in ((x[1], far), (words, out), (x[1], out)):
        products.einsum((x[0], scale), w, into, None)
    assert [name for name, _ in launches.made] == ["stream", "stream", "skinny"]


@pytest.mark.parametrize(
    ("tokens", "columns", "served"),
    [(1, 4096, True), (8, 28_672, True), (9, 28_672, False), (8, 32_768, False)],
)
def test_the_skinny_kernel_takes_few_tokens_whose_sums_fit(
    tokens: int, columns: int, served: bool
) -> None:
    x, w = torch.empty(tokens, 1, columns, device="meta"), torch.empty(1, 8, columns, device="meta")
    assert skinny_launch.serves(x, w) == served


@pytest.mark.parametrize(
    ("row_tiles", "groups", "most", "each"),
    [(64, 8, 51, 4), (64, 1, 51, 1), (64, 2, 51, 1), (2048, 1, 40, 16), (320, 1, 6, 3)],
)
def test_skinny_tiles_are_shared_out_so_that_each_multiprocessor_has_a_cta(
    row_tiles: int, groups: int, most: int, each: int
) -> None:
    assert skinny_launch.tiles_each(row_tiles, groups, most, 132) == each


def test_skinny_tiles_whose_sums_do_not_fit_take_more_ctas() -> None:
    assert skinny_launch.tiles_each(8192, 1, 7, 132) == 7


@pytest.mark.parametrize(
    ("row_tiles", "groups", "tiles"),
    [(128, 8, 8), (128, 4, 4), (128, 2, 2), (128, 1, 1), (256, 8, 8), (16, 1, 1)],
)
def test_one_token_has_a_cta_for_each_multiprocessor_while_a_build_has_the_tiles(
    row_tiles: int, groups: int, tiles: int
) -> None:
    assert skinny_launch.single_tiles(row_tiles, groups, 132) == tiles


def test_one_token_has_a_kernel_of_its_own_where_scales_load_four_rows_at_once() -> None:
    pair = alloc_mega_attn_output(2, 2, torch.device("cpu"))
    x, (_, packed) = pair.data[:1], weight()
    assert skinny_launch.single_serves(x, packed)
    by_rows = packed.contiguous()
    shifted = torch.empty(packed.numel() + 1, dtype=torch.int32)[1:].as_strided(
        packed.shape, packed.stride()
    )
    ragged = torch.empty_strided(packed.shape, (32 * 257, 1, 257), dtype=torch.int32)
    for scale in (by_rows, shifted, ragged):
        assert not skinny_launch.single_serves(x, scale)
    assert not skinny_launch.single_serves(pair.data, packed)
    assert not skinny_launch.single_serves(x[..., :2048], packed[..., :16])


def test_operands_carry_the_strides_of_a_step_and_its_live_groups() -> None:
    pair, w = alloc_mega_attn_output(6, 8, torch.device("cpu")), weight()
    out = torch.empty(3, 2, 512, dtype=torch.bfloat16)[:, :, 256:]
    listed = operands(pair.data[3:, :2], pair.scale[3:, :2], *w, out)
    o = product_launch.Operands(*listed)
    assert (o.x_token, o.x_group) == (8 * 4096, 4096)
    assert (o.x_scale_token, o.x_scale_word, o.x_scale_group) == (1, 8, 256)
    assert (o.w_row, o.w_group) == (4096, 256 * 4096)
    assert (o.w_scale_row, o.w_scale_word, o.w_scale_group) == (1, 256, 32 * 256)
    assert (o.out_token, o.out_group, o.tokens, o.words) == (1024, 512, 3, 32)
    assert o.x == pair.data.data_ptr() + 3 * 8 * 4096


def test_both_kernels_that_read_the_weight_take_operands_first_and_alike() -> None:
    names = [name for name, _ in product_launch.Operands._fields_]
    assert [name for name, _ in skinny_launch.Params._fields_][: len(names)] == names


def test_decode_is_compiled_from_sources_without_the_products() -> None:
    files = sources("decode.cu")
    seen, todo = set(), ["decode.cu"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += re.findall(r'#include "(\S+)"', files[name].decode())
    assert not seen & {"product.cuh", "dense.cuh", "mxfp8.cuh", "wgmma_registers.cuh", "ring.cuh"}
