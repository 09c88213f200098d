"""A run's rows as data frames, one column a fact; the only place that knows the rows' nesting."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from megabench.cases.batch import parse_batch
from megabench.results import CaseResult, Measurement, Run, StageResult
from megabench.results.names import STEP

PRIMARY = ("cold", "cpu", "warm", "eager")
"""Columns in the order a single figure for an op is taken from."""
AXES = ("model", "tp", "compress_ratio", "kv_cache", "page_layout", "batch", "decode_threshold")

CASE_COLUMNS = [
    "anchor",
    "case_id",
    "backend",
    "status",
    "reason",
    "tokens",
    "kind",
    *AXES,
    "worst",
    "worst_stage",
    "step_us",
    "step_column",
    "fraction",
    "datasheet_fraction",
    "problem",
    "seconds",
    "repro",
]
_NESTED = ("samples_us", "telemetry", "ci_us", "cross_check")
MEASUREMENT_COLUMNS = [
    "case_id",
    "backend",
    "tokens",
    "kind",
    *AXES,
    "primary",
    *(name for name in Measurement.model_fields if name not in _NESTED),
    "ci_low_us",
    "ci_high_us",
    "span_us",
    "span_status",
]
STAGE_COLUMNS = ["anchor", "case_id", "backend", *StageResult.model_fields]


def cases_frame(run: Run) -> pd.DataFrame:
    """One row a case and backend."""
    rows = [_case(index, case) for index, case in enumerate(run.cases)]
    return pd.DataFrame(rows, columns=CASE_COLUMNS)


def measurements_frame(run: Run) -> pd.DataFrame:
    """One row a measurement; `primary` marks the column an op's single figure comes from."""
    rows = [row for case in run.cases for row in _measurements(case)]
    return pd.DataFrame(rows, columns=MEASUREMENT_COLUMNS)


def stages_frame(run: Run) -> pd.DataFrame:
    """One row a stage of a case."""
    rows = [
        {"anchor": anchor(i), "case_id": case.case_id, "backend": case.backend}
        | stage.model_dump(mode="python")
        for i, case in enumerate(run.cases)
        for stage in case.stages
    ]
    return pd.DataFrame(rows, columns=STAGE_COLUMNS)


def anchor(index: int) -> str:
    """The HTML id of a case row's detail."""
    return f"case-{index}"


def primary(case: CaseResult, op: str) -> Measurement | None:
    """The measurement that stands for an op: cold, else cpu, else warm, else eager."""
    found = {m.column: m for m in case.measurements if m.op == op}
    return next((found[c] for c in PRIMARY if c in found), None)


def worst_stage(case: CaseResult) -> StageResult | None:
    """The judged stage with the largest error / bound; a failed one comes first."""
    judged = [s for s in case.stages if s.verdict and (s.worst is not None or not s.ok)]
    return max(judged, key=lambda s: (not s.ok, _known(s.worst)), default=None)


def _known(value: float | None) -> float:
    if value is None:
        return 0.0
    return math.inf if math.isnan(value) else value


def _axes(case: CaseResult) -> dict[str, Any]:
    return {"tokens": case.tokens, "kind": _kind(case)} | {a: case.case.get(a) for a in AXES}


def _kind(case: CaseResult) -> str:
    """decode, prefill, mixed or empty, from the batch."""
    try:
        requests = parse_batch(
            str(case.case.get("batch", "")), int(case.case.get("decode_threshold", 1))
        )
    except ValueError:
        return "other"
    decodes = {request.is_decode for request in requests}
    if len(decodes) == 2:
        return "mixed"
    return "empty" if not decodes else "decode" if decodes.pop() else "prefill"


def _case(index: int, case: CaseResult) -> dict[str, Any]:
    step, stage = primary(case, STEP), worst_stage(case)
    return {
        "anchor": anchor(index),
        "case_id": case.case_id,
        "backend": case.backend,
        "status": case.status,
        "reason": case.reason,
        **_axes(case),
        "worst": stage.worst if stage else None,
        "worst_stage": stage.name if stage else None,
        "step_us": step.median_us if step else None,
        "step_column": step.column if step else None,
        "fraction": step.roofline_fraction if step else None,
        "datasheet_fraction": step.datasheet_fraction if step else None,
        "problem": next((m.problem for m in case.measurements if m.problem), None),
        "seconds": case.seconds,
        "repro": case.repro,
    }


def _measurements(case: CaseResult) -> list[dict[str, Any]]:
    rows = []
    for m in case.measurements:
        fields = m.model_dump(exclude=set(_NESTED))
        rows.append(
            {"case_id": case.case_id, "backend": case.backend}
            | _axes(case)
            | fields
            | {
                "primary": m is primary(case, m.op),
                "ci_low_us": m.ci_us.low,
                "ci_high_us": m.ci_us.high,
                "span_us": m.cross_check.span_us if m.cross_check else None,
                "span_status": m.cross_check.status if m.cross_check else None,
            }
        )
    return rows


def usable(measurements: pd.DataFrame) -> pd.DataFrame:
    """Rows that stand for an op and whose median is a number; `package.module:attribute` goes by
    its attribute where that tells backends apart."""
    if measurements.empty:
        return measurements
    kept = measurements["primary"].astype(bool) & (measurements["median_us"] > 0)
    data = measurements[kept]
    short = {name: name.split(":")[-1] for name in data["backend"].unique()}
    if len(set(short.values())) < len(short):
        return data
    return data.assign(backend=data["backend"].map(short))


def short_cache(cache: Any) -> str:
    """A cache dtype's name as case ids have it."""
    return str(cache).removesuffix("_ds_mla")
