"""CPU time that the `flashmla` backend adds to each vendor call.

    python benchmarks/adapter_overhead.py

The vendor's ops are replaced by functions that return at once, so that what is timed is our Python
alone: the method call over the bare call with the same arguments. No GPU is needed. CPU time of
this process in microseconds, least of the repeats (other work can only add); the bar is 5.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megabench.backends.flashmla.backend import VendorOps
from megabench.backends.flashmla.binding import AttentionLibrary, adapt_wheel
from megabench.backends.flashmla.gemm import GemmLibrary
from megabench.backends.flashmla.probe import arguments
from megabench.backends.flashmla.schemas import DECODE, PERMUTE_Q_B, PERMUTE_WV, PREFILL, SCHEMAS
from megabench.quant import alloc_mega_attn_output, pack_mn_major

CALLS, REPEATS, BAR = 20_000, 9, 5.0
CPU = torch.device("cpu")
RESULTS = {DECODE: 3, PREFILL: 4, PERMUTE_Q_B: 2, PERMUTE_WV: 2}
"""Tensors each op returns."""


def microseconds(call: Callable[[], Any]) -> float:
    """CPU time of one call, the least of the repeats."""
    times = timeit.repeat(call, timer=time.process_time, number=CALLS, repeat=REPEATS)
    return min(times) / CALLS * 1e6


def returning(count: int) -> Callable[..., list[torch.Tensor]]:
    """An op that returns `count` tensors at once."""
    results = [torch.empty(0)] * count
    return lambda *args, **kwargs: results


def report(label: str, ours: Callable[[], Any], bare: Callable[[], Any]) -> None:
    """Print what `ours` takes over `bare`."""
    whole, alone = microseconds(ours), microseconds(bare)
    verdict = "ok" if whole - alone <= BAR else "ABOVE THE BAR"
    print(f"{label:58} {alone:7.2f} {whole:7.2f} {whole - alone:+7.2f}  {verdict}")


def in_place(backend: VendorOps) -> None:
    """vLLM's ops: our method passes its arguments on."""
    bare = {name: returning(count) for name, count in RESULTS.items()}
    backend._vendor = AttentionLibrary("bare", "", True, *(bare[name] for name in SCHEMAS))
    for name in SCHEMAS:
        args, op, ours = arguments(name, CPU), bare[name], getattr(backend, name)
        report(f"vllm {name}", lambda o=ours, a=args: o(*a), lambda o=op, a=args: o(*a))


def allocating(backend: VendorOps) -> None:
    """The package's functions, reordered; the copies into the caller's slice are device work, so
    the caller gives none here."""
    names = {"decode": 3, "prefill": 4, "permute_q_b_proj": 2, "permute_wv_proj": 2}
    fused = SimpleNamespace(**{name: returning(count) for name, count in names.items()})
    backend._vendor = adapt_wheel(fused, "", {})
    for name, bare in zip(SCHEMAS, vars(fused).values(), strict=True):
        args, ours = arguments(name, CPU), getattr(backend, name)
        args = args[:-2] if name in (DECODE, PREFILL) else args
        report(f"flash_mla {name}", lambda o=ours, a=args: o(*a), lambda o=bare, a=args: o(*a))


def products(backend: VendorOps) -> None:
    """DeepGEMM; a linear without its quantizer, which is a launch and not adapter time."""
    nothing = returning(0)
    backend._gemm = GemmLibrary("bare", "", nothing, nothing)
    out = alloc_mega_attn_output(4, 8, CPU)
    w = torch.zeros(8, 128, 4096).to(torch.float8_e4m3fn)
    sw = pack_mn_major(torch.zeros((8, 128, 128), dtype=torch.uint8))
    z = torch.empty((4, 8, 128), dtype=torch.bfloat16)
    einsum = ("bhr,hdr->bhd", (out.data, out.scale), (w, sw), z)
    report(
        "deep_gemm fp8_einsum",
        lambda: backend.fp8_einsum(*einsum, (1, 1, 32)),
        lambda: nothing(*einsum, recipe=(1, 1, 32)),
    )
    x = torch.zeros((4, 1280), dtype=torch.bfloat16)
    weight = torch.zeros(256, 1280).to(torch.float8_e4m3fn)
    scale = torch.zeros((256, 40), dtype=torch.uint8)
    backend.prepare(weight, scale)
    operand = backend.quantize(x)
    backend.quantize = lambda x: operand  # type: ignore[method-assign]
    packed = backend._packed.get(weight, scale)
    report(
        "deep_gemm linear (output allocated, quantizer left out)",
        lambda: backend.linear(x, weight, scale),
        lambda: nothing(operand, (weight, packed), x.new_empty((4, 256)), recipe=(1, 1, 32)),
    )


def main() -> None:
    print(f"{'op':58} {'bare':>7} {'ours':>7} {'added':>7}  us per call, bar {BAR}")
    for part in (in_place, allocating, products):
        part(VendorOps())


if __name__ == "__main__":
    main()
