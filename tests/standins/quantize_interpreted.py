"""The packing quantizer's kernel beside the eager one, byte for byte, under the interpreter."""

from __future__ import annotations

import torch

from megabench.backends.flashmla.gemm import pack_rows
from megabench.backends.flashmla.quantize import quantize_packed
from megabench.quant import quantize_activation

SHAPES = ((1, 32), (3, 160), (5, 1280), (6, 1056), (2, 128), (0, 64))
"""Tokens and columns: one scale, a part-filled last word, several programs a row, no token."""


def main() -> None:
    torch.manual_seed(0)
    for tokens, columns in SHAPES:
        spread = torch.exp2(torch.randint(-30, 30, (tokens, columns // 32, 1)).float())
        wide = torch.randn(tokens, columns // 32, 32) * spread
        x = torch.zeros(tokens, columns + 64, dtype=torch.bfloat16)[:, :columns]
        x.copy_(wide.view(tokens, columns))
        x[:1, :32] = 0
        codes, words = quantize_packed(x)
        expected_codes, scales = quantize_activation(x)
        expected = pack_rows(scales)
        assert torch.equal(codes.view(torch.uint8), expected_codes), (tokens, columns)
        assert torch.equal(words, expected), (tokens, columns)
        assert words.stride() == expected.stride()
    print(f"{len(SHAPES)} shapes equal")


if __name__ == "__main__":
    main()
