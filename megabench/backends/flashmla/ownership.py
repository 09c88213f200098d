"""Who holds `torch.ops._flashmla_C`: the vendor's library, our kernels, or nobody.

Our kernels can be registered under the vendor's names (megabench/flashmla_ops.py); the binding must
never take those for the vendor's.
"""

from __future__ import annotations

import torch

from megabench.backends.flashmla.schemas import SCHEMAS

NAMESPACE = "_flashmla_C"

_our_kernels: set[str] = set()
_our_definitions: set[str] = set()


def vendor_defined() -> bool:
    """Whether the vendor's library has defined any of its ops here."""
    known = (*SCHEMAS, "sparse_decode_fwd", "sparse_prefill_fwd", "dense_prefill_fwd")
    return any(name not in _our_definitions and defined(name) for name in known)


def defined(name: str) -> bool:
    """Whether `torch.ops._flashmla_C.<name>` exists, whoever defined it."""
    return torch._C._dispatch_has_kernel(f"{NAMESPACE}::{name}")


def ours() -> bool:
    """Whether our kernels answer for any of the ops."""
    return bool(_our_kernels)


def take(kernels: set[str], definitions: set[str]) -> None:
    """Note that our kernels answer for `kernels`, of which we also defined `definitions`."""
    _our_kernels.update(kernels)
    _our_definitions.update(definitions)


def release() -> None:
    """Note that ours are gone."""
    _our_kernels.clear()
    _our_definitions.clear()
