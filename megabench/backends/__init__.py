"""Backends: the protocol and registry, and the eager baseline users subclass."""

from megabench.backends.base import Backend, Support
from megabench.backends.registry import (
    BackendError,
    backend_specs,
    choose_backend,
    get_backend,
)
from megabench.backends.torch_eager import TorchBackend

__all__ = [
    "Backend",
    "BackendError",
    "Support",
    "TorchBackend",
    "backend_specs",
    "choose_backend",
    "get_backend",
]
