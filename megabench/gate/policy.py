"""The gate's policy: thresholds with defaults, changed per case, op, backend or column by globs.

    processes: 5
    rules:
      - {op: pad_insert, absolute_us: 0.5}
      - {case: "*-tp8-*", op: "wo_*", relative: 0.04}

Rules are read in order; a later one that matches overrides what it names and inherits the rest.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megabench.cases.located import CaseError, Located, nearest, read_located
from megabench.gate.pool import coverage

Fraction = Annotated[float, Field(gt=0, lt=1)]
Scope = ("case", "op", "backend", "column")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TimeRule(_Model):
    """When a time counts as changed."""

    relative: Fraction = 0.025
    """Least relative change of the median."""
    absolute_us: Annotated[float, Field(ge=0)] = 0.3
    """Least change of the median in microseconds: what an event pair can tell apart."""
    level: Fraction = 0.92
    """Confidence of the interval of a median over processes."""
    gated: bool = True
    """False reports the verdict without letting it decide the exit code."""


class RuleOverride(_Model):
    """Values for the times that all four globs match; None inherits."""

    case: str = "*"
    op: str = "*"
    backend: str = "*"
    column: str = "*"
    relative: Fraction | None = None
    absolute_us: Annotated[float, Field(ge=0)] | None = None
    level: Fraction | None = None
    gated: bool | None = None

    def matches(self, **names: str) -> bool:
        """Whether every glob matches: `case`, `op`, `backend`, `column`."""
        return all(fnmatch.fnmatchcase(names[scope], getattr(self, scope)) for scope in Scope)


class CorrectnessRule(_Model):
    """How much a stage's worst error / bound may grow while it stays within its bound."""

    growth: Annotated[float, Field(ge=1)] = 1.5
    slack: Annotated[float, Field(ge=0)] = 0.1
    """Added to growth x baseline, so that tiny ratios may move."""


class KernelRule(_Model):
    """How many more kernels a step may launch."""

    extra: Annotated[int, Field(ge=0)] = 0


class EnvironmentRule(_Model):
    """What two runs must share to be compared."""

    ignore: list[str] = ["platform", "packages.nvidia-ml-py"]
    """Globs on field names that may differ: `driver`, `packages.triton`, `backends.*`."""


class Policy(_Model):
    """The document of a policy file; every key has a default."""

    processes: Annotated[int, Field(ge=2)] = 5
    """Fewest processes on either side for a verdict on time."""
    pairs: Annotated[int, Field(ge=2)] = 8
    """Fewest ABBA pairs that may stand in for processes."""
    columns: list[Literal["cold", "warm", "eager", "cpu"]] = ["cold", "warm", "cpu"]
    """Columns whose times are gated. Eager times include the host and are left out."""
    missing: Literal["undecided", "ignore"] = "undecided"
    """Whether what the baseline has and the run lacks keeps the gate from deciding."""
    time: TimeRule = TimeRule()
    rules: list[RuleOverride] = []
    correctness: CorrectnessRule = CorrectnessRule()
    kernels: KernelRule = KernelRule()
    environment: EnvironmentRule = EnvironmentRule()

    @model_validator(mode="after")
    def _an_interval_exists(self) -> Self:
        best = coverage(self.processes, 0)
        levels = [self.time.level, *(r.level for r in self.rules if r.level is not None)]
        if max(levels) > best:
            raise ValueError(
                f"level {max(levels):g} is out of reach of {self.processes} processes, "
                f"whose range covers {best:.3g}"
            )
        return self

    def rule(self, *, case: str, op: str, backend: str, column: str) -> TimeRule:
        """The rule of one time, every matching override applied in order."""
        changed: dict[str, Any] = {}
        for override in self.rules:
            if override.matches(case=case, op=op, backend=backend, column=column):
                changed |= override.model_dump(exclude=set(Scope), exclude_none=True)
        return self.time.model_copy(update=changed)

    def idle_rules(self, times: Iterable[tuple[str, str, str, str]]) -> list[str]:
        """Rules that match none of these (case, op, backend, column): often a misspelt glob."""
        named = [dict(zip(Scope, names, strict=True)) for names in times]
        idle = []
        for number, rule in enumerate(self.rules):
            if not any(rule.matches(**names) for names in named):
                globs = rule.model_dump(include=set(Scope), exclude_defaults=True)
                text = ", ".join(f"{scope} {glob}" for scope, glob in globs.items())
                idle.append(f"rules.{number} ({text}) matches nothing in this run")
        return idle


def load_policy(path: Path | None) -> Policy:
    """The policy of a YAML file, the default one for None.

    CaseError, in one line with file, line, key and the nearest valid name, when it is not one.
    """
    if path is None:
        return Policy()
    document = read_located(path)
    try:
        return Policy.model_validate(document.data)
    except ValidationError as error:
        raise _first_error(document, error) from error


def _first_error(document: Located, error: ValidationError) -> CaseError:
    first = error.errors()[0]
    location: Sequence[str | int] = first["loc"]
    if first["type"] == "extra_forbidden":
        key = location[-1]
        valid = _model_at(location[:-1]).model_fields
        return document.error(location, f"unknown key {key!r}{nearest(key, valid)}")
    if first["type"] == "literal_error":
        valid_values = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        hint = nearest(first["input"], valid_values)
        return document.error(location, f"unknown value {first['input']!r}{hint}")
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    prefix = "" if first["type"] == "value_error" else "must be "
    return document.error(location, prefix + message)


def _model_at(location: Sequence[str | int]) -> type[BaseModel]:
    """The model whose keys stand at a location of the document."""
    nested: dict[str, type[BaseModel]] = {
        "time": TimeRule,
        "rules": RuleOverride,
        "correctness": CorrectnessRule,
        "kernels": KernelRule,
        "environment": EnvironmentRule,
    }
    return nested[str(location[0])] if location else Policy
