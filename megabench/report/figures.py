"""The report's figures as inline SVG; each gives None when the run has nothing for it."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from megabench.report.style import (
    GRID,
    INK,
    MARKERS,
    MUTED,
    colours,
    finish,
    styled,
    to_svg,
)
from megabench.report.words import microseconds, percent, rate
from megabench.results import Ceilings
from megabench.results.names import OP_ORDER, PARTS, STEP

PUBLISHED_FILE = "published.json"
MAX_SERIES = 8
MAX_BARS = 30
ATTENTION = "decode_attention"
OP_COLOURS = colours([op for op in OP_ORDER if op not in (*PARTS, STEP)]) | {STEP: INK}
"""One colour an op, the same in every figure."""
_SERIES = ["backend", "compress_ratio", "kv_cache", "tp", "kind"]


@dataclass(frozen=True)
class Figured:
    """A figure and the words under it."""

    svg: str
    title: str
    caption: str


def latency(measurements: pd.DataFrame, device_name: str = "") -> Figured | None:
    """Median against s_q: the whole step, and the decode attention op beside it, with what others
    published for the device."""
    data = _usable(measurements)
    panels = [op for op in (STEP, ATTENTION) if (data["op"] == op).any()]
    if not panels:
        return None
    with styled("latency"):
        figure = Figure(figsize=(5.6 * len(panels), 4.4), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        titles = {STEP: "Whole step", ATTENTION: "Decode attention op"}
        styles = _series_styles(data)
        for axis, op in zip(axes, panels, strict=True):
            _latency_panel(axis, data[data["op"] == op], styles)
            finish(axis, titles[op], "query tokens of the step (s_q)", "median time")
        sources = _published(axes[-1], device_name) if panels[-1] == ATTENTION else []
        handles, labels = _legend(axes)
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        svg = to_svg(figure, "latency")
    caption = (
        "Median with its 95 % bootstrap interval. Lines join cases that differ in s_q and length "
        "alone; markers tell decode, prefill and mixed steps apart."
    )
    for source in sources:
        caption += f" Dashed, from elsewhere and not measured in this run: {source}."
    return Figured(svg, "Latency against s_q", caption)


def _published(axis: Axes, device_name: str) -> list[str]:
    """Draw the published latencies of this device, inside the span of its own -> their sources."""
    text = (resources.files("megabench.data") / PUBLISHED_FILE).read_text(encoding="utf-8")
    found = [s for s in json.loads(text)["series"] if s["device"] in device_name]
    low, high = axis.get_xlim()
    for series in found:
        points = [(x, y) for x, y in series["points"] if low <= x <= high]
        if points:
            axis.plot(
                *zip(*points, strict=True), "--", color=MUTED, linewidth=1, label=series["label"]
            )
            bottom, top = axis.get_ylim()
            inside = [y for _, y in points]
            axis.set_ylim(min(bottom, min(inside) / 1.4), max(top, max(inside) * 1.4))
    return [series["source"] for series in found]


def _series_styles(data: pd.DataFrame) -> dict[Hashable, tuple[str, str, str]]:
    """Series key to (colour, marker, label); one colour a backend when series are many."""
    keys = list(dict.fromkeys(map(tuple, data[_SERIES].itertuples(index=False))))
    names = [_series_name(key) for key in keys]
    if len(keys) > MAX_SERIES:
        names = [str(key[0]) for key in keys]
    palette = colours(list(dict.fromkeys(names)))
    kinds = {kind: MARKERS[i] for i, kind in enumerate(("decode", "prefill", "mixed", "other"))}
    return {
        key: (palette[name], kinds.get(str(key[4]), "o"), name)
        for key, name in zip(keys, names, strict=True)
    }


def _series_name(key: tuple[Any, ...]) -> str:
    backend, ratio, cache, tp, kind = key
    return f"{backend} · r{ratio} {_short(cache)} TP{tp} · {kind}"


def _short(cache: Any) -> str:
    return str(cache).removesuffix("_ds_mla")


def _latency_panel(
    axis: Axes, data: pd.DataFrame, styles: dict[Hashable, tuple[str, str, str]]
) -> None:
    for key, group in data.groupby(_SERIES, dropna=False, sort=False):
        colour, marker, label = styles[key]
        group = group.sort_values(["tokens", "median_us"])
        x, y = group["tokens"].to_numpy(float), group["median_us"].to_numpy(float)
        low = np.maximum(y - group["ci_low_us"].to_numpy(float), 0.0)
        high = np.maximum(group["ci_high_us"].to_numpy(float) - y, 0.0)
        joined = "-" if group["tokens"].is_unique else ""
        axis.errorbar(
            x,
            y,
            yerr=np.vstack((low, high)),
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.4,
            linestyle=joined or "none",
            label=label,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted(data["tokens"].unique()))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    _time_axis(axis, float(data["ci_low_us"].min()), float(data["ci_high_us"].max()))


def _time_axis(axis: Axes, low: float, high: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, in words."""
    powers = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 2)
    ticks = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    if high / low > 100:
        ticks = [10.0**p for p in powers]
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _tick(v)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylim(low / 1.4, high * 1.4)


def _tick(value: float) -> str:
    """A round time in its unit, without the zeros of a measured one."""
    return f"{value:g} µs" if value < 1e4 else f"{value / 1e3:g} ms"


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def heat_map(measurements: pd.DataFrame) -> Figured | None:
    """Roofline fraction of the whole step: configurations by batch, one panel a backend."""
    data = _usable(measurements)
    data = data[(data["op"] == STEP) & data["roofline_fraction"].notna()]
    if data.empty:
        return None
    data = data.assign(
        row=[
            f"TP{tp} · r{ratio} {_short(cache)}"
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
    data = _usable(measurements)
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
        figure.legend(*_legend([axis]), loc="outside right upper")
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
    data = _usable(measurements)
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


def _usable(measurements: pd.DataFrame) -> pd.DataFrame:
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
