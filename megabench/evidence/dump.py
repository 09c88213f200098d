"""The tensors of failing cases as safetensors files, for looking at them elsewhere.

    DIR/<case id>/<backend>/case.json           the case's row; the strides of what was strided
    DIR/<case id>/<backend>/rank<k>.safetensors

Keys of a rank's file: `inputs/<name>` is what the step read; `calls/<n>.<op>/<argument>` what an
op was given, `…/after/<argument>` what it made of one in place, `…/results/<i>` what it returned;
`output/codes`, `output/scales`, `output/partial` what the step made. Weights are left out:
`megabench.workload.build_weights(geometry, seed, device)` makes them again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megabench.cases import Case
from megabench.results import CaseResult
from megabench.validate.judgement import Judgement
from megabench.validate.stages import Evidence
from megabench.validate.trace import EINSUM, LINEAR, Call
from megabench.workload import Workload, build_workload

_WEIGHTS = {LINEAR: ("w", "sw"), EINSUM: ("w",)}
_UNSAFE = re.compile(r"[^\w.+-]+")


class Dumper:
    """Watches ranks as they are judged and keeps those of failing cases under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root
        self._last: Evidence | None = None
        self._strides: dict[str, list[int]] = {}

    def start(self, case: Case, backend: str) -> None:
        """A case is about to be judged; what an earlier run left of it is removed."""
        self._folder = self.root / _UNSAFE.sub("_", case.id) / _UNSAFE.sub("_", backend)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._last, self._strides = None, {}

    def rank(self, evidence: Evidence, judged: list[Judgement]) -> None:
        """Keep a rank's tensors when something is wrong with it."""
        self._last = evidence
        if not all(judgement.ok for judgement in judged):
            self._save(dict(rank_tensors(evidence)), f"rank{evidence.run.rank}")

    def finish(self, row: CaseResult) -> Path | None:
        """Write what the case's row calls for -> its folder, or None when the case is right.

        What only all ranks together show leaves the last rank; what raised, the step's inputs.
        """
        last, self._last = self._last, None
        if row.status not in ("failed", "error"):
            return None
        if not self._folder.exists():
            if row.status == "failed" and last is not None:
                self._save(dict(rank_tensors(last)), f"rank{last.run.rank}")
            else:
                work = build_workload(Case.model_validate(row.case), torch.device("cpu"))
                self._save(dict(_inputs(work)), "inputs")
        about = {"row": row.model_dump(mode="json"), "strides": self._strides}
        (self._folder / "case.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        return self._folder

    def _save(self, tensors: dict[str, Tensor], name: str) -> None:
        """Write copies without gaps, and remember the strides of what had some."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for key, tensor in tensors.items():
            if not tensor.is_contiguous():
                self._strides[key] = list(tensor.stride())
        copies = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
        save_file(copies, self._folder / f"{name}.safetensors")


def rank_tensors(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Everything a rank's step read, was told op by op, and wrote."""
    run = evidence.run
    yield from _inputs(run.workload)
    reused = run.layer.workspace.buffer
    for number, call in enumerate(run.calls):
        yield from _of_call(f"calls/{number:02}.{call.op}", call, reused)
    for output in run.outputs:
        yield "output/codes", output.pair.data
        yield "output/scales", output.pair.scale
    yield "output/partial", run.output


def _inputs(workload: Workload) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(workload).items():
        if isinstance(value, Tensor):
            yield f"inputs/{name}", value


def _of_call(prefix: str, call: Call, reused: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`reused` memory holds a later step's data by now: copies stand for what lay in it."""
    left_out = {*_WEIGHTS.get(call.op, ()), *call.before, *call.after}
    memory = reused.untyped_storage().data_ptr()
    for name, value in call.args.items():
        for key, tensor in _flat(f"{prefix}/{name}", value):
            if name not in left_out and tensor.untyped_storage().data_ptr() != memory:
                yield key, tensor
    for name, value in call.before.items():
        yield f"{prefix}/{name}", value
    for name, value in call.after.items():
        yield f"{prefix}/after/{name}", value
    for index, result in enumerate(call.results):
        yield f"{prefix}/results/{index}", result


def _flat(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _flat(f"{name}/{index}", part)
