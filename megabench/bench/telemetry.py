"""Device state around a block of samples: clocks, power, temperature, throttle reasons.

A block seen under a hardware or thermal slowdown does not count; under a software power cap it
counts and is labelled, since that is the steady state of these parts under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megabench.results import Telemetry

REASONS: dict[int, str] = {
    0x1: "gpu idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""NVML clocks-event-reasons (nvml.h, nvmlClocksEventReason*)."""
INVALIDATING = 0x8 | 0x20 | 0x40 | 0x80
SILENT = 0x1
"""Idle is what a device between two blocks is."""


@dataclass(frozen=True)
class Reading:
    """One look at the device."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    throttle_mask: int = 0


class Probe(Protocol):
    """Where readings come from."""

    source: str

    def read(self, memory: bool = True) -> Reading:
        """The device's state now; its used memory, which is slow to ask for, where wanted."""
        ...


class NullProbe:
    """For devices that tell nothing: a CPU, or a host without NVML."""

    source = "none"

    def read(self, memory: bool = True) -> Reading:
        return Reading()


class FakeProbe:
    """Plays back given readings, then repeats the last one."""

    source = "fake"

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._left = list(readings)

    def read(self, memory: bool = True) -> Reading:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


class NvmlProbe:
    """NVML through nvidia-ml-py. A field the driver refuses stays None."""

    source = "nvml"

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self, memory: bool = True) -> Reading:
        nvml, handle = self._nvml, self._handle
        sm, mem = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        used = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle) if memory else None
        mask = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return Reading(
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, sm),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, mem),
            power_w=None if power is None else power / 1000,
            temperature_c=self._ask(
                nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            memory_used_bytes=None if used is None else used.used,
            throttle_mask=mask or 0,
        )

    def _ask(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return None


def make_probe(device: torch.device) -> Probe:
    """NVML for a CUDA device where it answers, else the null probe."""
    if device.type == "cuda":
        try:
            return NvmlProbe(device)
        except Exception:  # no driver library, or a device NVML cannot name: rows say "none"
            return NullProbe()
    return NullProbe()


def summarise_readings(source: str, readings: Sequence[Reading]) -> Telemetry:
    """One block's readings as a row: clocks and power averaged, the rest at their worst."""
    mask = 0
    for reading in readings:
        mask |= reading.throttle_mask
    bad = [text for bit, text in REASONS.items() if mask & bit & INVALIDATING]
    return Telemetry.model_validate(
        {
            "source": source,
            "sm_clock_mhz": _mean([r.sm_clock_mhz for r in readings]),
            "memory_clock_mhz": _mean([r.memory_clock_mhz for r in readings]),
            "power_w": _mean([r.power_w for r in readings]),
            "temperature_c": _largest([r.temperature_c for r in readings]),
            "memory_used_bytes": _largest([r.memory_used_bytes for r in readings]),
            "throttle_mask": mask,
            "labels": [text for bit, text in REASONS.items() if mask & bit & ~SILENT],
            "invalid": ", ".join(bad) or None,
        }
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _largest(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)
