"""The decisions of the gate: pure functions that return (verdict, reason code, message)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from megabench.gate.policy import CorrectnessRule, KernelRule, TimeRule
from megabench.gate.pool import Change, Pairs, Times, compare_times

Verdict = Literal["SAME", "FASTER", "SLOWER", "AMBIGUOUS", "MISSING", "NEW", "INVALID", "BROKEN"]
WRONG: tuple[Verdict, ...] = ("BROKEN", "SLOWER")
UNDECIDED: tuple[Verdict, ...] = ("INVALID", "MISSING", "AMBIGUOUS")
ORDER: tuple[Verdict, ...] = (*WRONG, *UNDECIDED, "NEW", "FASTER", "SAME")
"""Worst first."""
EXIT_GOOD, EXIT_WRONG, EXIT_UNDECIDED = 0, 1, 3


class Decision(NamedTuple):
    """What the gate says of one thing, and why."""

    verdict: Verdict
    code: str
    """A stable reason in a word or two, for scripts."""
    message: str
    """One line for a person."""


RUN_AGAIN = ("slower", "overlap", "clock", "noisy")
"""Codes of times that look slower, or too noisy to tell: more processes may settle them."""


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """1 when anything is slower or broken, else 3 when anything is undecided, else 0."""
    found = set(verdicts)
    if found & set(WRONG):
        return EXIT_WRONG
    return EXIT_UNDECIDED if found & set(UNDECIDED) else EXIT_GOOD


def judge_time(
    base: Times, run: Times, rule: TimeRule, processes: int, rerun: Times | None = None
) -> Decision:
    """A time against its baseline, both as medians over at least `processes` processes.

    With a re-run the processes of both runs are judged together, and SLOWER also needs the re-run
    alone to be slower by both thresholds.
    """
    first = _judge_once(base, run, rule, processes)
    if rerun is None:
        return first
    both = _judge_once(base, run.joined(rerun), rule, processes)
    again = rerun.median_us / base.median_us - 1
    agrees = again >= rule.relative and rerun.median_us - base.median_us >= rule.absolute_us
    if both.verdict == "SLOWER" and agrees:
        return both._replace(message=f"{both.message}; the re-run agrees ({_percent(again)})")
    if "SLOWER" in (first.verdict, both.verdict):
        message = f"{first.message}; the re-run does not agree ({_percent(again)})"
        return Decision("AMBIGUOUS", "not-reproduced", message)
    return both


def judge_pairs(base: Pairs, run: Pairs, change: Change, rule: TimeRule) -> Decision:
    """A ratio to a reference backend against the baseline's, both from ABBA pairs."""
    decision = decide(change, rule)
    ratios = f"ratio {base.ratio:.3f} -> {run.ratio:.3f} over {run.pairs} pairs"
    return decision._replace(message=f"{ratios}; {decision.message}")


def _judge_once(base: Times, run: Times, rule: TimeRule, processes: int) -> Decision:
    for name, times in (("the run", run), ("the baseline", base)):
        if times.processes < processes:
            message = f"{name} has {times.processes} of {processes} processes"
            return Decision("AMBIGUOUS", "few-processes", message)
    change = compare_times(base, run, rule.level)
    if change is None:
        message = f"too few processes for an interval at {rule.level:g}"
        return Decision("AMBIGUOUS", "few-processes", message)
    return decide(change, rule)


def decide(change: Change, rule: TimeRule) -> Decision:
    """The verdict on a change in time.

    SLOWER needs both thresholds, intervals apart, and as large a rise in cycles where the clock is
    known. SAME needs samples that leave no room for a slowdown of the threshold's size, so that
    noise is never taken for agreement.
    """
    if change.relative >= rule.relative:
        return _slower(change, rule)
    if _is_faster(change, rule):
        return Decision("FASTER", "faster", _moved(change))
    if change.cycles is not None and change.cycles >= rule.relative:
        message = f"{_moved(change)}, but cycles {_percent(change.cycles)}: the clock rose"
        return Decision("AMBIGUOUS", "clock-hides", message)
    if change.room >= rule.relative:
        message = f"{_moved(change)}; a slowdown of {_percent(change.room)} fits the samples too"
        return Decision("AMBIGUOUS", "noisy", message)
    code = "not-slower" if change.relative <= -rule.relative else "same"
    return Decision("SAME", code, f"{_moved(change)}, at most {_percent(change.room)}")


def _slower(change: Change, rule: TimeRule) -> Decision:
    moved = _moved(change)
    if change.absolute_us < rule.absolute_us:
        message = f"{moved}, below {rule.absolute_us:g} us"
        return Decision("AMBIGUOUS", "below-resolution", message)
    if not change.apart:
        return Decision("AMBIGUOUS", "overlap", f"{moved}, but the intervals overlap")
    if change.cycles is None:
        return Decision("SLOWER", "slower", f"{moved}; no clock known, cycles not checked")
    cycles = f"cycles {_percent(change.cycles)}"
    if change.cycles < rule.relative:
        return Decision("AMBIGUOUS", "clock", f"{moved}, but {cycles}: the clock fell")
    return Decision("SLOWER", "slower", f"{moved}; {cycles}")


def _is_faster(change: Change, rule: TimeRule) -> bool:
    large = change.relative <= -rule.relative and change.absolute_us <= -rule.absolute_us
    sure = change.apart and change.room < rule.relative
    return large and sure and (change.cycles is None or change.cycles <= -rule.relative)


def judge_kernels(base: int, run: set[int], rule: KernelRule) -> Decision:
    """Kernels a step launches; `run` holds the counts seen in its processes."""
    if len(run) != 1:
        counts = " or ".join(str(n) for n in sorted(run))
        return Decision("AMBIGUOUS", "kernels-vary", f"processes launched {counts} kernels a step")
    now = next(iter(run))
    message = f"{base} -> {now} kernels"
    if now > base + rule.extra:
        return Decision("SLOWER", "kernels", message)
    return Decision("FASTER" if now < base else "SAME", "kernels", message)


def judge_stages(base: dict[str, float], run: dict[str, float], rule: CorrectnessRule) -> Decision:
    """Worst error / bound by stage, of a case whose every stage is within its bound."""
    gone = [name for name in base if name not in run]
    if gone and not run:
        return Decision("MISSING", "not-validated", "no stage was validated (--no-validate?)")
    if gone:
        message = f"{len(gone)} of {len(base)} stages not validated, {gone[0]} first"
        return Decision("MISSING", "not-validated", message)
    for name in base:
        if not run[name] <= rule.growth * base[name] + rule.slack:  # NaN grew, too
            message = f"{name}: error / bound {base[name]:.3g} -> {run[name]:.3g}"
            return Decision("BROKEN", "error-growth", message)
    worst = max(run.values(), default=0.0)
    return Decision("SAME", "correct", f"{len(run)} stages, worst error / bound {worst:.3g}")


def _moved(change: Change) -> str:
    return f"{digits(change.base_us)} -> {digits(change.run_us)} us, {_percent(change.relative)}"


def digits(us: float) -> str:
    """A time in four digits, but nothing below a nanosecond."""
    places = 3 if us <= 0 else max(0, 3 - math.floor(math.log10(us)))
    return f"{us:.{min(places, 3)}f}"


def _percent(value: float) -> str:
    return f"{round(100 * value, 2) + 0.0:+.2f} %"  # + 0.0: no "-0.00"
