"""The evidence behind a verdict, in lines for a person."""

from __future__ import annotations

from megabench.gate.policy import CorrectnessRule, KernelRule, TimeRule
from megabench.gate.pool import Change, Pairs, Times


def explain_times(
    base: Times | None, run: Times, rerun: Times | None, change: Change | None, rule: TimeRule
) -> list[str]:
    """Each side's medians, interval, dispersion and clock, then the change and the thresholds."""
    lines = []
    for name, times in (("baseline", base), ("run", run), ("re-run", rerun)):
        if times is not None and times.processes:
            lines += _side(name, times, rule.level)
    if base is None or not run.processes:
        return lines
    if change is not None:
        both = "" if rerun is None else "run and re-run: "
        apart = "apart" if change.apart else "overlap"
        lines.append(
            f"change    {both}{100 * change.relative:+.2f} %, {change.absolute_us:+.3f} us; "
            f"intervals {apart}; room for {100 * change.room:+.2f} %"
        )
        if change.cycles is None:
            lines.append("cycles    not checked: the SM clock is not known on both sides")
        else:
            lines.append(f"cycles    {100 * change.cycles:+.2f} %")
    lines.append(
        f"rule      {100 * rule.relative:g} % and {rule.absolute_us:g} us, "
        f"intervals at {rule.level:g}{'' if rule.gated else ', not gated'}"
    )
    return lines


def explain_pairs(reference: str, base: Pairs, run: Pairs) -> list[str]:
    """Both sides' ratio to the reference backend."""
    lines = [
        f"{name:9} {p.ratio:.4f} x {reference} [{p.low:.4f}, {p.high:.4f}] over {p.pairs} pairs"
        for name, p in (("baseline", base), ("run", run))
    ]
    return [*lines, "clock     shared by the interleaved arms: the ratio is the same in cycles"]


def explain_kernels(base: int, run: set[int], rule: KernelRule) -> list[str]:
    """The counts of both sides; `run` holds those of all its processes."""
    counts = ", ".join(str(n) for n in sorted(run)) or "not counted"
    return [f"baseline {base}", f"run      {counts}", f"rule     at most {rule.extra} more"]


def explain_stages(
    base: dict[str, float], run: dict[str, float], rule: CorrectnessRule
) -> list[str]:
    """The worst error / bound of every stage on both sides, then the rule."""
    width = max((len(name) for name in base | run), default=0)
    lines = [
        f"{name:{width}}  {_ratio(base, name)} -> {_ratio(run, name)}"
        for name in dict.fromkeys([*base, *run])
    ]
    return [*lines, f"rule: at most {rule.growth:g} x baseline + {rule.slack:g}"]


def _ratio(stages: dict[str, float], name: str) -> str:
    return f"{stages[name]:.3g}" if name in stages else "none"


def _side(name: str, times: Times, level: float) -> list[str]:
    listed = " ".join(f"{t:.3f}" for t in times.medians_us)
    found = times.interval(level)
    interval = f" [{found[0]:.3f}, {found[1]:.3f}]" if found else " (too few for an interval)"
    cv = f", CV {100 * times.cv:.2f} %" if times.cv is not None else ""
    clock = f", SM clock {times.clock_mhz:.0f} MHz" if times.clock_mhz else ""
    return [
        f"{name:9} {times.median_us:.3f} us{interval} of {times.processes} processes{cv}{clock}",
        f"{'':9} medians {listed}",
    ]
