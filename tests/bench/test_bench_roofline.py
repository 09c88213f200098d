"""Floors, rotations, telemetry and datasheet entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.bench.ceilings import load_ceilings
from megabench.bench.peaks import find_peak, load_peaks
from megabench.bench.roofline import measured_rates, place
from megabench.bench.rotation import L2_MULTIPLE, MAX_SETS, plan_rotation, turn_problem
from megabench.bench.telemetry import FakeProbe, NullProbe, Reading, make_probe, summarise_readings
from megabench.bench.work import Work
from megabench.results import Ceiling, Ceilings

MIB = 1 << 20


def ceilings(datasheet: bool = True) -> Ceilings:
    def one(name: str, value: float, unit: str, sheet: float) -> Ceiling:
        return Ceiling.model_validate(
            {
                "name": name,
                "value": value,
                "unit": unit,
                "method": "",
                "samples": 1,
                "datasheet": sheet if datasheet else None,
            }
        )

    rows = [
        one("read", 4e12, "B/s", 5e12),
        one("bf16_matmul", 8e14, "FLOP/s", 1e15),
        one("fp8_matmul", 16e14, "FLOP/s", 2e15),
    ]
    return Ceilings(device_name="fake", ceilings=rows, seconds=0.0)


def test_the_floor_is_the_larger_of_compute_and_memory() -> None:
    rates = measured_rates(ceilings(), in_l2=False)
    assert rates.floor_us(Work(flops=8 * 10**9, bytes_compulsory=4)) == (10.0, "compute")
    assert rates.floor_us(Work(flops=8, bytes_compulsory=4 * 10**7)) == (10.0, "memory")


def test_fp8_products_run_at_the_fp8_rate() -> None:
    rates = measured_rates(ceilings(), in_l2=False)
    assert rates.compute_us(Work(flops=16 * 10**9, flops_fp8=16 * 10**9)) == pytest.approx(10.0)
    assert rates.compute_us(Work(flops=16 * 10**9, flops_fp8=8 * 10**9)) == pytest.approx(15.0)


def test_a_time_below_the_datasheet_floor_is_a_problem() -> None:
    work = Work(flops=1, bytes_compulsory=5 * 10**7)
    assert place(work, 9.9, "cold", ceilings(), 50 * MIB).problem is not None
    assert place(work, 10.1, "cold", ceilings(), 50 * MIB).problem is None


def test_a_time_between_datasheet_and_measured_floor_is_a_note() -> None:
    placed = place(Work(1, 0, 5 * 10**7), 11.0, "cold", ceilings(), 50 * MIB)
    assert placed.problem is None
    assert "below the measured floor" in placed.note
    assert placed.fraction is not None
    assert placed.fraction > 1


def test_a_warm_op_inside_the_l2_has_no_datasheet_memory_floor() -> None:
    work = Work(1, 0, 5 * 10**7)
    assert place(work, 1.0, "warm", ceilings(), 60 * MIB).problem is None
    assert place(work, 1.0, "warm", ceilings(), 10 * MIB).problem is not None


def test_what_the_l2_may_hold_is_not_held_against_a_time() -> None:
    """Of 50 MB, 40 MB through a memory of 5 TB/s take 8 us."""
    written = Work(1, 0, 5 * 10**7, bytes_written=10**7)
    read = Work(1, 0, 5 * 10**7)
    assert place(written, 8.1, "cold", ceilings(), 50 * MIB).problem is None
    assert place(written, 7.9, "cold", ceilings(), 50 * MIB).problem is not None
    assert place(written, 9.1, "cold", ceilings(), 5 * 10**6).problem is None
    assert place(written, 8.9, "cold", ceilings(), 5 * 10**6).problem is not None
    assert place(read, 8.1, "warm", ceilings(), 10**7).problem is None
    assert place(read, 7.9, "warm", ceilings(), 10**7).problem is not None
    assert place(written, 8.1, "cold", ceilings(), 50 * MIB).datasheet_floor_us == 10.0


def test_an_op_without_work_lies_nowhere() -> None:
    placed = place(Work(), 5.0, "cpu", ceilings(datasheet=False), None)
    assert placed.bound == "none"
    assert placed.fraction is None


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 1 << 32), st.integers(1, 1 << 34), st.integers(MIB, 200 * MIB))
def test_a_rotation_exceeds_the_l2_or_is_swept(touched: int, copy: int, l2: int) -> None:
    plan = plan_rotation(touched, copy, l2, free_bytes=64 << 30)
    assert 1 <= plan.sets <= MAX_SETS
    assert plan.bytes_rotated == plan.sets * touched
    assert plan.sweep or plan.bytes_rotated > L2_MULTIPLE * l2
    assert plan.sets == 1 or plan.sets * copy <= 64 << 30


@pytest.mark.parametrize("counts", [[7], [3, 3, 2, 2], [1, 1, 0]])
def test_copies_in_turn_are_no_problem(counts: list[int]) -> None:
    assert turn_problem(counts) is None


def test_one_copy_replayed_for_all_is_a_problem() -> None:
    assert turn_problem([20, 0, 0]) == "the copies were not replayed in turn, but 0 to 20 times"


def test_a_thermal_slowdown_invalidates_and_a_power_cap_labels() -> None:
    probe = FakeProbe([Reading(1755, throttle_mask=0x4), Reading(1200, throttle_mask=0x40)])
    capped = summarise_readings("fake", [probe.read()])
    assert capped.labels == ["software power cap"]
    assert capped.invalid is None
    hot = summarise_readings("fake", [probe.read()])
    assert hot.invalid == "hardware thermal slowdown"


def test_readings_are_averaged_and_the_hottest_kept() -> None:
    row = summarise_readings("fake", [Reading(1000, power_w=600, temperature_c=50), Reading(2000)])
    assert (row.sm_clock_mhz, row.power_w, row.temperature_c) == (1500, 600, 50)


def test_a_cpu_has_the_null_probe() -> None:
    assert isinstance(make_probe(torch.device("cpu")), NullProbe)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD EPYC 9B14", None),
    ],
)
def test_a_device_finds_its_own_datasheet_and_no_other(name: str, key: str | None) -> None:
    assert find_peak(name)[0] == key


def test_every_datasheet_entry_names_its_source_and_positive_figures() -> None:
    for key, entry in load_peaks().items():
        assert entry["source"], key
        assert all(value > 0 for value in entry["figures"].values()), key
        assert {"memory_bytes_per_s", "bf16_flops"} <= set(entry["figures"]), key


def test_ceilings_are_measured_once_a_folder(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    from megabench.bench import ceilings as module

    folder = Path(str(tmp_path))
    calls: list[torch.device] = []

    def fake(device: torch.device) -> Ceilings:
        calls.append(device)
        return ceilings()

    monkeypatch.setattr(module, "measure_ceilings", fake)
    device = torch.device("cpu")
    assert load_ceilings(device, folder) == load_ceilings(device, folder)
    assert len(calls) == 1
