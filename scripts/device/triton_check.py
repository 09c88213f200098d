"""Every op of the triton backend against the golden model, on the GPU of this machine.

    PYTHONPATH=.:tests/backends python scripts/device/triton_check.py [--only NAME] [--processes 8]

One check a line: its name and the worst error over its bound (exact ones say equal). Processes
share the work, for most of the time goes to compiling kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
import triton_cases
from triton_cases import Call

import reference.linear
from megabench.backends.torch_eager import TorchBackend
from megabench.backends.triton import attention
from megabench.backends.triton.backend import TritonBackend
from megabench.quant import (
    alloc_mega_attn_output,
    pack_mn_major,
    quantize_kv_mxfp8,
)

S_Q = (1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513)
S_Q_LARGE = (1023, 4097)
LENS = (0, 1, 3, 4, 5, 63, 64, 65, 95, 96, 97, 127, 128)
EXTRA_LENS = (0, 1, 63, 64, 511, 512)
PATTERNS = ("leading", "middle", "trailing", "alternating", "none")
DEVICE = "cuda"
Check = Callable[[], float]
"""Worst error / bound; an exact check gives 0 or inf."""


def call(**changes: object) -> Call:
    return Call(device=DEVICE, slots=4096, **changes)  # type: ignore[arg-type]


def decode(**changes: object) -> float:
    """Into a slice of a poisoned buffer, which must stay untouched outside the slice."""
    one = call(**changes)
    backend = TritonBackend(one.layout)  # type: ignore[arg-type]
    whole = one.output(before=3, after=2)
    part = slice(3, 3 + one.s_q)
    inner = type(whole)(
        whole.data[part], whole.scale[part], whole.orig_dtype, whole.data[part].shape
    )
    got = one.decode(backend, inner)
    outside = [*whole.data.view(torch.uint8)[:3], *whole.data.view(torch.uint8)[part.stop :]]
    scales = torch.cat((whole.scale[:3], whole.scale[part.stop :]))
    if not all(bool((row == triton_cases.POISON).all()) for row in outside):
        return float("inf")
    if not bool((scales == -1).all()):
        return float("inf")
    return triton_cases.decode_excess(one, got)


def prefill(**changes: object) -> float:
    one = call(topk=640, extra=0, **changes)
    workspace = one.workspace()
    return triton_cases.prefill_excess(one, workspace, one.prefill(TritonBackend(), workspace))


def decode_sweep(extra_bytes: int, layout: str) -> float:
    tokens = S_Q if layout == "interleaved" else (1, 5, 33, 129)
    return max(
        decode(
            s_q=s_q,
            extra_bytes=extra_bytes,
            layout=layout,
            lens=LENS,
            extra_lens=EXTRA_LENS,
            seed=s_q,
        )
        for s_q in tokens
    )


def large(extra_bytes: int) -> float:
    return max(decode(s_q=s_q, extra_bytes=extra_bytes, lens=LENS, seed=s_q) for s_q in S_Q_LARGE)


def patterns(extra_bytes: int) -> float:
    return max(
        decode(s_q=s_q, extra_bytes=extra_bytes, pattern=pattern, seed=s_q)
        for pattern in PATTERNS
        for s_q in (2, 140)
    )


def sinks() -> float:
    values = torch.tensor([float("-inf"), float("inf"), 1e3, -1e3, 3e38, -3e38, 0.0, 5.0]).repeat(8)
    one = {"sinks": values.to(DEVICE), "lens": (0, 128)}
    return max(decode(s_q=3, **one), decode(s_q=140, **one), prefill(s_q=5, **one))


def swa_only() -> float:
    return max(decode(s_q=s_q, extra=0, lens=LENS) for s_q in (1, 13, 200))


def wide_heads() -> float:
    return max(
        decode(s_q=7, heads=128, lens=LENS),
        decode(s_q=150, heads=128, extra_bytes=288),
        prefill(s_q=7, heads=128),
    )


def live_heads() -> float:
    worst = 0.0
    for live in (8, 16, 32):
        backend = TritonBackend().for_live_heads(live)
        for s_q, extra_bytes in ((1, 288), (130, 528), (65, 288)):
            one = call(s_q=s_q, extra_bytes=extra_bytes, lens=LENS, extra_lens=EXTRA_LENS)
            worst = max(worst, triton_cases.decode_excess(one, one.decode(backend), live))
    return worst


def q_norm() -> float:
    return max(decode(s_q=3, q_norm_eps=1e-6), prefill(s_q=3, q_norm_eps=1e-6))


def prefill_sweep() -> float:
    return max(
        prefill(s_q=s_q, lens=(0, 1, 64, 127, 640, 500), seed=s_q) for s_q in (*S_Q, *S_Q_LARGE)
    )


def prefill_patterns() -> float:
    return max(prefill(s_q=4, pattern=pattern) for pattern in PATTERNS)


def prefill_plain() -> float:
    """The kernel of other architectures, on this one."""
    limit, attention.SM90_PREFILL_HEADS = attention.SM90_PREFILL_HEADS, 1000
    try:
        return max(prefill(s_q=s_q, lens=(0, 1, 64, 127, 640, 500)) for s_q in (7, 300))
    finally:
        attention.SM90_PREFILL_HEADS = limit


def far_pages() -> float:
    """A pool whose last pages lie beyond 2^31 bytes."""
    one = call(s_q=5, topk=128, extra=0)
    blocks = (2**31 + 2**28) // (32 * 528)
    far = torch.full((blocks, 32, 528), triton_cases.POISON, dtype=torch.uint8, device=DEVICE)
    first = blocks - one.kv.shape[0]
    far[first:] = one.kv
    near, slots = one.kv, one.indices
    one.kv, one.indices = far, slots + first * 32
    got = one.decode(TritonBackend())
    one.kv, one.indices = near, slots
    return triton_cases.decode_excess(one, got)


def repeats() -> float:
    rows = call(s_q=200, topk=640, extra=0)
    workspace = rows.workspace()
    first = [t.clone() for t in rows.prefill(TritonBackend(), workspace)]
    for _ in range(200):
        again = rows.prefill(TritonBackend(), workspace)
        if equal(*zip(first[:1] + first[2:], again[:1] + again[2:], strict=True)):
            return float("inf")
    for s_q in (1, 33, 200):
        one = call(s_q=s_q, extra_bytes=288)
        first = [t.clone() for t in one.decode(TritonBackend())]
        for _ in range(300):
            again = one.decode(TritonBackend())
            if not all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(first[:1], again[:1], strict=True)
            ):
                return float("inf")
            if not (torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])):
                return float("inf")
    return 0.0


def graph_replay() -> float:
    one, other = call(s_q=7, seed=1), call(s_q=7, seed=2)
    out = one.output()
    backend = TritonBackend()
    one.decode(backend, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = one.decode(backend, out)
    for name in ("q", "positions", "kv", "extra_kv", "indices", "extra_indices", "sinks"):
        getattr(one, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    return triton_cases.decode_excess(other, got)


def equal(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    same = all(
        a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )
    return 0.0 if same else float("inf")


def inserts() -> float:
    """Bytes equal to the eager backend's, whose rotation does not contract multiply-adds: the few
    codes that may differ by one are counted against one in a hundred thousand."""
    g = torch.Generator(DEVICE).manual_seed(0)
    table = triton_cases.table(DEVICE)
    wrong, total = 0, 0
    for layout in ("interleaved", "page_split"):
        for tokens, live in ((1, 8), (33, 64), (700, 16)):
            q = torch.randn(tokens, live, 512, generator=g, device=DEVICE).bfloat16()
            kv = triton_cases.latents(tokens, g).bfloat16()
            positions = torch.randint(0, 4096, (tokens,), generator=g, device=DEVICE)
            slots = torch.randperm(1024, generator=g, device=DEVICE)[:tokens]
            slots[::7] = -1
            for nbytes, page in ((528, 32), (288, 64), (528, 64)):
                made = []
                for backend in (TritonBackend(layout), TorchBackend(layout)):  # type: ignore[arg-type]
                    storage = torch.full(
                        (32 * (page * nbytes + 48),), 7, dtype=torch.uint8, device=DEVICE
                    )
                    cache = storage.as_strided((32, page, nbytes), (page * nbytes + 48, nbytes, 1))
                    if page == 32:
                        padded = backend.pad_q_and_insert_kv(
                            q, kv, cache, slots, positions, table, 64
                        )
                    else:
                        backend.insert_compressed(kv, positions, table, cache, slots, 2)
                    made.append((storage, padded))
                wrong += int((made[0][0] != made[1][0]).sum())
                total += made[0][0].numel()
                if equal((made[0][1], made[1][1])):
                    return float("inf")
    return wrong / total * 1e5


def gathers() -> float:
    one = call(s_q=2)
    worst = 0.0
    table = torch.randperm(64, device=DEVICE).view(4, 16).int()
    for nbytes, layout in (
        (528, "interleaved"),
        (288, "interleaved"),
        (528, "page_split"),
        (288, "page_split"),
    ):
        g = torch.Generator(DEVICE).manual_seed(1)
        rows = triton_cases.latents(4096, g)
        cache = triton_cases.paged_pool(
            rows, torch.arange(4096, device=DEVICE), 64, 64, nbytes, layout, 32
        )
        lens = torch.tensor([1000, 0, 1024, 5], dtype=torch.int32, device=DEVICE)
        tails = torch.tensor([130, 0, 1024, 5], dtype=torch.int32, device=DEVICE)
        for gather in (None, tails):
            made = []
            for backend in (TritonBackend(layout), TorchBackend(layout)):  # type: ignore[arg-type]
                out = torch.full((4, 1200, 512), 3.0, dtype=torch.bfloat16, device=DEVICE)
                backend.dequantize_and_gather_k_cache(out, cache, lens, gather, table, 64, 100)
                made.append(out)
            worst = max(worst, equal((made[0], made[1])))
    del one
    return worst


def index_ops() -> float:
    g = torch.Generator(DEVICE).manual_seed(2)
    tokens, topk = 300, 512
    rows = torch.randint(-1, 640, (tokens, topk), generator=g, device=DEVICE).int()
    request = torch.randint(0, 8, (tokens,), generator=g, device=DEVICE).int()
    table = torch.randperm(8 * 10, generator=g, device=DEVICE).view(8, 10).int()
    valid = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    made = [
        b.compute_global_topk_indices_and_lens(rows, request, table, 64, valid)
        for b in (TritonBackend(), TorchBackend())
    ]
    start = torch.tensor([20, 120, 121, 320], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([100, 900, 700], dtype=torch.int32, device=DEVICE)
    tails = torch.tensor([100, 128, 327], dtype=torch.int32, device=DEVICE)
    more = [
        b.combine_topk_swa_indices(rows, start, lens, tails, 128, 2, 512, 900, 500)
        for b in (TritonBackend(), TorchBackend())
    ]
    return equal(*zip(*made, strict=True), *zip(*more, strict=True))


def permutes() -> float:
    g = torch.Generator(DEVICE).manual_seed(3)

    def fp8(*shape: int) -> torch.Tensor:
        return (
            torch.randint(0, 256, shape, generator=g, device=DEVICE)
            .to(torch.uint8)
            .view(torch.float8_e4m3fn)
        )

    def scales(*shape: int) -> torch.Tensor:
        return pack_mn_major(
            torch.randint(0, 255, shape, generator=g, device=DEVICE).to(torch.uint8)
        )

    q_args = (fp8(64 * 512, 1280), scales(1, 64 * 512, 40)[0], 64, 512)
    wv_args = (fp8(8, 1024, 4096), scales(8, 1024, 128), 8, 512)
    ours, eager = TritonBackend(), TorchBackend()
    return equal(
        *zip(ours.permute_q_b_proj(*q_args), eager.permute_q_b_proj(*q_args), strict=True),
        *zip(ours.permute_wv_proj(*wv_args), eager.permute_wv_proj(*wv_args), strict=True),
    )


def linears() -> float:
    g = torch.Generator(DEVICE).manual_seed(4)
    worst = 0.0
    for n, k in ((4096, 1280), (5120, 8192), (512, 1312)):
        w, sw = quantize_kv_mxfp8(torch.randn(n, k, generator=g, device=DEVICE) * 0.05)
        backend, weight = TritonBackend(), w.view(torch.float8_e4m3fn)
        backend.prepare(weight, sw)
        for tokens in (1, 5, 16, 33, 64, 65, 130, 300):
            x = (
                triton_cases.latents(tokens * 32, g)
                .flatten()[: tokens * k]
                .view(tokens, k)
                .bfloat16()
            )
            got = backend.linear(x, weight, sw)
            worst = max(worst, triton_cases.matmul_excess(got, reference.linear.linear(x, w, sw)))
    return worst


def einsums() -> float:
    g = torch.Generator(DEVICE).manual_seed(5)
    w, sw = quantize_kv_mxfp8(torch.randn(8, 1024, 4096, generator=g, device=DEVICE) * 0.05)
    packed = pack_mn_major(sw)
    whole = w.view(torch.float8_e4m3fn)
    backend = TritonBackend()
    backend.prepare(whole, packed)
    worst = 0.0
    for tokens, groups in (
        (1, 8),
        (3, 8),
        (17, 2),
        (33, 8),
        (65, 8),
        (130, 1),
        (513, 8),
        (1030, 8),
    ):
        x = alloc_mega_attn_output(tokens, 8, torch.device(DEVICE))
        codes, scale = quantize_kv_mxfp8(torch.randn(tokens, 8, 4096, generator=g, device=DEVICE))
        x.data.copy_(codes.view(torch.float8_e4m3fn))
        x.scale.copy_(scale.view(torch.int32))
        z = torch.full((tokens, groups, 1024), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        weights = (whole, packed) if groups == 8 else (whole[:groups], packed[:groups])
        backend.fp8_einsum(
            "bhr,hdr->bhd",
            (x.data[:, :groups], x.scale[:, :groups]),
            weights,
            z,
            (1, 1, 32),
        )
        for group in range(groups):
            dense = reference.linear.dequantize_weight(w[group], sw[group])
            a = reference.linear.dequantize_mxfp8(codes[:, group], scale[:, group], torch.float32)
            bound = reference.linear.gamma(4096) * (
                a.norm(dim=1)[:, None] * dense.value.norm(dim=1)[None]
            )
            want = reference.linear.Bounded(a.double() @ dense.value.double().T, bound)
            worst = max(worst, triton_cases.matmul_excess(z[:, group], want))
    return worst


CHECKS: dict[str, Check] = {
    "decode fp8": lambda: decode_sweep(528, "interleaved"),
    "decode fp4": lambda: decode_sweep(288, "interleaved"),
    "decode fp8 page_split": lambda: decode_sweep(528, "page_split"),
    "decode fp4 page_split": lambda: decode_sweep(288, "page_split"),
    "decode large": lambda: max(large(528), large(288)),
    "decode patterns fp8": lambda: patterns(528),
    "decode patterns fp4": lambda: patterns(288),
    "sinks": sinks,
    "swa only": swa_only,
    "128 heads": wide_heads,
    "live heads": live_heads,
    "q norm": q_norm,
    "far pages": far_pages,
    "repeats": repeats,
    "graph replay": graph_replay,
    "prefill": prefill_sweep,
    "prefill patterns": prefill_patterns,
    "prefill plain": prefill_plain,
    "inserts": inserts,
    "gathers": gathers,
    "index ops": index_ops,
    "permutes": permutes,
    "linears": linears,
    "einsums": einsums,
}


def run(names: list[str]) -> int:
    failed = 0
    for name in names:
        try:
            worst = CHECKS[name]()
            verdict = "ok" if worst <= 1 else "WRONG"
        except Exception as error:  # one broken check must not hide the others
            traceback.print_exc(limit=-3)
            worst, verdict = float("nan"), f"ERROR {type(error).__name__}: {str(error)[:300]}"
        failed += verdict != "ok"
        print(f"{name:24} {worst:8.3f}  {verdict}", flush=True)
    return failed


def shares(names: list[str], processes: int) -> Iterator[list[str]]:
    yield from (names[i::processes] for i in range(processes) if names[i::processes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--names", nargs="*", help="exactly these, in this process")
    parser.add_argument("--processes", type=int, default=8)
    chosen = parser.parse_args()
    if chosen.names:
        return 1 if run(chosen.names) else 0
    names = [name for name in CHECKS if chosen.only in name]
    children = [
        subprocess.Popen([sys.executable, __file__, "--names", *share])
        for share in shares(names, chosen.processes)
    ]
    return max(child.wait() for child in children)


if __name__ == "__main__":
    sys.exit(main())
