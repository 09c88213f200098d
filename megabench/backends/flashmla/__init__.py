"""The vendor's kernels: finding the libraries, checking their schemas, and the backend on them."""

from megabench.backends.flashmla.backend import FlashmlaBackend, library_versions

__all__ = ["FlashmlaBackend", "library_versions"]
