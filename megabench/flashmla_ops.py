"""Our kernels under the vendor's op names, `torch.ops._flashmla_C.<op>`.

An engine whose layer calls the vendor's ops by name, as vLLM's does, then runs ours where the
vendor's cannot: its library refuses every device but SM100 and SM103. Where that library is loaded,
ours take its ops' place for the devices it refuses; where there is none, we define the ops with its
schemas. The order matters: once we defined an op, the vendor's library can no longer define it and
fails to load, so it must come first (docs/integration.md).

The attention ops return the tensors they were given to write. torch.library's opcheck rejects such
schemas and torch.compile must not see them; eager calls and CUDA graphs are what this serves.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from megabench.backends import Backend, BackendError, choose_backend, get_backend
from megabench.backends.flashmla import ownership
from megabench.backends.flashmla.backend import DEVICE_FAMILY
from megabench.backends.flashmla.binding import (
    LibraryAbsentError,
    load_vllm_ops,
    package_folder,
)
from megabench.backends.flashmla.schemas import SCHEMAS, schema_problem
from megabench.formats import NVFP4, PageLayout
from megabench.geometry import Geometry

DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_Library: Any = torch.library.Library


class FlashmlaOpsWarning(UserWarning):
    """Something about the registration that a user should know: order, or that it did nothing."""


@dataclass
class Registration:
    """What `register_flashmla_ops` did; `undo` it, or use it as a context manager.

    Dropping it undoes nothing.

    `backends` maps a device type to the backend that answers there; empty when nothing was done.
    """

    backends: dict[str, str]
    message: str
    """One sentence: what was registered over what, or why not."""
    _libraries: list[Any] = field(default_factory=list, repr=False)

    @property
    def active(self) -> bool:
        return bool(self._libraries)

    def undo(self) -> None:
        """Take our kernels out: the vendor's answer again, or the ops are gone. Repeatable."""
        if self.active:
            while self._libraries:
                self._libraries.pop()._destroy()
            ownership.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.undo()


def register_flashmla_ops(
    backend: str = "auto", page_layout: PageLayout = "interleaved"
) -> Registration:
    """Register a backend's kernels as `torch.ops._flashmla_C`'s four mega-attention ops.

    backend: "auto" takes the fastest of ours for each device type; a name or `module:attribute`
    takes that one where it is supported (BackendError where it is nowhere). page_layout is the
    layout of the caches the caller writes.

    Call it after the vendor's library: when vLLM is installed and its ops are not loaded yet they
    are loaded here first, with a warning. On a device where the vendor's kernels run it does
    nothing and warns. RuntimeError when ours are registered already, or when a loaded op has a
    schema we do not know.
    """
    if ownership.ours():
        raise RuntimeError("megabench's ops are registered already; undo() that first")
    loaded_before = ownership.vendor_defined()
    absent = _load_vendor()
    vendor = ownership.vendor_defined()
    present = {name for name in SCHEMAS if ownership.defined(name)}
    vendor_runs = vendor and _vendor_runs_here()
    if vendor_runs and present == set(SCHEMAS):
        return _nothing("the vendor's own kernels run on this device; ours were not registered")
    for name in sorted(present):
        problem = schema_problem(ownership.NAMESPACE, name, in_place=True)
        if problem:
            raise RuntimeError(f"{problem}; ours cannot take its place")
    chosen = _choose(backend, page_layout)
    libraries = _register(chosen, present, {"cuda": present} if vendor_runs else {})
    names = {device: found.name for device, found in chosen.items()}
    if vendor and not loaded_before:
        _warn(
            "vllm's _flashmla_C was not loaded yet, so it was loaded now: ops must be defined by "
            "it first. Call register_flashmla_ops() after importing vllm's attention ops."
        )
    elif absent and package_folder("vllm") is not None:
        _warn(f"{absent}. Its ops were defined here, so loading it later in this process fails.")
    over = "in place of the vendor's" if vendor else "with the vendor's schemas"
    where = ", ".join(f"{name} on {device}" for device, name in names.items())
    return Registration(names, f"{ownership.NAMESPACE}: {where}, {over}", libraries)


def _load_vendor() -> str | None:
    """Load the vendor's ops if they are to be had; why not otherwise."""
    try:
        load_vllm_ops()
    except LibraryAbsentError as error:
        return str(error)
    return None


def _vendor_runs_here() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == DEVICE_FAMILY


def _choose(name: str, page_layout: PageLayout) -> dict[str, Backend]:
    """The backend for each device type torch has here."""
    geometry = Geometry.load()
    types = [kind for kind in DISPATCH_KEYS if kind == "cpu" or torch.cuda.is_available()]
    chosen: dict[str, Backend] = {}
    reasons = []
    for kind in types:
        device = torch.device(kind)
        if name == "auto":
            chosen[kind] = get_backend(
                choose_backend(geometry, device, NVFP4, page_layout)[0], page_layout
            )
            continue
        found = get_backend(name, page_layout)
        support = found.supports(geometry, device, NVFP4)
        if support.ok:
            chosen[kind] = found
        else:
            reasons.append(f"{kind}: {support.reason}")
    if not chosen:
        raise BackendError(f"backend {name}: runs on no device here ({'; '.join(reasons)})")
    return chosen


def _register(
    chosen: dict[str, Backend], present: set[str], kept: dict[str, set[str]]
) -> list[Any]:
    """Define what is not `present`, then register kernels, all or nothing. `kept` names the ops
    that the vendor answers for on a device type."""
    missing = set(SCHEMAS) - present
    libraries: list[Any] = []
    try:
        definitions = _Library(ownership.NAMESPACE, "FRAGMENT")
        libraries.append(definitions)
        for name in sorted(missing):
            definitions.define(SCHEMAS[name])
        kernels = _Library(ownership.NAMESPACE, "IMPL")
        libraries.append(kernels)
        with warnings.catch_warnings():
            # Taking the place of the vendor's kernel is what is asked for.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            for kind, backend in chosen.items():
                for name in set(SCHEMAS) - kept.get(kind, set()):
                    kernels.impl(name, getattr(backend, name), DISPATCH_KEYS[kind])
    except BaseException:
        for library in reversed(libraries):
            library._destroy()
        raise
    ownership.claim(libraries)
    return libraries


def _nothing(message: str) -> Registration:
    _warn(message)
    return Registration({}, message)


def _warn(message: str) -> None:
    warnings.warn(message, FlashmlaOpsWarning, stacklevel=3)
