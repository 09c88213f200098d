"""A run against its baseline: one finding for everything either of them has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from megabench.gate.baseline import (
    CORRECTNESS,
    KERNELS,
    Baseline,
    CorrectnessEntry,
    KernelsEntry,
    PairsEntry,
    TimeEntry,
)
from megabench.gate.environment import Mismatch, applying, clock_policy, mismatches
from megabench.gate.evidence import (
    explain_kernels,
    explain_pairs,
    explain_stages,
    explain_times,
)
from megabench.gate.findings import Finding, GateResult, nothing_compared
from megabench.gate.observe import WHOLE, Key, Observed, PairKey, TimeKey, observe
from megabench.gate.policy import Policy
from megabench.gate.pool import Change, Pairs, Times, compare_pairs, compare_times
from megabench.gate.processes import check_rerun, cut_short, header_of, rows_of
from megabench.gate.verdicts import (
    ORDER,
    Decision,
    digits,
    judge_kernels,
    judge_pairs,
    judge_stages,
    judge_time,
)
from megabench.results import Run
from megabench.results.names import STEP


@dataclass
class _Recorded:
    """A case of the baseline, its entries by what they tell of."""

    case_hash: str
    times: dict[TimeKey, Times] = field(default_factory=dict)
    pairs: dict[PairKey, Pairs] = field(default_factory=dict)
    kernels: int | None = None
    stages: dict[str, float] | None = None


def compare(
    baseline: Baseline, runs: list[Run], policy: Policy, rerun: list[Run] | None = None
) -> GateResult:
    """Judge a run's processes, and those of its re-run where there are any, by a baseline.

    GateError when the re-run is of other code or of another machine.
    """
    rerun = rerun or []
    check_rerun(runs, rerun)
    found = mismatches(
        baseline.header.environment,
        header_of(runs).environment,
        policy.environment.ignore,
        (baseline.header.clocks, clock_policy(runs)),
    )
    seen, again, recorded = observe(runs), observe(rerun), _recorded(baseline)
    findings: list[Finding] = []
    for key in sorted(recorded.keys() | seen.keys()):
        comparison = _Case(key, recorded.get(key), seen.get(key), again.get(key), policy, found)
        findings += comparison.findings()
    findings += _environment(found, policy) + _cut_short([*runs, *rerun])
    if policy.missing == "ignore":
        findings = [f for f in findings if (f.op, f.decision.code) != (WHOLE, "missing")]
    findings.sort(key=lambda f: (ORDER.index(f.decision.verdict), not f.gated))
    timed = [(f.case_id, f.op, f.backend, f.column) for f in findings]
    return GateResult(
        findings,
        found,
        notes=[*policy.idle_rules(timed), *_hints(findings, policy)],
        baseline=baseline.header,
        processes=len(runs),
        rerun=len(rerun),
        rows=rows_of(runs, rerun),
    )


@dataclass(frozen=True)
class _Case:
    """One case on one backend, as recorded and as seen."""

    key: Key
    base: _Recorded | None
    run: Observed | None
    rerun: Observed | None
    policy: Policy
    environment: list[Mismatch]

    def findings(self) -> Iterator[Finding]:
        fault = None if self.run is None else self.run.fault()
        if fault is None and self.rerun is not None:
            fault = self.rerun.fault()
        if fault is not None:
            yield self._whole(Decision("BROKEN", *fault), CORRECTNESS)
        elif self.run is None:
            yield self._whole(Decision("MISSING", "missing", "the run does not have this case"))
        elif (reason := self.run.skipped()) is not None:
            if self.base is not None:
                yield self._whole(Decision("MISSING", "skipped", f"skipped: {reason}"))
        elif self.base is None:
            yield self._whole(Decision("NEW", "new", "the baseline does not have this case"))
            for key in self.run.time_keys():
                if self.run.problems(*key):
                    yield from self._time(_Recorded(self.run.case_hash), self.run, key)
        elif self.base.case_hash != self.run.case_hash:
            hashes = f"hash {self.base.case_hash} -> {self.run.case_hash}"
            message = f"the case is not what it was in the baseline: {hashes}"
            yield self._whole(Decision("INVALID", "case-changed", message))
        else:
            yield from self._correctness(self.base, self.run)
            yield from self._kernels(self.base, self.run)
            for key in dict.fromkeys([*self.base.times, *self.run.time_keys()]):
                yield from self._time(self.base, self.run, key)

    def _correctness(self, base: _Recorded, run: Observed) -> Iterator[Finding]:
        other_inputs = any(m.field == "weights" for m in self.environment)
        if base.stages is not None and not other_inputs:
            now, rule = run.stages(), self.policy.correctness
            yield Finding(
                *self.key,
                WHOLE,
                CORRECTNESS,
                judge_stages(base.stages, now, rule),
                base=_worst(base.stages),
                run=_worst(now),
                evidence=tuple(explain_stages(base.stages, now, rule)),
            )

    def _kernels(self, base: _Recorded, run: Observed) -> Iterator[Finding]:
        if base.kernels is None:
            return
        counts, rule = run.kernels(), self.policy.kernels
        decision = Decision("MISSING", "missing", "the run did not count the step's kernels")
        if counts:
            decision = judge_kernels(base.kernels, counts, rule)
        yield Finding(
            *self.key,
            STEP,
            KERNELS,
            decision,
            base=str(base.kernels),
            run="/".join(str(n) for n in sorted(counts)),
            evidence=tuple(explain_kernels(base.kernels, counts, rule)),
        )

    def _time(self, base: _Recorded, run: Observed, key: TimeKey) -> Iterator[Finding]:
        op, column = key
        if column not in self.policy.columns or applying(self.environment, column):
            return
        case_id, backend = self.key
        rule = self.policy.rule(case=case_id, op=op, backend=backend, column=column)
        old, new = base.times.get(key), run.times(op, column)
        again = self.rerun.times(op, column) if self.rerun else None
        if again is not None and not again.processes:
            again = None
        both = new if again is None else new.joined(again)
        change = compare_times(old, both, rule.level) if old is not None else None
        evidence = explain_times(old, new, again, change, rule)
        if old is None:
            decision = Decision("NEW", "new", "the baseline does not have this time")
            if not new.processes:
                decision = _lost(run, key) or decision
        elif not new.processes and not run.problems(op, column):
            decision = Decision("MISSING", "missing", "the run did not time this")
        else:
            decision = judge_time(old, new, rule, self.policy.processes, again)
            if decision.code == "few-processes":
                decision, more, change = self._without_processes(base, run, key, decision)
                evidence += more
        yield Finding(
            *self.key,
            op,
            column,
            decision,
            gated=rule.gated,
            base=f"{digits(old.median_us)} us" if old else "",
            run=f"{digits(both.median_us)} us" if both.processes else "",
            evidence=tuple(evidence),
            base_us=old.median_us if old else None,
            run_us=both.median_us if both.processes else None,
            change=change,
        )

    def _without_processes(
        self, base: _Recorded, run: Observed, key: TimeKey, decision: Decision
    ) -> tuple[Decision, list[str], Change | None]:
        """What can be said with too few processes: why samples were lost, else pairs, else that."""
        lost = _lost(run, key)
        if lost is not None:
            return lost, [], None
        seen = run.pairs()
        for pair_key, old in base.pairs.items():
            new = seen.get(pair_key)
            enough = new and min(old.pairs, new.pairs) >= self.policy.pairs
            if pair_key[:2] == key and new and enough and key in base.times:
                case_id, backend = self.key
                rule = self.policy.rule(case=case_id, op=key[0], backend=backend, column=key[1])
                change = compare_pairs(old, new, base.times[key].median_us)
                judged = judge_pairs(old, new, change, rule)
                return judged, explain_pairs(pair_key[2], old, new), change
        return decision, [], None

    def _whole(self, decision: Decision, column: str = WHOLE) -> Finding:
        return Finding(*self.key, WHOLE, column, decision)


def _lost(run: Observed, key: TimeKey) -> Decision | None:
    """INVALID where a process took a time that does not stand."""
    problems = run.problems(*key)
    if not problems:
        return None
    lost = f"{len(problems)} of {len(run.rows)} processes cannot be used"
    return Decision("INVALID", "invalid", f"{lost}: {problems[0]}")


def _environment(found: list[Mismatch], policy: Policy) -> list[Finding]:
    """One INVALID finding when any gated column cannot be compared."""
    lost = [column for column in policy.columns if applying(found, column)]
    if not lost:
        return []
    fields = "; ".join(str(m) for m in found)
    message = f"{fields}; {', '.join(lost)} times were not compared"
    evidence = tuple(f"{m.field}: baseline {m.base}, run {m.run}" for m in found)
    decision = Decision("INVALID", "environment", message)
    return [Finding("*", "*", WHOLE, "environment", decision, evidence=evidence)]


def _cut_short(runs: list[Run]) -> list[Finding]:
    """One INVALID finding when a process did not end: its rows are not all there."""
    cut = cut_short(runs)
    if not cut:
        return []
    message = f"{len(cut)} of {len(runs)} processes crashed or were interrupted: {cut[0].path.name}"
    evidence = tuple(str(run.path) for run in cut)
    decision = Decision("INVALID", "cut-short", message)
    return [Finding("*", "*", WHOLE, WHOLE, decision, evidence=evidence)]


def _hints(findings: list[Finding], policy: Policy) -> list[str]:
    """What to do about findings that say nothing of the code, each once."""
    codes = {f.decision.code for f in findings if f.decision.code != "missing" or f.op == WHOLE}
    hints = {
        "few-processes": f"bench --processes {policy.processes} makes a run that can be judged, "
        "and a baseline that runs can be judged by",
        "environment": "to compare all the same, add fields to environment.ignore of a --policy; "
        "to start anew, take the run as the baseline",
        "missing": "to gate a part of a suite, say `missing: ignore` in a --policy",
    }
    notes = [f"{code}: {hint}" for code, hint in hints.items() if code in codes]
    if nothing_compared(findings):
        notes.append("nothing was compared: the run and the baseline have no case in common")
    return notes


def _worst(stages: dict[str, float]) -> str:
    """The worst error / bound in short; NaN is the worst of all."""
    values = stages.values()
    if not values:
        return ""
    return f"{math.nan if any(map(math.isnan, values)) else max(values):.3g}"


def _recorded(baseline: Baseline) -> dict[Key, _Recorded]:
    found: dict[Key, _Recorded] = {}
    for entry in baseline.entries:
        key = (entry.case_id, entry.backend)
        case = found.setdefault(key, _Recorded(entry.case_hash))
        match entry:
            case TimeEntry():
                times = Times(tuple(entry.medians_us), tuple(entry.clocks_mhz))
                case.times[entry.op, entry.column] = times
            case PairsEntry():
                pairs = Pairs(entry.ratio, entry.low, entry.high, entry.pairs)
                case.pairs[entry.op, entry.column, entry.reference] = pairs
            case KernelsEntry():
                case.kernels = entry.count
            case CorrectnessEntry():
                case.stages = entry.stages
    return found
