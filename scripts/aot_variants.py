"""The kernel variants CI compiles ahead of time, and the architectures it compiles them for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megabench.backends.triton import prefill_sm90
from megabench.backends.triton.attention import Tile, decode_tile, prefill_tile
from megabench.backends.triton.combine import (
    COMBINE_DIMS,
    COMBINE_HEADS,
    COMBINE_WARPS,
    combine_kernel,
)
from megabench.backends.triton.decode import decode_kernel
from megabench.backends.triton.matmul import MatmulTile, matmul_kernel, matmul_tile
from megabench.backends.triton.prefill import prefill_kernel
from megabench.backends.triton.target import Target
from megabench.formats import FP8, NVFP4


@dataclass(frozen=True)
class Architecture:
    """Facts of one GPU architecture."""

    shared_limit: int
    """Bytes of shared memory a block may opt in to."""


ARCHITECTURES = {
    80: Architecture(166_912),
    90: Architecture(232_448),
    100: Architecture(232_448),
    120: Architecture(101_376),
}
"""Compute capability times ten."""
ALL = tuple(ARCHITECTURES)


def target(capability: int) -> Target:
    """The launchers' view of an architecture."""
    return Target(False, capability >= 89, capability, 132)


@dataclass(frozen=True)
class Variant:
    """One kernel with argument types and compile-time values."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: Callable[[int], dict[str, Any]]
    tile: Callable[[int], Tile]
    spills: dict[int, int] = field(default_factory=dict)
    """Bytes of local memory accepted, by capability; 0 elsewhere."""
    capabilities: tuple[int, ...] = ALL
    max_registers: int | None = None
    """Registers a thread may have at launch, where the launcher says so."""

    def warps(self, capability: int) -> int:
        return self.tile(capability).warps

    def stages(self, capability: int) -> int:
        return self.tile(capability).stages


ATTENTION_TYPES = {
    "q_ptr": "*bf16",
    "q_stride": "i32",
    "kv_ptr": "*u8",
    "page_stride": "i32",
    "pool": "i32",
    "index_ptr": "*i32",
    "index_stride": "i32",
    "len_ptr": "*i32",
    "topk": "i32",
    "extra_ptr": "*u8",
    "extra_page_stride": "i32",
    "extra_pool": "i32",
    "extra_index_ptr": "*i32",
    "extra_index_stride": "i32",
    "extra_len_ptr": "*i32",
    "extra_topk": "i32",
    "rounds": "i32",
    "sink_ptr": "*fp32",
    "position_ptr": "*i32",
    "cos_sin_ptr": "*fp32",
    "sm_scale_log2": "fp32",
    "eps": "fp32",
    "out_ptr": "*u8",
    "sf_ptr": "*i32",
    "sf_stride_group": "i32",
    "sf_stride_word": "i32",
    "lse_ptr": "*fp32",
    "max_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "partial_ml_ptr": "*fp32",
    "kv_stride": "i32",
    "s_kv": "i32",
}


def _decode(
    name: str,
    tokens: int,
    live: int,
    splits: int,
    fp4: bool,
    spills: dict[int, int],
    capabilities: tuple[int, ...] = ALL,
) -> Variant:
    def tile(capability: int) -> Tile:
        return decode_tile(tokens, live, NVFP4 if fp4 else FP8, target(capability))

    def constants(capability: int) -> dict[str, Any]:
        record, data = (288, 256) if fp4 else (528, 512)
        return {
            "HEADS": 64,
            "H": tile(capability).heads,
            "N": tile(capability).rows,
            "SPLITS": splits,
            "PAGE": 32,
            "DATA_PITCH": 528,
            "SCALE_BASE": 512,
            "SCALE_PITCH": 528,
            "HAS_EXTRA": True,
            "EXTRA_FP4": fp4,
            "EXTRA_PAGE": 64,
            "EXTRA_DATA_PITCH": record,
            "EXTRA_SCALE_BASE": data,
            "EXTRA_SCALE_PITCH": record,
            "HAS_LEN": True,
            "HAS_EXTRA_LEN": True,
            "HAS_SINK": True,
            "Q_NORM": False,
            "EMULATE": False,
            "FP8_CVT": target(capability).fp8_cvt,
        }

    return Variant(name, decode_kernel, ATTENTION_TYPES, constants, tile, spills, capabilities)


def _combine(name: str, splits: int) -> Variant:
    def constants(capability: int) -> dict[str, Any]:
        return {
            "HEADS": 64,
            "H": COMBINE_HEADS,
            "W": COMBINE_DIMS,
            "SPLITS": splits,
            "HAS_SINK": True,
            "FP8_CVT": target(capability).fp8_cvt,
        }

    tile = Tile(COMBINE_HEADS, 0, COMBINE_WARPS, 1)
    return Variant(name, combine_kernel, ATTENTION_TYPES, constants, lambda _: tile)


def _prefill(name: str, live: int, spills: dict[int, int]) -> Variant:
    def tile(capability: int) -> Tile:
        return prefill_tile(live, target(capability))

    def constants(capability: int) -> dict[str, Any]:
        return {
            "HEADS": 64,
            "H": tile(capability).heads,
            "N": tile(capability).rows,
            "HAS_LEN": True,
            "HAS_SINK": True,
            "Q_NORM": False,
            "EMULATE": False,
            "FP8_CVT": target(capability).fp8_cvt,
        }

    types = ATTENTION_TYPES | {"kv_ptr": "*bf16"}
    return Variant(name, prefill_kernel, types, constants, tile, spills)


def _prefill_sm90() -> Variant:
    tile = Tile(prefill_sm90.HEADS_PER_PROGRAM, 64, prefill_sm90.WARPS, 1)
    return Variant(
        "prefill_sm90",
        prefill_sm90.prefill_sm90_kernel,
        ATTENTION_TYPES | {"kv_ptr": "*bf16"},
        lambda _: {"HEADS": 64, "HAS_LEN": True, "HAS_SINK": True},
        lambda _: tile,
        capabilities=(90,),
        max_registers=prefill_sm90.REGISTERS_AT_LAUNCH,
    )


MATMUL_TYPES = {
    "x_ptr": "*bf16",
    "x_row_stride": "i32",
    "x_group_stride": "i32",
    "w_ptr": "*u8",
    "w_scale_ptr": "*i32",
    "w_row_stride": "i32",
    "w_group_stride": "i32",
    "w_scale_row": "i32",
    "w_scale_word": "i32",
    "w_scale_group": "i32",
    "out_ptr": "*bf16",
    "out_row_stride": "i32",
    "out_group_stride": "i32",
    "partial_ptr": "*fp32",
    "T": "i32",
    "D": "i32",
    "K": "i32",
}


def _matmul(name: str, tokens: int, capabilities: tuple[int, ...] = ALL) -> Variant:
    def choice(capability: int) -> MatmulTile:
        return matmul_tile(tokens, 8, 1024, 4096, target(capability))

    def constants(capability: int) -> dict[str, Any]:
        tile = choice(capability)
        return {
            "BT": tile.tokens,
            "BD": tile.rows,
            "BK": tile.columns,
            "WEIGHT_LEFT": tile.weight_left,
            "SPLITS": tile.splits,
            "EMULATE": False,
        }

    def tile(capability: int) -> Tile:
        return Tile(0, 0, choice(capability).warps, choice(capability).stages)

    return Variant(name, matmul_kernel, MATMUL_TYPES, constants, tile, capabilities=capabilities)


VARIANTS = (
    _decode("decode_fp4", 512, 64, 1, True, {90: 616, 100: 400}),
    _decode("decode_fp8_split", 32, 64, 4, False, {90: 496, 100: 264, 120: 8}),
    _decode("decode_fp4_16_heads", 64, 16, 1, True, {80: 40, 90: 96}, (80, 90)),
    _combine("combine_4", 4),
    _prefill("prefill", 64, {90: 40, 100: 128}),
    _prefill_sm90(),
    _matmul("wo_a_few_tokens", 64),
    _matmul("wo_a_many_tokens", 4096, (90,)),
)
MAX_COMPILATIONS = 24
