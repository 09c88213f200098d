"""How figures look: one palette, and SVG that follows the page's light or dark scheme.

The palette is Okabe and Ito's (2008), told apart by all common kinds of colour blindness. Neutral
parts are drawn in marker colours that are replaced by CSS variables of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#b8a800",
    "#7f7f7f",
)
"""Okabe-Ito; its yellow darkened and its black greyed, to be seen on white and on black."""
LEAST_SCALE = 0.8
"""Of a figure's natural width: below it labels are too small, and the figure scrolls instead."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, GRID, MUTED = "#010203", "#040506", "#070809"
"""Stand for the page's text, grid and secondary text colours."""
_VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)", MUTED: "var(--muted)"}

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Figured:
    """A figure and the words under it."""

    svg: str
    title: str
    caption: str


@contextmanager
def styled(name: str) -> Iterator[None]:
    """Draw in the report's style; `name` keeps the ids of one figure apart from another's."""
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": f"megabench-{name}"}):
        yield


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an inline `<svg>`: at most its natural width and never too small to read, no
    date, page colours, and ids that start with `name`, since a page holds several figures."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    points = re.search(r'<svg[^>]*? width="([\d.]+)pt"', text)
    width = float(points.group(1)) * 4 / 3 if points else 800.0
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    sized = f'style="max-width: {width:.0f}px; min-width: {LEAST_SCALE * width:.0f}px"'
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf"\1 {sized}", text, count=1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    for found in dict.fromkeys(re.findall(r' id="([^"]*)"', text)):
        if f"#{found}" in text:
            text = text.replace(f'id="{found}"', f'id="{name}-{found}"')
            text = re.sub(rf"#{found}\b", f"#{name}-{found}", text)
        else:
            text = text.replace(f' id="{found}"', "")
    return re.sub(r"font: ([^;\"]*?)'[^;\"]*?sans-serif", r"font: \1sans-serif", text)


def colours(names: list[str]) -> dict[str, str]:
    """A colour a name, in order, going round when there are more names than colours."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and axis labels."""
    axes.set_title(title, pad=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.tick_params(length=0)


def legend(axes: Any) -> tuple[list[Any], list[str]]:
    """Handles and labels of several axes, each label once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
