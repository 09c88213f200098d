"""Checks the sm90 products (the wo_a einsum, the linears) on a GPU, then times them.

Run on a Hopper GPU: python scripts/device/sm90_product.py [check] [time] [linears] [sweep]
The einsum is checked against float64, the linears against the Triton backend's. Timing: one CUDA
graph per sample, 256 MB written between samples, medians of 21; the einsum has 8 groups, 4096 ->
1024, beside torch.bmm of bf16 operands and the Triton op in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from cold_clock import median_us
from far_scales import far_scales
from product_calls import (
    COLUMNS,
    DEVICE,
    GROUPS,
    POISON_CODE,
    ROWS,
    Call,
    dense,
    excess,
    make_call,
    make_linear,
    make_rows,
    make_weight,
    prepared,
    rescaled,
    run,
)

from megabench.backends.base import Pair
from megabench.backends.sm90 import dense_launch, product_launch, skinny_launch
from megabench.backends.sm90.backend import Sm90Backend
from megabench.backends.sm90.quantize_launch import quantize
from megabench.backends.triton.backend import TritonBackend
from megabench.quant import alloc_mega_attn_output, quantize_activation

LINEARS = ((32768, 1280), (5120, 8192))
SECOND_PASS = (
    *((11, 8), (50, 8), (77, 8), (128, 8), (200, 8)),
    *((128, 3), (30, 2), (16, 1), (100, 1)),
)
"""Tokens and groups: all widths, and clusters of 2, 4 and 8."""
UNEVEN_WORDS = (3, 9)
"""Of columns: a cluster's CTAs get unequal numbers of them, or none."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
EDGES = (*range(6), *(n + d for n in (32, 64, 128, 256, 512) for d in (-1, 0, 1)), 130, 1023, 4097)


def compare(name: str, call: Call, backend: TritonBackend, repeats: int = 3) -> bool:
    run(backend, call)
    torch.cuda.synchronize()
    first, same = call.buffer.clone(), True
    for _ in range(repeats):
        call.poison()
        run(backend, call)
        same &= torch.equal(call.buffer.view(torch.int16), first.view(torch.int16))
    guards = bool(call.buffer[[0, -1]].isnan().all())
    worst = excess(call)
    good = worst <= 1 and same and guards
    print(
        f"{'ok  ' if good else 'FAIL'} {name:32s} {worst:.3f} of the bound, "
        f"bitwise {same}, guards {guards}",
        flush=True,
    )
    return good


def replay(w: Pair) -> bool:
    """A captured call follows its inputs."""
    good, backend = True, prepared(w)
    for tokens in (1, 100, 600):
        call, other = make_call(tokens, 1, w), make_call(tokens, 2, w)
        run(backend, call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(backend, call)
        for mine, theirs in zip(call.x, other.x, strict=True):
            mine.view(torch.uint8 if mine.element_size() == 1 else torch.int32).copy_(
                theirs.view(torch.uint8 if mine.element_size() == 1 else torch.int32)
            )
        graph.replay()
        run(backend, other)
        torch.cuda.synchronize()
        good &= torch.equal(call.out.view(torch.int16), other.out.view(torch.int16))
    print(f"{'ok  ' if good else 'FAIL'} graph replay with changed inputs", flush=True)
    return good


def far(w: Pair) -> bool:
    """More than 2^31 bytes of activations: the last tokens are right, with either weight."""
    tokens, tail = 65600, 200
    step = alloc_mega_attn_output(tokens, GROUPS, DEVICE)
    step.data.view(torch.uint8).fill_(POISON_CODE)
    step.scale.fill_(0)
    last = make_call(tail, 3, w)
    step.data[-tail:].copy_(last.x[0])
    step.scale[-tail:].copy_(last.x[1])
    out = torch.empty(tokens, GROUPS, ROWS, dtype=torch.bfloat16, device=DEVICE)
    call = Call((step.data, step.scale), w, out, out)
    worst = 0.0
    for backend in (Sm90Backend(), prepared(w)):
        call.poison()
        run(backend, call)
        worst = max(worst, excess(call, slice(tokens - tail, tokens)))
    print(f"{'ok  ' if worst <= 1 else 'FAIL'} 65600 tokens {worst:.3f}", flush=True)
    return worst <= 1


def check() -> bool:
    w = make_weight(GROUPS, 0)
    kept, good = prepared(w), True
    for tokens in EDGES:
        good &= compare(f"{tokens} tokens", make_call(tokens, tokens, w), kept)
    for tokens in (129, 600):
        good &= compare(f"{tokens} tokens, no pieces", make_call(tokens, 8, w), Sm90Backend())
    for groups in (1, 2, 4):
        part = (w[0][:groups], w[1][:groups])
        backend = prepared(part)
        for tokens in (1, 12, 33, 128, 200, 700):
            call = make_call(tokens, 9, part, groups=groups, wide_out=True)
            good &= compare(f"{tokens} tokens, {groups} groups", call, backend)
    for shift in (-60, 60):
        far_weight = make_weight(GROUPS, 1, shift=shift)
        backend = prepared(far_weight)
        for tokens in (3, 20, 128, 300):
            call = make_call(tokens, 4, far_weight, shift=-shift)
            good &= compare(f"{tokens} tokens, weight x 2^{shift}", call, backend)
    for tokens, groups in SECOND_PASS:
        part = (w[0][:groups], w[1][:groups])
        for name, x_edit, w_edit in far_scales(COLUMNS // 32):
            call = rescaled(make_call(tokens, 7, part, groups=groups), x_edit, w_edit)
            good &= compare(f"{tokens} tokens, {groups} groups, {name}", call, Sm90Backend())
    for words in UNEVEN_WORDS:
        narrow = make_weight(GROUPS, words, columns=128 * words)
        for tokens, groups in ((12, 8), (50, 8), (97, 8), (100, 1)):
            part = (narrow[0][:groups], narrow[1][:groups])
            for name, x_edit, w_edit in far_scales(4 * words):
                call = rescaled(make_call(tokens, 7, part, groups=groups), x_edit, w_edit)
                label = f"{tokens} tokens, {groups} groups, {words} words, {name}"
                good &= compare(label, call, Sm90Backend())
    same_sign = make_weight(GROUPS, 2, positive=True)
    backend = prepared(same_sign)
    for tokens in (2, 64, 129, 512):
        call = make_call(tokens, 5, same_sign, positive=True)
        good &= compare(f"{tokens} tokens, positive", call, backend)
    for tokens in (1, 16, 64, 128, 200, 512):
        call = make_call(tokens, 6, w)
        good &= compare(f"{tokens} tokens, 1000 repeats", call, kept, 1000)
    return all((replay(w), far(w), check_linears(), good))


def check_linears() -> bool:
    """Activations quantized to the same bytes, and results of the Triton backend's size."""
    x, good = make_rows(5, 1280), True
    codes, words = quantize(x)
    want, scale = quantize_activation(x)
    good = torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    good &= torch.equal(words.view(torch.uint8), scale.view(torch.uint8))
    for rows, columns in LINEARS:
        w = make_linear(rows, columns)
        for tokens in (0, 1, 5, 8, 9, 300):
            x = make_rows(tokens, columns)
            mine, other = Sm90Backend().linear(x, *w), TritonBackend().linear(x, *w)
            off = (mine.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30)
            good &= bool(off < 2**-8)
    print(f"{'ok  ' if good else 'FAIL'} linears", flush=True)
    return good


def part_of(whole: Call, tokens: int) -> Call:
    """The first tokens of a call, in buffers of their own."""
    step = alloc_mega_attn_output(tokens, GROUPS, DEVICE)
    step.data.copy_(whole.x[0][:tokens])
    step.scale.copy_(whole.x[1][:tokens])
    out = torch.empty(tokens, GROUPS, ROWS, dtype=torch.bfloat16, device=DEVICE)
    return Call((step.data, step.scale), whole.w, out, out)


def warm_up(seconds: float = 0.2) -> None:
    """Until an idle GPU's clocks have risen, times come out a microsecond long."""
    x, end = torch.ones(4096, 4096, dtype=torch.bfloat16, device=DEVICE), time.time() + seconds
    while time.time() < end:
        x @ x
        torch.cuda.synchronize()


def time_all(sizes: tuple[int, ...]) -> None:
    w = make_weight(GROUPS, 0)
    whole = make_call(max(sizes), 1, w)
    ours, triton = prepared(w), TritonBackend()
    triton.prepare(*w)
    wide = dense(w).bfloat16().transpose(1, 2)
    warm_up()
    first = part_of(whole, min(sizes))
    median_us(lambda: run(ours, first))  # what a process times first comes out long
    for tokens in sizes:
        call = part_of(whole, tokens)
        x = dense(call.x).bfloat16().transpose(0, 1).contiguous()
        z = torch.empty(GROUPS, tokens, ROWS, dtype=torch.bfloat16, device=DEVICE)
        us = median_us(lambda: run(ours, call))  # noqa: B023 - called at once
        bmm = median_us(lambda: torch.bmm(x, wide, out=z))  # noqa: B023
        other = median_us(lambda: run(triton, call))  # noqa: B023
        print(
            f"time b {tokens:5d} {us:8.2f} us  {2e-6 * tokens * w[0].numel() / us:6.1f} TFLOP/s  "
            f"bmm {bmm:8.2f} ({us / bmm:.2f}x)  triton {other:8.2f}",
            flush=True,
        )


def time_linears(sizes: tuple[int, ...]) -> None:
    for rows, columns in LINEARS:
        w = make_linear(rows, columns)
        ours, triton = Sm90Backend(), TritonBackend()
        warm_up()
        for tokens in sizes:
            x = make_rows(tokens, columns)
            us = median_us(lambda: ours.linear(x, *w))  # noqa: B023 - called at once
            other = median_us(lambda: triton.linear(x, *w))  # noqa: B023
            print(
                f"linear {rows} x {columns} b {tokens:5d} {us:8.2f} us  triton {other:8.2f} "
                f"({us / other:.2f}x)",
                flush=True,
            )


def choices(call: Call, pieces: torch.Tensor) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every kernel and tile that may serve a call."""
    tokens = call.out.shape[0]
    stream = partial(product_launch.launch, *call.x, *call.w, call.out)
    if tokens <= skinny_launch.TOKENS[-1]:
        yield "skinny", partial(skinny_launch.launch, *call.x, *call.w, call.out)
    for width in product_launch.WIDTHS:
        if min(tokens, 64) <= width <= 2 * max(tokens, 8):
            yield str(width), partial(stream, width=width)
    if tokens >= 64:
        yield "dense", partial(dense_launch.launch, *call.x, pieces, call.out)


def sweep(sizes: tuple[int, ...]) -> None:
    """Every choice, timed; a wrong result is marked."""
    w = make_weight(GROUPS, 0)
    whole = make_call(max(sizes), 1, w)
    pieces = dense_launch.operand_pieces(dense(w).bfloat16())
    for tokens in sizes:
        call = part_of(whole, tokens)
        line = []
        for name, launch in choices(call, pieces):
            call.poison()
            us = median_us(launch, 11)
            worst = excess(call, slice(max(0, tokens - 300), tokens))
            line.append((us, name + ("" if worst <= 1 else "!")))
        best = "  ".join(f"{name} {us:.1f}" for us, name in sorted(line))
        print(f"sweep b {tokens:5d}  {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["check", "time"])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    args = parser.parse_args()
    sizes = tuple(int(size) for size in args.sizes.split(","))
    start = time.time()
    if "check" in args.what:
        print("ALL OK" if check() else "SOME FAILED", f"{time.time() - start:.1f} s", flush=True)
    if "time" in args.what:
        time_all(sizes)
    if "linears" in args.what:
        time_linears(tuple(size for size in sizes if size <= skinny_launch.TOKENS[-1]))
    if "sweep" in args.what:
        sweep(sizes)


if __name__ == "__main__":
    main()
