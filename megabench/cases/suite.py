"""Case files: axes crossed, points excluded, points included, every case named and unique."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from megabench.cases.case import DEFAULT_MODEL, Case, model_path, packaged_models, read_model_config
from megabench.cases.located import CaseError, Located, Location, nearest, read_located

_PACKAGE = Path(__file__).parent.parent
_INSTALLED_FOLDER = _PACKAGE / "case_files"
_CHECKOUT_FOLDER = _PACKAGE.parent / "cases"
_STRICT = ConfigDict(extra="forbid", strict=True)

AXES: dict[str, Any] = {
    name: field.rebuild_annotation()
    for name, field in Case.model_fields.items()
    if name not in ("suite", "model")
}
"""What a case file may vary, and the type of each axis."""


def _axes_model(title: str, several: bool) -> Any:
    """A model with the axes' names and types, all optional: nothing of Case repeated by hand."""
    fields: dict[str, Any] = {
        name: ((GenericAlias(list, (kind,)) if several else kind) | None, None)
        for name, kind in AXES.items()
    }
    return create_model(title, __config__=_STRICT, **fields)


if TYPE_CHECKING:
    AxisValues: TypeAlias = BaseModel
    AxisLists: TypeAlias = BaseModel
else:
    AxisValues = _axes_model("AxisValues", several=False)
    AxisLists = _axes_model("AxisLists", several=True)


class SuiteFile(BaseModel):
    """The document of a case file."""

    model_config = _STRICT

    description: str = ""
    model: str = DEFAULT_MODEL
    """A packaged geometry's name, or a config.json's path relative to the case file."""
    token_budget: int | None = None
    """Most tokens the file's cases may have together."""
    defaults: AxisValues = AxisValues()
    axes: AxisLists | None = None
    """Values of each axis, all crossed."""
    exclude: list[AxisLists] = []
    """Points to leave out of the crossing: those that match every axis named."""
    include: list[AxisLists] = []
    """Points to add, each entry crossed by itself."""


@dataclass(frozen=True)
class Suite:
    """The cases of one file, in the file's order."""

    name: str
    source: str
    """The file as it was asked for, by path or by packaged name."""
    path: Path
    description: str
    cases: list[Case]
    token_budget: int | None

    @property
    def num_tokens(self) -> int:
        return sum(case.num_tokens for case in self.cases)

    def reseeded(self, seed: int) -> Suite:
        """The suite with every case at `seed`; cases that differed in nothing else become one."""
        cases = [case.model_copy(update={"seed": seed}) for case in self.cases]
        return replace(self, cases=list({case.id: case for case in cases}.values()))

    def matching(self, pattern: str) -> list[Case]:
        """Cases whose id matches a glob, none perhaps.

        An id that ends in -seedN may also be that of a listed case at another seed.
        """
        cases = [case for case in self.cases if fnmatch.fnmatchcase(case.id, pattern)]
        plain, _, seed = pattern.rpartition("-seed")
        if not cases and plain and seed.isdecimal():
            cases = [case for case in self.reseeded(int(seed)).cases if case.id == pattern]
        return cases

    def select(self, *patterns: str) -> list[Case]:
        """Cases that match any of the globs, glob by glob, none twice; all cases without a glob.

        CaseError with the nearest id when a glob matches none.
        """
        chosen: dict[str, Case] = {}
        for pattern in patterns or ("*",):
            found = self.matching(pattern)
            if not found:
                hint = nearest(pattern, (case.id for case in self.cases))
                raise CaseError(f"{self.path}: no case matches {pattern!r}{hint}")
            chosen |= {case.id: case for case in found}
        return list(chosen.values())


def at_seeds(cases: Sequence[Case], seeds: int) -> list[Case]:
    """Every case at its own seed and at the `seeds - 1` seeds after it, none twice."""
    drawn = (
        case.model_copy(update={"seed": case.seed + more})
        for case in cases
        for more in range(seeds)
    )
    return list({case.id: case for case in drawn}.values())


def packaged_suites() -> list[Path]:
    """The case files shipped with megabench (or lying in its checkout)."""
    folder = _INSTALLED_FOLDER if _INSTALLED_FOLDER.is_dir() else _CHECKOUT_FOLDER
    return sorted(folder.glob("*.yaml"))


def find_suite(name: str | Path) -> Path:
    """The file of a path or of a packaged name: `smoke`, `smoke.yaml`, `cases/smoke.yaml`."""
    path = Path(name)
    if path.is_file():
        return path
    packaged = {file.stem: file for file in packaged_suites()}
    if path.parent in (Path(), Path("cases")) and path.suffix in ("", ".yaml"):
        found = packaged.get(path.stem)
        if found is not None:
            return found
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.yaml"))) or "no .yaml file"
        raise CaseError(f"{str(name)!r} is a folder, not a case file; it holds {inside}")
    raise CaseError(f"case file {str(name)!r} does not exist{nearest(path.stem, packaged)}")


def load_suite(name: str | Path) -> Suite:
    """Read, check and expand a case file. CaseError naming file, line and key."""
    document = read_located(find_suite(name))
    try:
        file = SuiteFile.model_validate(_listed(document.data))
    except ValidationError as error:
        raise _first_error(document, error) from error
    model = _resolve_model(document, file.model)
    cases: dict[str, Case] = {}
    for location, axes in _points(file):
        for case in _expand(document, file, location, axes, model):
            if location[0] == "axes" and any(_matches(case, rule) for rule in file.exclude):
                continue
            if cases.setdefault(case.id, case) is not case:
                raise document.error(location, f"case {case.id} is listed twice")
    if not cases:
        raise document.error((), "no case is left")
    suite = Suite(
        name=document.path.stem,
        source=str(name),
        path=document.path,
        description=file.description,
        cases=[*cases.values()],
        token_budget=file.token_budget,
    )
    if suite.token_budget is not None and suite.num_tokens > suite.token_budget:
        raise document.error(
            ("token_budget",), f"the cases have {suite.num_tokens} tokens, above the budget"
        )
    return suite


def _listed(data: Any) -> Any:
    """The document with single values of an axis made lists of one."""

    def lists(point: Any) -> Any:
        if not isinstance(point, dict):
            return point
        return {key: value if isinstance(value, list) else [value] for key, value in point.items()}

    if not isinstance(data, dict):
        return data
    data = dict(data)
    if "axes" in data:
        data["axes"] = lists(data["axes"])
    for key in ("exclude", "include"):
        if isinstance(data.get(key), list):
            data[key] = [lists(point) for point in data[key]]
    return data


def _points(file: SuiteFile) -> Iterator[tuple[Location, Any]]:
    if file.axes is not None:
        yield ("axes",), file.axes
    for i, point in enumerate(file.include):
        yield ("include", i), point


def _set_values(point: BaseModel) -> dict[str, Any]:
    return {name: getattr(point, name) for name in AXES if name in point.model_fields_set}


def _expand(
    document: Located, file: SuiteFile, location: Location, axes: Any, model: str
) -> Iterator[Case]:
    """Cross one point's lists, over the file's defaults."""
    fixed = {"suite": document.path.stem, "model": model, **_set_values(file.defaults)}
    varied = _set_values(axes)
    for values in itertools.product(*varied.values()):
        content = fixed | dict(zip(varied, values, strict=True))
        try:
            yield Case.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "missing":
                message = f"no {first['loc'][0]} here nor in defaults"
            else:
                message = first["msg"].removeprefix("Value error, ")
            raise document.error(location, message) from error


def _matches(case: Case, rule: BaseModel) -> bool:
    return all(getattr(case, name) in values for name, values in _set_values(rule).items())


def _resolve_model(document: Located, model: str) -> str:
    """The model's name, or its config's path seen from the case file; CaseError if unreadable."""
    beside = document.path.parent / model
    resolved = str(beside) if model.endswith(".json") and beside.is_file() else model
    try:
        read_model_config(resolved)
    except ValueError as error:
        known = [path.name.removesuffix(".config.json") for path in packaged_models()]
        hint = "" if model_path(resolved).is_file() else nearest(model, known)
        raise document.error(("model",), f"{error}{hint}") from error
    return resolved


def _first_error(document: Located, error: ValidationError) -> CaseError:
    """The first of pydantic's errors in the file's own words."""
    first = error.errors()[0]
    location: Sequence[str | int] = first["loc"]
    value, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "extra_forbidden":
            key = location[-1]
            valid = SuiteFile.model_fields if len(location) == 1 else AXES
            return document.error(location, f"unknown key {key!r}{nearest(key, valid)}")
        case "literal_error":
            axis = next(part for part in reversed(location) if isinstance(part, str))
            options = get_args(AXES[axis])
            listed = ", ".join(str(option) for option in options)
            hint = nearest(value, options)
            return document.error(location, f"unknown value {value!r} (one of {listed}){hint}")
        case "value_error":
            return document.error(location, str(context["error"]))
        case _:
            wanted = first["msg"].removeprefix("Input should be ").split(" or instance")[0]
            return document.error(location, f"must be {wanted}, not {_shown(value)}")


def _shown(value: object) -> str:
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return repr(value)
