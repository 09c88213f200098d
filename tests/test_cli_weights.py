"""`--weights`: a checkpoint file in place of random weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megabench.cli import main
from megabench.geometry import Geometry
from megabench.results import read_run
from megabench.workload import build_weights

PACKAGED = Path(__file__).parent.parent / "megabench/data/deepseek-v4.1-flash.config.json"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A case file over a model whose ranks are small, so that its checkpoint is too."""
    config = json.loads(PACKAGED.read_text())
    config["text_config"] |= {"hidden_size": 64, "q_lora_rank": 64, "o_lora_rank": 128}
    (tmp_path / "small.json").write_text(json.dumps(config))
    text = f"model: {tmp_path / 'small.json'}\naxes:\n  tp: [8]\n  batch: [1q1s300]\n"
    (tmp_path / "small.yaml").write_text(text)
    return tmp_path / "small.yaml"


def checkpoint(suite: Path, seed: int) -> Path:
    geometry = Geometry.load(suite.with_suffix(".json"))
    tensors = build_weights(geometry, seed, torch.device("cpu"))
    path = suite.with_name(f"layer{seed}.safetensors")
    save_file({**tensors, "attn_sink": torch.zeros(geometry.num_heads)}, path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megabench", "validate", "--no-isolate", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def chain(out: Path) -> float:
    """The end-to-end figure of the only case of the latest run: it moves with the weights."""
    (case,) = read_run(max(out.iterdir())).cases
    assert case.status == "passed"
    (stage,) = (stage for stage in case.stages if "relative_l2" in stage.detail)
    return float(stage.detail["relative_l2"])


def test_a_checkpoint_replaces_the_random_weights(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, told = {}, {}
    for name, weights in (("random", []), ("same", [0]), ("other", [5])):
        options = [o for seed in weights for o in ("--weights", str(checkpoint(suite, seed)))]
        out = tmp_path / name
        arguments = ("--cases", str(suite), "--backend", "torch", "--out", str(out), *options)
        assert run(monkeypatch, *arguments) == 0
        figures[name] = chain(out)
        header = read_run(max(out.iterdir())).header
        assert header is not None
        told[name] = header.environment.weights
    assert figures["same"] == figures["random"]
    assert figures["other"] != figures["random"]
    assert told["random"] is None
    assert told["same"] != told["other"]
    assert all(len(told[name] or "") == 16 for name in ("same", "other"))


def test_a_checkpoint_of_another_model_is_one_line_and_writes_nothing(
    suite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights, out = checkpoint(suite, 0), tmp_path / "runs"
    arguments = ("--cases", "smoke", "--weights", str(weights), "--out", str(out))
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert "wq_b.weight: expected [32768, 1280]" in error
    assert error.count("error:") == 1
    assert not out.exists()


def test_a_file_that_is_no_checkpoint_is_named(
    suite: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--cases", str(suite), "--weights", str(suite)) == 2
    assert "small.yaml: cannot be read as safetensors" in capsys.readouterr().err
