"""Values of queries and keys: what each input family draws, and cache rows as record bytes.

Everything comes from integer hashes and exact float steps, so the bytes are the same everywhere.
"""

from __future__ import annotations

from statistics import NormalDist

import torch

from megabench.cases import Family
from megabench.formats import FP8, HEAD_DIM, NOPE_DIM, KVRecord
from megabench.hashing import Stream
from megabench.quant import (
    UE8M0_BIAS,
    encode_e4m3,
    quantize_kv_mxfp8,
    quantize_nvfp4,
    ue8m0_to_float,
)

CODE_STD = 128.0
"""Standard deviation of random e4m3 codes; the largest stay below 448, so none is NaN."""
_FP8_SCALE_BYTES = (118, 119, 120, 121)
_NVFP4_SCALE_CODES = (0x29, 0x2A, 0x2D, 0x2F)
"""e4m3 of 9/32, 5/16, 13/32 and 15/32: with nibbles of deviation 2.9, keys close to N(0, 1). Odd
significands, so that a row has the 6 bits a row may have and is no e4m3 by itself."""
FAR_KEY = 2.0**17
"""Of every NoPE dim: with queries near N(0, 1), all scores of a head are alike and near 10^5."""
TINY_QUERY = 2.0**-64
"""Of queries beside tiny keys, whose scores are all nearly 0 anyway: activations have no floor."""
_SPIKE_ROWS = (0, 63, 64, 95)
"""Rows of a 96-row period that stand out: the edges of 64- and 96-row tiles."""


def _dims(width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(width, device=device)


def _signs(width: int, device: torch.device) -> torch.Tensor:
    """One fixed direction of +1 and -1, float32 [width]."""
    words = Stream.of("direction").words(width, device=device)
    return 1.0 - 2.0 * (words & 1).to(torch.float32)


def key_values(family: Family, stream: Stream, rows: int, device: torch.device) -> torch.Tensor:
    """float32 [rows, 512] of latents, before RoPE and quantization."""
    shape = (rows, HEAD_DIM)
    row = torch.arange(rows, device=device)[:, None]
    dim = _dims(HEAD_DIM, device)
    match family:
        case "zeros":
            return torch.zeros(shape, device=device)
        case "one_hot":
            target = stream.below(torch.full((rows, 1), NOPE_DIM, device=device))
            # Of either sign, so that some blocks have nothing above zero.
            return (dim == target).to(torch.float32) * (1 - target % 2 * 2)
        case "ramp":
            return ((row * 3 + dim) % 15 - 7).to(torch.float32)
        case "monotone":
            return (row % 256).to(torch.float32) / 64.0 * _signs(HEAD_DIM, device)
        case "far":
            return torch.where(dim < NOPE_DIM, FAR_KEY, 0.0).expand(shape) * _signs(
                HEAD_DIM, device
            )
        case "spikes":
            edge = torch.isin(row % 96, torch.tensor(_SPIKE_ROWS, device=device))
            return torch.where(edge, 4.0, 0.125) * _signs(HEAD_DIM, device)
    normal = stream.normals(*shape, device=device)
    match family:
        case "tiny":
            return normal * 2.0**-20
        case "saturating":
            return normal * 2.0**13
        case "outliers":
            return torch.where(dim % 128 == 77, 64.0, 1.0) * normal
        case "exponents":
            return normal * ue8m0_to_float(UE8M0_BIAS - 8 + dim // 16 % 16)
        case _:
            return normal


def query_values(
    family: Family, stream: Stream, tokens: int, width: int, device: torch.device
) -> torch.Tensor:
    """float32 [tokens, width] of normed low-rank queries."""
    if family == "equal_logits":
        return torch.zeros((tokens, width), device=device)
    normal = stream.normals(tokens, width, device=device)
    match family:
        case "outliers":
            return torch.where(_dims(width, device) % 128 == 77, 64.0, 1.0) * normal
        case "tiny":
            return normal * TINY_QUERY
        case _:
            return normal


def cache_rows(
    family: Family, stream: Stream, rows: int, record: KVRecord, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale bytes, uint8 [rows, data_bytes] and [rows, scale_bytes], of history rows.

    Random rows are drawn as codes with scales that differ from block to block; the other families'
    values are quantized. No NaN code, no scale byte 0 or 255.
    """
    if family not in ("random", "equal_logits"):
        values = key_values(family, stream, rows, device)
        return quantize_kv_mxfp8(values) if record is FP8 else quantize_nvfp4(values)
    data = stream.bytes(rows, record.data_bytes, device=device)
    pick = Stream.of(*stream.key, "scale").words(rows, record.scale_bytes, device=device) & 3
    choices = _FP8_SCALE_BYTES if record is FP8 else _NVFP4_SCALE_CODES
    scales = torch.tensor(choices, dtype=torch.uint8, device=device)[pick]
    if record is FP8:
        data = normal_codes(device)[data.to(torch.int32)]
    return data, scales


def normal_codes(device: torch.device) -> torch.Tensor:
    """uint8 [256]: e4m3 codes at 256 quantiles of a normal: uniform bytes to codes."""
    quantiles = [NormalDist(0.0, CODE_STD).inv_cdf((i + 0.5) / 256) for i in range(256)]
    return encode_e4m3(torch.tensor(quantiles, dtype=torch.float32)).to(device)
