"""`benchmarks` is no installed package: tests import it from the checkout, kernels interpreted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if not torch.cuda.is_available():
    # Read when a kernel is declared, so before one is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
