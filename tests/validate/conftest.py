"""A model small enough to validate in a moment; heads, rows, windows and records as in the real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megabench.cases import Case
from megabench.validate import Store

CPU = torch.device("cpu")

CONFIG = {
    "hidden_size": 256,
    "num_attention_heads": 16,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "index_topk": 512,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "num_hidden_layers": 2,
    "compress_ratios": [0, 1],
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "small.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture
def make_case(model: str) -> Callable[..., Case]:
    """A case of the small model; a mixed decode and prefill step unless told otherwise."""

    def make(**axes: object) -> Case:
        return Case.model_validate({"model": model, "batch": "2q1s300_1q9s140", **axes})

    return make


@pytest.fixture(scope="session")
def store() -> Store:
    """Weights and layers shared by the tests of a process; they leave them as they are."""
    return Store(CPU)
