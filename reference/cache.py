"""What inserting K/V rows must leave in a cache, and which other bytes the contract also allows.

NoPE bytes are exact. A RoPE'd value is a float32 rotation whose last bits depend on fused
multiply-adds, so a code or scale that a change of 2^-22 relative to the rotation's two products
could move may be either of its two neighbours; everything else must match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import records
from .quantize import spread
from .rope import FP32_SLACK, ROPE_DIM, on_rope_dims, rotate, rotated_magnitude


@dataclass(frozen=True)
class InsertedRows:
    """Expected records of T inserted rows.

    ``bytes`` uint8 ``[T, nbytes]``; ``may_differ`` bool ``[T, 512]``: dims with a second acceptable
    code (for an ambiguous scale, all dims of its group); ``exact`` fp64 ``[T, 512]``: the RoPE'd
    row; ``slack`` fp64 ``[T, 512]``: what float32 may be off, 0 on NoPE dims.
    """

    bytes: Tensor
    may_differ: Tensor
    exact: Tensor
    slack: Tensor

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest float32 row that a contract-abiding rotation can produce."""
        return (self.exact - self.slack).float(), (self.exact + self.slack).float()

    def scale_ends(self) -> tuple[Tensor, Tensor]:
        """Scale bytes of the smallest and the largest group amax, uint8 ``[T, groups]`` each."""
        nbytes, magnitude = self.bytes.shape[-1], self.exact.abs()
        least = (magnitude - self.slack).clamp(min=0).float()
        most = (magnitude + self.slack).float()
        low = records.scales_for(records.group_amax(least, nbytes), nbytes)
        return low, records.scales_for(records.group_amax(most, nbytes), nbytes)


def rope_positions(positions: Tensor, compress_ratio: int | None) -> Tensor:
    """Position at which a row is RoPE'd: its own, or its group's first for a compressed row."""
    positions = positions.long()
    return positions // compress_ratio * compress_ratio if compress_ratio else positions


def inserted_rows(
    kv: Tensor,
    positions: Tensor,
    table: Tensor,
    nbytes: int,
    compress_ratio: int | None = None,
) -> InsertedRows:
    """Records of rows ``kv`` bf16 ``[T, 512]`` at ``positions [T]``; ``table`` is fp32 ``[P, 64]``.

    With ``compress_ratio`` the rows are compressed ones, closing at ``positions``; a row that does
    not close is computed too, and the caller leaves it out (its slot is -1).
    """
    cos_sin = table[rope_positions(positions, compress_ratio)]
    rope = kv[..., -ROPE_DIM:]
    row = on_rope_dims(kv.float(), rotate(rope.float(), cos_sin))
    exact = on_rope_dims(kv.double(), rotate(rope.double(), cos_sin))
    products = rotated_magnitude(rope.double(), cos_sin)
    # A rotation by a zero angle (position 0) multiplies by one and adds zero: nothing rounds.
    rounds = cos_sin[..., ROPE_DIM // 2 :].repeat_interleave(2, -1) != 0
    slack = on_rope_dims(torch.zeros_like(exact), FP32_SLACK * products * rounds)
    encoded = records.encode_rows(row, nbytes)
    inserted = InsertedRows(encoded, torch.zeros_like(exact, dtype=torch.bool), exact, slack)

    low, high = inserted.ends
    _, scales = records.unpack(encoded)
    differ = records.codes_under(low, scales, nbytes) != records.codes_under(high, scales, nbytes)
    least, most = inserted.scale_ends()
    differ |= _per_dim(least != most, nbytes)
    return InsertedRows(encoded, differ, exact, slack)


def _per_dim(groups: Tensor, nbytes: int) -> Tensor:
    """bool ``[T, groups]`` -> bool ``[T, 512]``; dims without a scale (584 B, RoPE) get False."""
    wide = spread(groups, records.record_of(nbytes).group)
    missing = records.HEAD_DIM - wide.shape[-1]
    return torch.nn.functional.pad(wide, (0, missing))


def acceptable(inserted: InsertedRows, actual: Tensor) -> Tensor:
    """Per dim, whether written bytes uint8 ``[T, nbytes]`` obey the contract: bool ``[T, 512]``.

    A wrong scale condemns its whole group; codes are judged under the scale actually written.
    """
    nbytes = actual.shape[-1]
    codes, scales = records.unpack(actual)
    least, most = inserted.scale_ends()
    low, high = inserted.ends
    good = codes == records.codes_under(low, scales, nbytes)
    good |= codes == records.codes_under(high, scales, nbytes)
    return good & ~_per_dim((scales != least) & (scales != most), nbytes)


def accepts(inserted: InsertedRows, actual: Tensor) -> Tensor:
    """Per row, whether written bytes uint8 ``[T, nbytes]`` obey the contract: bool ``[T]``."""
    return acceptable(inserted, actual).all(dim=-1)


def compressed_slot(position: Tensor, ratio: int, block_table_row: Tensor, page: int) -> Tensor:
    """Slot int64 ``[T]`` of the compressed row that closes at each ``position [T]``; -1 where none
    does.

    ``block_table_row`` is ``[B]``, or ``[T, B]`` with a row a token. With ratio 1 and the SWA page
    size this is also the SWA slot of a position.
    """
    position = position.long()
    row = position // ratio
    table = block_table_row.long()
    table = table.expand(len(position), -1) if table.dim() == 1 else table
    block = table.gather(1, (row // page)[:, None])[:, 0]
    return torch.where((position + 1) % ratio == 0, block * page + row % page, -1)
