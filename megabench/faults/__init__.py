"""Faults: deliberate mistakes of kernels and of the layer around them that validation must catch.

`base` says what a fault is; each stage's faults are in a module of their own; `runner` wears them
one after the other on a backend and validates. docs/validation.md tells how to read the result.
"""

from megabench.faults import (  # isort: skip
    query,
    insertion,
    selection,
    dequantization,
    softmax,
    output,
    rounding,
    scales,
    products,
    steps,
    loading,
    runtime,
)
from megabench.faults.base import CATALOGUE, GROUPS, Fault
from megabench.faults.runner import Finding, Trials

__all__ = [
    "CATALOGUE",
    "GROUPS",
    "Fault",
    "Finding",
    "Trials",
    "dequantization",
    "insertion",
    "loading",
    "output",
    "products",
    "query",
    "rounding",
    "runtime",
    "scales",
    "selection",
    "softmax",
    "steps",
]
