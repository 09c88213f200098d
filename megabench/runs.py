"""Runs of many cases: everything is checked first, then a folder is opened and rows are written."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from megabench.backends import BackendError, Support, choose_backend, get_backend
from megabench.cases import Case, Suite, nearest
from megabench.console import Watch
from megabench.formats import PAGE_LAYOUTS
from megabench.geometry import Geometry
from megabench.results import (
    BackendInfo,
    RunEnd,
    RunFolder,
    StageResult,
    capture_environment,
    make_header,
    read_run,
)
from megabench.results.store import RESULTS, now

if TYPE_CHECKING:
    from megabench.validate import Store

INTERRUPTED = 130
_REPORT = "report.html"


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

    def repro(self, case: Case, backend: str) -> str:
        """The command that runs one case on one backend as this run did."""
        words = ["megabench", self.command, "--cases", self.suite.source, "--case", case.id]
        words += ["--backend", backend, "--device", str(self.device)]
        return shlex.join(words if self.seed is None else [*words, "--seed", str(self.seed)])


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
        _say(f"backend {chosen} on {device}")
        for other, reason in refused.items():
            _say(f"not {other}: {reason}")
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
            support = get_backend(name, layout).supports(geometries[model], device, record)
        except BackendError as error:
            support = Support(False, str(error))
        if support.ok:
            return
        reasons[support.reason or "no reason given"] = None
    if reasons:
        raise BackendError(f"backend {name} on {device}: {'; '.join(sorted(reasons))}")


def backend_infos(names: Sequence[str], device: torch.device) -> list[BackendInfo]:
    """What each backend says of the packaged model on a device."""
    geometry, case = Geometry.load(), Case(batch="1q1")
    infos = []
    for name in names:
        try:
            backend = get_backend(name)
            support = backend.supports(geometry, device, case.record)
            version = getattr(backend, "version", None)
            infos.append(
                BackendInfo(name=name, supported=support.ok, reason=support.reason, version=version)
            )
        except BackendError as error:
            infos.append(BackendInfo(name=name, supported=False, reason=str(error)))
    return infos


@contextmanager
def _opened(request: Request) -> Iterator[tuple[RunFolder, Watch]]:
    """The run's folder with its header written, and its progress; always ended, even by Ctrl-C."""
    planned = len(request.cases) * len(request.backends)
    environment = capture_environment(
        request.device, backend_infos(request.backends, request.device)
    )
    header = make_header(
        request.command,
        sys.argv[1:],
        environment,
        suite=request.suite.source,
        seed=request.seed,
        planned=planned,
    )
    started, code = time.perf_counter(), 0
    with RunFolder.create(request.out, request.command) as folder:
        folder.append(header)
        watch = Watch(planned, request.as_json)
        try:
            with watch:
                yield folder, watch
        except KeyboardInterrupt:
            code = INTERRUPTED
            _say("interrupted; the rows so far are kept")
        code = code or int(watch.counts["failed"] + watch.counts["error"] > 0)
        folder.append(
            RunEnd(
                finished=now(),
                seconds=time.perf_counter() - started,
                rows=folder.cases_written,
                exit_code=code,
            )
        )
        for line in watch.summary():
            _say(line)


def validate_cases(request: Request) -> int:
    """Validate cases against the golden model -> exit code."""
    from megabench.validate import run_validate

    with _opened(request) as (folder, watch):
        run_validate(
            request.cases,
            request.backends,
            request.device,
            folder,
            watch,
            source=request.suite.source,
            seed=request.seed or 0,
        )
    _result(request, str(folder.results))
    return _exit_code(folder.path)


def bench_cases(request: Request, check: bool) -> int:
    """Check (unless told not to) and time cases, write the report -> exit code."""
    from megabench.bench.runner import BenchRun
    from megabench.validate import Store

    store = Store(request.device, layer_seed=request.seed or 0)
    with _opened(request) as (folder, watch):
        run = BenchRun(
            folder=folder,
            device=request.device,
            suite=request.suite.name,
            judge=_judge(store) if check else None,
            repro=request.repro,
            progress=watch,
            layer_seed=store.layer_seed,
            weights=(lambda workload: store.model(workload.case.model).checkpoint)
            if check
            else None,
        )
        run.run(request.cases, request.backends)
    _result(request, str(write_html(folder.path)))
    return _exit_code(folder.path)


def _judge(store: Store) -> Callable[[Case, str, torch.device], list[StageResult]]:
    from megabench.validate import Skipped, validate_case

    def judge(case: Case, backend: str, device: torch.device) -> list[StageResult]:
        try:
            return validate_case(case, backend, device, store)
        except Skipped as reason:  # it fits to be timed, but not beside the golden model
            message = f"not validated: {reason}"
            return [
                StageResult(name="validate", ok=True, checked=0, verdict=False, message=message)
            ]

    return judge


def latest_run(out: Path) -> Path:
    """The newest run folder under `out`; RunError when there is none."""
    runs = sorted(path.parent for path in out.glob(f"*/{RESULTS}"))
    if not runs:
        raise RunError(f"{out}: holds no run; make one with megabench bench")
    return max(runs, key=lambda run: (run / RESULTS).stat().st_mtime)


def write_html(folder: Path) -> Path:
    """Write a run's HTML report into its folder -> the file's path."""
    from megabench.report import write_report

    return write_report(read_run(folder), folder / _REPORT)


def _exit_code(folder: Path) -> int:
    end = read_run(folder).end
    return end.exit_code if end else 1


def _say(text: str) -> None:
    click.echo(text, err=True)


def _result(request: Request, path: str) -> None:
    """What the command made: on stdout, unless stdout is for JSON."""
    click.echo(path, err=request.as_json)
