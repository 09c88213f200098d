"""Edits that give blocks of MXFP8 operands scales beyond f16: sm90_product.py checks them."""

from __future__ import annotations

from collections.abc import Callable

import torch

Edit = Callable[[torch.Tensor, torch.Tensor], None]
"""Changes codes uint8 [..., 32k] and scale bytes uint8 [..., k] in place."""


def zeros_under(byte: int) -> Edit:
    """A tenth of the blocks become zeros, of either sign, under this scale."""

    def edit(codes: torch.Tensor, scale: torch.Tensor) -> None:
        g = torch.Generator(codes.device).manual_seed(byte)
        picked = torch.rand(scale.shape, generator=g, device=codes.device) < 0.1
        sign = torch.randint(0, 2, codes.shape, generator=g, device=codes.device) * 0x80
        codes.copy_(torch.where(picked.repeat_interleave(32, -1), sign.to(torch.uint8), codes))
        scale.masked_fill_(picked, byte)

    return edit


def zeros_first(columns: int) -> Edit:
    """The first columns become zeros whose scale is 2^-127."""

    def edit(codes: torch.Tensor, scale: torch.Tensor) -> None:
        codes[..., :columns] = 0
        scale[..., : columns // 32] = 0

    return edit


def spread_over(low: int, high: int) -> Edit:
    """Every block gets a scale byte from low to high - 1."""

    def edit(codes: torch.Tensor, scale: torch.Tensor) -> None:
        g = torch.Generator(codes.device).manual_seed(low)
        drawn = torch.randint(low, high, scale.shape, generator=g, device=codes.device)
        scale.copy_(drawn.to(torch.uint8))

    return edit


def one_block(index: tuple[int, int, int], byte: int) -> Edit:
    """One block, of some values, gets another scale."""

    def edit(codes: torch.Tensor, scale: torch.Tensor) -> None:
        scale[index] = byte

    return edit


FAR_SCALES: tuple[tuple[str, Edit | None, Edit | None], ...] = (
    *((f"zeros under {byte}", zeros_under(byte), zeros_under(byte)) for byte in (0, 1, 60, 254)),
    ("256 zeros first", zeros_first(256), zeros_first(256)),
    ("2048 zeros first", zeros_first(2048), zeros_first(2048)),
    ("scales 90 to 164", spread_over(90, 165), spread_over(90, 165)),
    ("scales 104 to 127", spread_over(104, 128), spread_over(104, 128)),
    ("scales 105 to 126", spread_over(105, 127), spread_over(105, 127)),
    *(
        (f"one block of the weight under {byte}, {at}", None, one_block((0, 517, at), byte))
        for byte in (30, 104, 127, 200)
        for at in (2, 120)
    ),
    *((f"one of a token under {byte}", one_block((-1, 0, 77), byte), None) for byte in (104, 127)),
)
"""Names, and the edits of activations [tokens, groups, ...] and the weight [groups, rows, ...]."""
