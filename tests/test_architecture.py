"""Which package may import which: data flows one way, and the golden model stays independent."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "megabench").rglob("*.py"))
JUDGES = {"validate", "conformance"}
"""The only parts of megabench that may see the golden model."""
BELOW = ("formats", "quant", "layout", "geometry", "metadata", "backends", "weights", "layer")
ABOVE = {"validate", "bench", "report", "gate", "faults", "isolate", "conformance", "cli", "runs"}


def part(path: Path) -> str:
    """The top-level part of megabench a module belongs to."""
    return path.relative_to(ROOT / "megabench").parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_what_judges_imports_the_golden_model(path: Path) -> None:
    if part(path) not in JUDGES:
        assert not {name for name in imported(path) if name.split(".")[0] == "reference"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_production_side_imports_nothing_that_measures_or_judges_it(path: Path) -> None:
    if part(path) in BELOW:
        parts = {name.split(".")[1] for name in imported(path) if name.startswith("megabench.")}
        assert not parts & ABOVE
