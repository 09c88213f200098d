"""The report's figures as inline SVG; each gives None when the run has nothing for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from megabench.report.frames import short_cache, usable
from megabench.report.style import (
    GRID,
    INK,
    MARKERS,
    MUTED,
    Figured,
    colours,
    finish,
    legend,
    styled,
    to_svg,
)
from megabench.report.words import microseconds, percent, rate
from megabench.results import Ceilings
from megabench.results.names import OP_ORDER, PARTS, STEP

MAX_BARS = 30
OP_COLOURS = colours([op for op in OP_ORDER if op not in (*PARTS, STEP)]) | {STEP: INK}
"""One colour an op, the same in every figure."""


def heat_map(measurements: pd.DataFrame) -> Figured | None:
    """Roofline fraction of the whole step: configurations by batch, one panel a backend."""
    data = usable(measurements)
    data = data[(data["op"] == STEP) & data["roofline_fraction"].notna()]
    if data.empty:
        return None
    data = data.assign(
        row=[
            f"TP{tp} · r{ratio} {short_cache(cache)}"
            for tp, ratio, cache in zip(
                data["tp"], data["compress_ratio"], data["kv_cache"], strict=True
            )
        ]
    )
    batches = list(data.sort_values(["tokens", "batch"])["batch"].unique())
    rows = sorted(data["row"].unique())
    backends = list(data["backend"].unique())
    top = max(float(data["roofline_fraction"].max()), 1e-9)
    height = 1.5 + (0.34 * len(rows) + 0.7) * len(backends)
    with styled("heat"):
        figure = Figure(figsize=(2.2 + 0.62 * max(len(batches), 6), height), layout="constrained")
        panels = figure.subplots(len(backends), 1, squeeze=False)[:, 0]
        for axis, backend in zip(panels, backends, strict=True):
            table = data[data["backend"] == backend].pivot_table(
                index="row", columns="batch", values="roofline_fraction", aggfunc="median"
            )
            _heat_panel(axis, table.reindex(index=rows, columns=batches).to_numpy(float), top)
            axis.set_yticks(np.arange(len(rows)) + 0.5, rows)
            axis.set_xticks(np.arange(len(batches)) + 0.5, batches, rotation=40, ha="right")
            axis.invert_yaxis()
            axis.set_title(backend)
        svg = to_svg(figure, "heat")
    caption = (
        "Least possible time at the ceilings measured in this run over the median time, in "
        "percent; higher is better. Empty cells were not measured."
    )
    return Figured(svg, "Speed of light, TP × batch", caption)


def _heat_panel(axis: Axes, values: np.ndarray[Any, np.dtype[np.float64]], top: float) -> None:
    """One backend's cells, coloured on a scale from 0 to `top` that all panels share."""
    axis.pcolormesh(np.clip(values / top, 0, 1), cmap="cividis", vmin=0, vmax=1)
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            shade = "#000000" if value / top > 0.55 else "#ffffff"
            label = percent(float(value)).replace(" %", "")
            axis.text(j + 0.5, i + 0.5, label, ha="center", va="center", color=shade, fontsize=8)
    axis.grid(False)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def roofline(measurements: pd.DataFrame, ceilings: Ceilings | None) -> Figured | None:
    """Achieved FLOP/s against intensity, under the measured and the datasheet roof."""
    data = usable(measurements)
    data = data[(data["flops"] > 0) & (data["bytes_compulsory"] > 0) & ~data["op"].isin(PARTS)]
    if data.empty or ceilings is None:
        return None
    intensity = data["flops"] / data["bytes_compulsory"]
    span = np.array([float(intensity.min()) / 3, float(intensity.max()) * 6])
    with styled("roofline"):
        figure = Figure(figsize=(8.4, 4.8), layout="constrained")
        axis = figure.subplots()
        _roofs(axis, ceilings, span)
        ops = [op for op in OP_ORDER if (data["op"] == op).any()]
        backends = list(data["backend"].unique())
        for i, backend in enumerate(backends):
            for op in ops:
                part = (data["backend"] == backend) & (data["op"] == op)
                axis.scatter(
                    intensity[part],
                    data.loc[part, "flops_per_s"],
                    color=OP_COLOURS[op],
                    marker=MARKERS[i % len(MARKERS)],
                    s=28,
                    alpha=0.85,
                    linewidths=0,
                    label=op,
                )
        if len(backends) > 1:
            for i, backend in enumerate(backends):
                shape = MARKERS[i % len(MARKERS)]
                axis.plot([], [], shape, color=MUTED, markersize=5, label=backend)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: rate(v, "FLOP/s")))
        axis.minorticks_off()
        finish(axis, "", "FLOP per compulsory byte", "achieved")
        figure.legend(*legend([axis]), loc="outside right upper")
        svg = to_svg(figure, "roofline")
    caption = (
        "Each point is one op of one case. Roofs: solid, measured in this run; dashed, the "
        "datasheet. FLOPs and bytes are counted from the index lists."
    )
    return Figured(svg, "Roofline", caption)


def _roofs(axis: Axes, ceilings: Ceilings, span: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    x = np.geomspace(span[0], span[1], 200)
    names = ("read", "bf16_matmul", "fp8_matmul", "fp32_matmul")
    for pick, line, label in (
        (ceilings.value, "-", "measured"),
        (ceilings.datasheet, "--", "datasheet"),
    ):
        memory, *matmuls = (pick(name) for name in names)
        peak = max((m for m in matmuls if m is not None), default=None)
        if memory is None or peak is None:
            continue
        y = np.minimum(x * memory, peak)
        text = f"{label}: {rate(memory, 'B/s')},\n{rate(peak, 'FLOP/s')}"
        axis.plot(x, y, line, color=INK, linewidth=1.2, label=text)


def breakdown(measurements: pd.DataFrame) -> Figured | None:
    """Where a step's time goes: each op's share of the sum of its ops."""
    data = usable(measurements)
    steps = data[data["op"] == STEP]
    parts = data[~data["op"].isin((STEP, *PARTS))]
    keys = [k for k in steps[["case_id", "backend"]].itertuples(index=False, name=None)]
    keys = [k for k in keys if (_of(parts, k)).any()]
    if not keys:
        return None
    shown = keys[:MAX_BARS]
    ops = [op for op in OP_ORDER if (parts["op"] == op).any()]
    with styled("breakdown"):
        figure = Figure(figsize=(9.2, 1.4 + 0.3 * len(shown)), layout="constrained")
        axis = figure.subplots()
        for y, key in enumerate(shown):
            times = parts[_of(parts, key)].set_index("op")["median_us"]
            step = float(steps[_of(steps, key)]["median_us"].iloc[0])
            _bar(axis, y, times)
            axis.text(
                1.01,
                y,
                f"{microseconds(float(times.sum()))} / {microseconds(step)}",
                va="center",
                fontsize=8,
                color=MUTED,
            )
        several = len({backend for _, backend in shown}) > 1
        labels = [f"{case} · {backend}" if several else case for case, backend in shown]
        axis.set_yticks(range(len(shown)), labels, fontsize=8)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.set_xlim(0, 1.0)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        axis.grid(False)
        axis.tick_params(length=0)
        handles = [Patch(color=OP_COLOURS[op]) for op in ops]
        figure.legend(handles, ops, loc="outside upper center", ncols=min(len(ops), 4))
        svg = to_svg(figure, "breakdown")
    cut = f" The first {MAX_BARS} of {len(keys)} cases." if len(keys) > MAX_BARS else ""
    caption = f"At the right: sum of the ops / the whole step as timed.{cut}"
    return Figured(svg, "Where the step's time goes", caption)


def _of(data: pd.DataFrame, key: tuple[Any, ...]) -> Any:
    """Which rows are of a (case, backend)."""
    return (data["case_id"] == key[0]) & (data["backend"] == key[1])


def _bar(axis: Axes, y: int, times: pd.Series[float]) -> None:
    left, total = 0.0, float(times.sum())
    for op, colour in OP_COLOURS.items():
        if op in times.index:
            share = float(times[op]) / total
            axis.barh(y, share, left=left, color=colour, height=0.72, edgecolor=GRID, linewidth=0.3)
            left += share
