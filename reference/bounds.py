"""Forward-error bounds that stand beside golden values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BF16_ROUNDOFF = 2.0**-8
FP32_ROUNDOFF = 2.0**-24
NORM_BLOCK = 32


class Bounded(NamedTuple):
    """A golden value and how far a contract-abiding implementation may be from it, same shape."""

    value: Tensor
    bound: Tensor


def gamma(terms: int) -> float:
    """Error of an fp32 sum of ``terms`` products, relative to the sum of their magnitudes.

    Two ways to accumulate are covered. Rounded one by one: each step errs by at most 2^-24 of a
    partial sum that grows to the whole, a random walk of deviation 2^-24 · sqrt(terms) / 3, of
    which six deviations are taken. Tensor cores: one truncation of at most 2^-23 for every 16
    terms, of partial sums that are half the whole on average. Their sum is allowed.
    """
    return (2 * math.sqrt(terms) + terms / 16) * FP32_ROUNDOFF


def own_share(dtype: torch.dtype) -> float:
    """1 when golden is float64 and itself exact enough; 2 when it is float32 and errs as much."""
    return 1.0 if dtype == torch.float64 else 2.0


def block_norms(x: Tensor) -> Tensor:
    """Euclidean norms of blocks of 32: ``[..., n]`` -> fp32 ``[..., n / 32]``.

    By Cauchy-Schwarz, ``block_norms(a) @ block_norms(b)`` is at least Σ|a||b|, for 1/32 of the
    work.
    """
    blocks = torch.unflatten(x, -1, (-1, NORM_BLOCK))
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=-1)
    return norms.float()
