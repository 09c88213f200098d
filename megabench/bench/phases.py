"""Where a case's wall time goes: what is neither set-up nor a timed run is overhead.

Set-up includes an op's first, untimed run; timed runs are samples and those that checks time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megabench.results import Phases


class PhaseClock:
    """Wall time of one case by phase. The phases do not nest; what lies in none is overhead."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a case."""
        self._started = time.perf_counter()
        self._spent = {"validate": 0.0, "setup": 0.0, "timed": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside, an exception's time included, as `validate` or `setup`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] += time.perf_counter() - start

    def timed(self, runs_us: list[float]) -> None:
        """Count timed runs: the replays themselves, none of what lies between them."""
        self._spent["timed"] += sum(runs_us) * 1e-6

    def stop(self, shares: int) -> tuple[float, Phases]:
        """Seconds since the start and their parts, a case's time shared by so many rows."""
        total = time.perf_counter() - self._started
        spent = {f"{name}_s": seconds / shares for name, seconds in self._spent.items()}
        overhead = max(0.0, total - sum(self._spent.values())) / shares
        return total / shares, Phases(**spent, overhead_s=overhead)
