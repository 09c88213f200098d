"""What a process asks of its GPU."""

from __future__ import annotations

import pytest

from megabench.devices import first_cause


def fail_in_capture() -> None:
    try:
        raise ValueError("no such tile\nlong advice")
    finally:
        raise RuntimeError("capture cannot end")


def test_a_failed_capture_is_told_by_what_broke_the_step() -> None:
    with pytest.raises(RuntimeError) as failure:
        fail_in_capture()
    assert first_cause(failure.value) == "no such tile"


def test_a_failure_without_words_is_told_by_its_name() -> None:
    assert first_cause(MemoryError()) == "MemoryError"
