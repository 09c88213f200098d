"""A loaded kernel of one device, and how it is launched on torch's current stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from megabench.backends.sm90.nvrtc import bindings, check, load_function

SHARED_BYTES = 232_448
"""Dynamic shared memory of a CTA: all that an SM gives one. The kernels assert that they fit."""
LOG2E = 1.4426950408889634


def pointer(tensor: torch.Tensor | None) -> int | None:
    """An optional tensor's address, null without it."""
    return None if tensor is None else tensor.data_ptr()


class Kernel:
    """One entry point of one source, compiled and loaded for one device, which must be the current
    one at a launch. A launch configuration is made once and used again: one thread at a time."""

    def __init__(
        self, device: torch.device, source: str, name: str, shared: int, defines: tuple[str, ...]
    ) -> None:
        self._driver, _ = bindings()
        self._device, self._name, self._shared = device, name, shared
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes torch's context current
            self._function = load_function(source, name, shared, defines)
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._configs: dict[tuple[int, int, int, int], Any] = {}
        self._clusters: dict[tuple[int, int], int] = {}

    def _config(self, x: int, y: int, threads: int, cluster: int) -> Any:
        made = self._configs.get((x, y, threads, cluster))
        if made is not None:
            return made
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        self._configs[x, y, threads, cluster] = config
        return config

    def allow_large_clusters(self) -> None:
        """Clusters of more than 8 CTAs, on devices that have them."""
        attribute = (
            self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        )
        with torch.cuda.device(self._device):
            done = self._driver.cuFuncSetAttribute(self._function, attribute, 1)
        check(done, "allowing clusters of more than 8 CTAs")

    def clusters_at_once(self, size: int, threads: int) -> int:
        """Clusters of `size` CTAs that can run at once."""
        known = self._clusters.get((size, threads))
        if known is None:
            config = self._config(size, 1, threads, size)
            with torch.cuda.device(self._device):
                found = self._driver.cuOccupancyMaxActiveClusters(self._function, config)
            known = self._clusters[size, threads] = int(check(found, "counting clusters"))
        return known

    def launch(
        self, params: ctypes.Structure, grid: tuple[int, int], threads: int, cluster: int = 1
    ) -> None:
        """Run on torch's current stream."""
        config = self._config(*grid, threads, cluster)
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        argument = ctypes.c_void_p(ctypes.addressof(params))
        check(
            self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(argument), 0),
            f"the launch of {self._name}",
        )


@cache
def kernel(
    device_index: int, source: str, name: str, shared: int, defines: tuple[str, ...] = ()
) -> Kernel:
    """The kernel of one device, compiled and loaded on first use."""
    return Kernel(torch.device("cuda", device_index), source, name, shared, defines)
