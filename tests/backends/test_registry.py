"""Finding backends by name, entry point or attribute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import megabench
from megabench.backends import BackendError, TorchBackend, choose_backend, get_backend
from megabench.formats import FP8
from megabench.geometry import Geometry


class Mine(TorchBackend):
    name = "mine"


READY = Mine("page_split")


def test_a_built_in_name_gives_a_backend_of_the_asked_layout() -> None:
    backend = megabench.get_backend("torch", page_layout="page_split")
    assert (backend.name, backend.page_layout) == ("torch", "page_split")


def test_a_users_class_or_object_is_found_by_module_and_attribute() -> None:
    assert isinstance(get_backend(f"{__name__}:Mine"), Mine)
    assert get_backend(f"{__name__}:READY", "page_split") is READY


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("torhc", "did you mean torch?"),
        ("math", "auto, module:attribute"),
        ("nothing.at.all:Backend", "No module named"),
        (f"{__name__}:Missing", "no attribute 'Missing'"),
        (f"{__name__}:READY", "page_split, not interleaved"),
        ("builtins:len", "cannot be built"),
        ("math:pi", "lacks"),
    ],
)
def test_what_cannot_be_a_backend_is_one_line_that_says_why(spec: str, said: str) -> None:
    with pytest.raises(BackendError) as raised:
        get_backend(spec)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_that_fails_to_import_is_a_backend_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_backend.py").write_text("raise OSError('libfoo.so is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendError, match=r"libfoo\.so is missing"):
        get_backend("half_a_backend:B")
    sys.modules.pop("half_a_backend", None)


def test_auto_by_name_is_the_fastest_here() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen, _ = choose_backend(Geometry.load(), device, FP8, "page_split")
    backend = get_backend("auto", "page_split")
    assert (backend.name, backend.page_layout) == (chosen, "page_split")


def test_auto_takes_a_supported_backend_and_says_why_not_the_others() -> None:
    name, refused = choose_backend(Geometry.load(), torch.device("cpu"), FP8)
    assert name not in refused
    assert all(reason for reason in refused.values())
