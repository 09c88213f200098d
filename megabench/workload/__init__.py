"""Cases made tensors: what a step reads, the weights, and a layer ready to run it."""

from megabench.workload.build import POISON, Workload, build_workload
from megabench.workload.memory import (
    available_bytes,
    needed_bytes,
    obstacle,
    pool_bytes,
    workspace_bytes,
)
from megabench.workload.paging import striped
from megabench.workload.subset import subset, tokens_of
from megabench.workload.weights import bind, build_weights, checkpoint, clone_pages, make_layer

__all__ = [
    "POISON",
    "Workload",
    "available_bytes",
    "bind",
    "build_weights",
    "build_workload",
    "checkpoint",
    "clone_pages",
    "make_layer",
    "needed_bytes",
    "obstacle",
    "pool_bytes",
    "striped",
    "subset",
    "tokens_of",
    "workspace_bytes",
]
