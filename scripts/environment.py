#!/usr/bin/env python3
"""Print the Python that make targets use, after making sure that it has what the target needs.

A host whose Python already has a CUDA torch keeps that Python; anything else gets a `.venv`.
Where every requirement is already installed, no package index is touched, so offline machines work.

    python3 scripts/environment.py [EXTRA ...]     e.g. `dev` for the test tools
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PROBE = """
import sys
from importlib.metadata import PackageNotFoundError, version
def number(text):
    return [int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit()]
missing = []
for requirement in sys.argv[1:]:
    name, _, least = requirement.partition(">=")
    try:
        if least and number(version(name)) < number(least):
            missing.append(requirement)
    except PackageNotFoundError:
        missing.append(requirement)
print("\\n".join(missing))
"""


def requirements(extras: list[str]) -> list[str]:
    """`name>=version` strings from pyproject.toml, environment markers resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    linux = sys.platform.startswith("linux")
    return [re.split(r"\s*;", w)[0] for w in wanted if linux or "Linux" not in w]


def missing(python: str, wanted: list[str]) -> list[str]:
    """What `python` lacks of `wanted`."""
    probe = subprocess.run(
        [python, "-c", PROBE, *wanted], capture_output=True, text=True, check=True
    )
    return probe.stdout.split()


def has_cuda_torch(python: str) -> bool:
    """Whether `python` imports a torch that was built for CUDA."""
    check = "import torch, sys; sys.exit(torch.version.cuda is None)"
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def run(*command: str) -> None:
    """Run a set-up step; its output goes to stderr, since stdout carries the answer."""
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"set-up failed: {' '.join(command)}")


def main(extras: list[str]) -> str:
    wanted = requirements(extras)
    if not VENV.exists() and has_cuda_torch(sys.executable):
        # The tests of a GPU host run with whatever linters are there; only importable tools count.
        lacking = missing(sys.executable, wanted)
        if lacking:
            run(sys.executable, "-m", "pip", "install", "-q", *lacking)
        return sys.executable
    python = str(VENV / "bin" / "python")
    if not Path(python).exists():
        run(sys.executable, "-m", "venv", str(VENV))
    if missing(python, [*wanted, "megabench"]):
        pins = [] if shutil.which("nvidia-smi") else ["-c", str(ROOT / "constraints.txt")]
        extra = f"[{','.join(extras)}]" if extras else ""
        run(python, "-m", "pip", "install", "-q", *pins, "-e", f"{ROOT}{extra}")
    return python


if __name__ == "__main__":
    os.chdir(ROOT)
    print(main(sys.argv[1:]))
