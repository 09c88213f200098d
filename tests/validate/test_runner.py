"""Cases end to end: right ones pass, and every other ending is a row with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megabench.validate.memory as memory
import megabench.validate.runner as runner
import megabench.validate.store as store_module
from megabench.backends import Support, TorchBackend
from megabench.cases import Case
from megabench.geometry import Geometry
from megabench.validate import Skipped, Store, examine, validate_case
from megabench.validate.judgement import Judgement
from megabench.validate.poison import POISONS, CanariedOutput
from megabench.validate.stages import Evidence

CPU = torch.device("cpu")
MakeCase = Callable[..., Case]

STAGES = [
    "rope_table",
    "weights",
    "attn_sink",
    "wq_b_linear",
    "q_layout",
    "swa_cache",
    "compressed_cache",
    "indices_decode",
    "indices_prefill",
    "gathered_rows",
    "lse_decode",
    "output_scales_decode",
    "output_codes_decode",
    "lse_prefill",
    "max_logits",
    "output_scales_prefill",
    "output_codes_prefill",
    "rounding_direction",
    "exact_output",
    "holed_lists",
    "wo_a_einsum",
    "wo_b_linear",
    "layer_output",
    "canaries",
    "inputs_unchanged",
    "repeatable",
    "replay",
    "batch_invariance",
    "tp_sum",
    "end_to_end",
]


@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2},
        {"compress_ratio": 0},
        {"compress_ratio": 2, "kv_cache": "fp8_ds_mla", "page_padding": 3},
        {"page_layout": "page_split", "compress_ratio": 2},
        {"batch": "3q1s200", "padding_tokens": 3},
        {"batch": "3q4s600_1q3s60", "decode_threshold": 4},
        {"batch": "0q1"},
        {"batch": "12q2s200"},
        {"sink": "inf"},
        {"family": "exponents"},
        {"family": "equal_logits", "sink": "none"},
    ],
    ids=str,
)
def test_a_right_backend_passes_every_stage(
    axes: dict[str, object], make_case: MakeCase, store: Store
) -> None:
    row = examine(make_case(**axes), "torch", CPU, store)
    assert row.status == "passed", row.reason
    assert all(stage.ok for stage in row.stages)


def test_every_stage_checks_something_and_the_chain_gives_no_verdict(
    make_case: MakeCase, store: Store
) -> None:
    stages = validate_case(make_case(tp=2), "torch", CPU, store)
    assert [stage.name for stage in stages] == STAGES
    idle = [stage.name for stage in stages if not stage.checked]
    assert idle == ["exact_output"]  # needs an infinite sink
    chain = stages[-1]
    assert not chain.verdict
    assert 0 < chain.detail["relative_l2"] < 0.1


def test_float64_golden_accepts_the_same_results(make_case: MakeCase) -> None:
    stages = validate_case(make_case(), "torch", CPU, Store(CPU, dtype=torch.float64))
    assert all(stage.ok for stage in stages)


def test_a_topology_that_cannot_be_served_is_skipped_with_its_reason(
    make_case: MakeCase, store: Store
) -> None:
    row = examine(make_case(tp=4), "torch", CPU, store)
    assert (row.status, row.stages) == ("skipped", [])
    assert "TP 4" in row.reason


def test_a_case_larger_than_the_memory_is_skipped_with_what_it_needs(
    make_case: MakeCase, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(memory, "_held_bytes", lambda device: 0)
    monkeypatch.setattr(memory, "_total_bytes", lambda device: 2 << 20)
    with pytest.raises(Skipped, match=r"needs \d+\.\d GiB on cpu, 0\.0 GiB are free"):
        validate_case(make_case(), "torch", CPU, store)


def test_a_case_that_others_left_no_memory_for_is_an_error_and_not_skipped(
    make_case: MakeCase, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(memory, "_held_bytes", lambda device: 0)
    monkeypatch.setattr(memory, "_total_bytes", lambda device: 1 << 40)
    row = examine(make_case(), "torch", CPU, store)
    assert row.status == "error"
    assert row.reason.endswith("GiB on cpu, 0.0 GiB are free of 1024.0"), row.reason


def test_a_far_decode_needs_the_pages_it_names_and_not_its_whole_history(
    make_case: MakeCase,
) -> None:
    near, far = make_case(batch="8q1s4k"), make_case(batch="8q1s1024k")
    geometry = Geometry.load(far.model)
    history = 8 * (1 << 20) * far.record.nbytes
    grown = memory.needed_bytes(far, geometry) - memory.needed_bytes(near, geometry)
    table = far.max_seq_len * 64 * 20
    assert grown - table < history


def test_what_a_backend_does_not_support_is_skipped_in_its_words(
    make_case: MakeCase, store: Store
) -> None:
    class Picky(TorchBackend):
        def supports(self, *args: object) -> Support:
            return Support(False, "only on Tuesdays")

    store.add_backend("picky", Picky())
    row = examine(make_case(), "picky", CPU, store)
    assert (row.status, row.reason) == ("skipped", "only on Tuesdays")


class Broken(TorchBackend):
    def linear(self, *args: object) -> torch.Tensor:
        raise RuntimeError("no such\n instruction")


def test_a_backend_that_raises_is_an_error_in_one_line(make_case: MakeCase, store: Store) -> None:
    store.add_backend("broken", Broken())
    row = examine(make_case(), "broken", CPU, store)
    assert (row.status, row.reason) == ("error", "RuntimeError: no such instruction (in linear)")
    assert examine(make_case(), "torch", CPU, store).status == "passed"


def test_a_row_says_its_tokens_and_the_command_that_repeats_it(make_case: MakeCase) -> None:
    row = examine(make_case(batch="1q1s9"), "torch", CPU, Store(CPU, layer_seed=3), "mine.yaml")
    assert (row.status, row.tokens) == ("passed", 1)
    assert row.repro == (
        f"megabench validate --cases mine.yaml --case {row.case_id} --backend torch "
        "--device cpu --seed 3"
    )


def test_the_canaried_output_is_laid_out_as_the_kernels_demand() -> None:
    output = CanariedOutput.make(5, 8, CPU, POISONS[0])
    data, scale = output.pair.data, output.pair.scale
    assert data.is_contiguous()
    assert data.data_ptr() % 32 == 0
    assert (tuple(scale.shape), scale.stride()) == ((5, 8, 32), (1, 256, 8))
    data.view(torch.uint8).zero_()
    scale.zero_()
    assert not output.data.lost().any()
    assert not output.scale.lost().any()
    scale.as_strided((1,), (1,), scale.storage_offset() + 5).zero_()
    assert (int(output.data.lost().sum()), int(output.scale.lost().sum())) == (0, 1)


def test_backends_that_take_turns_load_their_weights_once(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    load = store_module.make_layer

    def counted(*args: object, **named: object) -> object:
        loaded.append(args)
        return load(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store_module, "make_layer", counted)
    store = Store(CPU)
    for batch in ("1q1s40", "1q1s50"):
        for name in ("torch", "megabench.backends:TorchBackend"):
            assert all(s.ok for s in validate_case(make_case(batch=batch), name, CPU, store))
    assert len(loaded) == 2


class Coarse(TorchBackend):
    """Has torch multiply its float32 in less, for good."""

    def linear(self, *args: Any) -> torch.Tensor:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return super().linear(*args)


def test_golden_products_are_in_float32_whatever_a_backend_sets(
    make_case: MakeCase, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, seen = torch.backends.cuda.matmul, []
    judge = runner.judge_rank

    def watched(evidence: Evidence) -> list[Judgement]:
        seen.append(setting.fp32_precision)
        return judge(evidence)

    monkeypatch.setattr(runner, "judge_rank", watched)
    store.add_backend("coarse", Coarse())
    kept = setting.fp32_precision
    try:
        validate_case(make_case(), "coarse", CPU, store)
        assert (seen, setting.fp32_precision) == (["ieee"], "tf32")
    finally:
        setting.fp32_precision = kept
