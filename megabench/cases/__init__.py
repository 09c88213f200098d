"""The case matrix: YAML files to stably named, canonically hashed cases. Imports no torch."""

from megabench.cases.batch import Request, parse_batch
from megabench.cases.case import DEFAULT_MODEL, FAMILIES, Case, Family, Sink
from megabench.cases.located import CaseError, nearest
from megabench.cases.suite import AXES, Suite, at_seeds, find_suite, load_suite, packaged_suites

__all__ = [
    "AXES",
    "DEFAULT_MODEL",
    "FAMILIES",
    "Case",
    "CaseError",
    "Family",
    "Request",
    "Sink",
    "Suite",
    "at_seeds",
    "find_suite",
    "load_suite",
    "nearest",
    "packaged_suites",
    "parse_batch",
]
