"""What a person sees of a run is what the rows say."""

from __future__ import annotations

import pytest

from megabench.console import Watch
from megabench.results import CaseResult, Comparison
from megabench.results.schema import Interval


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


@pytest.mark.parametrize(("op", "lines"), [("step", 1), ("wo_a", 0)])
def test_two_backends_ratio_of_a_step_is_shown_beside_their_times(
    op: str, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ratio = Comparison(
        suite="tiny", case_id="r1", op=op, column="warm", backend="my:[B]", baseline="torch",
        ratio=0.75, ci=Interval(low=0.7, high=0.8), pairs=12,
    )  # fmt: skip
    with Watch(1, as_json=False) as watch:
        watch.compared(ratio)
    shown = "ratio    r1 on my:[B] / torch: step 0.750 (0.700 to 0.800, 12 pairs) warm\n"
    assert capfd.readouterr().err.count(shown) == lines
