"""Checks the sm90 decode kernel against a float32 oracle on a GPU, then times it.

Run on a Hopper GPU: python scripts/device/sm90_decode.py [check] [time] [-D NAME=VALUE ...]
Timing: one CUDA graph per sample, 256 MB written between samples, medians of 41; random rows of a
131072-row extra cache, 128 + 512 rows a token, 64 heads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from cold_clock import median_us
from decode_calls import (
    DEVICE,
    SM_SCALE,
    Call,
    make_call,
    one_block_items,
    oracle,
    poison_unnamed,
)

from megabench.backends.sm90.decode_launch import blocks_of, decode_kernel, decode_params
from megabench.formats import FP8, HEAD_DIM, NVFP4
from megabench.quant import (
    alloc_mega_attn_output,
    decode_e4m3,
    dequantize_mxfp8,
    quantize_kv_mxfp8,
    ue8m0_to_float,
    unpack_scales,
)

S_Q = (*range(1, 6), *range(31, 34), *range(63, 67), *range(127, 131), *range(255, 258))
S_Q += (511, 512, 513, 1023, 4097)


def poison(out: list[torch.Tensor]) -> None:
    for tensor in out:
        tensor.view(torch.int8 if tensor.element_size() == 1 else torch.int32).fill_(-1)


def launcher(call: Call, defines: tuple[str, ...]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A function that launches the kernel, and its poisoned outputs."""
    s_q, heads = call.q.shape[:2]
    pair = alloc_mega_attn_output(s_q, heads // 8, DEVICE)
    lse = torch.empty(s_q, heads, device=DEVICE)
    extra = call.extra
    params = decode_params(
        call.q,
        call.swa.cache,
        call.swa_indices,
        SM_SCALE,
        call.sink,
        call.swa_lengths,
        extra.cache if extra else None,
        call.extra_indices,
        call.extra_lengths,
        call.positions,
        call.cos_sin,
        pair.data,
        pair.scale,
        lse,
    )
    kernel = decode_kernel(0, extra is not None and extra.record is NVFP4, defines)
    shape = kernel.shape_for(params.items, blocks_of(params))
    out = [pair.data, pair.scale, lse]
    poison(out)

    def launch(_alive: object = (call, out)) -> None:  # params holds addresses only
        kernel.launch(params, shape)

    return launch, out


def dequantized(out: list[torch.Tensor]) -> torch.Tensor:
    """[s_q, heads, 512] of the op's output layout."""
    data, scale = out[0], out[1]
    s_q, groups = data.shape[:2]
    values = decode_e4m3(data).view(s_q, groups, 16, 8, 32)
    factors = ue8m0_to_float(unpack_scales(scale)).view(s_q, groups, 16, 8, 1)
    return (values * factors).permute(0, 1, 3, 2, 4).reshape(s_q, groups * 8, HEAD_DIM)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int32 else x.view(torch.uint8)


def compare(name: str, call: Call, defines: tuple[str, ...], repeats: int = 3) -> bool:
    launch, out = launcher(call, defines)
    launch()
    torch.cuda.synchronize()
    first = [t.clone() for t in out]
    same = True
    for _ in range(repeats):
        poison(out)
        launch()
        torch.cuda.synchronize()
        same &= all(torch.equal(bits(a), bits(b)) for a, b in zip(out, first, strict=True))
    want, lse = oracle(call)
    got = dequantized(out)
    codes, scales = quantize_kv_mxfp8(want)
    cast = dequantize_mxfp8(codes, scales)
    off = (got - cast).norm() / want.norm().clamp_min(1e-20)
    # one code, or one binade of a block whose amax sits on an edge: 2^-3 of the block's largest
    worst = (
        (got - want).abs().view(*want.shape[:2], 16, 32).amax(-1)
        / want.abs().view(*want.shape[:2], 16, 32).amax(-1).clamp_min(1e-4)
    ).max()
    bytes_off = (
        (
            unpack_scales(out[1])
            .view(*got.shape[:1], -1, 16, 8)
            .transpose(2, 3)
            .reshape(*got.shape[:2], 16)
            != scales
        )
        .float()
        .mean()
    )
    finite = torch.isfinite(lse)
    lse_off = (out[2] - lse)[finite].abs().max() if finite.any() else torch.zeros(())
    lse_ok = torch.equal(torch.isinf(out[2]), torch.isinf(lse)) and not out[2].isnan().any()
    good = bool(
        same and off < 0.02 and worst < 0.09 and lse_off < 2e-3 and lse_ok and bytes_off < 0.02
    )
    print(
        f"{'ok  ' if good else 'FAIL'} {name:34s} off {off:.2e} worst {worst:.3f} "
        f"scale bytes {bytes_off:.1e} lse {lse_off:.1e} bitwise {same}",
        flush=True,
    )
    return good


def check(defines: tuple[str, ...]) -> bool:
    good = True
    for kept in (FP8, NVFP4, None):
        for name, few in one_block_items(kept):
            good &= compare(name, few, defines, repeats=100)
    for s_q in S_Q:
        record = NVFP4 if s_q % 2 else FP8
        good &= compare(f"s_q {s_q} {record.name}", make_call(s_q, s_q, record=record), defines)
    for s_q in (3, 65, 300):
        for record in (FP8, NVFP4, None):
            call = make_call(s_q, s_q, record=record, holes=0.3, lengths=True, pad=48)
            poison_unnamed(call.swa, call.swa_indices)
            if call.extra is not None and call.extra_indices is not None:
                poison_unnamed(call.extra, call.extra_indices)
            name = record.name if record else "no extra"
            good &= compare(f"s_q {s_q} {name} holes, lengths, pads", call, defines)
    swa = torch.tensor([0, 1, 3, 63, 64, 65, 127, 128], dtype=torch.int32, device=DEVICE)
    extra = torch.tensor([0, 1, 63, 64, 511, 512], dtype=torch.int32, device=DEVICE)
    for record in (FP8, NVFP4):
        for tokens in (48, 480):  # over clusters, and several items a block
            grid = replace(
                make_call(tokens, 7, record=record),
                swa_lengths=swa.repeat_interleave(6).repeat(tokens // 48),
                extra_lengths=extra.repeat(tokens // 6),
            )
            good &= compare(f"length grid {tokens} {record.name}", grid, defines)
        big = make_call(150, 8, record=record)
        assert big.extra_indices is not None
        big.swa_indices[:, :70] = -1  # a whole masked block first
        big.extra_indices[::2, 100:300] = -1
        big.extra_indices[1::2, ::2] = -1
        big.swa_indices[5] = -1
        big.extra_indices[5] = -1  # a token with no row
        big.extra_indices[9] = big.extra_indices[9, 0]
        big.swa_indices[11, 3] = 1 << 30  # outside the pool
        good &= compare(f"-1 patterns, duplicates {record.name}", big, defines)
        steep = make_call(64, 9, record=record, gain=6.0, q_gain=6.0)
        good &= compare(f"steep scores {record.name}", steep, defines)
        good &= compare(
            f"128 heads {record.name}", make_call(70, 10, record=record, heads=128), defines
        )
        good &= compare(
            f"128 heads few {record.name}", make_call(5, 10, record=record, heads=128), defines
        )
    for topk in (1, 64, 128, 200, 320):  # some of one block a CTA, whose clusters meet early
        for s_q in (1, 2, 3, 5):
            narrow = make_call(s_q, topk, record=NVFP4 if s_q % 2 else FP8, topk=topk)
            good &= compare(f"s_q {s_q}, lists of {topk}", narrow, defines, repeats=100)
    good &= compare(
        "scale bytes above 134", make_call(20, 11, gain=3e6, q_gain=1e-6, sink=False), defines
    )
    for s_q in (1, 33, 132):
        good &= compare(f"s_q {s_q}, 1000 repeats", make_call(s_q, 12), defines, repeats=1000)
    return good


def time_all(defines: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    for record in (FP8, NVFP4):
        whole = make_call(max(sizes), 1, record=record, blocks=2048)
        for s_q in sizes:
            assert whole.extra_indices is not None
            call = replace(
                whole,
                q=whole.q[:s_q],
                swa_indices=whole.swa_indices[:s_q],
                extra_indices=whole.extra_indices[:s_q],
                positions=whole.positions[:s_q],
            )
            launch, _ = launcher(call, defines)
            us = median_us(launch, 41)
            print(
                f"time {record.name:13s} s_q {s_q:5d} {us:8.2f} us "
                f"{83.886 * s_q / us:6.1f} TFLOP/s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["check", "time"])
    parser.add_argument("-D", action="append", default=[], dest="defines")
    parser.add_argument("--sizes", default="1,8,32,64,128,256,512,1024,2048")
    args = parser.parse_args()
    defines = tuple(args.defines)
    start = time.time()
    kernels = [decode_kernel(0, fp4, defines) for fp4 in (False, True)]
    print(
        f"{torch.cuda.get_device_name()} clusters {kernels[0].clusters} "
        f"built in {time.time() - start:.1f} s"
    )
    if "check" in args.what:
        print("ALL OK" if check(defines) else "SOME FAILED", f"{time.time() - start:.1f} s")
    if "launch" in args.what:  # for ncu and compute-sanitizer
        launch, _ = launcher(make_call(int(args.sizes.split(",")[0]), 1, blocks=2048), defines)
        launch()
        torch.cuda.synchronize()
    if "time" in args.what:
        time_all(defines, tuple(int(size) for size in args.sizes.split(",")))


if __name__ == "__main__":
    main()
