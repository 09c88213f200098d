"""What a person sees of a run is what the rows say."""

from __future__ import annotations

import pytest

from megabench.console import Watch
from megabench.results import CaseResult


def failed(backend: str, reason: str) -> CaseResult:
    return CaseResult(
        suite="tiny", case_id="r1", case_hash="0", case={}, backend=backend, status="failed",
        reason=reason, tokens=1, repro="megabench validate --case r1",
    )  # fmt: skip


@pytest.mark.parametrize("reason", ["index [3, :B:]", "[red]not a colour[/]", "a :key: of [x]"])
def test_names_and_reasons_are_shown_letter_by_letter(
    reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with Watch(1, as_json=False) as watch:
        watch(failed("module:B", reason))
    shown = capfd.readouterr().err
    assert f"r1 on module:B: {reason}" in shown
    assert "megabench validate --case r1" in shown
