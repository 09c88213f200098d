"""A backend that ends badly on a GPU, each time in another way: the token count says which."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megabench.backends import TorchBackend
from megabench.validate.device import _runtime


@triton.jit
def _store_far_away(out, distance):
    tl.store(out + distance, 1.0)


class EvilOnGpu(TorchBackend):
    """Right on steps of one token."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        match len(x):
            case 2:
                _store_far_away[(1,)](torch.zeros(1, device=x.device), 1 << 40)
            case 3:
                torch.empty(1 << 42, dtype=torch.uint8, device=x.device)
            case 4:
                torch.arange(3, device=x.device)[torch.tensor([1 << 20], device=x.device)]
            case 5:
                torch.cuda._sleep(1 << 40)
        result = super().linear(x, w, sw)
        if len(x) == 7:
            runtime = _runtime()
            assert runtime is not None
            runtime.cudaSetDevice(9999)  # refused, and nobody asks
        return result
