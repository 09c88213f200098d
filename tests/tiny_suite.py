"""A model and a case file of a few tokens, for tests that start processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

import megabench

ROOT = Path(megabench.__file__).parent.parent
_PACKAGED = ROOT / "megabench" / "data" / "deepseek-v4.1-flash.config.json"
NO_COMMIT = {"GIT_DIR": os.devnull}
_SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "q_lora_rank": 32,
    "o_groups": 1,
    "o_lora_rank": 32,
    "max_position_embeddings": 8192,
}


def write_suite(
    folder: Path, batches: Sequence[str], compress_ratio: int = 0, **sizes: int
) -> Path:
    """`tiny.yaml` with one case a batch of a model with 8 heads, by default of a sliding window
    only; `sizes` are fields of the model."""
    config = json.loads(_PACKAGED.read_text(encoding="utf-8"))
    config["text_config"] |= _SMALL | sizes
    (folder / "small.json").write_text(json.dumps(config), encoding="utf-8")
    axes = {"compress_ratio": compress_ratio, "kv_cache": "nvfp4_ds_mla", "batch": list(batches)}
    document = {"model": "small.json", "axes": axes}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """For child processes: this checkout and the tests' backends importable, one thread, and no
    commit, which may change between two of them."""
    here = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    return {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", **NO_COMMIT}


def command(*words: object) -> list[str]:
    """`megabench` in a fresh interpreter."""
    return [sys.executable, "-m", "megabench", *map(str, words)]
