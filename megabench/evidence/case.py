"""Finding the one case that a command is about."""

from __future__ import annotations

from megabench.cases import Case, CaseError, Suite, load_suite, nearest, packaged_suites


def find_case(case_id: str, source: str | None, seed: int | None) -> tuple[Suite, Case]:
    """A case by id and the file it is in; without a file, of the first packaged one that has it.

    `seed` puts every case at it first, and is then part of the id. CaseError with the nearest id.
    """
    names = [source] if source is not None else [path.stem for path in packaged_suites()]
    known: list[str] = []
    for name in names:
        suite = load_suite(name)
        if seed is not None:
            suite = suite.reseeded(seed)
        for case in suite.cases:
            if case.id == case_id:
                return suite, case
        known += [case.id for case in suite.cases]
    where = source or "any packaged case file"
    raise CaseError(f"no case {case_id!r} in {where}{nearest(case_id, known)}")
