"""Argument checks that name the argument: a misuse is a ValueError, not a wrong result.

Messages are built on failure alone, since these run on every eager call.
"""

from __future__ import annotations

import torch

from megabench.formats import KVRecord, record_of

CACHE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
PAGE_STRIDE_MULTIPLE = 16
"""Bytes a page stride is a multiple of, so that rows stay aligned for 16-byte loads."""


def require(condition: bool, argument: str, what: str) -> None:
    """ValueError "`argument`: `what`" unless `condition`. `what` is a constant, or cheap."""
    if not condition:
        raise ValueError(f"{argument}: {what}")


def check_tensor(
    argument: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Check dtype, shape (None is any size) and device of one tensor argument."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{argument}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise ValueError(f"{argument}: expected {dtype}, got {tensor.dtype}")
    found = tensor.shape
    fits = len(found) == len(shape) and all(
        want is None or have == want for have, want in zip(found, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("?" if size is None else str(size) for size in shape)
        raise ValueError(f"{argument}: expected shape [{wanted}], got {list(found)}")
    if tensor.device != device:
        raise ValueError(f"{argument}: expected on {device}, got {tensor.device}")


def check_cache(argument: str, cache: torch.Tensor, device: torch.device) -> KVRecord:
    """Check a paged cache [blocks, page, (1,) bytes] of one-byte elements; returns its record."""
    if cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"{argument}: expected one-byte elements, got {cache.dtype}")
    if cache.dim() not in (3, 4) or (cache.dim() == 4 and cache.shape[2] != 1):
        raise ValueError(
            f"{argument}: expected [blocks, page, (1,) bytes], got {list(cache.shape)}"
        )
    if cache.device != device:
        raise ValueError(f"{argument}: expected on {device}, got {cache.device}")
    try:
        record = record_of(cache.shape[-1])
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
    require(
        cache.stride(-1) == 1 and cache.stride(1) == record.nbytes,
        argument,
        "rows of a page must be contiguous",
    )
    page_bytes, stride = cache.shape[1] * record.nbytes, cache.stride(0)
    if cache.shape[0] > 1 and (stride < page_bytes or stride % PAGE_STRIDE_MULTIPLE):
        raise ValueError(
            f"{argument}: page stride {stride} must be >= {page_bytes} and a multiple of "
            f"{PAGE_STRIDE_MULTIPLE}"
        )
    return record
