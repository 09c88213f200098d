"""Without a GPU the triton backend's kernels run under Triton's interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Read when a kernel is declared, so before the backend is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
