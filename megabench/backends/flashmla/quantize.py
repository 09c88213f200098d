"""One launch from bf16 activations to DeepGEMM's operand: e4m3 codes and packed ue8m0 words."""

# Kernels are untyped: Triton's tensors have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from megabench.backends.triton.bits import (
    activation_scale_byte,
    bf16_to_f32,
    f32_to_e4m3,
    inverse_ue8m0,
)
from megabench.backends.triton.target import target_of
from megabench.formats import QUANT_GROUP
from megabench.quant import empty_mn_major

WORD_COLUMNS = 4 * QUANT_GROUP
"""Columns under one int32 word of scales."""
WORDS_A_PROGRAM = 8


@triton.jit(do_not_specialize=["word_stride"])
def quantize_packed_kernel(
    x_ptr,
    x_stride,
    code_ptr,
    word_ptr,
    word_stride,
    K,
    WORDS: tl.constexpr,
    EMULATE: tl.constexpr,
    FP8_CVT: tl.constexpr,
):
    """WORDS * 128 columns of one token. Chunks past K get byte 127, a factor of one."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WORDS
    column = first * 128 + tl.arange(0, WORDS * 128)
    x = bf16_to_f32(tl.load(x_ptr + row * x_stride + column, mask=column < K, other=0.0), EMULATE)
    blocks = tl.reshape(x, (WORDS * 4, 32))
    byte = activation_scale_byte(tl.max(tl.abs(blocks), axis=1))
    code = f32_to_e4m3(blocks * inverse_ue8m0(byte)[:, None], FP8_CVT)
    tl.store(code_ptr + row * K + column, tl.reshape(code, (WORDS * 128,)), mask=column < K)
    chunk = tl.arange(0, WORDS * 4)
    byte = tl.where((first * 4 + chunk) * 32 < K, byte, 127)
    # Bytes of one word do not overlap, so their sum is their union.
    shifted = byte.to(tl.uint32) << ((chunk % 4) * 8).to(tl.uint32)
    word = tl.sum(tl.reshape(shifted, (WORDS, 4)), axis=1)
    which = first + tl.arange(0, WORDS)
    place = which.to(tl.int64) * word_stride + row
    tl.store(word_ptr + place, word.to(tl.int32, bitcast=True), mask=which * 128 < K)


def quantize_packed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 [T, K] -> e4m3 [T, K] and ue8m0 words int32 [T, ceil(K/128)], MN-major.

    The quantizer of a linear's input (docs/contract.md, section 5): bytes as `quantize_activation`.
    """
    tokens, k = x.shape
    words = triton.cdiv(k, WORD_COLUMNS)
    codes = torch.empty((tokens, k), dtype=torch.uint8, device=x.device)
    packed = empty_mn_major(tokens, 1, words, x.device)[:, 0]
    if tokens:
        target = target_of(x.device)
        count = min(WORDS_A_PROGRAM, triton.next_power_of_2(words))
        quantize_packed_kernel[(tokens, triton.cdiv(words, count))](
            x,
            x.stride(0),
            codes,
            packed,
            packed.stride(1),
            k,
            WORDS=count,
            EMULATE=target.emulate,
            FP8_CVT=target.fp8_cvt,
            num_warps=4,
        )
    return codes.view(torch.float8_e4m3fn), packed
