"""Each guard has a backend that only it, or a stage beside it, can catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty_backends import Args, Fault, faulty
from torch import Tensor

from megabench.backends import TorchBackend
from megabench.cases import Case
from megabench.faults.kernel import Kernel, kernel
from megabench.results.schema import StageResult
from megabench.validate import Store, device, validate_case
from megabench.validate.batches import other_batches
from megabench.validate.guards import fingerprint
from megabench.validate.poison import FILLS, POISONS, Fenced, strayed_bytes
from megabench.validate.trace import (
    COMBINE,
    DECODE,
    EINSUM,
    GATHER,
    INSERT_COMPRESSED,
    PREFILL,
    whole,
)

CPU = torch.device("cpu")
MakeCase = Callable[..., Case]
Judge = Callable[..., dict[str, StageResult]]


@pytest.fixture
def judge(make_case: MakeCase, store: Store) -> Judge:
    """The stages of a case on a backend of the test's own."""

    def of(backend: TorchBackend, **axes: object) -> dict[str, StageResult]:
        store.add_backend("own", backend)
        stages = validate_case(make_case(**axes), "own", CPU, store)
        return {stage.name: stage for stage in stages}

    return of


def wrong(stages: dict[str, StageResult]) -> list[str]:
    return [name for name, stage in stages.items() if not stage.ok]


def with_fault(*ops: str, **change: Any) -> TorchBackend:
    return faulty(Fault("own", "", ops, **change))


# ---- memory beside what an op owns ---------------------------------------------------------------


def poke(tensor: Tensor, index: int, value: int = 0x5A) -> None:
    """Change one byte of a tensor's storage, counted from the tensor's own start."""
    raw = whole(tensor).view(torch.uint8)
    raw[tensor.storage_offset() * tensor.element_size() + index] = value


def row_before_the_slice(args: Args, result: Any) -> Any:
    poke(args["out_fp8"], -1)
    return result


def test_a_prefill_that_writes_a_decodes_row_is_caught_though_the_decode_writes_it_again(
    judge: Judge,
) -> None:
    stages = judge(with_fault(PREFILL, after=row_before_the_slice))
    assert "canaries" in wrong(stages)
    assert "out_fp8 beside the slice of" in stages["canaries"].message


def test_what_wo_a_writes_past_its_rows_is_caught(judge: Judge) -> None:
    def past(args: Args, result: None) -> None:
        poke(args["out"], args["out"].numel() * 2)

    stages = judge(with_fault(EINSUM, after=past))
    assert wrong(stages) == ["canaries"]
    assert "tensor latent" in stages["canaries"].message


def test_a_gather_that_rounds_its_rows_up_is_caught(judge: Judge) -> None:
    """A request of 5 rows beside one of 9: the rows between belong to nobody."""

    def past(args: Args, result: None) -> None:
        if args["offset"] and len(args["out"]) == 2:
            args["out"][0, args["offset"] + 5] = 0

    stages = judge(with_fault(GATHER, after=past), batch="1q5_1q9", compress_ratio=1)
    assert wrong(stages) == ["canaries"]
    assert "tensor workspace" in stages["canaries"].message


def test_lists_made_for_tokens_that_are_not_there_are_caught(judge: Judge) -> None:
    def past(args: Args, pair: Any) -> Any:
        lists = args["out"][0]
        poke(lists, lists.numel() * 4)
        return pair

    assert wrong(judge(with_fault(COMBINE, after=past))) == ["holed_lists", "canaries"]


def test_a_page_pad_that_attention_writes_is_caught(judge: Judge) -> None:
    def pad(args: Args, result: Any) -> Any:
        poke(args["extra_kv"], args["extra_kv"].shape[1] * args["extra_kv"].shape[3])
        return result

    stages = judge(with_fault(DECODE, after=pad), page_padding=1)
    assert wrong(stages) == ["inputs_unchanged"]


@pytest.mark.parametrize("name", ["kv", "indices", "topk_length"])
def test_a_prefill_that_changes_what_it_reads_is_caught(name: str, judge: Judge) -> None:
    def changed(args: Args, result: Any) -> Any:
        poke(args[name], 0)
        return result

    assert "inputs_unchanged" in wrong(judge(with_fault(PREFILL, after=changed)))


# ---- memory that holds poison --------------------------------------------------------------------


def lsb(result: list[Tensor], bit: Tensor) -> list[Tensor]:
    """The results with one lse off by an ulp, within every bound, if `bit` is set."""
    lse = result[-1]
    lse[0, 0] += float(bit & 1) * 2.0**-20
    return [*result[:-1], lse]


def test_a_result_that_leans_on_an_unowned_slot_is_caught(judge: Judge) -> None:
    def leans(args: Args, result: list[Tensor]) -> list[Tensor]:
        return lsb(result, (args["kv"][0, 0, 0, 0] > 0xC0).int())

    assert "repeatable" in wrong(judge(with_fault(DECODE, after=leans)))


def test_a_result_that_leans_on_the_workspaces_gaps_is_caught(judge: Judge) -> None:
    def leans(args: Args, result: list[Tensor]) -> list[Tensor]:
        gap = args["kv"].view(2, -1, 512)[0, -1, 0].view(torch.int16)
        return lsb(result, gap.int())

    stages = judge(with_fault(PREFILL, after=leans), batch="1q5_1q9")
    assert "repeatable" in wrong(stages)


def test_a_result_that_leans_on_a_lists_tail_is_caught(judge: Judge) -> None:
    def leans(args: Args, result: list[Tensor]) -> list[Tensor]:
        return lsb(result, (args["indices"][0, -1] > 0).int())

    assert "repeatable" in wrong(judge(with_fault(DECODE, after=leans), batch="2q1s9"))


def test_a_live_head_that_sees_padded_heads_is_caught(judge: Judge) -> None:
    def sees(args: Args) -> None:
        chunks = args["q"].view(len(args["q"]), 32, -1, 16)
        chunks[:, :, 0] += chunks[:, :, -1]

    stages = judge(with_fault(DECODE, before=sees))
    assert wrong(stages) == ["holed_lists"]


def test_an_einsum_that_reads_the_padded_heads_groups_is_caught(judge: Judge) -> None:
    """Zero times what lies there is only zero while that is finite."""

    def reads(args: Args, result: None) -> None:
        data = args["x"][0]
        groups = data.shape[1]
        beyond = data.as_strided(data.shape, data.stride(), data.storage_offset() + groups * 4096)
        args["out"] += 0 * beyond.float().sum((1, 2))[:, None, None].bfloat16()

    assert "wo_a_einsum" in wrong(judge(with_fault(EINSUM, after=reads)))


def test_an_einsum_that_adds_to_what_its_output_held_is_caught(judge: Judge) -> None:
    held: list[Tensor] = []

    def before(args: Args) -> None:
        held[:] = [args["out"].clone()]

    def after(args: Args, result: None) -> None:
        args["out"] += held[0] * 2.0**-130

    assert wrong(judge(with_fault(EINSUM, before=before, after=after)))


def test_no_page_row_or_word_has_the_same_fill_in_both_runs() -> None:
    first, second = POISONS
    assert set(first.fills) == set(second.fills) == set(FILLS) == {0x00, 0x7F, 0xFF, 0xA5}
    assert all(a != b for a, b in zip(first.fills, second.fills, strict=True))
    assert (first.data, second.data, first.scale, second.scale) == (0x7F, 0x01, 0xFE, 0x01)


def test_a_fence_sees_every_word_around_and_between_the_elements() -> None:
    fenced = Fenced.make((3, 2), (1, 4), 8, torch.int32, CPU, POISONS[0], 0x11)
    assert fenced.tensor.tolist() == [[0x11111111] * 2] * 3
    assert not fenced.lost().any()
    for index in (-4, 12, 28):  # before, between, after
        kept = whole(fenced.tensor).clone()
        poke(fenced.tensor, index)
        assert int(fenced.lost().sum()) == 1, index
        whole(fenced.tensor).copy_(kept)


def test_a_workspace_may_change_only_where_it_is_owned() -> None:
    buffer = torch.empty(4096, dtype=torch.uint8)
    clean = strayed_bytes(buffer, [], POISONS[0])
    buffer[clean] ^= 0xFF  # nothing is as it was filled
    rows = buffer[1024:2048].view(torch.bfloat16)
    assert bool(strayed_bytes(buffer, [], POISONS[0])[1024:2048].any())
    assert not bool(strayed_bytes(buffer, [rows], POISONS[0])[1024:2048].any())


# ---- the same step again -------------------------------------------------------------------------


class ByPointer(TorchBackend):
    """Keeps what the first call at an address gave."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[int, int], Tensor] = {}

    def linear(self, x: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        key = x.data_ptr(), len(x)
        return self.kept.setdefault(key, super().linear(x, w, sw)).clone()


def test_results_kept_by_address_are_caught(judge: Judge) -> None:
    assert "replay" in wrong(judge(ByPointer()))


class Claims(TorchBackend):
    """Says that a token's results do not depend on its batch; they do for a lone decode."""

    batch_invariant = True
    nudge = 2.0**-20

    def decode(self, args: Any) -> list[Tensor]:
        result = super().decode(args)
        if len(args.q) == 1:
            result[-1].add_(self.nudge)
        return result


class Silent(Claims):
    batch_invariant = False


def test_a_backend_that_claims_batch_invariance_is_held_to_it(judge: Judge) -> None:
    assert wrong(judge(Claims(), batch="3q1s300")) == ["batch_invariance"]


def test_one_that_does_not_claim_it_is_told_how_much_differs(judge: Judge) -> None:
    stages = judge(Silent(), batch="3q1s300")
    assert wrong(stages) == []
    found = stages["batch_invariance"]
    assert (found.verdict, found.worst) == (False, None)
    assert "tensor lse" in found.message


def test_three_requests_run_alone_and_all_in_reverse_with_decodes_first(
    make_case: MakeCase,
) -> None:
    requests = make_case(batch="4q1s9_3q5").requests
    for draw in range(7):
        *alone, reverse = other_batches(requests, draw)
        assert len({one for (one,) in alone}) == 3
        assert reverse == [3, 2, 1, 0, 6, 5, 4]
    assert other_batches(requests[:1], 0) == []
    assert other_batches(make_case(batch="1q1s9_1q5").requests, 0) == [[0], [1]]


# ---- launches and checksums ----------------------------------------------------------------------


def test_an_error_that_a_launch_left_behind_ends_the_case(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "taken_error", lambda: "invalid configuration argument")
    monkeypatch.setattr(device, "_on_a_gpu", lambda args: True)
    with pytest.raises(device.LaunchError, match="linear left a CUDA error behind: invalid conf"):
        judge(TorchBackend())


@pytest.mark.parametrize("size", [0, 3, 8 * 4099, 8 * 4099 * 3 + 21])
def test_a_fingerprint_changes_with_any_byte_and_with_their_order(size: int) -> None:
    torch.manual_seed(0)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    first = fingerprint(data)
    assert fingerprint(data.clone()) == first
    for index in {0, size // 2, size - 1} if size else ():
        data[index] ^= 1
        assert fingerprint(data) != first
        data[index] ^= 1
    if size:
        assert fingerprint(data.roll(8)) != first


class Declares(TorchBackend):
    """Says that it divides by the sum of probabilities as rounded to bf16."""

    sums_rounded_p = True


class RoundedSums(Kernel):
    """Does so."""

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, top, _ = super().softmax(scores)
        return weights, top, self.probabilities(weights).sum(-1)


@pytest.mark.parametrize("right", [Declares, TorchBackend])
def test_sums_of_rounded_probabilities_pass_only_where_they_are_declared(
    right: type[TorchBackend], judge: Judge
) -> None:
    with kernel(RoundedSums).faulty(right()) as backend:
        found = wrong(judge(backend))
    assert (found == []) == (right is Declares)
    assert "lse_decode" in found or "holed_lists" in found or right is Declares


def test_the_latent_rows_of_a_compressed_insert_are_inputs_too(judge: Judge) -> None:
    def negated(args: Args, result: None) -> None:
        args["latent"].neg_()

    assert "inputs_unchanged" in wrong(judge(with_fault(INSERT_COMPRESSED, after=negated)))
