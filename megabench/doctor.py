"""What is installed, which devices there are, and what each backend can run on each of them."""

from __future__ import annotations

import platform

import torch
from pydantic import BaseModel

from megabench.backends import BackendError, backend_specs, get_backend
from megabench.formats import FP8, NVFP4, PAGE_LAYOUTS, KVRecord, PageLayout
from megabench.geometry import Geometry
from megabench.results import capture_environment
from megabench.results.environment import cpu_name
from megabench.version import __version__

_OPTIONAL = {
    "sgl-flash-mla": "FlashMLA's kernels; pip install 'sgl-flash-mla>=1.0'",
    "sgl-deep-gemm": "DeepGEMM's kernels; pip install 'sgl-deep-gemm>=0.2.5'",
    "vllm": "its bundled FlashMLA and DeepGEMM serve the flashmla backend",
}
_UNPROVEN = {
    "flashmla": "runs on compute capability 10.x alone, where this project has never run it",
}
"""What a backend's own support answer does not say."""


class Ability(BaseModel):
    """What one backend answers for one device."""

    backend: str
    device: str
    ok: bool
    records: list[str]
    """Compressed-cache records it serves there."""
    layouts: list[str]
    """Page layouts it can be built for."""
    reason: str | None
    """Why a record or everything is not served."""
    note: str | None


class Examination(BaseModel):
    """The doctor's findings."""

    megabench: str
    python: str
    platform: str
    packages: dict[str, str]
    missing: dict[str, str]
    """Optional distributions that are not installed, and what they are for."""
    devices: dict[str, str]
    """torch device to its name."""
    abilities: list[Ability]

    def text(self) -> str:
        """The findings for a person."""
        lines = [f"megabench {self.megabench}, Python {self.python}, {self.platform}", ""]
        lines += [f"  {name:16} {version}" for name, version in self.packages.items()]
        lines += [f"  {name:16} not installed ({use})" for name, use in self.missing.items()]
        for device, name in self.devices.items():
            lines += ["", f"{device}: {name}"]
            lines += [_ability_line(a) for a in self.abilities if a.device == device]
        if not torch.cuda.is_available():
            build = torch.version.cuda or "a build without CUDA"
            lines += ["", f"no GPU: torch sees no CUDA device ({build}); no GPU timings here"]
        return "\n".join(lines)


def _ability_line(ability: Ability) -> str:
    line = f"  {ability.backend:16} {'yes' if ability.ok else 'no '}  "
    if ability.ok:
        line += f"{', '.join(ability.records)}; pages {', '.join(ability.layouts)}"
    notes = [note for note in (ability.reason, ability.note) if note]
    return line + (" - " if ability.ok and notes else "") + "; ".join(notes)


def examine() -> Examination:
    """Look at this machine. Builds each backend once per layout, runs none of their kernels."""
    devices = {"cpu": cpu_name()}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        devices[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"
    packages = capture_environment("cpu").packages
    return Examination(
        megabench=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        missing={name: use for name, use in _OPTIONAL.items() if name not in packages},
        devices=devices,
        abilities=[
            _ability(name, torch.device(device)) for device in devices for name in backend_specs()
        ],
    )


def _ability(name: str, device: torch.device) -> Ability:
    records: list[str] = []
    layouts: list[str] = []
    reasons: dict[str, None] = {}
    for layout in PAGE_LAYOUTS:
        served, reason = _served(name, layout, device)
        records += [record for record in served if record not in records]
        layouts += [layout] if served else []
        reasons |= dict.fromkeys(reason)
    return Ability(
        backend=name,
        device=str(device),
        ok=bool(records),
        records=records,
        layouts=layouts,
        reason="; ".join(reasons) or None,
        note=_UNPROVEN.get(name),
    )


def _served(name: str, layout: PageLayout, device: torch.device) -> tuple[list[str], list[str]]:
    """Records a backend serves in a layout, and its reasons for those it does not."""
    geometry = Geometry.load()
    records: tuple[KVRecord, ...] = (FP8, NVFP4)
    try:
        backend = get_backend(name, layout)
        answers = {record.name: backend.supports(geometry, device, record) for record in records}
    except BackendError as error:
        return [], [str(error)]
    except Exception as error:  # a broken vendor library must not end the examination
        return [], [f"{type(error).__name__}: {error}"]
    served = [name for name, answer in answers.items() if answer.ok]
    return served, [a.reason or "no reason given" for a in answers.values() if not a.ok]
