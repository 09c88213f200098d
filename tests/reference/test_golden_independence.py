"""The golden model stands alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import reference

FOLDER = Path(reference.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_a_module_imports_torch_the_standard_library_and_its_siblings_only(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "reference"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] in allowed
