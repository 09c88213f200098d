"""The `sm90` backend: attention and products in CUDA C++ for Hopper, the rest from `triton`."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.backends.base import Pair, Support
from megabench.backends.sm90 import prefill_launch, products
from megabench.backends.sm90.decode_launch import blocks_of, decode_kernel, decode_params
from megabench.backends.triton.backend import TritonBackend
from megabench.formats import FP8, NVFP4, V4_FP8, KVRecord, PageLayout
from megabench.geometry import Geometry

CAPABILITY = (9, 0)
OFFSET_BITS = 32
"""Records are addressed in units of 16 bytes by 32-bit offsets."""


def _pool_serves(cache: torch.Tensor) -> bool:
    """Whether the kernel can read a checked cache: aligned, not empty, its offsets in range."""
    blocks, page, width = cache.shape[0], cache.shape[1], cache.shape[-1]
    return (
        width in (FP8.nbytes, NVFP4.nbytes)
        and cache.data_ptr() % 16 == 0
        and 0 < blocks * page < 2**31
        and (blocks * cache.stride(0) // 16 < 2**OFFSET_BITS or blocks == 1)
    )


def _last_dim_dense(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


class Sm90Backend(TritonBackend):
    """CUDA C++ attention, einsum and linears of few tokens for sm_90a, compiled at run time.

    The decode kernel serves 528-byte caches and 288-byte extra caches in interleaved pages, 64 or
    128 padded heads, no Q norm and a positive softmax scale; other calls go to the inherited op. It
    computes 64 heads however few are live: down to 8 that is faster than Triton's 16-head tiles at
    every number of tokens (docs/kernels.md). What the other kernels serve: prefill_launch.serves,
    products.serves and products.serves_linear.
    """

    name = "sm90"

    def __init__(self, page_layout: PageLayout = "interleaved") -> None:
        super().__init__(page_layout)
        self._pieces = products.PieceWeights()

    def supports(self, geometry: Geometry, device: torch.device, record: KVRecord) -> Support:
        if record is V4_FP8:
            return Support(False, f"the sm90 kernels read no {record.name} records")
        if device.type != "cuda" or not torch.cuda.is_available():
            return Support(False, "the sm90 kernels need a CUDA device")
        capability = torch.cuda.get_device_capability(device)
        if capability != CAPABILITY:
            found = ".".join(map(str, capability))
            return Support(False, f"the sm90 kernels need compute capability 9.0, not {found}")
        if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
            return Support(False, "the sm90 kernels need cuda-bindings (pip install cuda-bindings)")
        return Support(True)

    def _serves(self, args: DecodeArguments) -> bool:
        """Whether the kernel can read the arguments of a call that passed its checks."""
        q = args.q
        lists = (args.indices, args.extra_indices)
        vectors = (args.attn_sink, args.topk_length, args.extra_topk_length)
        return (
            self.page_layout == "interleaved"
            and not args.enable_q_norm
            and args.sm_scale > 0
            and q.shape[0] > 0
            and q.data_ptr() % 16 == 0
            and q.stride(0) % 8 == 0
            and args.cos_sin_cache.data_ptr() % 16 == 0
            and (args.out_fp8 is None or args.out_fp8.data_ptr() % 8 == 0)
            and all(_pool_serves(cache) for cache in (args.kv, args.extra_kv) if cache is not None)
            and all(_last_dim_dense(x) for x in (*lists, *vectors) if x is not None)
        )

    def decode(self, args: DecodeArguments) -> list[torch.Tensor]:
        args.check()
        if not self._serves(args):
            return super().decode(args)
        out, lse = args.output(), args.empty_lse()
        params = decode_params(
            args.q,
            args.kv,
            args.indices,
            args.sm_scale,
            args.attn_sink,
            args.topk_length,
            args.extra_kv,
            args.extra_indices,
            args.extra_topk_length,
            args.token_positions,
            args.cos_sin_cache,
            out.data,
            out.scale,
            lse,
        )
        fp4 = args.extra_kv is not None and args.extra_kv.shape[-1] == NVFP4.nbytes
        kernel = decode_kernel(args.q.device.index or 0, fp4)
        kernel.launch(params, kernel.shape_for(params.items, blocks_of(params)))
        return [out.data, out.scale, lse]

    def prefill(self, args: PrefillArguments) -> list[torch.Tensor]:
        args.check()
        if not prefill_launch.serves(args):
            return super().prefill(args)
        return prefill_launch.prefill(args)

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep the bf16 form that the einsum's kernel reads, or the inherited one."""
        if weight.device.type == "cuda" and products.can_prepare(weight, scale):
            self._pieces.prepare(weight, scale)
        else:
            super().prepare(weight, scale)

    def checked_einsum(self, x: Pair, w: Pair, out: torch.Tensor) -> None:
        if products.serves(x[0], w[0], out):
            products.einsum(x, w, out, self._pieces.kept(*w))
        else:
            super().checked_einsum(x, w, out)

    def checked_linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        if products.serves_linear(x, w, sw):
            return products.linear(x, w, sw)
        return super().checked_linear(x, w, sw)
