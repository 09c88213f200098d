"""The device's limits and state as the suite reads them, and times that cannot be true."""

from __future__ import annotations

import pytest
import torch

from megabench.bench.ceilings import measure_ceilings
from megabench.bench.roofline import place
from megabench.bench.telemetry import NvmlProbe, make_probe
from megabench.bench.work import Work
from megabench.results import Ceilings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STREAMS = ("read", "write", "copy")
GIB = 1 << 30


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return measure_ceilings(torch.device("cuda"))


def test_all_ceilings_take_at_most_twenty_seconds(ceilings: Ceilings) -> None:
    names = {c.name for c in ceilings.ceilings}
    assert {*STREAMS, "gather_528", "gather_288", "l2", "bf16_matmul", "fp32_matmul"} <= names
    assert 0 < ceilings.seconds <= 20


def test_ceilings_lie_below_the_datasheet_and_not_far(ceilings: Ceilings) -> None:
    """fp32 is left out: the product may run on tensor cores where the user allows it."""
    if ceilings.datasheet_key is None:
        pytest.skip(f"no datasheet entry for {ceilings.device_name}")
    for name in (*STREAMS, "bf16_matmul", "fp8_matmul"):
        measured, sheet = ceilings.value(name), ceilings.datasheet(name)
        if measured is not None and sheet is not None:
            assert 0.5 < measured / sheet < 1.02, name


def test_the_l2_is_faster_than_memory_and_gathers_are_no_faster(ceilings: Ceilings) -> None:
    value = {c.name: c.value for c in ceilings.ceilings}
    best = max(value[name] for name in STREAMS)
    assert value["l2"] > best
    assert 0.1 * best < value["gather_288"] <= 1.05 * best
    assert 0.1 * best < value["gather_528"] <= 1.05 * best


def test_a_time_that_the_datasheet_forbids_is_a_problem(ceilings: Ceilings) -> None:
    sheet = ceilings.datasheet("read")
    if sheet is None:
        pytest.skip(f"no datasheet entry for {ceilings.device_name}")
    work, l2 = Work(bytes_compulsory=GIB), torch.cuda.get_device_properties(0).L2_cache_size
    least_us = GIB / sheet * 1e6
    too_fast = place(work, 0.99 * least_us, "cold", ceilings, l2)
    assert "is below the datasheet floor" in (too_fast.problem or "")
    assert place(work, 1.01 * least_us, "cold", ceilings, l2).problem is None


def test_the_device_tells_its_state() -> None:
    probe = make_probe(torch.device("cuda"))
    assert isinstance(probe, NvmlProbe)
    torch.cuda._sleep(100_000_000)
    reading = probe.read()
    torch.cuda.synchronize()
    assert reading.sm_clock_mhz is not None
    assert reading.sm_clock_mhz > 300
    assert reading.memory_clock_mhz is not None
    assert reading.power_w is not None
    assert reading.power_w > 20
    assert reading.temperature_c is not None
    assert 10 < reading.temperature_c < 100
    assert reading.memory_used_bytes is not None
    assert reading.memory_used_bytes > 100 << 20
