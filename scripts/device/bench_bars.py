"""Hold bench runs against the bars for measuring: agreement of processes, overhead, wall time.

    megabench bench --cases scripts/device/bench_bars.yaml --processes 5 --no-validate --out OUT
    python scripts/device/bench_bars.py OUT/*-bench-x5

For each run folder: the wall time and overhead of every process, then a line an op and column with
the medians' coefficient of variation over processes, their range, and what NVML said meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megabench.gate.observe import Observed, observe
from megabench.gate.processes import read_processes
from megabench.results import CaseResult, Run
from megabench.results.schema import Column

CV_BAR = 0.01
OVERHEAD_BAR_S = 0.5
WALL_BAR_S = 480.0
NAMED = ("step", "decode_attention", "prefill")
"""Ops whose process medians the bar is about; the others are shown with --all."""
COLUMNS: tuple[Column, ...] = ("cold", "warm", "cpu")


def time_lines(run: Run) -> list[str]:
    """Wall time of a process, and the dearest overhead a case, all its backends together."""
    spent: dict[str, list[CaseResult]] = {}
    for row in run.cases:
        spent.setdefault(row.case_id, []).append(row)
    overhead = {
        case: sum(r.phases.overhead_s for r in rows if r.phases) for case, rows in spent.items()
    }
    parts = [r.phases for r in run.cases if r.phases]
    sums = {
        name: sum(getattr(p, f"{name}_s") for p in parts)
        for name in ("validate", "setup", "timed", "overhead")
    }
    wall = run.end.seconds if run.end else float("nan")
    wrong = sum(r.status in ("failed", "error") for r in run.cases)
    worst = max(overhead, key=overhead.__getitem__, default="-")
    return [
        f"{run.path.name}: {len(run.cases)} rows, {wrong} wrong, {wall:.1f} s "
        f"(bar {WALL_BAR_S:.0f}), ceilings {run.ceilings.seconds if run.ceilings else 0:.1f} s",
        "  " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sums.items()),
        f"  overhead a case: worst {overhead.get(worst, 0):.3f} s ({worst}), "
        f"{sum(s > OVERHEAD_BAR_S for s in overhead.values())} of {len(overhead)} above "
        f"{OVERHEAD_BAR_S} s",
    ]


def cv_lines(runs: Sequence[Run], every: bool) -> list[str]:
    """One line an op and column: how far the processes' medians are apart."""
    lines = []
    for (case, backend), seen in observe(runs).items():
        for op, column in seen.time_keys():
            if column not in COLUMNS or not (every or op in NAMED):
                continue
            times = seen.times(op, column)
            if times.cv is None:
                continue
            low, high = min(times.medians_us), max(times.medians_us)
            clock = f"{times.clock_mhz:.0f} MHz" if times.clock_mhz else "-"
            lines.append(
                f"{case:28} {backend:8} {op:17} {column:5} {times.processes} "
                f"{times.median_us:9.2f} us {low:9.2f} … {high:9.2f}  CV {times.cv * 100:5.2f} % "
                f"{'ok  ' if times.cv <= CV_BAR else 'HIGH'} {clock} {_state(seen, op, column)}"
            )
    return lines


def _state(seen: Observed, op: str, column: Column) -> str:
    """What NVML said during an op's samples, over all processes."""
    found = [
        m.telemetry
        for row in seen.rows
        for m in row.measurements
        if (m.op, m.column) == (op, column) and m.telemetry
    ]
    discarded = sum(m.discarded for row in seen.rows for m in row.measurements if m.op == op)
    labels = sorted({label for t in found for label in t.labels}) or ["no throttling"]
    hottest = max((t.temperature_c or 0 for t in found), default=0)
    return f"{', '.join(labels)}; {hottest:.0f} °C; {discarded} refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="+", type=Path, help="a run folder, or one of --processes N")
    parser.add_argument("--all", action="store_true", help="every op, not only the step's whole")
    options = parser.parse_args()
    for path in options.run:
        runs = read_processes(path)
        for run in runs:
            print("\n".join(time_lines(run)))
        if len(runs) > 1:
            print("\n".join(cv_lines(runs, options.all)))


if __name__ == "__main__":
    main()
