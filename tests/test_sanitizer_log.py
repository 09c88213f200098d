"""What the device scripts make of compute-sanitizer's output and of line tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megabench.backends.sm90 import product_launch, products
from megabench.backends.sm90.nvrtc import sources

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts" / "device"

RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x7038d06 in block (27,0,0) :
=========     Write Thread (158,0,0) at store_shared(u32)+0x15f0 in ptx.cuh:100
=========     Read Thread (160,0,0) at load_shared(u32)+0x1ce0 in ptx.cuh:91
=========     Current Value : 1
=========
========= Error: Potential RAW hazard detected at __shared__ 0x38d0c in block (5,0,0) :
=========     Write Thread (190,0,0) at store_shared(u32)+0x15f0 in ptx.cuh:100
=========     Read Thread (192,0,0) at load_shared(u32)+0x1ce0 in ptx.cuh:91
=========     Current Value : 1
=========
launched decode
========= Error: Potential WAR hazard detected at __shared__ 0x881c in block (0,0,0) :
=========     Read Thread (136,0,0) at sm90_mega_prefill+0x1200
=========     Write Thread (66,0,0) at copy16(u32, const void *)+0x56c0 in ptx.cuh:70
=========     Current Value : 190, Incoming Value : 63
=========
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at matmul_kernel+0x70 in matmul.py:200
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000 is out of bounds
=========
========= Invalid __global__ read of size 4 bytes
=========     at matmul_kernel+0x70 in matmul.py:200
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f0004 is out of bounds
=========
========= Detected overflow of tracked cuda::barrier structures. Results might be incorrect.
========= ERROR SUMMARY: 2 errors
"""

ANALYSIS = """\
========= Error: Race reported between Write access at store_shared(u32)+0x15f0 in ptx.cuh:100
=========     and Read access at load_shared(u32)+0x1ce0 in ptx.cuh:91 [124 hazards]
=========     and Write access at store_shared(u32)+0x15f0 in ptx.cuh:100 [1 hazard]
=========
"""

DISASSEMBLY = """\
	.section	.text.sm90_mega_decode,"ax",@progbits
.text.sm90_mega_decode:
	//## File "/somewhere/ptx.cuh", line 100 inlined at "/somewhere/cursor.cuh", line 87
	//## File "/somewhere/cursor.cuh", line 87 inlined at "/somewhere/scores.cuh", line 256
	//## File "/somewhere/scores.cuh", line 256 inlined at "/somewhere/decode.cu", line 54
	//## File "/somewhere/decode.cu", line 54
        /*15f0*/                   STS [R6+0x38900], R7 ;
        /*1600*/                   BSYNC B1 ;
	//## File "/somewhere/ptx.cuh", line 91 inlined at "/somewhere/cursor.cuh", line 94
	//## File "/somewhere/cursor.cuh", line 94 inlined at "/somewhere/decode.cu", line 54
	//## File "/somewhere/decode.cu", line 54
        /*1ce0*/                   LDS R7, [R7+0x38900] ;
.text.sm90_other:
	//## File "/somewhere/decode.cu", line 7
        /*1ce0*/                   EXIT ;
"""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    import sanitizer_log

    return sanitizer_log


def test_hazards_between_the_same_lines_are_one_finding_with_its_extent(log: ModuleType) -> None:
    report = log.read_log(RACECHECK.splitlines(), {})
    first, second = report.findings.items()
    assert first[0].title == "Error RAW __shared__"
    assert first[0].places == (
        "write store_shared ptx.cuh:100",
        "read load_shared ptx.cuh:91",
    )
    assert (first[1].count, first[1].low, first[1].high) == (2, 0x38D06, 0x38D0C)
    assert second[0].places == ("read sm90_mega_prefill+0x1200", "write copy16 ptx.cuh:70")
    assert report.summaries == ["RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"]
    assert not report.notes


def test_offsets_become_the_line_that_called_the_helper(log: ModuleType) -> None:
    table = log.read_disassembly(DISASSEMBLY.splitlines())
    assert table[0x15F0, "ptx.cuh:100"] == "sm90_mega_decode cursor.cuh:87"
    assert table[0x1600, "ptx.cuh:100"] == "sm90_mega_decode cursor.cuh:87"
    assert table[0x1CE0, "ptx.cuh:91"] == "sm90_mega_decode cursor.cuh:94"
    assert table[0x1CE0, "decode.cu:7"] == "sm90_other decode.cu:7"
    (first, _) = log.read_log(RACECHECK.splitlines(), table).findings
    assert first.places == (
        "write sm90_mega_decode cursor.cuh:87",
        "read sm90_mega_decode cursor.cuh:94",
    )


def test_an_analysis_is_read_with_the_counts_that_it_gives(log: ModuleType) -> None:
    table = log.read_disassembly(DISASSEMBLY.splitlines())
    (finding, extent), _ = log.read_log(ANALYSIS.splitlines(), table).findings.items()
    assert finding.title == "Error race"
    assert finding.places == (
        "write sm90_mega_decode cursor.cuh:87",
        "read sm90_mega_decode cursor.cuh:94",
    )
    assert (extent.count, extent.low) == (124, None)


def test_every_lane_arrives_and_the_counts_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from every_lane import every_lane_sources

    for entry in ("decode.cu", "prefill.cu", "product.cu", "dense.cu"):
        files = sources(entry)
        changed = every_lane_sources(files)
        assert changed["ptx.cuh"] == files["ptx.cuh"]
        text = b"".join(text for name, text in changed.items() if name != "ptx.cuh").decode()
        assert "mbar_arrive(" in text
        assert not re.search(r"if \([^;{]*(lane|% 32)[^;{]*\)\s*\{?\s*mbar_arrive\(", text)
        assert "32 * (" in text
        assert "kFactorsArrive = 32;" in text  # beside one thread, on the same barrier


def test_an_elected_lane_of_another_form_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from every_lane import every_lane

    both = "if (first_lane) {\n  mbar_arrive(a);\n  mbar_arrive(b);\n}"
    assert every_lane(both).replace(" ", "") == "{\nmbar_arrive(a);\nmbar_arrive(b);\n}"
    with pytest.raises(ValueError, match="which lanes arrive here"):
        every_lane("if (lane_id() % 32 == kFirst) mbar_arrive(a);")
    with pytest.raises(ValueError, match="how many lanes arrive"):
        every_lane("constexpr int kFactorsArrive = 2;")


def test_late_warps_sleep_before_they_arrive_or_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from late_warps import late_sources

    files = sources("decode.cu")
    changed = late_sources(files)
    assert {name for name in files if changed[name] != files[name]} == {"ptx.cuh"}
    text = changed["ptx.cuh"].decode()
    for name in ("mbar_arrive", "mbar_wait", "bar_sync", "bar_arrive"):
        assert re.search(rf"DEVICE void {name}\([^)]*\) {{\n  come_late\(\);", text)
    assert text.index("come_late() {") < text.index("come_late();")


def test_reports_of_other_tools_are_counted_by_place(log: ModuleType) -> None:
    report = log.read_log(MEMCHECK.splitlines(), {})
    ((finding, extent),) = report.findings.items()
    assert finding.title == "Invalid __global__ read of size 4 bytes"
    assert finding.places == ("matmul_kernel matmul.py:200",)
    assert (extent.count, extent.low) == (2, None)


def test_what_the_tool_says_besides_is_kept_as_a_note(log: ModuleType) -> None:
    report = log.read_log(MEMCHECK.splitlines(), {})
    assert [note for note in report.notes if "overflow of tracked" in note]
    assert report.summaries == ["ERROR SUMMARY: 2 errors"]


def test_every_launch_belongs_to_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.syspath_prepend(SCRIPTS.parents[1] / "tests" / "backends")
    import sanitize
    import small_launches

    groups = (sanitize.SM90 | sanitize.TRITON).values()
    named = [launch for group in groups for launch in group]
    assert sorted(named) == sorted(small_launches.LAUNCHES)
    with small_launches.multiprocessors(2):  # on which 257 tokens read pieces, and fewer do not
        tiles = [product_launch.tiles_of(n, 1, small_launches.EINSUM_ROWS) for n in (65, 257)]
        assert [n > products.MULTIPROCESSORS for n in tiles] == [False, True]
    monkeypatch.delitem(sys.modules, "small_launches")
