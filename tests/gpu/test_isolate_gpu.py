"""A CUDA context that is beyond repair costs one case; so does a hang on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_suite import write_suite

from megabench.cases import load_suite
from megabench.isolate import Job, Pool, ValidateSetup
from megabench.results import CaseResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EVIL = "evil_gpu_backends:EvilOnGpu"
CAUSES = {1: None, 2: "device", 3: "out_of_memory", 4: "device", 5: "timeout", 6: None, 7: None}
"""How a step of so many tokens ends."""


def run(folder: Path, devices: list[str], tokens: list[int], limit_s: float) -> list[CaseResult]:
    cases = load_suite(write_suite(folder, [f"{n}q1s9" for n in tokens])).cases
    setups = [ValidateSetup(device=device, source="tiny.yaml") for device in devices]
    with Pool(setups, limit_s) as pool:
        rows = list(pool.run([Job(case=case, backends=(EVIL,)) for case in cases]))
    return [row for row in rows if isinstance(row, CaseResult)]


def test_what_breaks_the_device_or_hangs_on_it_ends_its_own_case_only(tmp_path: Path) -> None:
    rows = {row.tokens: row for row in run(tmp_path, ["cuda:0"], list(CAUSES), 20)}
    for tokens, cause in CAUSES.items():
        row = rows[tokens]
        assert row.cause == cause, row.reason
        assert row.status == ("error" if cause or tokens == 7 else "passed"), row.reason
    assert "illegal memory access" in rows[2].reason
    assert "out of memory" in rows[3].reason
    assert "device-side assert" in rows[4].reason
    assert "no result after 20 s, in " in rows[5].reason
    assert "linear left a CUDA error behind: invalid device ordinal" in rows[7].reason


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_workers_serve_a_gpu_each(tmp_path: Path) -> None:
    rows = run(tmp_path, ["cuda:0", "cuda:1"], [1, 6, 8, 9, 10, 11], 120)
    assert [row.status for row in rows] == ["passed"] * 6
    assert {row.repro.split("--device ")[1].split()[0] for row in rows} == {"cuda:0", "cuda:1"}
