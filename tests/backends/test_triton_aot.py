"""The ahead-of-time compile list: its size, its verdicts, and one real compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def aot(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    import aot_compile

    return aot_compile


def test_the_list_names_every_architecture_and_stays_within_its_limit(aot: Any) -> None:
    pairs = [(v.name, c) for v in aot.VARIANTS for c in v.capabilities]
    assert {capability for _, capability in pairs} == {80, 90, 100, 120}
    assert len(pairs) == len(set(pairs))
    assert len(pairs) <= aot.MAX_COMPILATIONS == 24


def test_an_undeclared_spill_and_too_much_shared_memory_are_problems(aot: Any) -> None:
    variant = next(v for v in aot.VARIANTS if v.name == "decode_fp4")
    declared = variant.spills[90]
    limit = aot.ARCHITECTURES[90].shared_limit

    def found(spilled: int, shared: int) -> list[str]:
        return list(aot.problems(variant, 90, aot.Resources(255, spilled, spilled, shared)))

    assert found(declared, limit) == []
    assert "local memory" in found(declared + 1, limit)[0]
    assert "shared memory" in found(declared, limit + 1)[0]


def test_a_variant_compiles_without_a_gpu() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPTS / "aot_compile.py", "--only", "combine", "--arch", "80"]
    env["PYTHONPATH"] = str(SCRIPTS.parent)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sm_80" in done.stdout
