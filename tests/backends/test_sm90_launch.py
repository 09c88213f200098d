"""How the sm90 kernels are launched, on a driver that only takes notes."""

# ruff: noqa: N802, N815 - the driver's names

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabench.backends.sm90 import (
    decode_launch,
    dense_launch,
    prefill_launch,
    product_launch,
    skinny_launch,
    tensor_map,
)
from megabench.backends.sm90 import kernel as module
from megabench.backends.sm90.kernel import Kernel

SMS, STREAM = 132, 77


class Status(int):
    name = "CUDA_SUCCESS"


class Config(SimpleNamespace):
    """Of a launch: what was never set is absent, but for the attributes."""

    attrs: Any = ()
    numAttrs = 0


class Driver:
    """Notes what is launched, and which attributes were set before clusters were counted."""

    CUlaunchConfig = Config
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster")
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="large clusters"
    )

    CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_UINT8="bytes")
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE="plain")
    CUtensorMapSwizzle = SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B="128-byte swizzle")
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_128B="128 bytes")
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE="zeros")

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.maps: list[tuple[Any, ...]] = []

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace()

    def CUlaunchAttributeValue(self) -> SimpleNamespace:
        return SimpleNamespace(clusterDim=SimpleNamespace())

    def cuFuncSetAttribute(self, function: object, attribute: str, value: int) -> tuple[Status]:
        self.notes.append(f"{attribute} {value}")
        return (Status(0),)

    cuuint32_t = cuuint64_t = int

    def cuTensorMapEncodeTiled(
        self, kind: str, rank: int, address: int, shape: list[int], strides: list[int], *rest: Any
    ) -> tuple[Status, SimpleNamespace]:
        assert (kind, rank, address % 16) == ("bytes", 3, 0)
        self.maps.append((shape, strides, *rest))
        self.map = tensor_map.TensorMap(*range(16))
        return Status(0), SimpleNamespace(getPtr=lambda: ctypes.addressof(self.map))

    def cuOccupancyMaxActiveClusters(self, function: object, config: Config) -> tuple[Status, int]:
        self.notes.append(f"count {config.gridDimX}")
        return Status(0), SMS // config.gridDimX

    def cuLaunchKernelEx(
        self, config: Config, function: str, arguments: int, extra: int
    ) -> tuple[Status]:
        parameters = ctypes.c_void_p.from_address(arguments).value
        clusters = [a.value.clusterDim.x for a in config.attrs]
        assert config.numAttrs == len(clusters)
        self.launches.append(
            {
                "function": function,
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "threads": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared": config.sharedMemBytes,
                "cluster": clusters[0] if clusters else 1,
                "stream": config.hStream,
                "parameters": parameters,
            }
        )
        return (Status(0),)


def forget_kernels() -> None:
    module.kernel.cache_clear()
    decode_launch.decode_kernel.cache_clear()
    tensor_map._encoded.cache_clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    forget_kernels()
    for user in (module, tensor_map):
        monkeypatch.setattr(user, "bindings", lambda: (made, None))
    monkeypatch.setattr(module, "load_function", lambda source, name, shared, defines: name)
    cuda = {
        "device": lambda device: nullcontext(),
        "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=SMS),
        "current_stream": lambda device: SimpleNamespace(cuda_stream=STREAM),
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield made
    forget_kernels()


def test_a_launch_has_its_grid_its_memory_and_the_current_stream(driver: Driver) -> None:
    made, parameters = Kernel(torch.device("cuda", 0), "a.cu", "entry", 1000, ()), decode_params()
    made.launch(parameters, (3, 2), 128)
    made.launch(parameters, (4, 1), 256, 2)
    first, second = driver.launches
    assert first == {
        "function": "entry",
        "grid": (3, 2, 1),
        "threads": (128, 1, 1),
        "shared": 1000,
        "cluster": 1,
        "stream": STREAM,
        "parameters": ctypes.addressof(parameters),
    }
    assert (second["grid"], second["threads"], second["cluster"]) == ((4, 1, 1), (256, 1, 1), 2)


def test_a_launch_follows_the_stream_of_its_own_moment(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Kernel(torch.device("cuda", 0), "a.cu", "entry", 0, ())
    made.launch(decode_params(), (3, 1), 128)
    other = SimpleNamespace(cuda_stream=STREAM + 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    made.launch(decode_params(), (3, 1), 128)
    assert [launch["stream"] for launch in driver.launches] == [STREAM, STREAM + 1]


def decode_params(items: int = 1) -> decode_launch.Params:
    params = decode_launch.Params()
    params.items = items
    return params


def test_decode_counts_its_clusters_once_large_ones_are_allowed(driver: Driver) -> None:
    made = decode_launch.decode_kernel(0, False)
    sizes = decode_launch.CLUSTER_SIZES
    assert driver.notes == ["large clusters 1", *(f"count {size}" for size in sizes)]
    assert made.clusters == {size: SMS // size for size in sizes}


@pytest.mark.parametrize(
    ("items", "shape", "grid"),
    [(2, (5, 8), (5, 16, 1)), (100, (1, 1), (100, 1, 1)), (4000, (1, 1), (SMS, 1, 1))],
)
def test_decode_has_a_cluster_for_each_replica_or_is_persistent(
    driver: Driver, items: int, shape: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    params = decode_params(items)
    decode_launch.decode_kernel(0, False).launch(params, decode_launch.Shape(*shape))
    assert (params.split, params.replicas) == shape
    (launch,) = driver.launches
    assert (launch["grid"], launch["cluster"]) == (grid, shape[0])


@pytest.mark.parametrize(("items", "ctas"), [(5, 5), (4000, SMS)])
def test_prefill_has_a_cta_for_each_item_or_is_persistent(
    driver: Driver, items: int, ctas: int
) -> None:
    params = prefill_launch.PrefillParams()
    params.items = items
    prefill_launch.launch(params, 0)
    (launch,) = driver.launches
    assert (launch["grid"], launch["cluster"]) == ((ctas, 1, 1), 1)


@pytest.mark.parametrize(
    ("tokens", "groups", "grid", "threads", "cluster"),
    [
        (16, 1, (8 * 8, 1), 512, 8),
        (100, 8, (8 * 2, 8), 640, 2),
        (200, 2, (8 * 4, 2 * 2), 640, 4),
        (600, 8, (8, 8 * 5), 640, 1),
    ],
)
def test_a_streamed_product_covers_its_tiles(
    driver: Driver, tokens: int, groups: int, grid: tuple[int, int], threads: int, cluster: int
) -> None:
    streamed(tokens, groups)
    (launch,) = driver.launches
    assert (launch["function"], launch["grid"]) == ("sm90_product", (*grid, 1))
    assert (launch["threads"], launch["cluster"]) == ((threads, 1, 1), cluster)


def streamed(tokens: int, groups: int) -> None:
    """A launch over a part of a step's groups."""
    step = torch.empty(tokens + 7, 8, 4096, dtype=torch.uint8)
    w, w_scale = torch.empty(groups, 1024, 4096, dtype=torch.uint8), torch.empty(groups, 1024, 32)
    x, x_scale = step[3 : 3 + tokens, :groups], torch.empty(tokens, groups, 32)
    product_launch.launch(x, x_scale, w, w_scale, torch.empty(tokens, groups, 1024))


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (60, 64), (300, 128)])
def test_a_streamed_product_reads_a_tiles_tokens_in_a_box_and_its_rows_in_four(
    driver: Driver, tokens: int, width: int
) -> None:
    streamed(tokens, 2)
    x, w = driver.maps
    token_step = 8 * 4096 if tokens > 1 else 4096
    assert x[:3] == ([4096, 2, tokens], [4096, token_step], [128, 1, width])
    assert w[:3] == ([4096, 1024, 2], [4096, 1024 * 4096], [128, 32, 1])
    assert x[3:] == w[3:] == ([1, 1, 1], "plain", "128-byte swizzle", "128 bytes", "zeros")


@pytest.mark.parametrize(("tokens", "ctas"), [(300, 2 * 4 * 3), (65536, SMS)])
def test_the_dense_product_is_persistent_over_its_tiles(
    driver: Driver, tokens: int, ctas: int
) -> None:
    x, x_scale, out = (torch.empty(1).expand(tokens, 2, n) for n in (4096, 32, 1024))
    dense_launch.launch(x, x_scale, torch.empty(2, 4, 64, 256, 64, device="meta"), out)
    assert driver.launches[0]["grid"] == (ctas, 1, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_dense_product_reads_boxes_of_a_tile_from_a_step_of_more_groups(
    driver: Driver, groups: int
) -> None:
    step = torch.empty(310, 8, 4096, dtype=torch.uint8)
    x, x_scale, out = step[3:303, :groups], torch.empty(300, 2, 32), torch.empty(300, 2, 1024)
    pieces = torch.empty(groups, 4, 64, 256, 64, device="meta")
    for _ in range(2):
        dense_launch.launch(x, x_scale, pieces, out)
    (made,) = driver.maps
    assert made[:4] == ([4096, groups, 300], [4096, 8 * 4096], [128, 1, 128], [1, 1, 1])
    assert made[4:] == ("plain", "128-byte swizzle", "128 bytes", "zeros")
    assert list(tensor_map.box_map(x, (128, 1, 128))) == list(range(16))
    assert len(driver.maps) == 1


@pytest.mark.parametrize(
    ("groups", "build", "grid"), [(8, 8, (16, 8, 1)), (4, 4, (32, 4, 1)), (1, 1, (128, 1, 1))]
)
def test_the_product_of_one_token_has_a_build_for_its_tiles(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    groups: int,
    build: int,
    grid: tuple[int, int, int],
) -> None:
    builds: list[tuple[str, ...]] = []

    def load(source: str, name: str, shared: int, defines: tuple[str, ...]) -> str:
        builds.append(defines)
        return name

    monkeypatch.setattr(module, "load_function", load)
    x, x_scale = torch.empty(1, groups, 4096), torch.empty(1, groups, 32)
    w, w_scale = torch.empty(groups, 1024, 4096), torch.empty(groups, 32, 1024).transpose(1, 2)
    skinny_launch.launch(x, x_scale, w, w_scale, torch.empty(1, groups, 1024))
    (launch,) = driver.launches
    assert (launch["function"], launch["grid"]) == ("sm90_single_product", grid)
    assert (launch["threads"], launch["shared"]) == ((512, 1, 1), 0)
    assert builds == [(f"TILES={build}",)]


@pytest.mark.parametrize(("tokens", "groups", "grid"), [(1, 8, (16, 8, 1)), (8, 1, (64, 1, 1))])
def test_the_skinny_product_has_a_cta_for_a_few_tiles_of_a_group(
    driver: Driver, tokens: int, groups: int, grid: tuple[int, int, int]
) -> None:
    x, x_scale = torch.empty(tokens, groups, 4096), torch.empty(tokens, groups, 32)
    w, w_scale = torch.empty(groups, 1024, 4096), torch.empty(groups, 1024, 32)
    skinny_launch.launch(x, x_scale, w, w_scale, torch.empty(tokens, groups, 1024))
    (launch,) = driver.launches
    assert (launch["grid"], launch["threads"]) == (grid, (512, 1, 1))
