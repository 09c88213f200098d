"""Timers: one sample is one run of an op, and nothing but the op lies between its two marks.

CUDA: every sample replays a CUDA graph between an event pair of its own. A spin kernel before the
pair keeps the host ahead, so that launch gaps stay out; of graphs that take long enough to keep it
ahead by themselves, before the first pair of a block alone. The cold column rotates
pointer-distinct copies (`rotation.py`) and, where they are small, reads an L2-sized buffer before
each pair; the warm column replays one copy. When capture fails the row says so in its method and
note: its launches are eager and host gaps are inside the pair.

Host: `perf_counter_ns` around the call; on CUDA with a synchronize inside (the eager column).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import torch

from megabench.bench.kernels import kernels_of
from megabench.devices import first_cause

Run = Callable[[], list[torch.Tensor]]
Microseconds = Callable[[], float]

FIRST_SPIN_CYCLES = 150_000
"""About 80 us: longer than the host needs for two events and a graph launch, hiccups included."""
NEXT_SPIN_CYCLES = 60_000
"""About 30 us, what the host needs, so that it stays as far ahead as the first spin has put it."""
AHEAD_US = 100.0
"""A graph that takes as long, thrice what the host needs, needs no spin but the first."""
OVERHEAD_PAIRS = 10
WARM_UPS = 2


class Timer(Protocol):
    """Takes samples of one op, one way."""

    method: str
    note: str
    sets: int
    overhead_us: float | None
    counts: list[int]
    """Samples taken of each copy."""
    turn: int
    """The copy to be sampled next."""

    def take(self, n: int) -> list[float]:
        """n samples in microseconds."""
        ...

    def replay(self, copy: int) -> list[torch.Tensor]:
        """Run one copy as it is timed -> the tensors it returned, ready as far as its clock waits:
        an event pair waits for the current stream alone."""
        ...

    def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Microseconds]:
        """The same as one sample, and a function that waits for its time."""
        ...

    def returned(self, copy: int) -> list[torch.Tensor] | None:
        """The tensors every replay of a copy returns to, None when each returns new ones."""
        ...


class HostTimer:
    """Host wall time of a call, up to `wait` returning. Its caller has run each copy before."""

    def __init__(
        self, runs: list[Run], method: str, wait: Callable[[], None] = lambda: None, note: str = ""
    ) -> None:
        self.method, self.note = method, note
        self.sets = len(runs)
        self.overhead_us: float | None = _clock_pair_us()
        self.counts = [0] * len(runs)
        self._runs, self._wait, self.turn = runs, wait, 0

    def take(self, n: int) -> list[float]:
        samples = []
        for _ in range(n):
            copy, self.turn = self.turn, (self.turn + 1) % self.sets
            run = self._runs[copy]
            start = perf_counter_ns()
            run()
            self._wait()
            samples.append((perf_counter_ns() - start) * 1e-3)
            self.counts[copy] += 1
        return samples

    def replay(self, copy: int) -> list[torch.Tensor]:
        fresh = self._runs[copy]()
        self._wait()
        return fresh

    def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Microseconds]:
        start = perf_counter_ns()
        fresh = self.replay(copy)
        taken = (perf_counter_ns() - start) * 1e-3
        return fresh, lambda: taken

    def returned(self, copy: int) -> list[torch.Tensor] | None:
        return None


def cpu_timer(run: Run) -> HostTimer:
    """The CPU column: wall time at the pinned thread count."""
    return HostTimer([run], f"perf_counter_ns, {torch.get_num_threads()} threads")


def eager_timer(run: Run) -> HostTimer:
    """The eager column on CUDA: launches, kernels and the final synchronize."""
    return HostTimer([run], "eager, perf_counter_ns with synchronize", torch.cuda.synchronize)


@dataclass(frozen=True)
class Launch:
    """One captured (or eager) copy: how to launch it, and where its returned tensors lie."""

    launch: Callable[[], object]
    returned: list[torch.Tensor] | None
    """None when every launch returns new tensors."""
    graph: torch.cuda.CUDAGraph | None = None


class Sample(NamedTuple):
    """One sample, its clock left out: what happens before the clock starts, and what it times."""

    before: Callable[[], object]
    launch: Callable[[], object]


class EventTimer:
    """An event pair around each launch, copies in rotation."""

    def __init__(
        self,
        launches: list[Launch],
        method: str,
        note: str = "",
        sweep: Callable[[], object] | None = None,
    ) -> None:
        self.method, self.note = method, note
        self.sets = len(launches)
        self.counts = [0] * len(launches)
        self._launches, self._sweep, self.turn = launches, sweep or _nothing, 0
        self._pairs: list[_Pair] = []
        self._cycles = NEXT_SPIN_CYCLES
        self.overhead_us: float | None = event_pair_us()

    def take(self, n: int) -> list[float]:
        self._pairs += [_Pair() for _ in range(n - len(self._pairs))]
        taken = _timed(self.samples(n), self._pairs, self._cycles)
        # Not by a sample alone: a graph's first may take ten times as long as those after it.
        long = len(taken) > 1 and min(taken) >= AHEAD_US
        self._cycles = 0 if long and self._launches[0].graph is not None else NEXT_SPIN_CYCLES
        return taken

    def samples(self, n: int) -> list[Sample]:
        """The next n samples, copies in rotation, for another clock."""
        copies = [(self.turn + i) % self.sets for i in range(n)]
        self.turn = (self.turn + n) % self.sets
        for copy in copies:
            self.counts[copy] += 1
        return [Sample(self._sweep, self._launches[copy].launch) for copy in copies]

    def replay(self, copy: int) -> list[torch.Tensor]:
        launch = self._launches[copy]
        fresh = launch.launch()
        if launch.returned is not None:
            return launch.returned
        assert isinstance(fresh, list)
        return fresh

    def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Microseconds]:
        pair, stream = _Pair(), torch.cuda.current_stream()
        self._sweep()
        spin()
        pair.start.record(stream)
        fresh = self.replay(copy)
        pair.end.record(stream)
        return fresh, pair.microseconds

    def returned(self, copy: int) -> list[torch.Tensor] | None:
        return self._launches[copy].returned

    def kernels(self) -> int | None:
        """Kernels that a replay launches, copies and fills left out; None of eager launches."""
        graph = self._launches[0].graph
        return None if graph is None else kernels_of(graph)


def graph_timer(
    runs: list[Run], column: str, sweep: Callable[[], object] | None = None, note: str = ""
) -> EventTimer:
    """Capture each run and time its replays; eager launches, and the reason, where that fails."""
    swept = sweep is not None
    try:
        pool = torch.cuda.graph_pool_handle()
        launches = [capture(run, pool, WARM_UPS if i == 0 else 1) for i, run in enumerate(runs)]
        spaced = "L2 sweep before each, host ahead" if swept else "host ahead"
        method = f"CUDA graph replay, event pair, {spaced}"
    except CaptureError as error:
        launches = [Launch(run, None) for run in runs]
        spaced = "L2 sweep and spin before each" if swept else "spin before each"
        method = f"eager launches, event pair, {spaced}"
        note = "; ".join(filter(None, (note, f"graph capture failed: {error}")))
    return EventTimer(launches, method, f"{column}; {note}" if note else column, sweep)


class CaptureError(RuntimeError):
    """A run that cannot be captured; the message is the first line of the cause."""


def capture(run: Run, pool: object = None, warm_ups: int = WARM_UPS) -> Launch:
    """Warm `run` up on a side stream and capture it. Graphs of one rotation may share a `pool`:
    they replay one after another.

    Without `torch.cuda.graph`, whose garbage collection at every entry would take most of a run.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
        torch.cuda.synchronize()
        try:
            graph.capture_begin(pool=pool)  # type: ignore[arg-type]
            try:
                returned = run()
            finally:
                graph.capture_end()
            graph.instantiate()
        except Exception as error:
            raise CaptureError(first_cause(error)) from error
    torch.cuda.current_stream().wait_stream(side)
    return Launch(graph.replay, returned, graph)


def _nothing() -> None:
    pass


def event_pair_us() -> float:
    """An empty event pair's own time on the current device, median."""
    empty = [Sample(_nothing, _nothing)] * OVERHEAD_PAIRS
    return float(statistics.median(_timed(empty, [_Pair() for _ in empty])))


class _Pair:
    """Two events, to be used again and again."""

    def __init__(self) -> None:
        self.start, self.end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def microseconds(self) -> float:
        """From start to end, once the device has come to the end."""
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) * 1e3


def _timed(
    samples: Sequence[Sample], pairs: Sequence[_Pair], next_cycles: int = NEXT_SPIN_CYCLES
) -> list[float]:
    """Microseconds of each sample, enqueued one after another and read at the end."""
    stream, cycles = torch.cuda.current_stream(), FIRST_SPIN_CYCLES
    used = list(zip(samples, pairs, strict=False))
    for sample, pair in used:
        sample.before()
        if cycles:
            spin(cycles)
        pair.start.record(stream)
        sample.launch()
        pair.end.record(stream)
        cycles = next_cycles
    torch.cuda.synchronize()
    return [pair.microseconds() for _, pair in used]


def spin(cycles: int = FIRST_SPIN_CYCLES) -> None:
    """Keep the device busy while the host enqueues what follows."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _clock_pair_us() -> float:
    def pair() -> int:
        start = perf_counter_ns()
        return perf_counter_ns() - start

    return statistics.median(pair() for _ in range(OVERHEAD_PAIRS)) * 1e-3
