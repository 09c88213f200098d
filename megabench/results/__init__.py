"""Results: the rows of a run as pydantic models, and the folder they are kept in.

`results.jsonl` is the source of truth; CSV, Markdown and HTML are made from it by
`megabench.report`. One row a line: a `run` header, then `ceilings`, `case` and `comparison` rows
in the order they were made, then `end`.
"""

from __future__ import annotations

from megabench.results.environment import capture_environment, make_header
from megabench.results.schema import (
    SCHEMA_VERSION,
    BackendInfo,
    CaseResult,
    Ceiling,
    Ceilings,
    Comparison,
    CrossCheck,
    Environment,
    Interval,
    Measurement,
    Phases,
    Row,
    RunEnd,
    RunHeader,
    StageResult,
    Status,
    Telemetry,
)
from megabench.results.store import Run, RunFolder, StoreError, read_run

__all__ = [
    "SCHEMA_VERSION",
    "BackendInfo",
    "CaseResult",
    "Ceiling",
    "Ceilings",
    "Comparison",
    "CrossCheck",
    "Environment",
    "Interval",
    "Measurement",
    "Phases",
    "Row",
    "Run",
    "RunEnd",
    "RunFolder",
    "RunHeader",
    "StageResult",
    "Status",
    "StoreError",
    "Telemetry",
    "capture_environment",
    "make_header",
    "read_run",
]
