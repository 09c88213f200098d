"""One launch of one op for a profiler to look at, and the command that makes it look."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megabench.backends import BackendError, get_backend
from megabench.bench.arms import LayerPool, step_arms
from megabench.cases import Case, CaseError, nearest
from megabench.devices import make_current
from megabench.reasons import reason_of
from megabench.workload import build_weights, build_workload, obstacle

RANGE = "megabench"
"""The NVTX range around the launch."""
_PREFERRED = ("decode_attention", "prefill_attention", "prefill")
TOOLS = {
    "ncu": f"ncu --nvtx --nvtx-include {RANGE}/ --clock-control none --set full "
    "--import-source yes -f -o",
    "nsys": "nsys profile --trace cuda,nvtx --capture-range cudaProfilerApi -f true -o",
}
"""A profiler's own arguments; the name of its file comes next."""


@contextmanager
def blamed(case: Case, backend_name: str) -> Iterator[None]:
    """What a backend raises inside, as a BackendError of one line."""
    try:
        yield
    except CaseError:
        raise
    except Exception as error:
        raise BackendError(f"{case.id} on {backend_name} raised {reason_of(error)}") from error


def prepare(
    case: Case, backend_name: str, device: torch.device, op: str | None, layer_seed: int
) -> tuple[str, Callable[[], object]]:
    """An op of a case, made ready and run once, so that what it compiles is compiled.

    -> (the op's name, what runs it). The attention is taken when none is named. CaseError when the
    case cannot run here or has no such op.
    """
    make_current(device)
    backend = get_backend(backend_name, case.page_layout)
    reason = obstacle(case, backend, device)
    if reason:
        raise CaseError(f"{case.id} on {backend_name}: {reason}")
    workload = build_workload(case, device)
    pool = LayerPool(lambda work: build_weights(work.geometry, layer_seed, device))
    arms = step_arms(pool, workload, backend_name, backend)
    name = op or next((name for name in _PREFERRED if name in arms), None)
    if name not in arms:
        raise CaseError(f"{case.id}: no op {op!r} in this step{nearest(op, arms)}")
    run = arms[name].first.run
    run()
    return name, run


def launch(run: Callable[[], object], device: torch.device) -> None:
    """Run it once inside the range, and inside a profiler's capture, where there is a GPU."""
    if device.type != "cuda":
        run()
        return
    torch.cuda.synchronize(device)
    marks = torch.cuda.profiler.profile(), torch.cuda.nvtx.range(RANGE)
    with marks[0], marks[1]:
        run()
        torch.cuda.synchronize(device)


def command(tool: str, case: Case, op: str, arguments: Sequence[str]) -> list[str]:
    """The command that profiles `op` of `case`; `arguments` are those of `megabench profile`."""
    ours = [sys.executable, "-m", "megabench", "profile", case.id, "--op", op, *arguments]
    return [*TOOLS[tool].split(), f"{case.id}-{op}", *ours]
