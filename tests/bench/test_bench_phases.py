"""What of an op's wall time is set-up, what timed, and what the harness adds."""

from __future__ import annotations

import time

import torch

from megabench.bench.copies import Copy
from megabench.bench.measure import Arm, Bench, measure
from megabench.bench.sampling import Policy
from megabench.bench.telemetry import NullProbe
from megabench.bench.work import Work
from megabench.results import Ceilings, Phases

POLICY = Policy(min_samples=3, min_seconds=0.0, timeout=5.0, max_samples=6)


class Op:
    """Doubles a tensor, and knows how long each run was."""

    def __init__(self, first: float = 0.0, changed: float = 0.0) -> None:
        self.input, self._first, self._changed = torch.arange(1.0, 9.0), first, changed
        self.seconds: list[float] = []

    def __call__(self) -> list[torch.Tensor]:
        start = time.perf_counter()
        time.sleep(self._changed if self.input[0] < 0 else 0.001 if self.seconds else self._first)
        doubled = self.input * 2.0
        self.seconds.append(time.perf_counter() - start)
        return [doubled]


def spent(op: Op) -> tuple[list[float], Phases]:
    """The samples of an op on a CPU, in seconds, and where the time of measuring it went."""
    ceilings = Ceilings(device_name="none", ceilings=[], seconds=0.0)
    bench = Bench(torch.device("cpu"), ceilings, NullProbe(), POLICY)
    arm = Arm("mine", "wq_b", Work(), 1, 0, Copy(op, flippable=op.input), lambda _: [])
    bench.clock.start()
    ((row,),), _ = measure(bench, [arm])
    return [us * 1e-6 for us in row.samples_us], bench.clock.stop(1)[1]


def test_the_run_that_compiles_is_set_up() -> None:
    _, phases = spent(Op(first=0.5))
    assert phases.setup_s > 0.5
    assert phases.timed_s + phases.overhead_s < 0.5


def test_runs_that_checks_time_are_timed_runs_as_samples_are() -> None:
    """A changed input that takes long is tried again and again."""
    op = Op(changed=0.02)
    samples, phases = spent(op)
    assert len(op.seconds) > 1 + len(samples) + 7
    assert phases.timed_s > sum(op.seconds[1:]) > sum(samples) + 7 * 0.02
