"""A run as asked for: device, cases, models and backends are checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from megabench.backends import Backend, BackendError, Support, choose_backend, get_backend
from megabench.cases import Case, Suite, nearest
from megabench.formats import PAGE_LAYOUTS, KVRecord
from megabench.geometry import Geometry
from megabench.reasons import reason_of
from megabench.results import (
    BackendInfo,
)
from megabench.results.store import RESULTS
from megabench.weights import check_checkpoint, read_checkpoint


class RunError(ValueError):
    """A request that cannot be run; one line for a person."""


def find_device(name: str | None) -> torch.device:
    """The device of a name; the first GPU, or the CPU, when none is given. RunError if not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        hint = nearest(name.split(":")[0], ("cpu", "cuda"))
        raise RunError(f"--device {name}: no such device{hint}") from error
    if device.type not in ("cpu", "cuda"):
        raise RunError(f"--device {name}: megabench runs on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def check_workers(workers: int, device: torch.device) -> None:
    """RunError unless there are devices for that many workers; a device that was named by its
    number, like the CPU, serves them all."""
    if workers > 1 and device.type == "cuda" and device.index is None:
        count = torch.cuda.device_count()
        if workers > count:
            shared = "say --device cuda:0 for workers that share one"
            raise RunError(f"--jobs {workers}: torch sees {count} CUDA devices; {shared}")


def check_cross_check(device: torch.device) -> None:
    """RunError unless CUPTI's records can be asked for."""
    from megabench.bench.cupti import installed

    if device.type != "cuda":
        raise RunError(f"--cross-check cupti: {device} has no CUDA graphs to check")
    if not installed():
        raise RunError("--cross-check cupti: needs cupti-python; pip install 'megabench[cupti]'")


def suite_for(device: torch.device) -> str:
    """The packaged case file for a device: by name for an H200, by family for Blackwell."""
    if device.type == "cpu":
        return "smoke"
    if "H200" in torch.cuda.get_device_name(device):
        return "h200"
    return "b200" if torch.cuda.get_device_capability(device)[0] == 10 else "default"


@dataclass(frozen=True)
class Request:
    """A run as asked for, checked: nothing was written yet."""

    command: str
    suite: Suite
    cases: list[Case]
    backends: list[str]
    device: torch.device
    out: str
    seed: int | None
    as_json: bool
    resume: Path | None = None
    """A run to continue, in place of a new one."""
    limit_s: float | None = None
    """Seconds a case may take in a worker process; None runs all in this one."""
    workers: int = 1
    """A GPU each, or all on the one that was named, or on the CPU."""
    weights: Path | None = None
    """A safetensors checkpoint in place of random weights."""
    dump: Path | None = None
    """Where the tensors of failing cases go."""
    cross_check: bool = False
    """Beside event pairs, the span of CUPTI's records."""

    @property
    def devices(self) -> list[str]:
        """A device for each worker."""
        if self.workers == 1 or self.device.type == "cpu" or self.device.index is not None:
            return [str(self.device)] * self.workers
        return [f"cuda:{index}" for index in range(self.workers)]


def check_weights(file: Path, cases: Sequence[Case]) -> None:
    """WeightsError unless `file` holds the layer of every case's model."""
    tensors = read_checkpoint(file)
    for model in dict.fromkeys(case.model for case in cases):
        check_checkpoint(tensors, Geometry.load(model))


def resolve_backends(names: Sequence[str], cases: list[Case], device: torch.device) -> list[str]:
    """Backends by name, each found once; `auto` becomes the fastest one that serves the first case.

    Reads every case's model too, so that GeometryError or BackendError comes before any writing.
    """
    geometries = {case.model: Geometry.load(case.model) for case in cases}
    first = cases[0]
    found = [_backend_name(name, geometries[first.model], first, device) for name in names]
    unique = list(dict.fromkeys(found))
    for name in unique:
        _require_support(name, cases, geometries, device)
    return unique


def _backend_name(name: str, geometry: Geometry, case: Case, device: torch.device) -> str:
    if name == "auto":
        chosen, refused = choose_backend(geometry, device, case.record, case.page_layout)
        say(f"backend {chosen} on {device}")
        for other, reason in refused.items():
            say(f"not {other}: {reason}")
        return chosen
    problems = []
    for layout in PAGE_LAYOUTS:
        try:
            get_backend(name, layout)
            return name
        except BackendError as error:
            problems.append(error)
    raise problems[0]


def _require_support(
    name: str, cases: Sequence[Case], geometries: dict[str, Geometry], device: torch.device
) -> None:
    """BackendError when a backend serves none of the cases here: its library or the device is
    wrong, and a run of skipped rows would pass for a good one."""
    reasons: dict[str, None] = {}
    for model, layout, record in {(c.model, c.page_layout, c.record) for c in cases}:
        try:
            support = _support(get_backend(name, layout), geometries[model], device, record)
        except BackendError as error:
            support = Support(False, str(error))
        if support.ok:
            return
        reasons[support.reason or "no reason given"] = None
    if reasons:
        raise BackendError(f"backend {name} on {device}: {'; '.join(sorted(reasons))}")


def _support(
    backend: Backend, geometry: Geometry, device: torch.device, record: KVRecord
) -> Support:
    """What a backend says it serves; BackendError when it raises or says something else."""
    try:
        support: object = backend.supports(geometry, device, record)
    except Exception as error:
        raise BackendError(f"supports raised {reason_of(error)}") from error
    if not isinstance(support, Support):
        raise BackendError(f"supports returned {support!r}, not a Support")
    return support


def backend_infos(names: Sequence[str], device: torch.device) -> list[BackendInfo]:
    """What each backend says of the packaged model on a device."""
    geometry, case = Geometry.load(), Case(batch="1q1")
    infos = []
    for name in names:
        try:
            backend = get_backend(name)
            support = _support(backend, geometry, device, case.record)
            version = getattr(backend, "version", None)
            infos.append(
                BackendInfo(name=name, supported=support.ok, reason=support.reason, version=version)
            )
        except BackendError as error:
            infos.append(BackendInfo(name=name, supported=False, reason=str(error)))
    return infos


def latest_run(out: Path) -> Path:
    """The newest run under `out`, of one process or of several; RunError when there is none."""
    files = sorted([*out.glob(f"*/{RESULTS}"), *out.glob(f"*/*/{RESULTS}")])
    if not files:
        raise RunError(f"{out}: holds no run; make one with megabench bench")
    newest = max(files, key=lambda file: file.stat().st_mtime)
    return out / newest.relative_to(out).parts[0]


def write_html(folder: Path) -> Path:
    """Write a run's HTML report into its folder -> the file's path."""
    from megabench.report import build

    return build(folder)


def say(text: str) -> None:
    """A line for a person, kept off stdout."""
    click.echo(text, err=True)
