"""Checks the sm90 decode kernel against a float32 oracle on a GPU, then times it.

Run on a Hopper GPU: python scripts/device/sm90_decode.py [check] [time] [-D NAME=VALUE ...]
Timing: one CUDA graph per sample, 256 MB written between samples, medians of 41; random rows of a
131072-row extra cache, 128 + 512 rows a token, 64 heads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from cold_clock import median_us

from megabench.backends.sm90.decode_launch import blocks_of, decode_kernel, decode_params
from megabench.formats import FP8, HEAD_DIM, NVFP4, KVRecord
from megabench.quant import (
    alloc_mega_attn_output,
    decode_e4m3,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_kv_mxfp8,
    quantize_nvfp4,
    ue8m0_to_float,
    unpack_scales,
)

S_Q = (*range(1, 6), *range(31, 34), *range(63, 67), *range(127, 131), *range(255, 258))
S_Q += (511, 512, 513, 1023, 4097)
DEVICE = torch.device("cuda")
SM_SCALE = HEAD_DIM**-0.5


@dataclass
class Pool:
    """A paged cache whose unnamed bytes are 0xFF, and its rows in float32."""

    cache: torch.Tensor
    rows: torch.Tensor
    record: KVRecord


@dataclass
class Call:
    """Inputs of one call of the op."""

    q: torch.Tensor
    swa: Pool
    swa_indices: torch.Tensor
    swa_lengths: torch.Tensor | None
    extra: Pool | None
    extra_indices: torch.Tensor | None
    extra_lengths: torch.Tensor | None
    sink: torch.Tensor | None
    positions: torch.Tensor
    cos_sin: torch.Tensor


def make_pool(
    blocks: int,
    page: int,
    record: KVRecord,
    pad: int,
    generator: torch.Generator,
    gain: float = 1.0,
) -> Pool:
    """Random quantized rows; pages `pad` bytes longer than their rows."""
    count = blocks * page
    rows = torch.randn(count, HEAD_DIM, generator=generator, device=DEVICE) * gain
    rows *= torch.exp2(
        torch.randint(-3, 3, (count, 16), generator=generator, device=DEVICE)
    ).repeat_interleave(32, 1)
    codes, scales = quantize_nvfp4(rows) if record is NVFP4 else quantize_kv_mxfp8(rows)
    exact = dequantize_nvfp4(codes, scales) if record is NVFP4 else dequantize_mxfp8(codes, scales)
    stride = page * record.nbytes + pad
    storage = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8, device=DEVICE)
    cache = storage.as_strided(
        (blocks, page, 1, record.nbytes), (stride, record.nbytes, record.nbytes, 1)
    )
    cache.copy_(torch.cat((codes, scales), -1).view(blocks, page, 1, record.nbytes))
    return Pool(cache, exact, record)


def poison_unnamed(pool: Pool, named: torch.Tensor) -> None:
    """0xFF into every slot that no index names."""
    keep = torch.zeros(pool.rows.shape[0], dtype=torch.bool, device=DEVICE)
    keep[named[named >= 0].long().flatten()] = True
    blocks, page = pool.cache.shape[:2]
    pool.cache[~keep.view(blocks, page)] = 0xFF
    pool.rows[~keep] = 0


def rope_table(length: int) -> torch.Tensor:
    angle = torch.arange(length).float()[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    return torch.cat((angle.cos(), angle.sin()), -1).to(DEVICE)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, sign: float) -> torch.Tensor:
    """RoPE of adjacent pairs on the last 64 dims; sign -1 undoes it."""
    pairs = x[..., -64:].unflatten(-1, (32, 2))
    cos, sin = cos_sin[:, None, :32], cos_sin[:, None, 32:] * sign
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-64], turned), -1)


def oracle(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [s_q, heads, 512] before the cast, lse [s_q, heads]) in float32."""
    s_q, heads = call.q.shape[:2]
    q = call.q.view(s_q, 32, heads, 16).transpose(1, 2).reshape(s_q, heads, HEAD_DIM).float()
    cos_sin = call.cos_sin[call.positions.long()]
    q = torch.cat((q[..., :448], rotate(q, cos_sin, 1.0)[..., 448:].bfloat16().float()), -1)
    rows, valid = [], []
    for pool, indices, lengths in (
        (call.swa, call.swa_indices, call.swa_lengths),
        (call.extra, call.extra_indices, call.extra_lengths),
    ):
        if pool is None or indices is None:
            continue
        live = (indices >= 0) & (indices < pool.rows.shape[0])
        if lengths is not None:
            live &= torch.arange(indices.shape[1], device=DEVICE) < lengths[:, None]
        rows.append(pool.rows[torch.where(live, indices, 0).long()] * live[..., None])
        valid.append(live)
    k, live = torch.cat(rows, 1), torch.cat(valid, 1)
    scores = torch.einsum("thd,tkd->thk", q, k) * SM_SCALE
    scores = scores.masked_fill(~live[:, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    empty = ~live.any(-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(empty[:, None, None], 0)
    out = torch.einsum("thk,tkd->thd", weights, k)
    if call.sink is not None:
        out = out / (1 + torch.exp(call.sink - lse))[..., None]
    out = torch.where(empty[:, None, None], 0.0, out)
    return rotate(out, cos_sin, -1.0), torch.where(empty[:, None], float("inf"), lse)


def launcher(call: Call, defines: tuple[str, ...]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A function that launches the kernel, and its poisoned outputs."""
    s_q, heads = call.q.shape[:2]
    pair = alloc_mega_attn_output(s_q, heads // 8, DEVICE)
    lse = torch.full((s_q, heads), float("nan"), device=DEVICE)
    pair.data.view(torch.uint8).fill_(0x7F)
    pair.scale.fill_(-1)
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


def make_call(
    s_q: int,
    seed: int,
    *,
    heads: int = 64,
    record: KVRecord | None = FP8,
    topk: int = 512,
    holes: float = 0.0,
    lengths: bool = False,
    sink: bool = True,
    pad: int = 0,
    blocks: int = 512,
    gain: float = 1.0,
    q_gain: float = 1.0,
) -> Call:
    g = torch.Generator(DEVICE).manual_seed(seed)

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, device=DEVICE, dtype=torch.int32)

    def indices(count: int, width: int) -> torch.Tensor:
        made = integers(0, count, (s_q, width))
        drop = torch.rand(s_q, width, generator=g, device=DEVICE) < holes
        return made.masked_fill(drop, -1)

    swa = make_pool(64, 32, FP8, pad, g, gain)
    extra = make_pool(blocks, 64, record, pad, g, gain) if record else None
    sinks = torch.randn(heads, generator=g, device=DEVICE) * 3
    sinks[:6] = torch.tensor([-torch.inf, torch.inf, 1e3, -1e3, 3e38, -3e38], device=DEVICE)
    return Call(
        q=(torch.randn(s_q, heads, HEAD_DIM, generator=g, device=DEVICE) * q_gain).bfloat16(),
        swa=swa,
        swa_indices=indices(64 * 32, 128),
        swa_lengths=integers(0, 129, (s_q,)) if lengths else None,
        extra=extra,
        extra_indices=indices(blocks * 64, topk) if extra else None,
        extra_lengths=integers(0, topk + 1, (s_q,)) if lengths and extra else None,
        sink=sinks if sink else None,
        positions=integers(0, 4096, (s_q,)),
        cos_sin=rope_table(4096),
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int32 else x.view(torch.uint8)


def compare(name: str, call: Call, defines: tuple[str, ...], repeats: int = 3) -> bool:
    launch, out = launcher(call, defines)
    launch()
    torch.cuda.synchronize()
    first = [t.clone() for t in out]
    same = True
    for _ in range(repeats):
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
