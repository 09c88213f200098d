"""A timed op must still do its work: kept outputs, skipped work and broken inputs are caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megabench.bench.copies import Copy
from megabench.bench.ops import Target
from megabench.bench.pace import HostPace
from megabench.bench.recheck import DEAF, KEPT, Expected, last_round, recheck
from megabench.bench.timers import HostTimer, Timer

Run = Callable[[], list[torch.Tensor]]
MEDIAN_US = 40_000.0
"""More than a run here takes, changed input or not."""


def double(x: torch.Tensor, out: torch.Tensor) -> Run:
    def run() -> list[torch.Tensor]:
        torch.mul(x, 2.0, out=out)
        return [x * 3.0]

    return run


def judge(copies: list[Copy], timer: Timer, expected: Expected) -> str | None:
    """What is found wrong after timing."""
    wrong = last_round(copies, timer, expected)[1]
    return wrong or recheck(copies, timer, expected, MEDIAN_US)[0]


class Replay:
    """A timer whose timed form may differ from the untimed run, as a captured graph's may."""

    method, note, sets, overhead_us = "fake", "", 1, None

    def __init__(self, run: Run, static: list[torch.Tensor] | None = None) -> None:
        self.counts, self.turn, self._run, self._static = [0], 0, run, static

    def take(self, n: int) -> list[float]:
        for _ in range(n):
            self._run()
        return [1.0] * n

    def replay(self, copy: int) -> list[torch.Tensor]:
        return self._run()

    def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Callable[[], float]]:
        return self._run(), lambda: 1.0

    def returned(self, copy: int) -> list[torch.Tensor] | None:
        return self._static


class Rotation(Replay):
    """Graphs in rotation, each with its own tensor. An earlier one scratches in the next one's, as
    graphs that share a pool may."""

    def __init__(self, x: torch.Tensor, copies: int, turn: int = 0) -> None:
        self.x, self.outs, self.sets = x, [torch.empty(8) for _ in range(copies)], copies
        self.counts, self.turn, self.idle = [0] * copies, turn, -1

    def replay(self, copy: int) -> list[torch.Tensor]:
        if copy + 1 < self.sets:
            self.outs[copy + 1].fill_(-1.0)
        if copy != self.idle:
            torch.mul(self.x, 3.0, out=self.outs[copy])
        return [self.outs[copy]]

    def take(self, n: int) -> list[float]:
        turns = [(self.turn + i) % self.sets for i in range(n)]
        for turn in turns:
            self.replay(turn)
            self.counts[turn] += 1
        self.turn = (self.turn + n) % self.sets
        return [float(turn) for turn in turns]

    def returned(self, copy: int) -> list[torch.Tensor] | None:
        return [self.outs[copy]]


def case() -> tuple[torch.Tensor, torch.Tensor, Copy, Expected]:
    x, out = torch.arange(1.0, 9.0), torch.empty(8)
    copy = Copy(double(x, out), [Target(out)], flippable=x)
    return x, out, copy, Expected(copy)


def test_an_honest_op_passes_and_leaves_its_input_as_it_was() -> None:
    x, _, copy, expected = case()
    before = x.clone()
    assert judge([copy], HostTimer([copy.run], "host"), expected) is None
    assert torch.equal(x, before)


def test_the_untimed_runs_are_made_once_for_all_columns() -> None:
    x, out = torch.arange(1.0, 9.0), torch.empty(8)
    runs: list[int] = []

    def counted() -> list[torch.Tensor]:
        runs.append(1)
        return double(x, out)()

    copy = Copy(counted, [Target(out)], flippable=x)
    expected = Expected(copy)
    for _ in range(3):
        assert judge([copy], Replay(double(x, out)), expected) is None
    assert len(runs) == 2


def test_an_op_that_skips_its_work_on_replay_is_caught() -> None:
    x, _, copy, expected = case()
    kept = x * 3.0
    assert judge([copy], Replay(lambda: [kept]), expected) is not None


def test_an_op_that_returns_a_cached_output_is_caught_by_a_changed_input() -> None:
    x, out, copy, expected = case()
    cached = (x * 2.0).clone(), (x * 3.0).clone()

    def from_cache() -> list[torch.Tensor]:
        out.copy_(cached[0])
        return [cached[1].clone()]

    wrong = judge([copy], Replay(from_cache), expected)
    assert wrong is not None
    assert "changed input" in wrong


def test_an_op_that_ignores_its_input_every_time_is_caught_where_it_must_not() -> None:
    x, out, _, _ = case()
    kept = x * 3.0

    def run() -> list[torch.Tensor]:
        out.fill_(2.0)
        return [kept.clone()]

    for sensitive in (True, False):
        copy = Copy(run, [Target(out)], flippable=x, sensitive=sensitive)
        wrong = judge([copy], HostTimer([run], "host"), Expected(copy))
        assert (wrong is not None) == sensitive


def test_a_graph_that_leaves_its_returned_tensor_untouched_is_caught() -> None:
    x, out, copy, expected = case()
    static = [x * 3.0]

    def replay() -> list[torch.Tensor]:
        torch.mul(x, 2.0, out=out)
        return static

    assert judge([copy], Replay(replay, static), expected) is not None


def test_an_output_that_is_right_and_written_again_before_the_device_is_idle_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, out, copy, expected = case()
    assert judge([copy], Replay(copy.run), expected) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: torch.mul(x, 2.0, out=out))
    wrong = judge([copy], Replay(copy.run), expected)
    assert wrong == "outputs are still written when the clock has stopped"


@pytest.mark.parametrize(
    ("again_us", "changed_us", "host", "wrong", "note"),
    [
        (9.0, 25.0, 1.0, None, ""),
        (9.0, 90.0, 20.0, "with a changed input it takes 90.0 us, not 9.0", ""),
        (30.0, 70.0, 1.0, None, "when checked, samples took 30.0 us, not 9.0"),
        (90.0, 90.0, 1.0, "with a changed input it takes 90.0 us, not 9.0", ""),
        (90.0, 90.0, 20.0, None, "when checked, samples took 90.0 us, not 9.0"),
    ],
    ids=["as ever", "done before", "busy device", "honest when watched", "busy host"],
)
def test_a_changed_input_may_take_no_longer_than_samples_do_now(
    again_us: float,
    changed_us: float,
    host: float,
    wrong: str | None,
    note: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostPace, "slowdown", lambda _: host)
    x, _, copy, expected = case()
    plain = x.clone()

    class Clocked(Replay):
        def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Callable[[], float]]:
            taken = again_us if torch.equal(x, plain) else changed_us
            return self._run(), lambda: taken

    found = "" if wrong is None else f"{wrong}: the samples found their work done"
    assert recheck([copy], Clocked(copy.run), expected, 9.0) == (found or None, note)


@pytest.mark.parametrize("known", ["plain", "changed", "nothing"])
def test_a_changed_input_that_is_fast_at_last_is_followed_as_well(known: str) -> None:
    """Slow and right with the whole input changed, then quick with what is known already."""
    x, out, _, _ = case()
    answers = {"plain": (x * 2.0).clone(), "changed": (x * -2.0).clone()}

    def run() -> list[torch.Tensor]:
        partly = x[0] < 0 < x[-1]
        if not partly or known != "nothing":
            out.copy_(answers[known] if partly else x * 2.0)
        return []

    class Clocked(Replay):
        def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Callable[[], float]]:
            taken = 90.0 if x[-1] < 0 else 9.0
            return self._run(), lambda: taken

    copy = Copy(run, [Target(out)], flippable=x, sensitive=True)
    wrong, _ = recheck([copy], Clocked(run), Expected(copy), 9.0)
    told = DEAF if known == "nothing" else KEPT
    assert wrong == told


def test_the_host_is_as_slow_as_it_is_beside_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 30, 100, 110, 200, 225])
    monkeypatch.setattr("megabench.bench.pace.perf_counter_ns", lambda: next(ticks))
    pace = HostPace()
    assert [pace.slowdown() for _ in range(3)] == [1.0, 1.0, 2.5]


def test_tries_end_with_the_first_that_takes_no_longer() -> None:
    _, _, copy, expected = case()
    taken = iter([90.0, 90.0, 9.0, 9.0, 25.0])
    """A changed input twice, two samples, a changed input."""

    class Clocked(Replay):
        def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Callable[[], float]]:
            return self._run(), lambda: next(taken)

    assert recheck([copy], Clocked(copy.run), expected, 9.0) == (None, "")
    assert list(taken) == []


def test_every_copy_is_compared_and_the_wrong_one_is_named() -> None:
    x, _, copy, expected = case()
    lazy = Copy(lambda: [x * 3.0], [Target(torch.empty(8))], flippable=x)
    timer = HostTimer([copy.run, lazy.run], "host")
    wrong = judge([copy, lazy], timer, expected)
    assert wrong == "copy 1: outputs after timing differ from the untimed run's"


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_the_last_sample_of_every_graph_of_a_rotation_is_looked_at(turn: int) -> None:
    x = torch.arange(1.0, 9.0)
    copies = [Copy(lambda: [x * 3.0]) for _ in range(3)]
    timer, expected = Rotation(x, 3, turn), Expected(copies[0])
    samples = [float((turn + i) % 3) for i in range(3)]
    assert last_round(copies, timer, expected) == (samples, None)
    assert timer.counts == [1, 1, 1]
    for idle in range(3):
        timer.idle = idle
        _, wrong = last_round(copies, timer, expected)
        assert wrong == f"copy {idle}: outputs after timing differ from the untimed run's"


def test_a_graph_that_leaves_its_work_to_another_is_caught_when_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.arange(1.0, 9.0)
    copies = [Copy(lambda: [x * 3.0], flippable=x) for _ in range(3)]

    class Shared(Rotation):
        def replay(self, copy: int) -> list[torch.Tensor]:
            if copy != 1:
                for out in self.outs[copy:]:
                    torch.mul(self.x, 3.0, out=out)
            return [self.outs[copy]]

        def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Callable[[], float]]:
            return self.replay(copy), lambda: 1.0

    timer, expected = Shared(x, 3), Expected(copies[0])
    assert last_round(copies, timer, expected)[1] is None
    found = []
    for drawn in range(3):
        monkeypatch.setattr("secrets.randbelow", lambda _, drawn=drawn: drawn)
        found.append(recheck(copies, timer, expected, MEDIAN_US)[0])
    assert found == [None, f"copy 1: {DEAF}", None]


@pytest.mark.parametrize("turn", [0, 2])
def test_the_last_samples_of_launches_are_taken_in_turn(turn: int) -> None:
    _, _, copy, expected = case()
    ran: list[int] = []

    class Turns(Replay):
        def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Callable[[], float]]:
            ran.append(copy)
            return self._run(), lambda: float(copy)

    timer = Turns(copy.run)
    timer.counts, timer.turn = [0] * 3, turn
    taken, _ = last_round([copy] * 3, timer, expected)
    assert ran == taken == [(turn + i) % 3 for i in range(3)]
    assert timer.counts == [1] * 3


def test_the_last_sample_of_a_launch_is_a_sample_and_finds_no_earlier_output() -> None:
    _, _, copy, expected = case()
    timer = Replay(copy.run)
    assert last_round([copy], timer, expected) == ([1.0], None)
    assert timer.counts == [1]
    kept = copy.run()
    _, wrong = last_round([copy], Replay(lambda: kept), expected)
    assert wrong == "outputs after timing differ from the untimed run's"


def test_a_form_that_is_timed_and_stands_for_all_runs_a_changed_input_once() -> None:
    x, out = torch.arange(1.0, 9.0), torch.empty(8)
    runs: list[bool] = []

    def counted() -> list[torch.Tensor]:
        runs.append(bool(x[0] < 0))
        return double(x, out)()

    copy = Copy(counted, [Target(out)], flippable=x, sensitive=True)
    timer = HostTimer([counted], "eager")
    expected = Expected(copy, timer)
    assert judge([copy], Replay(double(x, out)), expected) is None
    assert judge([copy], timer, expected) is None
    assert runs == [False, True, False]


def test_an_argument_handed_back_is_not_poisoned() -> None:
    x = torch.arange(4.0)
    copy = Copy(lambda: [x], flippable=x, inputs=frozenset({x.untyped_storage().data_ptr()}))
    expected = Expected(copy)
    assert judge([copy], Replay(copy.run, [x]), expected) is None


def test_zeros_of_a_changed_input_change_nothing_and_need_not() -> None:
    x = torch.tensor([1.0, 2.0, 0.0, 0.0])
    copy = Copy(lambda: [x.sum().mul(2.0)], flippable=x, sensitive=True)
    times = iter([90.0, 9.0])

    class Clocked(Replay):
        def timed_replay(self, copy: int) -> tuple[list[torch.Tensor], Callable[[], float]]:
            taken = next(times)
            return self._run(), lambda: taken

    assert recheck([copy], Clocked(copy.run), Expected(copy), 9.0) == (None, "")
