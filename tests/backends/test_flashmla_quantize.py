"""The one-launch quantizer of the `flashmla` backend's linears, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_codes_and_packed_scales_are_those_of_the_eager_quantizer() -> None:
    """In a process of its own: kernels are declared for the interpreter or for a GPU, not both."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "standins" / "quantize_interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 shapes equal\n"
