"""The kernel's layouts: wq_b row order, wo_a column order, and Q padding inside every chunk.

Pure index work on any dtype. Sources: CONTRACT 3 and 4; FlashMLA's `permute_q_b_proj` and
`permute_wv_proj` give the same orders.
"""

from __future__ import annotations

import torch

from megabench.formats import HEAD_DIM, Q_CHUNK, QUANT_GROUP, WV_GROUP_SIZE


def _check_one_byte(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() != 1:
        raise ValueError(f"{name}: expected a one-byte dtype, got {tensor.dtype}")
    return tensor.view(torch.uint8)


def chunk_rows(standard: torch.Tensor, heads: int, head_dim: int = HEAD_DIM) -> torch.Tensor:
    """Rows [heads*head_dim, ...] from h*head_dim + d to (d//16)*(heads*16) + h*16 + d%16."""
    split = torch.unflatten(standard, 0, (heads, head_dim // Q_CHUNK, Q_CHUNK))
    return split.transpose(0, 1).flatten(0, 2)


def chunk_columns(standard: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """Columns [..., heads*16*width] from (h, c, j) to (c, h, j), c in 0..15, j in 0..width-1."""
    split = torch.unflatten(standard, -1, (heads, HEAD_DIM // QUANT_GROUP, width))
    return split.transpose(-3, -2).flatten(-3)


def permute_wq_b_(weight: torch.Tensor, weight_scale: torch.Tensor, num_local_heads: int) -> None:
    """Permute wq_b into the kernel's Q order, in place.

    weight: one-byte [H*512, r]; weight_scale: one-byte [H*512, r/32], which moves with its rows.
    H is the number of *live* local heads. ValueError before anything is written.
    """
    for name, tensor in (("weight", weight), ("weight_scale", weight_scale)):
        _check_one_byte(name, tensor)
        if tensor.shape[0] != num_local_heads * HEAD_DIM:
            raise ValueError(
                f"{name}: expected {num_local_heads} heads x {HEAD_DIM} rows, got {tensor.shape[0]}"
            )
    for tensor in (weight, weight_scale):
        view = tensor.view(torch.uint8)
        view.copy_(chunk_rows(view, num_local_heads))


def permute_wo_a_(weight: torch.Tensor, weight_scale: torch.Tensor, heads_per_group: int) -> None:
    """Permute wo_a input columns into the kernel's output order, in place.

    weight: one-byte [..., heads_per_group*512]; weight_scale: one-byte [..., heads_per_group*16],
    whose per-32 chunks move whole. ValueError before anything is written.
    """
    chunks = HEAD_DIM // QUANT_GROUP
    for name, tensor, width in (("weight", weight, QUANT_GROUP), ("weight_scale", weight_scale, 1)):
        _check_one_byte(name, tensor)
        if tensor.shape[-1] != heads_per_group * chunks * width:
            raise ValueError(
                f"{name}: expected {heads_per_group * chunks * width} columns for "
                f"{heads_per_group} heads, got {tensor.shape[-1]}"
            )
    for tensor, width in ((weight, QUANT_GROUP), (weight_scale, 1)):
        view = tensor.view(torch.uint8)
        view.copy_(chunk_columns(view, heads_per_group, width))


def pad_q(q: torch.Tensor, padded_heads: int) -> torch.Tensor:
    """Pad [T, H, 512] in chunk order to [T, padded_heads, 512], zeros inside every chunk.

    The token's memory is 32 chunks of [H, 16] before and 32 chunks of [padded_heads, 16] after; at
    H == padded_heads the values are unchanged.
    """
    tokens, heads, dim = q.shape
    chunks = q.reshape(tokens, dim // Q_CHUNK, heads, Q_CHUNK)
    padded = q.new_zeros((tokens, dim // Q_CHUNK, padded_heads, Q_CHUNK))
    padded[:, :, :heads] = chunks
    return padded.view(tokens, padded_heads, dim)


def heads_of(q: torch.Tensor) -> torch.Tensor:
    """Natural [T, H, 512] of a Q tensor [T, H, 512] in chunk order."""
    tokens, heads, dim = q.shape
    chunks = q.reshape(tokens, dim // Q_CHUNK, heads, Q_CHUNK)
    return chunks.transpose(1, 2).reshape(tokens, heads, dim)


def output_order(heads: torch.Tensor) -> torch.Tensor:
    """[T, H, w*16] per head to the kernel's output order [T, H/8, 8*16*w]: element (h, c, j) of a
    group at (c*8 + h)*w + j. w is 32 for codes and 1 for scales."""
    width = heads.shape[-1] // (HEAD_DIM // QUANT_GROUP)
    grouped = torch.unflatten(heads, 1, (-1, WV_GROUP_SIZE))
    return chunk_columns(grouped.flatten(2), WV_GROUP_SIZE, width)
