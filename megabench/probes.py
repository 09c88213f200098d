"""What `megabench doctor --probe NAME` runs: short experiments on this machine's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megabench.backends import BackendError, backend_specs, get_backend
from megabench.formats import NVFP4, PAGE_LAYOUTS, PageLayout
from megabench.geometry import Geometry
from megabench.layout_probe import LayoutError, check_layouts, layout_verdicts

Check = tuple[str, bool, str]
"""(what was checked, whether it holds, what was found)"""


def probe_layouts() -> list[Check]:
    """Which page layout every reader and writer of every backend really uses, where it runs."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda")] if torch.cuda.is_available() else []
    checks: list[Check] = []
    for name in backend_specs():
        for device in devices:
            for layout in PAGE_LAYOUTS:
                checks += _probe_layout(name, device, layout)
    return checks


def _probe_layout(name: str, device: torch.device, layout: PageLayout) -> list[Check]:
    """One line for a backend that does as it says; else one for each reader and writer that does
    not, and one for the first pair of them that would not understand each other."""
    try:
        backend = get_backend(name, layout)
    except BackendError:
        return []  # plain doctor says why
    if not backend.supports(Geometry.load(), device, NVFP4).ok:
        return []
    title = f"{name} on {device}"
    try:
        verdicts = layout_verdicts(backend, device)
        bad: list[Check] = [(title, False, str(v)) for v in verdicts if not v.ok]
        if not bad:
            return [(title, True, f"{len(verdicts)} readers and writers use {layout} pages")]
        check_layouts(backend, backend, device)
    except LayoutError as error:
        return [*bad, (title, False, str(error))]
    except Exception as error:  # a kernel may fail in any way
        return [(title, False, f"{type(error).__name__}: {error}")]
    return bad


def _probe_flashmla() -> list[Check]:
    from megabench.backends.flashmla.probe import probe_flashmla

    return probe_flashmla()


PROBES: dict[str, Callable[[], list[Check]]] = {
    "layout": probe_layouts,
    "flashmla": _probe_flashmla,
}
"""Probe name to what runs it."""


def run_probes(names: Sequence[str]) -> dict[str, list[Check]]:
    """Run the named probes -> their checks by name."""
    return {name: PROBES[name]() for name in dict.fromkeys(names)}


def probes_text(found: dict[str, list[Check]]) -> str:
    """The checks for a person, one a line."""
    lines = []
    for name, checks in found.items():
        lines += ["", f"probe {name}:"]
        lines += [f"  {'ok ' if ok else 'BAD'}  {what}: {said}" for what, ok, said in checks]
    return "".join(f"{line}\n" for line in lines)
