"""Quantizers and scale packing: MXFP8, NVFP4, ue8m0 bytes, MN-major words, output buffers.

Every rule is CONTRACT-exact and works on the bits of float32, so results are the same on every
device. Codes travel as `torch.float8_e4m3fn` where an op wants that dtype, else as uint8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megabench.formats import HEAD_DIM, QUANT_GROUP, WV_GROUP_SIZE, round_up

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
"""Floor of a KV or output block's amax: an all-zero block gets byte 105."""
UE8M0_BIAS = 127
MXFP8_DYNAMIC = "mxfp8_dynamic"
"""The quant_key of an activation with per-token, per-32 ue8m0 scales."""


@dataclass(frozen=True)
class QuantizedActivation:
    """A quantized tensor and its scales, as the layer hands them from op to op.

    data: float8_e4m3fn [T, n_wv_group, 8*512]; scale: int32 [T, n_wv_group, 32], four ue8m0
    bytes a word, MN-major (stride 1 along tokens).
    """

    data: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    orig_shape: torch.Size
    quant_key: str = MXFP8_DYNAMIC


def ue8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """float32 2^(byte - 127) of uint8 bytes 1..254, built from bits; byte 0 gives 0."""
    return (scale.to(torch.int32) << 23).view(torch.float32)


def _ceil_power_of_two_byte(ratio: torch.Tensor) -> torch.Tensor:
    """The ue8m0 byte of the least power of two >= `ratio` (float32, > 0), on bits."""
    bits = ratio.view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """e4m3 codes (uint8) of float32 `x`: nearest, ties to even, saturating, sign kept."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3 codes given as uint8 or float8_e4m3fn."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _blocks(x: torch.Tensor, group: int) -> torch.Tensor:
    return torch.unflatten(x.to(torch.float32), -1, (-1, group))


def _encode_scaled(blocks: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """Codes of blocks * 2^(127 - byte), [..., n]. Two exact steps keep the factor normal."""
    exponent = UE8M0_BIAS - scale_bytes.to(torch.int32)
    scaled = torch.ldexp(blocks.to(torch.float64), exponent.unsqueeze(-1).to(torch.float64))
    return encode_e4m3(scaled.to(torch.float32)).flatten(-2)


def quantize_kv_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KV rows and attention output, per 32 dims: amax floored at 1e-4, byte = 127 +
    ceil(log2(amax / 448)).

    x [..., 32k] -> codes uint8 [..., 32k], scale bytes uint8 [..., k]. An all-zero block: 105.
    """
    blocks = _blocks(x, QUANT_GROUP)
    amax = blocks.abs().amax(-1).clamp_min(AMAX_FLOOR)
    # ceil(log2(amax/448)) on bits: 448 = 1.75 * 2^8, so compare the mantissa with 1.75.
    bits = amax.view(torch.int32)
    over = (bits & 0x7FFFFF) > 0x600000
    scale = ((bits >> 23) - 8 + over).clamp(0, 254).to(torch.uint8)
    return _encode_scaled(blocks, scale), scale


def quantize_activation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the wq_b and wo_b linears, per token and 32 columns: t = amax * fp32(1/448), byte =
    t rounded up to a power of two, no floor.

    x [T, K] -> codes uint8 [T, K], scale bytes uint8 [T, K/32]. An all-zero block: byte 0, codes 0.
    """
    blocks = _blocks(x, QUANT_GROUP)
    t = blocks.abs().amax(-1) * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)
    scale = _ceil_power_of_two_byte(t)
    return _encode_scaled(blocks, scale), scale


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """e2m1 codes 0..15 (uint8) of float32 `x`: {0, .5, 1, 1.5, 2, 3, 4, 6}, ties to even."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    # A tie goes to the even code, so the step into an odd code is strict, into an even one not.
    for edge, into_even in zip(
        (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True) * 4, strict=False
    ):
        code += (magnitude >= edge) if into_even else (magnitude > edge)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def quantize_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 rows, per 16 dims: scale = e4m3(clamp(amax * fp32(1/6), 2^-9, 448)), e2m1(x / scale).

    x [..., 16k] -> nibble pairs uint8 [..., 8k] (even element low), e4m3 scale codes [..., k].
    """
    blocks = _blocks(x, 16)
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32)
    scale = encode_e4m3((blocks.abs().amax(-1) * sixth).clamp(2.0**-9, E4M3_MAX))
    codes = encode_e2m1(blocks / decode_e4m3(scale).unsqueeze(-1)).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def decode_e2m1(pairs: torch.Tensor) -> torch.Tensor:
    """float32 values [..., 2n] of nibble pairs uint8 [..., n], even element in the low nibble."""
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int32)
    # Exponent and mantissa moved into a float32's read 2^-126 of the value, subnormals included.
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.view(torch.float32) * 2.0**126


def dequantize_mxfp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., 32k] of codes and ue8m0 bytes [..., k]; exact in bf16 too."""
    return (_blocks(decode_e4m3(codes), QUANT_GROUP) * ue8m0_to_float(scale).unsqueeze(-1)).flatten(
        -2
    )


def dequantize_nvfp4(pairs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., 2n] of nibble pairs [..., n] and e4m3 scales [..., n/8]; exact in bf16 too."""
    return (_blocks(decode_e2m1(pairs), 16) * decode_e4m3(scale).unsqueeze(-1)).flatten(-2)


def tma_aligned(num_tokens: int) -> int:
    """Tokens of an int32 scale column rounded up to 16 bytes: ceil4."""
    return round_up(num_tokens, 4)


def empty_mn_major(rows: int, groups: int, words: int, device: torch.device) -> torch.Tensor:
    """An uninitialised int32 scale tensor [rows, groups, words]: strides 1, words*ceil4, ceil4."""
    storage = torch.empty((groups, words, tma_aligned(rows)), dtype=torch.int32, device=device)
    return storage.permute(2, 0, 1)[:rows]


def pack_mn_major(scale: torch.Tensor) -> torch.Tensor:
    """Pack ue8m0 bytes uint8 [groups, rows, 4w] into int32 [groups, rows, w], MN-major.

    Byte b of word w is chunk 4w+b, little endian; stride 1 along rows, as DeepGEMM's packed ue8m0.
    """
    groups, rows, chunks = scale.shape
    packed = empty_mn_major(rows, groups, chunks // 4, scale.device)
    packed.copy_(scale.contiguous().view(torch.int32).transpose(0, 1))
    return packed.transpose(0, 1)


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """ue8m0 bytes uint8 [..., 4w] of packed int32 words [..., w], any strides."""
    return packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def alloc_mega_attn_output(
    num_tokens: int, n_wv_group: int, device: torch.device
) -> QuantizedActivation:
    """Allocate the output buffer pair the mega-attention kernels write into.

    One pair serves a whole step: prefill and decode write disjoint token slices of it, and one
    fp8_einsum reads it. data: float8_e4m3fn [T, n_wv_group, 4096], contiguous; scale: int32
    [T, n_wv_group, 32] with token stride 1 and head-dim stride ceil4(T), which the kernel demands
    of a caller's buffer and DeepGEMM's einsum expects.
    """
    width = WV_GROUP_SIZE * HEAD_DIM
    data = torch.empty((num_tokens, n_wv_group, width), dtype=torch.float8_e4m3fn, device=device)
    scale = empty_mn_major(num_tokens, n_wv_group, width // (QUANT_GROUP * 4), device)
    return QuantizedActivation(data, scale, torch.bfloat16, data.shape)


def token_slice(out: QuantizedActivation, start: int, end: int) -> QuantizedActivation:
    """The [start, end) tokens of an output buffer; the scale keeps the whole step's stride."""
    data = out.data[start:end]
    return replace(out, data=data, scale=out.scale[start:end], orig_shape=data.shape)
