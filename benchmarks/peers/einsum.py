"""Groups of the wo_a einsum: bf16 by the vendor's library, DeepGEMM's fp8 kernel, and ours.

Scales are shared by 128 columns of a token and by 128 x 128 blocks of the weight, so that
DeepGEMM's SM90 recipe, whose scales are that coarse, multiplies the same values. It does not serve
the contract's per-32 scales: its time is of an easier product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.peers.arms import Arm, Bar, Group
from benchmarks.peers.judge import first, product_truth
from benchmarks.peers.steps import Bench
from megabench.backends.base import EINSUM, EINSUM_RECIPE
from megabench.backends.flashmla.gemm import find_gemm
from megabench.formats import HEAD_DIM, QUANT_GROUP, WV_GROUP_SIZE
from megabench.hashing import Stream
from megabench.quant import dequantize_mxfp8, pack_mn_major, tma_aligned, ue8m0_to_float
from megabench.workload.families import normal_codes

BMM, DEEP_GEMM = "torch.bmm, bf16", "DeepGEMM fp8, coarser scales, not the contract's"
BARS = {1: 0.6, 128: 0.7, 512: 1.1, 4096: 1.1}
COARSE = 128
COARSE_RECIPE = (1, COARSE, COARSE)
PER_COARSE = COARSE // QUANT_GROUP
ACTIVATION_BYTES = (118, 119, 120, 121)


@dataclass
class Product:
    """Operands with scales that are equal within 128 columns (and 128 weight rows)."""

    x: torch.Tensor
    """e4m3 [b, h, r]"""
    x_bytes: torch.Tensor
    """uint8 [h, b, r/128]"""
    w: torch.Tensor
    """e4m3 [h, d, r]"""
    w_bytes: torch.Tensor
    """uint8 [h, d/128, r/128]"""

    @classmethod
    def make(cls, bench: Bench, b: int) -> Product:
        geometry, device = bench.geometry, bench.device
        h, d, r = geometry.o_groups, geometry.o_lora_rank, WV_GROUP_SIZE * HEAD_DIM
        stream = Stream.of("peers", "einsum", b)
        codes = normal_codes(device)[stream.bytes(b, h, r, device=device).int()]
        pick = Stream.of(*stream.key, "scale").words(h, b, r // COARSE, device=device) & 3
        choices = torch.tensor(ACTIVATION_BYTES, dtype=torch.uint8, device=device)
        # Block scales of 32 x 32: the first of each 4 x 4 stands for all.
        scale = bench.weights["wo_a.scale"].view(h, d // QUANT_GROUP, r // QUANT_GROUP)
        return cls(
            codes.view(torch.float8_e4m3fn),
            choices[pick],
            bench.weights["wo_a.weight"].view(h, d, r),
            scale[:, ::PER_COARSE, ::PER_COARSE].contiguous(),
        )

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of x int32 [b, h, r/128] and of w [h, d, r/128], a word of four per-32 bytes."""
        x = self.x_bytes.repeat_interleave(PER_COARSE, -1)
        return pack_mn_major(x).transpose(0, 1), pack_mn_major(self._w_bytes())

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 [b, h, r] and [h, d, r], exact."""
        x_bytes = self.x_bytes.transpose(0, 1).repeat_interleave(PER_COARSE, -1)
        x, w = dequantize_mxfp8(self.x, x_bytes), dequantize_mxfp8(self.w, self._w_bytes())
        return x.bfloat16(), w.bfloat16()

    def coarse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 scales of x [b, h, r/128], MN-major as DeepGEMM wants, and of w."""
        h, b, chunks = self.x_bytes.shape
        storage = torch.zeros((h, chunks, tma_aligned(b)), device=self.x.device)
        x = storage.permute(2, 0, 1)[:b]
        x.copy_(ue8m0_to_float(self.x_bytes).transpose(0, 1))
        return x, ue8m0_to_float(self.w_bytes)

    def output(self) -> torch.Tensor:
        return self.x.new_empty((*self.x.shape[:2], self.w.shape[1]), dtype=torch.bfloat16)

    def _w_bytes(self) -> torch.Tensor:
        rows = self.w_bytes.repeat_interleave(COARSE, 1)
        return rows.repeat_interleave(PER_COARSE, 2)


def einsum_group(bench: Bench, b: int) -> Group:
    """One product in every form, at b tokens."""
    product = Product.make(bench, b)
    dense = product.dense()
    truth = product_truth(*dense)
    group = Group("einsum", f"b {b}", [], dict(bench.absent))
    for name, run in {BMM: _bmm(product, dense), **_ours(bench, product)}.items():
        group.arms.append(Arm(name, run, first, truth))
    gemm = find_gemm()
    if gemm.library is None:
        group.absent[DEEP_GEMM] = gemm.reason
    else:
        loose = product_truth(*dense, fp8_sums=True)
        run = _deep_gemm(gemm.library.fp8_einsum, product)
        group.arms.append(Arm(DEEP_GEMM, run, first, loose))
    for ours in bench.backends:
        group.bars.append(Bar(ours, BMM, BARS[b] if ours == "sm90" else None))
        group.bars.append(Bar(ours, DEEP_GEMM))
    return group


Run = Callable[[], list[torch.Tensor]]


def _bmm(product: Product, dense: tuple[torch.Tensor, torch.Tensor]) -> Run:
    """The library's product of operands that are bf16 already: no dequantization in the time."""
    z = product.output()
    x, w = dense[0].transpose(0, 1), dense[1].transpose(1, 2)

    def run() -> list[torch.Tensor]:
        torch.bmm(x, w, out=z.transpose(0, 1))
        return [z]

    return run


def _ours(bench: Bench, product: Product) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for name, backend in bench.backends.items():
        x_scale, w_scale = product.packed()
        w, z = product.w.clone(), product.output()
        backend.prepare(w, w_scale)

        def run(backend=backend, w=w, ws=w_scale, xs=x_scale, z=z) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
            backend.fp8_einsum(EINSUM, (product.x, xs), (w, ws), z, EINSUM_RECIPE)
            return [z]

        runs[name] = run
    return runs


def _deep_gemm(fp8_einsum: Callable[..., object], product: Product) -> Run:
    z, (x_scale, w_scale) = product.output(), product.coarse()

    def run() -> list[torch.Tensor]:
        fp8_einsum(EINSUM, (product.x, x_scale), (product.w, w_scale), z, recipe=COARSE_RECIPE)
        return [z]

    return run
