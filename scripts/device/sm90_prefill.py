"""Checks the sm90 prefill kernel against a float32 oracle on a GPU, then times it.

Run on a Hopper GPU: python scripts/device/sm90_prefill.py [check] [time] [-D NAME=VALUE ...]
Timing: one CUDA graph per sample, 256 MB written between samples, medians of 21; 640 random rows of
a 16384-row workspace a token, 64 heads; beside the Gluon kernel, and FlashMLA where installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from cold_clock import median_us
from sm90_decode import dequantized

from megabench.backends.sm90 import prefill_launch
from megabench.backends.sm90.prefill_launch import prefill_params
from megabench.backends.triton.backend import TritonBackend
from megabench.formats import HEAD_DIM
from megabench.quant import (
    alloc_mega_attn_output,
    dequantize_mxfp8,
    quantize_kv_mxfp8,
    unpack_scales,
)

DEVICE = torch.device("cuda")
SM_SCALE = HEAD_DIM**-0.5
TOPK = 640


@dataclass
class Call:
    """Inputs of one call of the op."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None
    sink: torch.Tensor | None
    positions: torch.Tensor
    cos_sin: torch.Tensor


def make_call(
    s_q: int,
    seed: int,
    *,
    heads: int = 64,
    topk: int = TOPK,
    rows: int = 4096,
    holes: float = 0.0,
    lengths: bool = False,
    sink: bool = True,
    gain: float = 1.0,
    q_gain: float = 1.0,
) -> Call:
    g = torch.Generator(DEVICE).manual_seed(seed)

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, device=DEVICE, dtype=torch.int32)

    indices = integers(0, rows, (s_q, 1, topk))
    drop = torch.rand(indices.shape, generator=g, device=DEVICE) < holes
    sinks = torch.randn(heads, generator=g, device=DEVICE) * 3
    sinks[:6] = torch.tensor([-torch.inf, torch.inf, 1e3, -1e3, 3e38, -3e38], device=DEVICE)
    angle = torch.arange(4096).float()[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    return Call(
        q=(torch.randn(s_q, heads, HEAD_DIM, generator=g, device=DEVICE) * q_gain).bfloat16(),
        kv=(torch.randn(rows, 1, HEAD_DIM, generator=g, device=DEVICE) * gain).bfloat16(),
        indices=indices.masked_fill(drop, -1),
        lengths=integers(0, topk + 1, (s_q,)) if lengths else None,
        sink=sinks if sink else None,
        positions=integers(0, 4096, (s_q,)),
        cos_sin=torch.cat((angle.cos(), angle.sin()), -1).to(DEVICE),
    )


def poisoned(call: Call) -> Call:
    """The call with NaN in every row that no live entry names."""
    live = (
        call.indices[call.indices >= 0]
        if call.lengths is None
        else torch.cat(
            [row[0, :n][row[0, :n] >= 0] for row, n in zip(call.indices, call.lengths, strict=True)]
        )
    )
    keep = torch.zeros(call.kv.shape[0], dtype=torch.bool, device=DEVICE)
    keep[live.long()] = True
    kv = call.kv.clone()
    kv[~keep] = float("nan")
    return replace(call, kv=kv)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, sign: float) -> torch.Tensor:
    """RoPE of adjacent pairs on the last 64 dims; sign -1 undoes it."""
    pairs = x[..., -64:].unflatten(-1, (32, 2))
    cos, sin = cos_sin[:, None, :32], cos_sin[:, None, 32:] * sign
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-64], turned), -1)


def oracle(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [s_q, heads, 512] before the cast, max_logits, lse [s_q, heads]) in float32."""
    parts = [_oracle(_tokens(call, first, 256)) for first in range(0, call.q.shape[0], 256)]
    out, most, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, most, lse


def _tokens(call: Call, first: int, count: int) -> Call:
    cut = slice(first, first + count)
    return replace(
        call,
        q=call.q[cut],
        indices=call.indices[cut],
        lengths=None if call.lengths is None else call.lengths[cut],
        positions=call.positions[cut],
    )


def _oracle(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s_q, heads = call.q.shape[:2]
    q = call.q.view(s_q, 32, heads, 16).transpose(1, 2).reshape(s_q, heads, HEAD_DIM).float()
    cos_sin = call.cos_sin[call.positions.long()]
    q = torch.cat((q[..., :448], rotate(q, cos_sin, 1.0)[..., 448:].bfloat16().float()), -1)
    indices = call.indices[:, 0]
    live = (indices >= 0) & (indices < call.kv.shape[0])
    if call.lengths is not None:
        live &= torch.arange(indices.shape[1], device=DEVICE) < call.lengths[:, None]
    k = call.kv[torch.where(live, indices, 0).long(), 0].float()
    k = k.masked_fill(~live[..., None], 0)
    scores = torch.einsum("thd,tkd->thk", q, k) * SM_SCALE
    scores = scores.masked_fill(~live[:, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    empty = ~live.any(-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(empty[:, None, None], 0)
    out = torch.einsum("thk,tkd->thd", weights, k)
    if call.sink is not None:
        out = out / (1 + torch.exp(call.sink - lse))[..., None]
    out = torch.where(empty[:, None, None], 0.0, out)
    most = scores.amax(-1) if scores.shape[-1] else torch.full_like(lse, -torch.inf)
    return rotate(out, cos_sin, -1.0), most, torch.where(empty[:, None], float("inf"), lse)


def launcher(call: Call, defines: tuple[str, ...]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A function that launches the kernel, and its poisoned outputs."""
    s_q, heads = call.q.shape[:2]
    pair = alloc_mega_attn_output(s_q, heads // 8, DEVICE)
    most, lse = (torch.full((s_q, heads), float("nan"), device=DEVICE) for _ in range(2))
    pair.data.view(torch.uint8).fill_(0x7F)
    pair.scale.fill_(-1)
    params = prefill_params(
        call.q,
        call.kv,
        call.indices,
        SM_SCALE,
        call.sink,
        call.lengths,
        call.positions,
        call.cos_sin,
        pair.data,
        pair.scale,
        most,
        lse,
    )
    out = [pair.data, pair.scale, most, lse]

    def launch(_alive: object = (call, out)) -> None:  # params holds addresses only
        prefill_launch.launch(params, 0, defines)

    return launch, out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int32 else x.view(torch.uint8)


def agree(got: torch.Tensor, want: torch.Tensor) -> tuple[float, bool]:
    """Largest difference of finite entries; whether the infinite ones are the same and none NaN."""
    finite = torch.isfinite(want)
    off = (got - want)[finite].abs().max().item() if finite.any() else 0.0
    return off, torch.equal(got[~finite], want[~finite]) and bool(torch.isfinite(got[finite]).all())


def compare(name: str, call: Call, defines: tuple[str, ...], repeats: int = 3) -> bool:
    launch, out = launcher(call, defines)
    launch()
    torch.cuda.synchronize()
    first = [t.clone() for t in out]
    same = True
    for _ in range(repeats):
        launch()
        same &= all(torch.equal(bits(a), bits(b)) for a, b in zip(out, first, strict=True))
    return judge(name, call, out, same)


def judge(name: str, call: Call, out: list[torch.Tensor], same: bool = True) -> bool:
    want, most, lse = oracle(call)
    got = dequantized(out)
    codes, scales = quantize_kv_mxfp8(want)
    off = (got - dequantize_mxfp8(codes, scales)).norm() / want.norm().clamp_min(1e-20)
    # one code, or one binade of a block whose amax sits on an edge: 2^-3 of the block's largest
    worst = (
        (got - want).abs().view(*want.shape[:2], 16, 32).amax(-1)
        / want.abs().view(*want.shape[:2], 16, 32).amax(-1).clamp_min(1e-4)
    ).max()
    written = unpack_scales(out[1]).view(got.shape[0], -1, 16, 8).transpose(2, 3)
    bytes_off = (written.reshape(*got.shape[:2], 16) != scales).float().mean()
    lse_off, lse_ok = agree(out[3], lse)
    most_off, most_ok = agree(out[2], most)
    good = bool(
        same
        and off < 0.02
        and worst < 0.09
        and max(lse_off, most_off) < 2e-3
        and lse_ok
        and most_ok
        and bytes_off < 0.02
    )
    print(
        f"{'ok  ' if good else 'FAIL'} {name:34s} off {off:.2e} worst {worst:.3f} "
        f"scale bytes {bytes_off:.1e} lse {lse_off:.1e} max {most_off:.1e} {lse_ok} {most_ok} "
        f"bitwise {same}",
        flush=True,
    )
    return good


SIZES = (1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513)
"""Tokens; 1023 and 4097 are checked with fewer rows of the oracle at a time."""


def check(defines: tuple[str, ...]) -> bool:
    good = True
    for s_q in (*SIZES, 1023, 4097):
        good &= compare(f"s_q {s_q}", make_call(s_q, s_q, holes=0.1 * (s_q % 2)), defines)
    for topk in (0, 1, 4, 63, 64, 65, 127, 128, 129, 192, 576, 648, 1024):
        good &= compare(f"topk {topk}", make_call(140, topk, topk=topk), defines)
    for s_q in (3, 65, 300):
        call = poisoned(make_call(s_q, s_q, rows=30000, holes=0.3, lengths=True))
        good &= compare(f"s_q {s_q} holes, lengths, poison", call, defines)
    edges = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 639, 640, 641, -5])
    grid = make_call(480, 7, rows=30000)
    grid.lengths = edges.repeat(32).int().to(DEVICE)
    good &= compare("length edges", poisoned(grid), defines)
    big = make_call(150, 8)
    big.indices[:, :, :70] = -1  # a whole masked block first
    big.indices[::3, :, 100:300] = -1
    big.indices[1::3, :, ::2] = -1
    big.indices[2::3, :, 200:] = -1
    big.indices[5] = -1  # a token with no row
    big.indices[9] = big.indices[9, 0, 80]
    big.indices[11, 0, 73] = 1 << 30  # outside the workspace
    good &= compare("-1 patterns, duplicates", big, defines)
    steep = make_call(64, 9, gain=6.0, q_gain=6.0)
    good &= compare("steep scores", steep, defines)
    climbing = make_call(64, 19, gain=4.0)
    climbing.kv *= torch.linspace(0.1, 12, len(climbing.kv), device=DEVICE)[
        :, None, None
    ].bfloat16()
    climbing.indices = climbing.indices.sort(-1).values
    good &= compare("climbing scores", climbing, defines)
    good &= compare("no sink", make_call(64, 20, sink=False), defines)
    for tokens in (1, 70, 200):
        good &= compare(f"128 heads {tokens}", make_call(tokens, 10, heads=128), defines)
    good &= compare("s_q 132, 1000 repeats", make_call(132, 13), defines, repeats=1000)
    return good & check_one_row(defines) & check_graph(defines)


def check_one_row(defines: tuple[str, ...]) -> bool:
    """A token with one row returns it exactly, amaxes on a scale's edge included."""
    call = make_call(150, 16, sink=False, q_gain=9.0)
    edges = torch.randint(-3, 3, (len(call.kv), 1, 16, 1), device=DEVICE).float().exp2()
    call.kv = (call.kv.float().view(-1, 1, 16, 32).clamp(-1.7, 1.7) * edges).flatten(2).bfloat16()
    call.kv.view(-1, 1, 16, 32)[..., 5:6] = 1.75 * edges.bfloat16()
    keep = torch.randint(0, TOPK, (150, 1, 1), device=DEVICE)
    call.indices.masked_fill_(torch.arange(TOPK, device=DEVICE) != keep, -1)
    launch, out = launcher(call, defines)
    launch()
    rows = call.kv[call.indices.amax(-1).long().flatten(), 0].float()
    codes, scales = quantize_kv_mxfp8(rows)
    nope = slice(0, 14)  # chunks that the inverse RoPE leaves alone
    got = out[0].view(torch.uint8).view(150, 8, 16, 8, 32)[:, :, nope]
    got_scales = unpack_scales(out[1]).view(150, 8, 16, 8)[:, :, nope]
    want = codes.view(torch.uint8).view(150, 1, 16, 1, 32)[:, :, nope]
    good = bool((got == want).all()) and bool(
        (got_scales == scales.view(150, 1, 16, 1)[:, :, nope]).all()
    )
    print(f"{'ok  ' if good else 'FAIL'} one row, exactly", flush=True)
    return good


def check_graph(defines: tuple[str, ...]) -> bool:
    """A replay reads the inputs as they are then."""
    call, other = make_call(300, 14, lengths=True), make_call(300, 15, lengths=True)
    launch, out = launcher(call, defines)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for name in ("q", "kv", "indices", "lengths", "sink", "positions"):
        getattr(call, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    return judge("graph replay, changed inputs", other, out)


def report(name: str, s_q: int, launch: Callable[[], object]) -> None:
    us = median_us(launch)
    print(f"time {name:24s} s_q {s_q:5d} {us:8.2f} us {83.886 * s_q / us:6.1f} TFLOP/s", flush=True)


def time_all(defines: tuple[str, ...], sizes: tuple[int, ...], rows: int, peers: bool) -> None:
    whole = make_call(max(sizes), 1, rows=rows)
    whole.lengths = torch.full((max(sizes),), TOPK, dtype=torch.int32, device=DEVICE)
    for s_q in sizes:
        call = _tokens(whole, 0, s_q)
        report(f"sm90 {rows} rows", s_q, launcher(call, defines)[0])
        if peers:
            time_peers(call, s_q)


def time_peers(call: Call, s_q: int) -> None:
    pair = alloc_mega_attn_output(s_q, 8, DEVICE)
    rest = (False, 64, call.cos_sin, 8, 32, True, True, True, pair.data, pair.scale)
    sizes = (SM_SCALE, HEAD_DIM, call.sink, call.lengths, False, 0.0, call.positions)
    gluon = TritonBackend().fused_norm_rope_attn_rope_cast_fwd
    report("gluon", s_q, lambda: gluon(call.q, call.kv, call.indices, *sizes, *rest))
    try:
        import flash_mla
    except ImportError:
        return
    args = (call.q, call.kv, call.indices, SM_SCALE, HEAD_DIM, call.sink, call.lengths)
    report("FlashMLA", s_q, lambda: flash_mla.flash_mla_sparse_fwd(*args, use_legacy=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["check", "time"])
    parser.add_argument("-D", action="append", default=[], dest="defines")
    parser.add_argument("--sizes", default="128,1024,4096")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    defines, sizes = tuple(args.defines), tuple(int(size) for size in args.sizes.split(","))
    start = time.time()
    launcher(make_call(sizes[0], 1), defines)[0]()
    print(f"{torch.cuda.get_device_name()} built in {time.time() - start:.1f} s", flush=True)
    if "check" in args.what:
        print("ALL OK" if check(defines) else "SOME FAILED", f"{time.time() - start:.1f} s")
    if "launch" in args.what:  # for ncu and compute-sanitizer
        launcher(make_call(sizes[0], 1), defines)[0]()
        torch.cuda.synchronize()
    if "time" in args.what:
        time_all(defines, sizes, args.rows, not args.no_peers)


if __name__ == "__main__":
    main()
