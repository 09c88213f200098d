"""Finding a backend by name: built-ins, entry points, or `package.module:attribute`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

import torch

from megabench.backends.base import Backend, Support
from megabench.formats import NVFP4, KVRecord, PageLayout
from megabench.geometry import Geometry

ENTRY_POINT_GROUP = "megabench.backends"
AUTO = "auto"
BUILT_IN: dict[str, str] = {
    "torch": "megabench.backends.torch_eager:TorchBackend",
    "triton": "megabench.backends.triton.backend:TritonBackend",
    "sm90": "megabench.backends.sm90.backend:Sm90Backend",
    "flashmla": "megabench.backends.flashmla:FlashmlaBackend",
}
"""Name to spec, slowest first; `auto` takes the last supported one."""


class BackendError(ValueError):
    """A backend that cannot be found or built; one line for a person."""


def backend_specs() -> dict[str, str]:
    """Every known name and its `module:attribute`: entry points first, then the built-in ones."""
    known = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return known | BUILT_IN


def get_backend(name_or_spec: str, page_layout: PageLayout = "interleaved") -> Backend:
    """The backend of a known name or of `package.module:attribute` (a class, factory or object).

    A class or factory is called with `page_layout=`. BackendError says what is wrong with the name,
    the import, or the object. `auto` is the fastest for the packaged model on the first GPU, or on
    the CPU; `choose_backend` chooses for any other case, and says why.
    """
    if name_or_spec == AUTO:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name_or_spec, _ = choose_backend(Geometry.load(), device, NVFP4, page_layout)
    spec = backend_specs().get(name_or_spec, name_or_spec)
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        known = [*backend_specs(), AUTO]
        near = difflib.get_close_matches(name_or_spec, known, 1)
        hint = (
            f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}, module:attribute"
        )
        raise BackendError(f"backend {name_or_spec}: no such backend; {hint}")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except SystemExit as stop:
        raise BackendError(f"backend {name_or_spec}: {module_name} calls sys.exit") from stop
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise BackendError(f"backend {name_or_spec}: {error}") from error
    backend = _build(found, page_layout) if callable(found) else found
    missing = [op for op in _op_names() if not callable(getattr(backend, op, None))]
    if missing:
        raise BackendError(
            f"backend {name_or_spec}: lacks {', '.join(missing)}; "
            "subclass megabench.backends.TorchBackend to inherit them"
        )
    if backend.page_layout != page_layout:
        raise BackendError(
            f"backend {name_or_spec}: lays pages out {backend.page_layout}, not {page_layout}"
        )
    return cast(Backend, backend)


def _build(factory: Callable[..., Backend], page_layout: PageLayout) -> Backend:
    try:
        return factory(page_layout=page_layout)
    except Exception as error:
        name = getattr(factory, "__name__", repr(factory))
        raise BackendError(f"backend {name}: cannot be built ({error})") from error


def _op_names() -> list[str]:
    return [name for name, value in vars(Backend).items() if callable(value) and name[0] != "_"]


def choose_backend(
    geometry: Geometry,
    device: torch.device,
    record: KVRecord,
    page_layout: PageLayout = "interleaved",
) -> tuple[str, dict[str, str]]:
    """The fastest built-in backend that serves a case, and why each faster one does not."""
    refused: dict[str, str] = {}
    for name in reversed(BUILT_IN):
        try:
            support = get_backend(name, page_layout).supports(geometry, device, record)
        except BackendError as error:
            support = Support(False, str(error))
        if support.ok:
            return name, refused
        refused[name] = support.reason or "no reason given"
    raise BackendError(f"no backend serves this case on {device}: {refused}")
