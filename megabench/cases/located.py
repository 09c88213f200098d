"""YAML with line numbers, and errors that name file, line, key and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Location = tuple[str | int, ...]
_MAX_DEPTH = 8


class CaseError(ValueError):
    """A case file that cannot be used; the message is one line, ready for a person."""


def nearest(name: object, valid: Iterable[object]) -> str:
    """`; did you mean ...?` with the closest valid name, however far, or nothing to offer."""
    options = {str(option): option for option in valid}
    close = difflib.get_close_matches(str(name), list(options), n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class Located:
    """A parsed document and the line (1-based) of each of its keys and items."""

    path: Path
    data: Any
    lines: Mapping[Location, int]

    def error(self, location: Sequence[str | int], message: str) -> CaseError:
        """The error of a key: `file:line: key: message`, all in one line."""
        known = tuple(location)
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known, 1)
        key = ".".join(str(part) for part in location)
        where = f"{self.path}:{line}: {key + ': ' if key else ''}"
        return CaseError(where + " ".join(message.split()))


def read_located(path: Path) -> Located:
    """Parse a YAML file. CaseError for a missing file, bad syntax, or a key given twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CaseError(f"{path}: cannot be read ({reason})") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CaseError(f"{path}:{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise CaseError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    lines: dict[Location, int] = {}
    data = {} if root is None else _build(path, root, (), lines)
    return Located(path, data, lines)


def _build(path: Path, node: yaml.Node, location: Location, lines: dict[Location, int]) -> Any:
    lines.setdefault(location, node.start_mark.line + 1)
    if len(location) > _MAX_DEPTH:  # an alias of its own parent never ends
        raise CaseError(f"{path}:{node.start_mark.line + 1}: nested too deeply")
    if isinstance(node, yaml.SequenceNode):
        return [_build(path, item, (*location, i), lines) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = str(_scalar(path, key_node))
            line = lines[(*location, key)] = key_node.start_mark.line + 1
            if key in mapping:
                raise CaseError(f"{path}:{line}: key {key!r} is given twice")
            mapping[key] = _build(path, value_node, (*location, key), lines)
        return mapping
    return _scalar(path, node)


def _scalar(path: Path, node: yaml.Node) -> Any:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode):
        raise CaseError(f"{path}:{line}: a key must be plain text")
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise CaseError(f"{path}:{line}: {node.value!r} is not a plain value") from error
