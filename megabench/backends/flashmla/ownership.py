"""Who holds `torch.ops._flashmla_C`: the vendor's library, our kernels, or nobody.

Our kernels can be registered under the vendor's names (megabench/flashmla_ops.py); the binding must
never take those for the vendor's.
"""

from __future__ import annotations

from typing import Any

import torch

from megabench.backends.flashmla.schemas import SCHEMAS

NAMESPACE = "_flashmla_C"
_VENDOR_OPS = (*SCHEMAS, "sparse_decode_fwd", "sparse_prefill_fwd", "dense_prefill_fwd")

_claims: list[Any] = []


def defined(name: str) -> bool:
    """Whether `torch.ops._flashmla_C.<name>` exists, whoever defined it."""
    return torch._C._dispatch_has_kernel(f"{NAMESPACE}::{name}")


def vendor_defined() -> bool:
    """Whether the vendor's library has defined any of its ops here; asked while none is ours."""
    return any(defined(name) for name in _VENDOR_OPS)


def ours() -> bool:
    """Whether our kernels answer for the ops."""
    return bool(_claims)


def claim(libraries: list[Any]) -> None:
    """Note that ours answer for the ops, and keep their registrations until `release`: torch
    withdraws one when it is collected, and a caller need not hold on to it."""
    _claims.extend(libraries)


def release() -> None:
    """Note that ours are gone."""
    _claims.clear()
