"""Outputs are compared after timing: a number stands only for work that was done.

Before each check the outputs are poisoned. Two checks: the last sample of every copy leaves bit for
bit what an untimed run wrote; and with the sign of an input flipped a copy that is drawn writes, as
it is timed, what an eager run of the flipped input writes, and something new where the op must. The
second catches an output that is kept, or left to another copy. It is timed, too, and compared with
samples that nobody poisoned: an op that computes only what it does not find done takes longer then.

An untimed run's outputs are read when the device is idle, a timed one's as soon as the clock has
stopped: work on a stream that the clock does not wait for is missing from them. A graph has none,
so the outputs of its copies are read after all have run. Memory that comes new from the allocator,
as it does without a graph, may hold an earlier run's right answer, though; so after one more run
poison is laid over its outputs, and nobody may write there until the device is idle.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import torch

from megabench.bench.copies import Copy, cloned, differ, same
from megabench.bench.ops import poison_word
from megabench.bench.pace import HOST, judge, slow
from megabench.bench.timers import HostTimer, Timer

KEPT = "outputs do not change with a changed input"
DEAF = "the timed form does not follow a changed input"
DIFFERENT = "outputs after timing differ from the untimed run's"
FLIP_LIMIT_US = 50_000.0
"""Ops slower than this are not run again for the changed-input check (eager CPU steps)."""
TRIES = 6
"""Changed inputs that must all take longer than the median of samples taken between them: noise
hits both, and not always."""


class Expected:
    """What an op writes when it is launched eagerly and every stream waited for: as its inputs are,
    and with a sign flipped. Each is run once for all the ways an op is timed."""

    def __init__(self, copy: Copy, timer: Timer | None = None) -> None:
        """`timer` times the copy's own run, where that is one of those ways."""
        self.timer = timer or HostTimer([copy.run], "untimed", _wait)
        self.checked_us: list[float] = []
        """Of the runs that checks have timed."""
        self._form = _Form(copy, self.timer, self.checked_us)
        with copy.poisoned([]):
            self.plain = cloned(copy.bits(self.timer.replay(0)))
        # Not beside a GPU, whose samples would be launched amid threads that still spin.
        for _ in range(0 if timer else 2):
            HOST.slowdown()

    @cached_property
    def changed(self) -> tuple[list[torch.Tensor], float]:
        """Outputs' bits with the sign flipped, and the run's microseconds."""
        return self._form.changed()

    def tried(self, halvings: int) -> list[torch.Tensor]:
        """Outputs' bits with the sign of a part flipped."""
        return self._form.changed(halvings)[0]


@dataclass(frozen=True)
class _Form:
    """A copy in the way it is timed."""

    copy: Copy
    timer: Timer
    times: list[float]
    """Microseconds of all runs that are timed here are added to it."""
    index: int = 0
    """Of the copy in its timer."""

    def changed(self, halvings: int = 0) -> tuple[list[torch.Tensor], float]:
        """Outputs' bits and microseconds of a timed replay that finds its input changed and nothing
        of its outputs."""
        returned = self.timer.returned(self.index) or []
        with self.copy.flipped(halvings), self.copy.poisoned(returned):
            fresh, microseconds = self.timer.timed_replay(self.index)
            self.times.append(microseconds())
            return cloned(self.copy.bits(fresh)), self.times[-1]

    def again(self) -> float:
        """Microseconds of a sample now, when its machine may be busier than it was: the second of
        two, which finds what the first has left."""
        self.times.extend(self.timer.timed_replay(self.index)[1]() for _ in range(2))
        return self.times[-1]

    def written_late(self) -> bool:
        """Whether outputs are written after a replay has ended for its clock: poison laid over them
        there must last until the device is idle.

        Twice, for the first time loads the kernels that poison, and a load may wait for the device.
        """
        return any([self._overwritten() for _ in range(2)])

    def _overwritten(self) -> bool:
        fresh = self.timer.replay(self.index)
        with self.copy.poisoned(fresh):
            _wait()
            laid = self.copy.bits(self.copy.outputs(fresh))
            return any(bool((bits != poison_word(bits)).any()) for bits in laid)


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def last_round(
    copies: list[Copy], timer: Timer, expected: Expected
) -> tuple[list[float], str | None]:
    """One more sample of every copy, each of which finds its outputs poisoned -> microseconds, and
    what is wrong with the outputs that a copy leaves."""
    samples = _one_by_one if timer.returned(0) is None else _in_one_go
    taken, found = samples(copies, timer, expected.plain)
    for index, wrong in enumerate(torch.stack(found).tolist()):
        if wrong:
            return taken, f"copy {index}: {DIFFERENT}" if len(copies) > 1 else DIFFERENT
    return taken, None


def _in_one_go(
    copies: list[Copy], timer: Timer, plain: list[torch.Tensor]
) -> tuple[list[float], list[torch.Tensor]]:
    """Of graphs, which return to tensors of their own: in rotation, as all samples are taken.

    Graphs share a pool: an earlier one may use what a later one returns. So the later ones are
    looked at before it is an earlier one's turn again.
    """
    returned = [timer.returned(index) or [] for index in range(len(copies))]
    taken: list[float] = []
    found: dict[int, torch.Tensor] = {}
    with ExitStack() as poisoned:
        for copy, kept in zip(copies, returned, strict=True):
            poisoned.enter_context(copy.poisoned(kept))
        for part in range(timer.turn, len(copies)), range(timer.turn):
            taken += timer.take(len(part))
            found |= {i: differ(copies[i].bits(returned[i]), plain) for i in part}
    return taken, [found[index] for index in range(len(copies))]


def _one_by_one(
    copies: list[Copy], timer: Timer, plain: list[torch.Tensor]
) -> tuple[list[float], list[torch.Tensor]]:
    """Of launches that return new tensors, each looked at before the next; in rotation, too."""
    taken: list[float] = []
    found: dict[int, torch.Tensor] = {}
    for index in [*range(timer.turn, len(copies)), *range(timer.turn)]:
        with copies[index].poisoned([]):
            fresh, microseconds = timer.timed_replay(index)
            found[index] = differ(copies[index].bits(fresh), plain)
            taken.append(microseconds())
        timer.counts[index] += 1
    return taken, [found[index] for index in range(len(copies))]


def recheck(
    copies: list[Copy], timer: Timer, expected: Expected, median_us: float
) -> tuple[str | None, str]:
    """What is wrong with the way a copy of `timer` does its work, None when it does it as in
    samples of `median_us` that nobody poisoned; and a note. One copy stands for all in what takes
    longer: late writes and a changed input, which must not take much more than the samples. It is
    drawn, so that none can leave its work to another."""
    index = secrets.randbelow(len(copies))
    form = _Form(copies[index], timer, expected.checked_us, index)
    wrong, note = None, ""
    if median_us <= FLIP_LIMIT_US:
        wrong, note = _unchanged(form, expected, median_us)
    launched = timer.returned(index) is None and not isinstance(timer, HostTimer)
    if wrong is None and launched and form.written_late():
        wrong = "outputs are still written when the clock has stopped"
    return (f"copy {index}: {wrong}" if wrong and len(copies) > 1 else wrong), note


def _unchanged(form: _Form, expected: Expected, median_us: float) -> tuple[str | None, str]:
    """What is wrong when the timed form finds its input changed and its outputs gone; a note."""
    copy = form.copy
    seen, changed_us = expected.changed if form.timer is expected.timer else form.changed()
    if copy.flippable is None:
        if not same(seen, expected.plain):
            return DIFFERENT, ""
    elif not same(seen, expected.changed[0]):
        return DEAF, ""
    elif copy.sensitive and same(seen, expected.plain):
        return KEPT, ""
    return _found_done(form, expected, changed_us, median_us)


def _found_done(
    form: _Form, expected: Expected, changed_us: float, median_us: float
) -> tuple[str | None, str]:
    """What is wrong when changed inputs, one after another, take longer than the samples did; a
    note when samples do, too, by now."""
    if not slow(changed_us, median_us):
        return None, ""
    again: list[float] = []
    host: list[float] = []
    for halvings in range(1, TRIES):
        seen, taken = form.changed(halvings)
        if not slow(taken, median_us):
            return _unfollowed(form.copy, seen, expected, halvings), ""
        changed_us = min(changed_us, taken)
        again.append(form.again())
        host.append(HOST.slowdown())
    return judge(changed_us, median_us, median(again), max(host))


def _unfollowed(
    copy: Copy, seen: list[torch.Tensor], expected: Expected, halvings: int
) -> str | None:
    """What is wrong with outputs that came as fast as the samples' for a part flipped: that they
    are old or missing, when a run on all of it flipped was slow."""
    both = zip(seen, expected.plain, strict=True)
    missing = [bool((b == poison_word(b)).all()) and not same([b], [plain]) for b, plain in both]
    if any(missing) or not same(seen, expected.tried(halvings)):
        return DEAF
    part, rest = copy.parts(halvings)
    kept = [old for old, moved in ((expected.plain, part), (expected.changed[0], rest)) if moved]
    return KEPT if copy.sensitive and any(same(seen, old) for old in kept) else None
