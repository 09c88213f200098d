"""Number formats: e4m3, e2m1, ue8m0 and bf16, from bit arithmetic alone.

Rounding is to nearest, ties to even, saturating, and keeps the sign of zero. All of it is exact:
scaling is by powers of two and the only inexact step is the one rounding asked for, so float64
input is rounded once, never through float32.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def _minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of one code of a sign-exponent-mantissa format with subnormals and no infinities."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    hidden = 1 << mantissa_bits if exponent else 0
    return sign * (hidden + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)


E4M3 = torch.tensor(
    [math.nan if c & 0x7F == 0x7F else _minifloat(c, 4, 3, bias=7) for c in range(256)],
    dtype=torch.float32,
)
"""fp32 ``[256]``: the value of every e4m3 byte; NaN at 0x7F and 0xFF, no infinities."""

E2M1 = torch.tensor([_minifloat(c, 2, 1, bias=1) for c in range(16)], dtype=torch.float32)
"""fp32 ``[16]``: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

UE8M0 = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [math.nan], dtype=torch.float32)
"""fp32 ``[256]``: 2^(byte - 127); byte 0 is the subnormal 2^-127 and 255 is NaN."""


def _interval_tables() -> tuple[Tensor, Tensor]:
    """Ends of the set of reals that round to each e4m3 code; see :func:`e4m3_interval`."""
    magnitude = E4M3[:0x7F]
    middle = (magnitude[:-1] + magnitude[1:]) / 2
    low = torch.cat([torch.zeros(1), middle, torch.tensor([math.nan])])
    high = torch.cat([middle, torch.tensor([math.inf, math.nan])])
    return torch.cat([low, -high]), torch.cat([high, -low])


_LOW, _HIGH = _interval_tables()
_TABLES = {"e4m3": E4M3, "e2m1": E2M1, "ue8m0": UE8M0, "low": _LOW, "high": _HIGH}


@lru_cache(maxsize=64)
def _on(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _TABLES[name].to(device=device, dtype=dtype)


def _look_up(name: str, codes: Tensor, dtype: torch.dtype) -> Tensor:
    if codes.dtype != torch.int32:
        codes = as_bytes(codes).int()
    table = _on(name, codes.device, dtype)
    return table.index_select(0, codes.reshape(-1)).view(codes.shape)


def as_bytes(t: Tensor) -> Tensor:
    """A one-byte tensor (uint8, int8 or a float8 type) as uint8, sharing memory."""
    if t.element_size() != 1:
        raise ValueError(f"codes must be one byte wide, got {t.dtype}")
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """e4m3 bytes of any shape -> values. uint8, a float8 view, or int32 within 0..255."""
    return _look_up("e4m3", codes, dtype)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """e2m1 codes 0..15, one per element -> values of the same shape."""
    return _look_up("e2m1", codes, dtype)


def decode_ue8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """ue8m0 bytes -> 2^(byte - 127), same shape; 255 is NaN."""
    return _look_up("ue8m0", codes, dtype)


def floor_log2(a: Tensor) -> Tensor:
    """floor(log2 a) of non-negative float32/float64, read from the exponent field, as int32.

    Zero and subnormals give the field's minimum (-127 or -1023): callers clamp far above that.
    """
    if a.dtype == torch.float32:
        return (a.view(torch.int32) >> 23) - 127
    if a.dtype == torch.float64:
        return ((a.view(torch.int64) >> 52) - 1023).int()
    raise ValueError(f"expected float32 or float64, got {a.dtype}")


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent for int32 exponents within the normal range of ``dtype``, assembled from bits."""
    if dtype == torch.float32:
        return ((exponent + 127) << 23).view(torch.float32)
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _as_float(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _round_minifloat(x: Tensor, mantissa_bits: int, min_exponent: int, top: float) -> Tensor:
    """Magnitude code (int32) of x.

    Binades are 2^mantissa_bits codes apart, so a carry needs no care.
    """
    a = x.abs().clamp(max=top)
    exponent = floor_log2(a).clamp(min=min_exponent)
    steps = torch.round(a * power_of_two(mantissa_bits - exponent, a.dtype))
    return ((exponent - min_exponent) << mantissa_bits) + steps.int()


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 code, ties to even, saturating at ±448, sign kept, NaN -> 0x7F.

    Uint8 of x's shape.
    """
    x = _as_float(x)
    code = _round_minifloat(x, mantissa_bits=3, min_exponent=-6, top=E4M3_MAX)
    code = torch.where(x.isnan(), 0x7F, code | (x.signbit().int() << 7))
    return code.to(torch.uint8)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 code 0..15, ties to even, saturating at ±6, sign kept.

    Uint8, one code an element.
    """
    x = _as_float(x)
    code = _round_minifloat(x, mantissa_bits=1, min_exponent=0, top=E2M1_MAX)
    return (code | (x.signbit().int() << 3)).to(torch.uint8)


def round_bf16(x: Tensor) -> Tensor:
    """x rounded once to the bf16 grid (nearest, ties to even), in x's own dtype and shape."""
    if x.dtype == torch.bfloat16:
        return x
    if x.dtype == torch.float32:
        return x.bfloat16().float()
    exponent = floor_log2(x.abs()).clamp(-126, 127)
    rounded = torch.round(x * power_of_two(7 - exponent, x.dtype)) * power_of_two(
        exponent - 7, x.dtype
    )
    return torch.where(rounded.abs() < 2.0**128, rounded, rounded * math.inf)


def e4m3_interval(codes: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Smallest and largest value that rounds to each e4m3 code, at the code's own binade.

    Ends are the exact midpoints to the neighbouring codes (so below a power of two the interval is
    half as wide as above it); +0 covers ``[0, 2^-10]``, -0 ``[-2^-10, 0]``, ±448 reach infinity,
    NaN codes give NaN. Returned closed: an end belongs to the code with the even mantissa, and the
    other neighbour is accepted there too. Both ``[...]`` like ``codes``.
    """
    return _look_up("low", codes, dtype), _look_up("high", codes, dtype)
