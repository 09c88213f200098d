"""The gate: a run against a recorded baseline, with verdicts that say why.

`compare` judges, `find_baseline` and `plan_update` keep what to judge by, `show` and `write_junit`
say what came out. `megabench.gate.verdicts` holds every decision as a pure function.
"""

from __future__ import annotations

from megabench.gate.baseline import Baseline, baseline_of, find_baseline
from megabench.gate.compare import compare
from megabench.gate.findings import Finding, GateResult
from megabench.gate.policy import Policy, load_policy
from megabench.gate.processes import GateError, read_processes, read_rerun
from megabench.gate.verdicts import Decision, Verdict

__all__ = [
    "Baseline",
    "Decision",
    "Finding",
    "GateError",
    "GateResult",
    "Policy",
    "Verdict",
    "baseline_of",
    "compare",
    "find_baseline",
    "load_policy",
    "read_processes",
    "read_rerun",
]
