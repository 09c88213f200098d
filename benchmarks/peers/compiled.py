"""The group of `torch.compile`: the torch backend's decode as one graph, beside ours.

The op itself checks its arguments and walks over chunks of tokens, and breaks into 18 graphs. What
it computes is compiled here in one: rows gathered and dequantized, then its own attention and cast.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.arms import Arm, Bar, Group
from benchmarks.peers.attention import LENGTH, RECORDS
from benchmarks.peers.judge import attention_truth
from benchmarks.peers.steps import Bench, own_output, runner
from megabench.backends.arguments import DecodeArguments
from megabench.backends.eager_attention import attend, store_output
from megabench.formats import FP8
from megabench.layout import heads_of
from megabench.quant import dequantize_mxfp8

COMPILED = "torch.compile of the eager decode"
COMPILED_SIZES = (32, 128)


def gather(
    cache: torch.Tensor, slots: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 rows [t, n, 512] of interleaved 528-byte records, zeros where not valid, and the
    mask."""
    valid = (slots >= 0) & (torch.arange(slots.shape[1], device=slots.device) < length[:, None])
    slot, page = torch.where(valid, slots, 0).long(), cache.shape[1]
    records = cache[slot // page, slot % page, 0]
    codes, scales = records[..., : FP8.data_bytes], records[..., FP8.data_bytes :]
    rows = dequantize_mxfp8(codes.contiguous(), scales)
    return torch.where(valid[..., None], rows, 0.0), valid


def eager_decode(args: DecodeArguments) -> list[torch.Tensor]:
    """The decode op of full arguments with an output pair -> that pair."""
    assert args.topk_length is not None
    assert args.extra_kv is not None
    assert args.extra_indices is not None
    assert args.extra_topk_length is not None
    window = gather(args.kv, args.indices, args.topk_length)
    extra = gather(args.extra_kv, args.extra_indices, args.extra_topk_length)
    rows, valid = (torch.cat(both, 1) for both in zip(window, extra, strict=True))
    cos_sin = args.cos_sin_cache[args.token_positions.long()]
    q = heads_of(args.q)
    out = args.output()
    attended = attend(q, rows, valid, cos_sin, args.sm_scale, args.attn_sink, None)
    store_output(attended.out, out)
    return [out.data, out.scale]


def compiled_group(bench: Bench, s_q: int) -> Group:
    """The fused decode of fp8 rows beside the compiled one."""
    group = Group("compiled", f"s_q {s_q}", [], dict(bench.absent))
    args = bench.step(f"{s_q}q1s{LENGTH}", RECORDS["fp8"]).decode_arguments()
    truth = attention_truth(args)
    for ours, backend in bench.backends.items():
        run = runner(backend.decode, args)  # type: ignore[attr-defined]
        group.arms.append(Arm(f"{ours}, fp8", run, truth.fused, truth.fp8()))
        group.bars.append(Bar(f"{ours}, fp8", COMPILED))
    torch._dynamo.reset()
    compiled: Any = torch.compile(eager_decode, dynamic=False, fullgraph=True)
    mine = own_output(args)
    group.arms.append(Arm(COMPILED, lambda: compiled(mine), truth.fused, truth.fp8()))
    return group
