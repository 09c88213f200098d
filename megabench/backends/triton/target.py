"""What a launch is compiled for: the interpreter, or a CUDA device's capability and size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class Target:
    """Compile-time facts of one device."""

    emulate: bool
    """Triton's interpreter on a CPU: bf16 is rounded on bits and dots run in float32."""
    fp8_cvt: bool
    """The hardware converts float32 to e4m3 (SM89 and later)."""
    capability: int
    """Ten times major plus minor, 0 under the interpreter."""
    multiprocessors: int

    @property
    def narrow(self) -> bool:
        """A block has 99 KB of shared memory (SM86, SM89, SM120, SM121), not 163 KB or more."""
        return self.capability in (86, 89, 120, 121)


@cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major * 10 + properties.minor
    return Target(False, capability >= 89, capability, properties.multi_processor_count)


INTERPRETER = Target(emulate=True, fp8_cvt=False, capability=0, multiprocessors=1)


def interpreting() -> bool:
    """Whether kernels were declared under TRITON_INTERPRET=1 (read when they are declared)."""
    return bool(triton.knobs.runtime.interpret)


def target_of(device: torch.device) -> Target:
    """The target of tensors on `device`; RuntimeError for a CPU without the interpreter."""
    if interpreting():
        return INTERPRETER
    if device.type != "cuda":
        raise RuntimeError(
            f"triton backend: no kernels for device {device}; set TRITON_INTERPRET=1 before "
            "megabench is imported to run them on a CPU"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_target(index)
