"""The peers' benchmark: same values for every arm, exact helpers, and no time without a check."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import peer_standin
import pytest
import torch

from benchmarks.peers import flash
from benchmarks.peers.__main__ import PARTS, listing, plan
from benchmarks.peers.arms import Arm, Bar, Group, Ratio, checked, measure
from benchmarks.peers.attention import decode_group, flash_arms
from benchmarks.peers.compiled import eager_decode
from benchmarks.peers.einsum import BMM, DEEP_GEMM, einsum_group
from benchmarks.peers.flash import PrefillAttention, Unfused, UnfusedBackend, unfused
from benchmarks.peers.judge import Truth, attention_truth, first
from benchmarks.peers.kernels import cast_output, rope_queries
from benchmarks.peers.layer_step import leave_queries_natural
from benchmarks.peers.records import encode_v4, representable, to_v4
from benchmarks.peers.report import Report
from benchmarks.peers.steps import Bench, Step, own_output
from megabench.backends import TorchBackend
from megabench.bench.sampling import Policy
from megabench.cases import Case
from megabench.quant import alloc_mega_attn_output
from megabench.results import capture_environment
from megabench.workload import build_workload
from reference.cast import cast_output as golden_cast
from reference.codes import round_bf16
from reference.layouts import output_from_meaning
from reference.records import decode_slots
from reference.rope import cos_sin_table, on_rope_dims, rotate, unrotate

CPU = torch.device("cpu")
QUICK = Policy(min_samples=3, max_samples=3, timeout=0.5)
WEIGHTS = Bench(CPU).weights


@pytest.fixture
def bench() -> Bench:
    """A bench whose one backend is eager torch."""
    made = Bench(CPU)
    made.weights = WEIGHTS
    made.backends = {"torch": TorchBackend()}
    made.absent = {"sm90": "no device"}
    return made


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_mla, computed with the golden model's parts."""
    module = peer_standin.module()
    module.__spec__ = ModuleSpec("flash_mla", None)
    monkeypatch.setitem(sys.modules, "flash_mla", module)


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "vllm", None)


# ---- the same values in both records ----------------------------------------


@pytest.mark.parametrize("record", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_re_encoded_rows_hold_the_same_values_slot_for_slot(record: str) -> None:
    case = Case.model_validate({"batch": "2q1s300_q9", "kv_cache": record})
    workload = representable(build_workload(case, CPU))
    assert workload.compressed_cache is not None
    for cache in (workload.swa_cache, workload.compressed_cache):
        v4 = to_v4(cache)
        slots = torch.arange(cache.shape[0] * cache.shape[1])
        before = decode_slots(cache, slots, "interleaved")
        named = before.isfinite().all(-1)
        assert named.any()
        assert not named.all(), "a pool has rows that nobody may read"
        after = decode_slots(v4, slots, "page_split")
        assert torch.equal(after[named], before[named])
        assert after[~named].isnan().any(-1).all()


def test_rows_that_a_v4_record_cannot_hold_are_refused() -> None:
    rows = torch.zeros(3, 512)
    rows[1, :2] = torch.tensor([448.0, 0.001])
    with pytest.raises(ValueError, match="V4 record"):
        encode_v4(rows)
    rows[1, 1] = 0.0
    encode_v4(rows)
    rows[2, 500] = 1 + 2.0**-10
    with pytest.raises(ValueError, match="V4 record"):
        encode_v4(rows)


def test_rows_the_step_inserts_are_held_exactly_too(bench: Bench) -> None:
    step = bench.step("2q1s140", "nvfp4_ds_mla")
    written = step.workload.swa_metadata.slot_mapping
    before = decode_slots(step.caches()[0], written, "interleaved")
    step.run()
    after = decode_slots(step.caches()[0], written, "interleaved")
    assert not torch.equal(before, after)
    assert torch.equal(decode_slots(to_v4(step.caches()[0]), written, "page_split"), after)
    to_v4(step.caches()[1])


# ---- the pipeline's kernels -------------------------------------------------


def test_the_rope_kernel_is_golden_bit_for_bit_and_touches_no_other_dim() -> None:
    q = torch.randn(3, 64, 512).bfloat16()
    positions, table = torch.tensor([0, 77, 4095], dtype=torch.int32), cos_sin_table(4096, True)
    turned = round_bf16(rotate(q[..., 448:].float(), table[positions.long()][:, None]))
    out = torch.full_like(q, 3.0)
    rope_queries(q, out, positions, table)
    assert torch.equal(out[..., 448:].float(), turned)
    assert (out[..., :448] == 3.0).all()
    whole = on_rope_dims(q.float(), turned)
    rope_queries(q, q, positions, table)
    assert torch.equal(q.float(), whole), "in place"


def test_the_cast_kernel_is_golden_bit_for_bit_in_wo_a_order() -> None:
    o = (torch.randn(5, 64, 512) * torch.logspace(-6, 3, 64)[:, None]).bfloat16()
    positions = torch.tensor([5, 0, 300, 1, 4095], dtype=torch.int32)
    table = cos_sin_table(4096, True)
    pair = alloc_mega_attn_output(5, 8, CPU)
    cast_output(o, positions, table, pair)
    turned = unrotate(o[..., 448:].float(), table[positions.long()][:, None])
    codes, scales = golden_cast(on_rope_dims(o.float(), turned))
    data, words = output_from_meaning(codes, scales)
    assert torch.equal(pair.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(pair.scale, words)


# ---- arms -------------------------------------------------------------------


@pytest.mark.usefixtures("vendor")
def test_every_decode_arm_agrees_with_golden_attention(bench: Bench) -> None:
    group = decode_group(bench, 1)
    assert len(group.arms) == 4
    assert [checked(arm) for arm in group.arms] == [None] * 4


def test_what_torch_compiles_is_the_eager_op(bench: Bench) -> None:
    args = own_output(bench.step("2q1s700", "fp8_ds_mla").decode_arguments())
    args.indices[1, 100:] = -1
    args.topk_length[0] = 70
    codes, scales = (t.clone() for t in eager_decode(args))
    want = bench.eager.decode(args)
    assert torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(scales, want[1])


@pytest.mark.usefixtures("vendor")
def test_a_pipeline_that_forgets_a_part_is_wrong(bench: Bench) -> None:
    args = bench.step("q2s700", "nvfp4_ds_mla").prefill_arguments()
    truth = attention_truth(args)
    plain, whole = flash_arms(args, PrefillAttention(args), truth)
    assert checked(plain) is None
    assert checked(whole) is None
    pipeline = unfused(args, PrefillAttention(args))
    unturned = replace(args, token_positions=args.token_positions * 0)
    for wrong in (
        Unfused(unturned, pipeline.attend, pipeline.q, pipeline.rotated, pipeline.out),
        replace(pipeline, attend=lambda q: pipeline.attend(q) * 1.02),
        replace(pipeline, attend=PrefillAttention(replace(args, attn_sink=args.attn_sink * 0))),
    ):
        assert truth.fp8(rounded=True).problem(truth.fused(wrong())) is not None
    assert truth.bf16().problem(truth.plain(plain.run()) + 0.02) is not None


@pytest.mark.usefixtures("vendor")
def test_the_step_with_the_pipeline_does_the_fused_steps_work(bench: Bench) -> None:
    ours = bench.step("2q1s140", "nvfp4_ds_mla")
    fused = ours.run()[0].double()
    pipeline = UnfusedBackend(ours.layer.backend)
    pipeline.caches = (to_v4(ours.caches()[0]), to_v4(ours.caches()[1]))
    peer = Step(bench, ours.workload, bench.pool.layer(ours.workload, pipeline, fresh=True))
    chunked = (peer.run()[0].double() - fused).norm() / fused.norm()
    leave_queries_natural(peer)
    natural = (peer.run()[0].double() - fused).norm() / fused.norm()
    assert natural < 0.06 < chunked


def test_every_einsum_arm_agrees_with_float64(bench: Bench) -> None:
    group = einsum_group(bench, 1)
    assert {arm.name for arm in group.arms} >= {BMM, "torch"}
    assert [checked(arm) for arm in group.arms] == [None] * len(group.arms)
    arm = group.arms[0]
    assert arm.truth.problem(first(arm.run()) * 1.05) is not None


def group_of(*arms: Arm) -> Group:
    return Group("decode", "s_q 1", list(arms), {"peer": "not here"}, [Bar("right", "other", 9.0)])


def test_a_wrong_arm_is_reported_and_not_timed() -> None:
    truth = Truth(torch.ones(4, dtype=torch.float64), torch.full((4,), 0.1, dtype=torch.float64))
    runs = []

    def broken() -> list[torch.Tensor]:
        raise RuntimeError("no kernel image\nmore")

    def wrong() -> list[torch.Tensor]:
        runs.append(1)
        return [torch.tensor([1.0, 1.0, torch.nan, 1.0])]

    arms = [
        Arm("right", lambda: [torch.ones(4)], first, truth),
        Arm("wrong", wrong, first, truth),
        Arm("broken", broken, first, truth),
        Arm("other", lambda: [torch.ones(4) * 1.05], first, truth),
    ]
    rows, ratios = measure(group_of(*arms), None, QUICK)
    found = {row.arm: row for row in rows}
    assert found["wrong"].status == "WRONG"
    assert found["wrong"].median_us is None
    assert "25.00%" in found["wrong"].note
    assert len(runs) == 1
    assert (found["broken"].status, found["broken"].note) == (
        "FAILED",
        "RuntimeError: no kernel image",
    )
    assert found["peer"].status == "not installed"
    assert found["right"].status == found["other"].status == "timed"
    assert [(r.ours, r.peer, r.verdict) for r in ratios] == [("right", "other", "met")]


def test_an_arm_that_goes_wrong_while_timed_loses_its_time() -> None:
    truth = Truth(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    count = iter(range(100))
    drifting = Arm("right", lambda: [torch.ones(1) + (next(count) > 1)], first, truth)
    rows, ratios = measure(group_of(drifting), None, QUICK)
    assert [row.status for row in rows] == ["not installed", "WRONG"]
    assert ratios == []


# ---- what is absent, what is written ----------------------------------------


@pytest.mark.usefixtures("no_packages")
def test_arms_of_absent_packages_are_listed_with_the_way_to_get_them(bench: Bench) -> None:
    text = "\n".join(listing(CPU))
    assert "sgl-flash-mla" in text
    assert f"{DEEP_GEMM}: not installed" in text
    assert "sm90: the sm90 kernels need a CUDA device" in text
    group = decode_group(bench, 1)
    assert set(group.absent) == {
        "sm90",
        "FlashMLA attention only",
        "unfused: RoPE + FlashMLA + cast",
    }
    assert DEEP_GEMM in einsum_group(bench, 1).absent


def test_only_takes_parts_and_every_bar_has_its_size() -> None:
    assert {part for part, _, _ in plan(["einsum"])} == {"einsum"}
    sizes = [(part, size) for part, size, _ in plan(list(PARTS))]
    assert sizes[:5] == [("decode", s) for s in ("1", "32", "128", "512", "1024")]
    assert ("step", "512q1s4k") in sizes
    assert [size for _, size, _ in plan(["decode", "einsum"], ["1", "4096"])] == ["1", "1", "4096"]


def test_a_report_has_machine_date_and_every_row(tmp_path: Path) -> None:
    truth = Truth(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    arms = [Arm(name, lambda: [torch.ones(1)], first, truth) for name in ("right", "other")]
    report = Report(tmp_path, capture_environment(CPU))
    report.add(*measure(group_of(*arms), None, QUICK))
    page = report.page.read_text()
    lines = [json.loads(line) for line in (tmp_path / "peers.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "arm", "arm", "arm", "ratio"]
    assert lines[0]["environment"]["packages"]["torch"]
    assert lines[0]["date"] in page
    assert "| decode, µs | s_q 1 |" in page
    assert "| peer | not installed |" in page
    assert "- decode s_q 1, peer: not here" in page
    assert re.search(r"\| right / other \| [\d.]+ \([\d.]+-[\d.]+\), bar 9: met \|", page)


def test_a_bar_inside_the_interval_is_neither_met_nor_missed() -> None:
    verdicts = [
        Ratio("decode", "s_q 1", "ours", "peer", ratio, 0.97, 1.05, bar).verdict
        for ratio, bar in ((1.02, 1.02), (1.02, 1.0), (1.02, 0.9), (1.02, None))
    ]
    assert verdicts == ["met", "undecided", "MISSED", ""]
