"""Calls of the decode op for checks on a GPU, and what they mean in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megabench.formats import FP8, HEAD_DIM, NVFP4, KVRecord
from megabench.quant import (
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_kv_mxfp8,
    quantize_nvfp4,
)

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


def one_block_items(record: KVRecord | None) -> Iterator[tuple[str, Call]]:
    """Calls whose persistent CTAs have two to four items: the last, the first, those between or all
    of them with one block of keys, some of these masked."""
    ctas = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for tokens in (2 * ctas, 3 * ctas, 2 * ctas + ctas // 2, 4 * ctas):
        call = make_call(tokens, tokens, record=record)
        item = torch.arange(tokens, device=DEVICE)
        last = item + ctas >= tokens
        everywhere = torch.ones_like(last)
        for name, few in (
            ("last", last),
            ("first", item < ctas),
            ("middle", (item >= ctas) & ~last),
            ("all but first", item >= ctas),
            ("all", everywhere),
        ):
            swa = torch.tensor([1, 64, 0, 33, 0, 0], dtype=torch.int32, device=DEVICE)[item % 6]
            extra = torch.tensor([0, 0, 1, 0, 64, 0], dtype=torch.int32, device=DEVICE)[item % 6]
            yield (
                f"one block {name}, {tokens} {record.name if record else 'no extra'}",
                replace(
                    call,
                    swa_lengths=torch.where(few, swa, 128),
                    extra_lengths=torch.where(few, extra, 512) if record else None,
                ),
            )
