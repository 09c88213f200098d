"""Latency against s_q, with figures from elsewhere beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from megabench.report.frames import short_cache, usable
from megabench.report.published import published
from megabench.report.style import MARKERS, MUTED, Figured, colours, finish, legend, styled, to_svg
from megabench.results.names import STEP

MAX_SERIES = 8
ATTENTION = "decode_attention"
_LABEL_APART = 1.5
"""Least ratio of two labelled token counts: nearer ones run into each other."""
Styles = dict[tuple[Any, ...], tuple[str, str, str]]
"""Series key to colour, marker and label."""
_SERIES = ["backend", "compress_ratio", "kv_cache", "tp", "kind"]


def latency(measurements: pd.DataFrame, device_name: str = "") -> Figured | None:
    """Median against s_q: the whole step, and the decode attention op beside it, with what others
    published for the device."""
    data = usable(measurements)
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
        _kinds(axes[0], styles)
        sources = _published(axes[-1], device_name) if panels[-1] == ATTENTION else []
        handles, labels = legend(axes)
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        svg = to_svg(figure, "latency")
    caption = (
        "Median with its 95 % bootstrap interval. Lines join cases that differ in s_q and length "
        "alone; markers tell decode, prefill and mixed steps apart."
    )
    for source in sources:
        caption += f" Dashed, from elsewhere and not measured in this run: {source}."
    return Figured(svg, "Latency against s_q", caption)


def _kinds(axis: Axes, styles: Styles) -> None:
    """Legend entries for the markers, where the series' own do not name their kind."""
    markers = {str(key[4]): style[1] for key, style in styles.items() if key[4] not in style[2]}
    for kind, marker in markers.items():
        axis.plot([], [], marker, color=MUTED, markersize=5, label=kind)


def _published(axis: Axes, device_name: str) -> list[str]:
    """Draw the published latencies of this device, inside the span of its own -> their sources."""
    found = [s for s in published() if s.op == ATTENTION and s.device in device_name]
    low, high = axis.get_xlim()
    for series in found:
        points = [(x, y) for x, y in series.points if low <= x <= high]
        if points:
            axis.plot(
                *zip(*points, strict=True), "--", color=MUTED, linewidth=1, label=series.label
            )
            bottom, top = axis.get_ylim()
            inside = [y for _, y in points]
            axis.set_ylim(min(bottom, min(inside) / 1.4), max(top, max(inside) * 1.4))
    return [series.source for series in found]


def _series_styles(data: pd.DataFrame) -> Styles:
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
    return f"{backend} · r{ratio} {short_cache(cache)} TP{tp} · {kind}"


def _latency_panel(axis: Axes, data: pd.DataFrame, styles: Styles) -> None:
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
    axis.set_xticks(_apart(sorted(data["tokens"].unique())))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    _time_axis(axis, float(data["ci_low_us"].min()), float(data["ci_high_us"].max()))


def _apart(tokens: Sequence[int]) -> list[int]:
    """Of ascending counts, those whose labels have room beside the one before."""
    kept = list(tokens[:1])
    for count in tokens[1:]:
        if count >= kept[-1] * _LABEL_APART:
            kept.append(count)
    return kept


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
    return f"{value:g} µs" if value < 1e3 else f"{value / 1e3:g} ms"
