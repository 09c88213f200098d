"""JSON lines with a header: how baselines and verdicts are kept, for `git diff` and for scripts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from megabench.gate.processes import GateError

Head = TypeVar("Head")
Body = TypeVar("Body")


class Line(BaseModel):
    """A line of such a file: unknown keys are errors, non-finite numbers are strings."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


def text_of(rows: Iterable[Line]) -> str:
    """The rows as a file holds them."""
    return "".join(row.model_dump_json() + "\n" for row in rows)


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, its folder made if need be. OSError when it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def read_lines(
    path: Path, head: TypeAdapter[Head], body: TypeAdapter[Body]
) -> tuple[Head, list[Body]]:
    """The header and the other lines. GateError naming file, line and field when it has others."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise GateError(f"{path}: cannot be read ({reason})") from error
    if not lines:
        raise GateError(f"{path}: is empty")
    first = _parsed(path, 1, lines[0], head)
    return first, [_parsed(path, n, line, body) for n, line in enumerate(lines[1:], start=2)]


def _parsed(path: Path, number: int, line: str, adapter: TypeAdapter[Body]) -> Body:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise GateError(f"{path}:{number}: {place + ': ' if place else ''}{message}") from error
