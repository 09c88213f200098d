"""Edits that give blocks of MXFP8 operands scales beyond f16: sm90_product.py checks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def far_scales(blocks: int) -> Iterator[tuple[str, Edit | None, Edit | None]]:
    """Names, and the edits of activations [tokens, groups, ...] and the weight [groups, rows, ...]
    that have `blocks` blocks of 32 columns: 12 or more."""
    for byte in (0, 1, 60, 254):
        yield f"zeros under {byte}", zeros_under(byte), zeros_under(byte)
    for columns in (256, 16 * blocks):
        yield f"{columns} zeros first", zeros_first(columns), zeros_first(columns)
    for low, high in ((90, 165), (104, 128), (105, 127)):
        edit = spread_over(low, high)
        yield f"scales {low} to {high - 1}", edit, edit
    for byte in (30, 104, 127, 200):
        for at in (2, blocks - 8):
            yield f"one block of the weight under {byte}, {at}", None, one_block((0, 517, at), byte)
    for byte in (104, 127):
        yield f"one of a token under {byte}", one_block((-1, 0, blocks * 3 // 5), byte), None
