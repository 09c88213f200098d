"""The HTML report: figures, tables and text in one file that opens offline."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from megabench.report import figures, words
from megabench.report.frames import anchor, measurements_frame, primary, worst_stage
from megabench.report.latency import latency
from megabench.report.published import beside
from megabench.report.summary import stage_lines, summarise
from megabench.report.verdict import GateView
from megabench.results import CaseResult, Measurement, Run
from megabench.results.names import STEP

TEMPLATE = "report.html.j2"


def render(run: Run, gate: GateView | None = None, processes: int = 1) -> str:
    """The whole report of a run as one HTML document without any external reference.

    `gate` are its verdicts, where it was gated; `processes` how many the run was pooled from.
    """
    measurements = measurements_frame(run)
    device_name = run.header.environment.device_name if run.header else ""
    drawn = (
        latency(measurements, device_name),
        figures.heat_map(measurements),
        figures.roofline(measurements, run.ceilings),
        figures.breakdown(measurements),
    )
    return (
        _jinja()
        .get_template(TEMPLATE)
        .render(
            run=run,
            gate=gate,
            processes=processes,
            header=run.header,
            environment=run.header.environment if run.header else None,
            summary=summarise(run),
            figures=[figure for figure in drawn if figure is not None],
            published=beside(run),
            stages=stage_lines(run),
            cases=[_case_view(i, case) for i, case in enumerate(run.cases)],
            backends=sorted({case.backend for case in run.cases}),
            statuses=sorted({case.status for case in run.cases}),
            measured=not measurements.empty,
            datasheet=bool(measurements["datasheet_fraction"].notna().any()),
            validated=any(case.stages for case in run.cases),
            telemetry=_telemetry(run),
        )
    )


def _jinja() -> Jinja:
    jinja = Jinja(
        loader=PackageLoader("megabench.report"),
        autoescape=select_autoescape(["html.j2"], default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("microseconds", "percent", "ratio", "rate", "size", "digits"):
        jinja.filters[name] = getattr(words, name)
    jinja.filters["svg"] = Markup
    jinja.filters["arrows"] = lambda text: text.replace("->", "→")
    jinja.filters["sortable"] = _sortable
    return jinja


def _sortable(value: float | None) -> str:
    """A number for a cell's sort key; missing ones sort last either way."""
    return "" if value is None or value != value else repr(float(value))


def _case_view(index: int, case: CaseResult) -> dict[str, Any]:
    """What the templates show of one row."""
    return {
        "row": case,
        "anchor": anchor(index),
        "step": primary(case, STEP),
        "worst": worst_stage(case),
        "columns": _columns(case.measurements),
        "ops": _by_op(case.measurements),
        "notes": list(dict.fromkeys(m.note for m in case.measurements if m.note)),
    }


def _columns(measurements: list[Measurement]) -> list[str]:
    return list(dict.fromkeys(m.column for m in measurements))


def _by_op(measurements: list[Measurement]) -> dict[str, list[Measurement]]:
    ops: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        ops.setdefault(measurement.op, []).append(measurement)
    return ops


def _telemetry(run: Run) -> dict[str, Any] | None:
    """The span of the device's state over all measurements, or None where it does not tell."""
    seen = [m.telemetry for c in run.cases for m in c.measurements if m.telemetry is not None]
    seen = [t for t in seen if t.source != "none"]
    if not seen:
        return None
    fields = {
        "SM clock (MHz)": [t.sm_clock_mhz for t in seen],
        "memory clock (MHz)": [t.memory_clock_mhz for t in seen],
        "power (W)": [t.power_w for t in seen],
        "temperature (°C)": [t.temperature_c for t in seen],
    }
    spans = {
        name: (min(known), max(known))
        for name, values in fields.items()
        if (known := [v for v in values if v is not None])
    }
    return {
        "source": seen[0].source,
        "blocks": len(seen),
        "spans": spans,
        "labels": sorted({label for t in seen for label in t.labels}),
        "discarded": sum(m.discarded for c in run.cases for m in c.measurements),
    }
