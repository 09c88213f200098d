"""Differential validation: a production step against the golden model, stage by stage.

`runner.validate_case` runs a case; `trace` watches the backend; `truth` says what the case means;
`stages` judge what was written; `guards` watch what must not be. How the bounds come about:
docs/validation.md.
"""

from megabench.validate.runner import (
    Skipped,
    examine,
    skip_reason,
    validate_case,
)
from megabench.validate.store import Store
from megabench.validate.trace import Call, TracingBackend

__all__ = [
    "Call",
    "Skipped",
    "Store",
    "TracingBackend",
    "examine",
    "skip_reason",
    "validate_case",
]
