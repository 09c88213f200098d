"""Operands of the sm90 products with poison around them, and their results' errors: for
sm90_product.py, which checks and times them, and small_launches.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from far_scales import Edit

from megabench.backends.base import EINSUM, EINSUM_RECIPE, Pair
from megabench.backends.sm90.backend import Sm90Backend
from megabench.backends.triton.backend import TritonBackend
from megabench.quant import (
    alloc_mega_attn_output,
    dequantize_mxfp8,
    pack_mn_major,
    quantize_kv_mxfp8,
    unpack_scales,
)
from reference.bounds import gamma

DEVICE = torch.device("cuda")
GROUPS, ROWS, COLUMNS = 8, 1024, 4096
POISON_CODE, POISON_SCALE = 0x7F, -1


@dataclass
class Call:
    """Operands of one einsum, and its output inside a guarded buffer."""

    x: Pair
    w: Pair
    out: torch.Tensor
    buffer: torch.Tensor

    def poison(self) -> None:
        self.buffer.fill_(float("nan"))


def shifted(codes: torch.Tensor, scale: torch.Tensor, by: int) -> Pair:
    return codes, (scale.int() + by).to(torch.uint8)


def make_weight(
    groups: int, seed: int, *, positive: bool = False, shift: int = 0, columns: int = COLUMNS
) -> Pair:
    g = torch.Generator(DEVICE).manual_seed(seed)
    value = torch.randn(groups, ROWS, columns, generator=g, device=DEVICE) * 0.05
    value *= spread((groups, ROWS, columns), g)
    codes, scale = shifted(*quantize_kv_mxfp8(value.abs() if positive else value), shift)
    return codes.view(torch.float8_e4m3fn), pack_mn_major(scale)


def spread(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Powers of two, one for 32 columns."""
    blocks = (*shape[:-1], shape[-1] // 32)
    exponents = torch.randint(-4, 4, blocks, generator=g, device=DEVICE)
    return torch.exp2(exponents.float()).repeat_interleave(32, -1)


def make_call(
    tokens: int,
    seed: int,
    w: Pair,
    *,
    groups: int = GROUPS,
    positive: bool = False,
    shift: int = 0,
    wide_out: bool = False,
) -> Call:
    """Tokens 3.. and as many columns as `w` has of a longer step's buffer; everything outside is
    poison."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    columns = w[0].shape[-1]
    value = torch.randn(tokens, groups, columns, generator=g, device=DEVICE)
    value *= spread((tokens, groups, columns), g)
    codes, scale = shifted(*quantize_kv_mxfp8(value.abs() if positive else value), shift)
    step = alloc_mega_attn_output(tokens + 7, GROUPS, DEVICE)
    step.data.view(torch.uint8).fill_(POISON_CODE)
    step.scale.fill_(POISON_SCALE)
    data = step.data[3 : 3 + tokens, :groups, :columns]
    words = step.scale[3 : 3 + tokens, :groups, : columns // 128]
    data.copy_(codes.view(torch.float8_e4m3fn))
    words.copy_(scale.view(torch.int32))
    width = 2 * ROWS if wide_out else ROWS
    buffer = torch.empty(tokens + 2, groups, width, dtype=torch.bfloat16, device=DEVICE)
    call = Call((data, words), w, buffer[1:-1, :, width - ROWS :], buffer)
    call.poison()
    return call


def edited(pair: Pair, edit: Edit | None) -> Pair:
    """Copies of a pair's codes and scale bytes, changed."""
    codes, scale = pair[0].view(torch.uint8).contiguous().clone(), unpack_scales(pair[1]).clone()
    if edit is not None:
        edit(codes, scale)
    return codes.view(torch.float8_e4m3fn), scale


def rescaled(call: Call, x: Edit | None, w: Edit | None) -> Call:
    """The call, its activations changed in place, with a changed copy of its weight."""
    codes, scale = edited(call.x, x)
    call.x[0].copy_(codes)
    call.x[1].copy_(scale.contiguous().view(torch.int32).view(call.x[1].shape))
    codes, scale = edited(call.w, w)
    return Call(call.x, (codes, pack_mn_major(scale)), call.out, call.buffer)


def run(backend: TritonBackend, call: Call) -> None:
    backend.fp8_einsum(EINSUM, call.x, call.w, call.out, EINSUM_RECIPE)


def dense(pair: Pair) -> torch.Tensor:
    return dequantize_mxfp8(pair[0].view(torch.uint8), unpack_scales(pair[1]))


def excess(call: Call, tokens: slice = slice(None)) -> float:
    """The worst error over the einsum's bound, gamma(columns) of the sum of magnitudes."""
    worst, columns = 0.0, call.x[0].shape[-1]
    for group in range(call.out.shape[1]):
        x = dense((call.x[0][tokens, group], call.x[1][tokens, group])).double()
        w = dense((call.w[0][group], call.w[1][group])).double()
        got = call.out[tokens, group].double()
        half_step = torch.exp2(torch.frexp(got).exponent.double() - 9)
        off = ((got - x @ w.T).abs() - half_step).clamp_min(0)
        ratio = off / (gamma(columns) * (x.abs() @ w.abs().T)).clamp_min(1e-300)
        worst = max(worst, float(ratio.nan_to_num(nan=torch.inf).max()) if ratio.numel() else 0.0)
    return worst


def prepared(w: Pair) -> Sm90Backend:
    backend = Sm90Backend()
    backend.prepare(*w)
    return backend


def make_linear(rows: int, columns: int) -> Pair:
    g = torch.Generator(DEVICE).manual_seed(rows)
    value = torch.randn(rows, columns, generator=g, device=DEVICE) * 0.03
    codes, scale = quantize_kv_mxfp8(value)
    return codes.view(torch.float8_e4m3fn), scale


def make_rows(tokens: int, columns: int) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(tokens)
    rows = torch.randn(tokens, columns, generator=g, device=DEVICE)
    exponents = torch.randint(-30, 30, (tokens, columns // 32), generator=g, device=DEVICE)
    rows *= torch.exp2(exponents.float()).repeat_interleave(32, 1)
    rows[:, :32] = 0
    return rows.bfloat16()
