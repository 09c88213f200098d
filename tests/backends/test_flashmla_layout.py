"""The ramp page tells page layouts apart, and a writer and reader that differ are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

from loading import PACKAGES, on_path, vllm_ops
from standin_backend import StandinBackend

import reference.records
from megabench.backends import TorchBackend
from megabench.formats import FP8, NVFP4, PAGE_LAYOUTS, KVRecord, PageLayout
from megabench.layout_probe import (
    PROBED,
    SLOT,
    LayoutError,
    check_layouts,
    layout_verdicts,
    ramp_page,
    reader_verdicts,
    row_of,
    writer_verdicts,
)

CPU = torch.device("cpu")
OTHER: dict[PageLayout, PageLayout] = {"interleaved": "page_split", "page_split": "interleaved"}


class Mixed(TorchBackend):
    """Says one layout and attends by the other, as a kernel of another release would."""

    def fused_norm_rope_attn_rope_cast_decode(self, *args: Any) -> list[torch.Tensor]:
        other = TorchBackend(OTHER[self.page_layout])
        return other.fused_norm_rope_attn_rope_cast_decode(*args)


class Garbled(TorchBackend):
    """Gathers rows whose two halves are swapped."""

    def dequantize_and_gather_k_cache(self, out: torch.Tensor, *args: Any) -> None:
        super().dequantize_and_gather_k_cache(out, *args)
        out.copy_(out.roll(256, -1))


@pytest.mark.parametrize("record", PROBED)
@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_the_probe_and_the_golden_model_agree_on_a_ramp_row(
    record: KVRecord, layout: PageLayout
) -> None:
    cache = ramp_page(record, CPU)
    golden = reference.records.decode_slots(cache, torch.tensor([SLOT]), layout)[0]
    assert torch.equal(row_of(cache, record, layout, SLOT), golden)


@pytest.mark.parametrize("record", PROBED)
def test_no_two_rows_of_a_ramp_page_are_alike_in_either_layout(record: KVRecord) -> None:
    cache = ramp_page(record, CPU)
    rows = [row_of(cache, record, layout, slot) for layout in PAGE_LAYOUTS for slot in range(32)]
    assert all(row.isfinite().all() for row in rows)
    # Row 0 of both layouts starts with the same data, and differs by its scales.
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_our_own_readers_and_writers_do_as_they_say(layout: PageLayout) -> None:
    verdicts = layout_verdicts(TorchBackend(layout), CPU)
    assert len(verdicts) == 7
    assert {verdict.found for verdict in verdicts} == {layout}
    assert all(verdict.ok for verdict in verdicts)
    check_layouts(TorchBackend(layout), TorchBackend(layout), CPU)


def test_the_vendors_ops_are_found_to_read_interleaved_pages() -> None:
    with on_path(PACKAGES), vllm_ops():
        verdicts = reader_verdicts(StandinBackend(), CPU)
    assert {verdict.found for verdict in verdicts} == {"interleaved"}


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_a_reader_of_the_other_layout_is_found_out(layout: PageLayout) -> None:
    found = {(v.op, v.record): v for v in reader_verdicts(Mixed(layout), CPU)}
    decode = found["fused_norm_rope_attn_rope_cast_decode", NVFP4.name]
    assert decode.found == OTHER[layout]
    assert not decode.ok
    assert str(decode).endswith(f"pages {OTHER[layout]}, not {layout} as it says")
    assert found["dequantize_and_gather_k_cache", NVFP4.name].ok


def test_a_reader_that_fits_no_layout_is_found_out() -> None:
    gathers = [v for v in reader_verdicts(Garbled(), CPU) if v.op.startswith("dequantize")]
    assert [v.found for v in gathers] == ["neither", "neither"]


@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_a_writer_and_a_reader_that_differ_are_an_error_that_names_both(
    layout: PageLayout,
) -> None:
    with pytest.raises(LayoutError) as raised:
        check_layouts(TorchBackend(layout), Mixed(layout), CPU)
    message = str(raised.value)
    assert f"torch.pad_q_and_insert_kv writes {FP8.name} pages {layout}" in message
    assert f"decode reads {FP8.name} pages {OTHER[layout]}" in message


def test_a_row_written_to_more_than_its_own_bytes_is_no_known_layout() -> None:
    class Spilling(TorchBackend):
        def insert_compressed(self, *args: Any) -> None:
            super().insert_compressed(*args)
            args[3][0, -1, -1] ^= 0xFF

    found = [v.found for v in writer_verdicts(Spilling(), CPU) if v.op == "insert_compressed"]
    assert found == ["neither", "neither"]
