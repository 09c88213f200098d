"""What a person sees of a run: a progress bar on stderr, a line a case, a summary."""

from __future__ import annotations

import time
from collections import Counter

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megabench.results import CaseResult, Comparison
from megabench.results.names import STEP

_STYLE = {
    "passed": "green",
    "measured": "green",
    "skipped": "yellow",
    "failed": "bold red",
    "error": "bold red",
}
_QUIET = ("passed", "measured")


class Watch:
    """Shows rows as they are made; on a terminal the right ones only move the bar.

    With `as_json` each row also goes to stdout as one line of JSON, flushed.
    """

    def __init__(self, planned: int, as_json: bool) -> None:
        self.as_json = as_json
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.started = time.perf_counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True, emoji=False),
            transient=True,
        )
        self._task = self._progress.add_task("cases", total=planned)

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._progress.stop()

    def count(self, row: CaseResult) -> None:
        """Take a row into the summary."""
        self.counts[row.status] += 1
        if row.status == "skipped":
            self.reasons[row.reason] += 1
        self._progress.update(self._task, advance=1, description=escape(row.case_id))

    def __call__(self, row: CaseResult) -> None:
        """Show one row."""
        self.count(row)
        if self.as_json:
            click.echo(row.model_dump_json())
        console = self._progress.console
        if row.status not in _QUIET or not console.is_terminal:
            text = f"[{_STYLE[row.status]}]{row.status:8}[/] {escape(_line(row))}"
            console.print(text, soft_wrap=True, highlight=False)

    def compared(self, row: Comparison) -> None:
        """Show a step's ratio between two backends, where right cases are shown."""
        console = self._progress.console
        if row.op == STEP and not console.is_terminal:
            span = f"{row.ci.low:.3f} to {row.ci.high:.3f}, {row.pairs} pairs"
            arms = f"{row.case_id} on {row.backend} / {row.baseline}"
            text = f"ratio    {arms}: step {row.ratio:.3f} ({span}) {row.column}"
            console.print(escape(text), soft_wrap=True, highlight=False)

    def summary(self) -> list[str]:
        """Counts by status, then each reason for skipping once."""
        counts = ", ".join(
            f"{self.counts[status]} {status}" for status in _STYLE if self.counts[status]
        )
        seconds = time.perf_counter() - self.started
        lines = [f"{counts or 'no case ran'} in {seconds:.1f} s"]
        return lines + [f"skipped {n} x: {reason}" for reason, n in self.reasons.items()]


def _line(row: CaseResult) -> str:
    """`case on backend`, then what matters of the row: the step's time, or the reason."""
    text = f"{row.case_id} on {row.backend}"
    steps = [m for m in row.measurements if m.op == "step"]
    if steps:
        text += ": step " + ", ".join(f"{m.median_us:.1f} us {m.column}" for m in steps)
    if row.reason:
        text += f": {row.reason}"
    return text + (f"\n         {row.repro}" if row.status in ("failed", "error") else "")
