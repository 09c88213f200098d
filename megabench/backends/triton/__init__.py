"""Triton kernels for every op; `backend.TritonBackend` is the way in."""
