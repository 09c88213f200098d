"""Time the triton backend's ops on this machine's GPU, and tile candidates where asked.

    PYTHONPATH=.:tests/backends python scripts/device/triton_bench.py [--what decode-tiles]
        [--warm PROCESSES]

Median microseconds of a CUDA graph replay, the L2 flushed by a 256 MB write before each. --warm
only compiles what would be timed, in many processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch

from megabench.backends.sm90.backend import Sm90Backend
from megabench.backends.triton import attention, matmul
from megabench.backends.triton import products as product_launches
from megabench.backends.triton.attention import Tile
from megabench.backends.triton.backend import TritonBackend
from megabench.backends.triton.matmul import MatmulTile
from megabench.geometry import Geometry, cos_sin_cache
from megabench.quant import alloc_mega_attn_output, pack_mn_major

POOL = 131_072
TOPK, EXTRA = 128, 512
DEVICE = torch.device("cuda")


class Compile:
    """In place of the timer: run every n-th call once, so that its kernels are in the cache."""

    def __init__(self, share: int, shares: int) -> None:
        self.share, self.shares, self.calls = share, shares, 0

    def __call__(self, op: Callable[[], object]) -> float:
        self.calls += 1
        if self.calls % self.shares == self.share:
            op()
            torch.cuda.synchronize()
        return 0.0


class Timer:
    """Cold-L2 median of a captured call."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def __call__(self, op: Callable[[], object], samples: int = 25) -> float:
        op()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op()
        times = []
        for _ in range(samples):
            self.flush.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return float(median(times[5:]))


def pool(page: int, nbytes: int) -> torch.Tensor:
    cache = torch.randint(0, 0x70, (POOL // page, page, 1, nbytes), device=DEVICE).to(torch.uint8)
    if nbytes == 528:
        cache[..., 512:] = torch.randint(116, 120, cache[..., 512:].shape, device=DEVICE).to(
            torch.uint8
        )
    else:
        cache[..., 256:] = torch.randint(0x20, 0x30, cache[..., 256:].shape, device=DEVICE).to(
            torch.uint8
        )
    return cache


class Decode:
    """Decode calls of one extra record."""

    def __init__(self, nbytes: int) -> None:
        self.swa, self.extra = pool(32, 528), pool(64, nbytes)
        self.table = cos_sin_cache(Geometry.load(), 4096, True).to(DEVICE)
        self.sinks = torch.randn(64, device=DEVICE)

    def op(self, s_q: int, backend: TritonBackend) -> Callable[[], object]:
        q = torch.randn(s_q, 64, 512, device=DEVICE).bfloat16()
        rows = [torch.randint(0, POOL, (s_q, n), device=DEVICE).int() for n in (TOPK, EXTRA)]
        lens = [torch.full((s_q,), n, device=DEVICE, dtype=torch.int32) for n in (TOPK, EXTRA)]
        positions = torch.randint(0, 4096, (s_q,), device=DEVICE).int()
        out = alloc_mega_attn_output(s_q, 8, DEVICE)
        fixed = (False, 64, self.table, 8, 32, True, True, True, out.data, out.scale)
        return lambda: backend.fused_norm_rope_attn_rope_cast_decode(
            q,
            self.swa,
            rows[0],
            512**-0.5,
            512,
            self.sinks,
            lens[0],
            self.extra,
            rows[1],
            lens[1],
            False,
            0.0,
            positions,
            *fixed,
        )


def prefill_op(s_q: int, backend: TritonBackend) -> Callable[[], object]:
    kv = torch.randn(16_384, 1, 512, device=DEVICE).bfloat16()
    q = torch.randn(s_q, 64, 512, device=DEVICE).bfloat16()
    rows = torch.randint(0, len(kv), (s_q, 1, TOPK + EXTRA), device=DEVICE).int()
    lens = torch.full((s_q,), TOPK + EXTRA, device=DEVICE, dtype=torch.int32)
    positions = torch.randint(0, 4096, (s_q,), device=DEVICE).int()
    table = cos_sin_cache(Geometry.load(), 4096, True).to(DEVICE)
    sinks, out = torch.randn(64, device=DEVICE), alloc_mega_attn_output(s_q, 8, DEVICE)
    fixed = (False, 64, table, 8, 32, True, True, True, out.data, out.scale)
    return lambda: backend.fused_norm_rope_attn_rope_cast_fwd(
        q, kv, rows, 512**-0.5, 512, sinks, lens, False, 0.0, positions, *fixed
    )


class Products:
    """The wo_a einsum and the two linears."""

    def __init__(self) -> None:
        self.w = self.codes(8, 1024, 4096)
        self.dense = torch.randn(8, 4096, 1024, device=DEVICE).bfloat16()
        self.sw = pack_mn_major(self.scales(8, 1024, 128))
        self.linear_w = {
            (n, k): (self.codes(n, k), self.scales(n, k // 32))
            for n, k in ((32768, 1280), (5120, 8192))
        }

    def keep(self, backend: TritonBackend) -> None:
        """Have the bf16 forms made."""
        backend.prepare(self.w, self.sw)
        for w, sw in self.linear_w.values():
            backend.prepare(w, sw)

    @staticmethod
    def codes(*shape: int) -> torch.Tensor:
        return (
            torch.randint(0, 0x60, shape, device=DEVICE).to(torch.uint8).view(torch.float8_e4m3fn)
        )

    @staticmethod
    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(116, 120, shape, device=DEVICE).to(torch.uint8)

    def einsum(self, b: int, backend: TritonBackend) -> Callable[[], object]:
        x = alloc_mega_attn_output(b, 8, DEVICE)
        x.data.copy_(self.codes(b, 8, 4096))
        x.scale.copy_(self.scales(b, 8, 128).view(torch.int32))
        z = torch.empty(b, 8, 1024, device=DEVICE, dtype=torch.bfloat16)
        pair, weights = (x.data, x.scale), (self.w, self.sw)
        return lambda: backend.fp8_einsum("bhr,hdr->bhd", pair, weights, z, (1, 1, 32))

    def bmm(self, b: int) -> Callable[[], object]:
        x = torch.randn(8, b, 4096, device=DEVICE).bfloat16()
        z = torch.empty(8, b, 1024, device=DEVICE, dtype=torch.bfloat16)
        return lambda: torch.bmm(x, self.dense, out=z)

    def linear(self, tokens: int, n: int, k: int, backend: TritonBackend) -> Callable[[], object]:
        x = torch.randn(tokens, k, device=DEVICE).bfloat16()
        return lambda: backend.linear(x, *self.linear_w[n, k])


def attempt(timer: Timer | Compile, op: Callable[[], object]) -> float:
    try:
        return timer(op)
    except Exception as error:  # a candidate that does not fit is a result too
        print("   ", type(error).__name__, str(error)[:120].replace("\n", " "))
        return float("nan")


def row(name: str, times: Iterator[float] | list[float]) -> None:
    print(f"{name:44}" + "".join(f"{t:9.1f}" for t in times), flush=True)


DECODE_TILES = (
    Tile(16, 32, 4, 1, resident=2),
    Tile(32, 32, 8, 1),
    Tile(64, 64, 8, 1),
    Tile(64, 128, 8, 1),
)


def decode_tiles(timer: Timer | Compile, backend: TritonBackend) -> None:
    """Candidates for every number of live heads, beside the sm90 kernel, which computes 64."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    chosen = attention.decode_tile
    for nbytes in (528, 288):
        calls = Decode(nbytes)
        for live in (8, 16, 32, 64):
            narrow = backend.for_live_heads(live)
            print(f"decode, {live} live heads, extra {nbytes} B, us, s_q", sizes)
            for tile in DECODE_TILES:
                attention.decode_tile = lambda *_, tile=tile: tile
                name = f"tile {tile.heads} x {tile.rows}"
                row(name, [attempt(timer, calls.op(s, narrow)) for s in sizes])
            attention.decode_tile = chosen
            row("as launched", [attempt(timer, calls.op(s, narrow)) for s in sizes])
        cuda = Sm90Backend()
        row("sm90, 64 heads", [attempt(timer, calls.op(s, cuda)) for s in sizes])


def prefill_tiles(timer: Timer | Compile, backend: TritonBackend) -> None:
    """What few live heads gain in the prefill."""
    sizes = (16, 128, 1024, 4096)
    print("prefill, us, s_q", sizes)
    for live in (8, 16, 32, 64):
        narrow = backend.for_live_heads(live)
        row(f"{live} live heads", [attempt(timer, prefill_op(s, narrow)) for s in sizes])


def product_tiles(timer: Timer | Compile, backend: TritonBackend) -> None:
    """Candidates for the products."""
    products = Products()

    def use(tile: MatmulTile) -> None:
        matmul.matmul_tile = lambda t, *_, tile=tile: replace(
            tile, tokens=tile.tokens or max(16, t)
        )

    print("wo_a tile, b 1 16 32 64")
    for rows in (16, 32, 64):
        for columns, stages, warps in (
            (128, 4, 4),
            (256, 3, 4),
            (256, 4, 8),
            (512, 3, 4),
            (512, 2, 8),
        ):
            use(MatmulTile(0, rows, columns, warps, stages, True))
            times = [attempt(timer, products.einsum(b, backend)) for b in (1, 16, 32, 64)]
            row(f"left {rows} x {columns} warps {warps} stages {stages}", times)
    products.keep(backend)
    product_launches.DENSE_TOKENS = 1
    sizes = (16, 32, 64, 128, 256, 512, 1024, 4096)
    print("wo_a dense, b", sizes)
    row("dense", [attempt(timer, products.einsum(b, backend)) for b in sizes])


def ops(timer: Timer | Compile, backend: TritonBackend) -> None:
    """The ops as the backend launches them."""
    sizes = (1, 8, 32, 64, 128, 256, 512, 1024)
    print("decode, us, s_q", sizes)
    for nbytes in (528, 288):
        calls = Decode(nbytes)
        row(f"64 heads, extra {nbytes} B", [timer(calls.op(s, backend)) for s in sizes])
        for live in (32, 16):
            narrow = backend.for_live_heads(live)
            times = [timer(calls.op(s, narrow)) for s in sizes]
            row(f"{live} live heads, extra {nbytes} B", times)
    products = Products()
    products.keep(backend)
    tokens = (1, 16, 64, 128, 512, 4096)
    print("products, us, tokens", tokens)
    row("wo_a einsum", [timer(products.einsum(b, backend)) for b in tokens])
    row("torch.bmm bf16", [timer(products.bmm(b)) for b in tokens])
    for n, k in products.linear_w:
        row(f"linear {n} x {k}", [timer(products.linear(b, n, k, backend)) for b in tokens])
    times = [timer(prefill_op(s, backend)) for s in (128, 1024, 4096)]
    row("prefill 640, s_q 128 1024 4096", times)


WHAT = {
    "ops": ops,
    "decode-tiles": decode_tiles,
    "prefill-tiles": prefill_tiles,
    "product-tiles": product_tiles,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--what", default="ops", choices=tuple(WHAT), help="the ops, or candidates for their tiles"
    )
    parser.add_argument("--warm", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.warm and chosen.share is None:
        command = [sys.executable, *sys.argv]
        children = [
            subprocess.Popen([*command, "--share", str(i)], stdout=subprocess.DEVNULL)
            for i in range(chosen.warm)
        ]
        sys.exit(max(child.wait() for child in children))
    timer = Compile(chosen.share, chosen.warm) if chosen.warm else Timer()
    WHAT[chosen.what](timer, TritonBackend())


if __name__ == "__main__":
    main()
