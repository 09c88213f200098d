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

METHOD = (
    "CUDA graph per arm, event pair per sample, 256 MB written before each sample, arms in turns "
    "with the order reversed every other round, median and 95 % bootstrap interval; every arm "
    "checked against float64 before and after it was timed"
)
Lines = list[list[str]]
ARM_HEAD = ["part", "size", "arm", "µs", "95 %", "note"]
RATIO_HEAD = ["part", "size", "ours", "beside", "ratio", "95 %", "bar", "verdict"]


class Report:
    """Rows as they come, to disk at once; the markdown page at the end."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows, self.ratios = folder, list[Row](), list[Ratio]()
        flash = flash_problem() or flash_version()
        gemm = find_gemm()
        self.header: dict[str, Any] = {
            "kind": "run",
            "date": datetime.now(UTC).date().isoformat(),
            "method": METHOD,
            "flash_mla": flash,
            "deep_gemm": gemm.library.version if gemm.library else gemm.reason,
            "environment": environment.model_dump(mode="json"),
        }
        self._file = (folder / "peers.jsonl").open("w", encoding="utf-8")
        self._write(self.header)

    def add(self, rows: list[Row], ratios: list[Ratio]) -> None:
        self.rows += rows
        self.ratios += ratios
        for line in [row.as_json() for row in rows] + [ratio.as_json() for ratio in ratios]:
            self._write(line)

    def finish(self) -> Path:
        """Write the page -> its path."""
        self._file.close()
        path = self.folder / "peers.md"
        path.write_text(self.markdown(), encoding="utf-8")
        return path

    def markdown(self) -> str:
        """Machine, versions and date, every arm, every ratio."""
        where = self.header["environment"]
        packages = ", ".join(f"{k} {v}" for k, v in where["packages"].items() if v)
        text = [
            "# Peers in one run",
            f"{self.header['date']}, {where['device_name']}, driver {where['driver']}, CUDA "
            f"{where['cuda']}, {packages}; FlashMLA {self.header['flash_mla']}; DeepGEMM "
            f"{self.header['deep_gemm']}.",
            f"Method: {METHOD}.",
            _table(ARM_HEAD, [_arm_line(row) for row in self.rows]),
            _table(RATIO_HEAD, [_ratio_line(ratio) for ratio in self.ratios]),
        ]
        return "\n\n".join(text) + "\n"

    def show(self, console: Console) -> None:
        """Both tables on a terminal."""
        arms = (ARM_HEAD, [_arm_line(row) for row in self.rows])
        for head, lines in (arms, (RATIO_HEAD, [_ratio_line(r) for r in self.ratios])):
            table = Table(*head)
            for line in lines:
                bad = any(word in line for word in ("WRONG", "FAILED", "MISSED"))
                table.add_row(*line, style="red" if bad else None)
            console.print(table)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _arm_line(row: Row) -> list[str]:
    if row.median_us is None:
        return [row.part, row.size, row.arm, row.status, "", row.note]
    interval = f"{row.low_us:.1f}-{row.high_us:.1f}"
    return [row.part, row.size, row.arm, f"{row.median_us:.1f}", interval, row.note]


def _ratio_line(ratio: Ratio) -> list[str]:
    bar = "" if ratio.bar is None else f"{ratio.bar:g}"
    interval = f"{ratio.low:.3f}-{ratio.high:.3f}"
    numbers = [f"{ratio.ratio:.3f}", interval, bar, ratio.verdict]
    return [ratio.part, ratio.size, ratio.ours, ratio.peer, *numbers]


def _table(head: list[str], lines: Lines) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows
    )
