"""Validating cases: every rank's step judged stage by stage, one result row a case."""

from __future__ import annotations

import gc
import shlex
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megabench.backends import BackendError
from megabench.cases import Case
from megabench.geometry import Geometry, topology_problem
from megabench.reasons import reason_of
from megabench.results.schema import CaseResult, StageResult, Status
from megabench.validate.batches import batch_invariance
from megabench.validate.chain import chain_error
from megabench.validate.golden import full_precision
from megabench.validate.guards import Inputs, canaries, repeatable
from megabench.validate.judgement import Judgement, attempted, merge
from megabench.validate.memory import memory_problem
from megabench.validate.poison import POISONS, name_rows_of_padding, poison_tails
from megabench.validate.replay import replay
from megabench.validate.stages import Evidence, judge_rank, load, projection, sign_test, tp_sum
from megabench.validate.step import RankRun, run_step
from megabench.validate.store import Store
from megabench.validate.trace import EINSUM
from megabench.validate.truth import Truth, truth_of
from megabench.workload import Workload, bind, build_workload


class Skipped(Exception):  # noqa: N818 - it is no error
    """A case that cannot run here; the message is the reason."""


def skip_reason(case: Case, backend_name: str, store: Store) -> str | None:
    """Why a case cannot be validated on this backend, model, device or memory; None when it can.

    MemoryError when only what others hold of the memory is in the way."""
    geometry = Geometry.load(case.model)
    problem = topology_problem(geometry, case.tp)
    if problem:
        return problem
    try:
        backend = store.backend(backend_name, case.page_layout)
    except BackendError as error:
        return str(error)
    support = backend.wrapped.supports(geometry, store.device, case.record)
    if not support.ok:
        return support.reason or f"backend {backend_name} does not support it"
    return memory_problem(case, geometry, store.device)


def validate_case(
    case: Case, backend_name: str, device: torch.device, store: Store | None = None
) -> list[StageResult]:
    """Every stage of one case, over all TP ranks and their sum.

    Skipped when it cannot run here; whatever a backend raises passes through.
    """
    store = store or Store(device)
    reason = skip_reason(case, backend_name, store)
    if reason:
        raise Skipped(reason)
    workloads = [build_workload(case, device, poison.fills) for poison in POISONS]
    for workload, poison in zip(workloads, POISONS, strict=True):
        poison_tails(workload.swa_metadata, poison)
        name_rows_of_padding(workload)
    truth = truth_of(workloads[0])
    golden = store.model(case.model).golden
    found: list[Judgement] = []
    latents: list[Tensor] = []
    outputs: list[Tensor] = []
    for rank in range(case.tp):
        evidence, judged = _judge_rank(workloads, truth, backend_name, rank, store)
        found += [judgement.at(rank=rank) for judgement in judged]
        outputs.append(evidence.run.output)
        if evidence.run.of(EINSUM):
            latents.append(projection.latent(evidence))
    stages = [sign_test(j) if j.stage == "rounding_direction" else j for j in merge(found)]
    if case.tp > 1 and len(latents) == case.tp:
        with full_precision():
            stages.append(tp_sum(latents, outputs, golden.prepared.wo_b))
    results = [stage.result() for stage in stages]
    return [*results, chain_error(truth, golden, outputs)]


def _judge_rank(
    workloads: Sequence[Workload], truth: Truth, backend_name: str, rank: int, store: Store
) -> tuple[Evidence, list[Judgement]]:
    """One rank's step: every stage. On one rank of the case, again over other poison, with changed
    inputs, and in other batches."""
    first, second = workloads
    case = first.case
    layer = store.layer(first, backend_name, rank)
    backend = store.backend(backend_name, case.page_layout)
    golden = store.model(case.model).golden
    inputs = Inputs(first, layer)
    run = run_step(layer, backend, first, rank, POISONS[0])
    unchanged = inputs.unchanged(run)
    quantized = golden.quantized.shard(case.tp, rank)
    rotation = load.rotation(run, truth)

    def evidence_of(some: RankRun) -> Evidence:
        return Evidence(
            some,
            truth,
            quantized,
            golden.shard(case.tp, rank, first.attn_sink),
            load.table_for(some, truth, rotation.ok),
            store.dtype,
            sums_rounded_p=bool(getattr(backend.wrapped, "sums_rounded_p", False)),
        )

    evidence = evidence_of(run)
    found = [rotation, store.judge_weights(run, quantized)]
    with full_precision():
        found += judge_rank(evidence)
    found += [canaries(run, truth), unchanged]
    draw = int(case.hash, 16)
    if rank == draw % case.tp:
        bind(layer, second)
        inputs = Inputs(second, layer)
        again = run_step(layer, backend, second, rank, POISONS[1])
        found += [canaries(again, truth), inputs.unchanged(again)]
        found.append(repeatable(evidence, evidence_of(again)))
        found.append(attempted("replay", lambda: replay(layer, second)))
        batches = partial(batch_invariance, evidence, backend, draw)
        found.append(attempted("batch_invariance", batches))
    if store.on_rank is not None:
        store.on_rank(evidence, found)
    return evidence, found


def examine(
    case: Case, backend_name: str, device: torch.device, store: Store, source: str = ""
) -> CaseResult:
    """One case's row: passed, failed, skipped with its reason, or the error that ended it."""
    start = time.perf_counter()
    stages: list[StageResult] = []
    status: Status
    try:
        stages = validate_case(case, backend_name, device, store)
        wrong = [stage for stage in stages if stage.verdict and not stage.ok]
        status = "failed" if wrong else "passed"
        reason = f"{wrong[0].name}: {wrong[0].message}" if wrong else ""
    except Skipped as skipped:
        status, reason = "skipped", str(skipped)
    except Exception as error:
        status, reason = "error", reason_of(error)
        gc.collect()
    return CaseResult(
        suite=case.suite,
        case_id=case.id,
        case_hash=case.hash,
        case=case.model_dump(mode="json"),
        backend=backend_name,
        status=status,
        reason=reason,
        tokens=case.num_tokens,
        stages=stages,
        seconds=time.perf_counter() - start,
        repro=_command(case, backend_name, device, source, store),
    )


def _command(case: Case, backend_name: str, device: torch.device, source: str, store: Store) -> str:
    words = ["megabench", "validate", "--cases", source or case.suite, "--case", case.id]
    words += ["--backend", backend_name, "--device", str(device)]
    if store.layer_seed:
        words += ["--seed", str(store.layer_seed)]
    if store.weights_file is not None:
        words += ["--weights", str(store.weights_file)]
    return shlex.join(words)
