"""Number formats on integer bits: bf16, e4m3, ue8m0 and e2m1, exact on every target.

Two compile-time flags choose the path. EMULATE is set under Triton's interpreter, whose bf16 casts
truncate, whose e4m3 casts lose a carry and whose bf16 dots multiply raw bits: there a "bf16" dot
operand stays float32, rounded to a bf16 value. FP8_CVT is set where the hardware converts float32
to e4m3 (SM89 and later); elsewhere codes are rounded on bits.
"""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)
E4M3_REBIAS = tl.constexpr(2.0**120)
"""e4m3 bits moved into a float32's exponent field read 2^-120 of their value."""
SUBNORMAL_STEP = tl.constexpr(16384.0)
"""2^14: a float32 here has ulp 2^-9, the step of e4m3's subnormals."""


@triton.jit
def bf16_to_f32(x, EMULATE: tl.constexpr):
    """float32 of loaded bf16 values."""
    if EMULATE:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _rounded_bf16_bits(x):
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def round_bf16(x, EMULATE: tl.constexpr):
    """float32 values rounded to bf16, kept as float32."""
    if EMULATE:
        return _rounded_bf16_bits(x).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def dot_operand(x, EMULATE: tl.constexpr):
    """A dot operand of float32 `x` rounded to bf16; float32 with bf16 values when emulating."""
    if EMULATE:
        return _rounded_bf16_bits(x).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def bf16_operand(x, EMULATE: tl.constexpr):
    """A dot operand of loaded bf16 values."""
    if EMULATE:
        return bf16_to_f32(x, True)
    else:
        return x


@triton.jit
def f32_to_bf16(x, EMULATE: tl.constexpr):
    """bf16 to store, nearest, ties to even."""
    if EMULATE:
        return (_rounded_bf16_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def e4m3_to_f32(code):
    """float32 of e4m3 codes (uint8). The NaN codes read as +-480: they are never multiplied by a
    scale other than 0."""
    wide = code.to(tl.int32)
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * E4M3_REBIAS


@triton.jit
def f32_to_e4m3(x, FP8_CVT: tl.constexpr):
    """e4m3 codes (uint8): nearest, ties to even, saturating, sign kept."""
    if FP8_CVT:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), E4M3_MAX)
        mag_bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((mag_bits + 0x7FFFF + ((mag_bits >> 20) & 1)) >> 20) - (120 << 3)
        step = (magnitude + SUBNORMAL_STEP).to(tl.int32, bitcast=True)
        subnormal = step - 0x46800000
        code = tl.where(mag_bits < 0x3C800000, subnormal, normal)  # below 2^-6
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def ue8m0_to_f32(byte):
    """float32 2^(byte - 127) of int32 bytes 1..254; 0 reads 0."""
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def kv_scale_byte(amax):
    """ue8m0 byte (int32) of KV rows and output: 127 + ceil(log2(max(amax, 1e-4) / 448)), on bits.

    448 = 1.75 * 2^8, so the exponent drops by 8 and grows by one above a mantissa of 1.75.
    """
    bits = tl.maximum(amax, AMAX_FLOOR).to(tl.int32, bitcast=True)
    return (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def activation_scale_byte(amax):
    """ue8m0 byte (int32) of a linear's input: fp32(amax) * fp32(1/448) up to a power of two."""
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def inverse_ue8m0(byte):
    """float32 2^(127 - byte) of int32 bytes 0..253."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_f32(nibble):
    """float32 of e2m1 codes 0..15 (int32): exponent and mantissa bits read 2^-126 of the value."""
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * (2.0**126)


@triton.jit
def f32_to_e2m1(x):
    """e2m1 codes 0..15 (int32) of 0, .5, 1, 1.5, 2, 3, 4, 6: ties to even, saturating, signed."""
    bits = x.to(tl.int32, bitcast=True)
    a = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # A step into an even code is taken at the tie, into an odd one only beyond it.
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def dot(a, b, acc, EMULATE: tl.constexpr):
    """acc + a @ b with float32 accumulation."""
    if EMULATE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def loop_bound(x, EMULATE: tl.constexpr):
    """A scalar as a `range` bound: the interpreter's own conversion fails on numpy 2.4 and later,
    which refuses int() of a one-element array."""
    if EMULATE:
        return x.handle.data.item()
    else:
        return x
