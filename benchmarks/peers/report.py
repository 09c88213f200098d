"""A run's rows: JSON lines, a markdown page, and a table on the terminal."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.arms import Ratio, Row
from benchmarks.peers.flash import flash_problem, flash_version
from megabench.backends.flashmla.gemm import find_gemm
from megabench.results import Environment
from megabench.results.environment import git_commit

METHOD = (
    "CUDA graph per arm, event pair per sample, 256 MB written before each sample, arms in turns "
    "with the order reversed every other round, median and 95 % bootstrap interval; every arm "
    "checked against float64 before and after it was timed"
)
Lines = list[list[str]]
BAD = ("WRONG", "FAILED", "MISSED")


class Report:
    """Rows as they come, to disk at once, and the markdown page of those there are."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.ratios = list[Row](), list[Ratio]()
        flash = flash_problem() or flash_version()
        gemm = find_gemm()
        self.header: dict[str, Any] = {
            "kind": "run",
            "date": datetime.now(UTC).date().isoformat(),
            "git_commit": git_commit(),
            "method": METHOD,
            "flash_mla": flash,
            "deep_gemm": gemm.library.version if gemm.library else gemm.reason,
            "environment": environment.model_dump(mode="json"),
        }
        self.page = folder / "peers.md"
        self._file = (folder / "peers.jsonl").open("w", encoding="utf-8")
        self._write(self.header)

    def add(self, rows: list[Row], ratios: list[Ratio]) -> None:
        self.rows += rows
        self.ratios += ratios
        for line in [row.as_json() for row in rows] + [ratio.as_json() for ratio in ratios]:
            self._write(line)
        self.page.write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """Machine, versions and date, every arm, every ratio."""
        where = self.header["environment"]
        packages = ", ".join(f"{k} {v}" for k, v in where["packages"].items() if v)
        text = [
            "# Peers in one run",
            f"{self.header['date']}, commit {self.header['git_commit']}, {where['device_name']}, "
            f"driver {where['driver']}, CUDA {where['cuda']}, {packages}; "
            f"FlashMLA {self.header['flash_mla']}; DeepGEMM {self.header['deep_gemm']}.",
            f"Method: {METHOD}.",
            *(_markdown(table) for table in self.tables()),
            *(f"- {row.part} {row.size}, {row.arm}: {row.note}" for row in self.rows if row.note),
        ]
        return "\n\n".join(text) + "\n"

    def show(self, console: Console) -> None:
        """The tables on a terminal."""
        for head, *lines in self.tables():
            table = Table(*head)
            for line in lines:
                bad = any(word in cell for cell in line for word in BAD)
                table.add_row(*line, style="red" if bad else None)
            console.print(table)

    def tables(self) -> list[Lines]:
        """For each part its times by arm and size, then its ratios by pair and size."""
        made = []
        for part in dict.fromkeys(row.part for row in self.rows):
            times = {(r.arm, r.size): _time_cell(r) for r in self.rows if r.part == part}
            ratios = {
                (f"{r.ours} / {r.peer}", r.size): _ratio_cell(r)
                for r in self.ratios
                if r.part == part
            }
            made += [_pivot(f"{part}, µs", times), _pivot(f"{part}, ratio", ratios)]
        return [table for table in made if len(table) > 1]

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _pivot(title: str, cells: dict[tuple[str, str], str]) -> Lines:
    """A line of sizes, then a line an arm or pair; empty where it has no cell."""
    names, sizes = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    return [[title, *sizes], *([n, *(cells.get((n, size), "") for size in sizes)] for n in names)]


def _time_cell(row: Row) -> str:
    return row.status if row.median_us is None else f"{row.median_us:.1f}"


def _ratio_cell(ratio: Ratio) -> str:
    text = f"{ratio.ratio:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
    return text if ratio.bar is None else f"{text}, bar {ratio.bar:g}: {ratio.verdict}"


def _markdown(table: Lines) -> str:
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)
