"""Memory around what an op may write, what it was given, and the form of what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from faulty_backends import Args, Fault, faulty
from torch import Tensor

from megabench.backends import TorchBackend
from megabench.backends.arguments import DecodeArguments
from megabench.cases import Case
from megabench.quant import dequantize_mxfp8, quantize_activation
from megabench.results.schema import StageResult
from megabench.validate import Store, examine, validate_case
from megabench.validate.guards import fingerprint
from megabench.validate.reload import reload_weights
from megabench.validate.trace import (
    COMBINE,
    DECODE,
    GLOBAL_TOPK,
    INSERT_COMPRESSED,
    PAD_AND_INSERT,
    PREFILL,
    whole,
)
from megabench.workload import build_workload, checkpoint, make_layer

CPU = torch.device("cpu")
Wrong = Callable[..., list[str]]


@pytest.fixture
def wrong(make_case: Callable[..., Case], store: Store) -> Wrong:
    """The stages of a case that a backend of the test's own gets wrong."""

    def of(backend: TorchBackend, **axes: object) -> list[str]:
        store.add_backend("own", backend)
        stages: list[StageResult] = validate_case(make_case(**axes), "own", CPU, store)
        return [stage.name for stage in stages if not stage.ok]

    return of


def after(*ops: str, change: Callable[[Args, Any], Any]) -> TorchBackend:
    return faulty(Fault("own", "", ops, after=change))


def poked(tensor: Tensor, index: int) -> None:
    """Change a byte of a tensor's storage, counted from the tensor's first."""
    raw = whole(tensor).view(torch.uint8)
    raw[tensor.storage_offset() * tensor.element_size() + index] ^= 0x5A


# ---- memory beside what an op owns ---------------------------------------------------------------


def test_slot_minus_one_taken_for_the_record_before_the_pool_is_caught(wrong: Wrong) -> None:
    def before_the_pool(args: Args, padded: Tensor) -> Tensor:
        if bool((args["slot_mapping"] < 0).any()):
            poked(args["swa_cache"], -1)
        return padded

    backend = after(PAD_AND_INSERT, change=before_the_pool)
    assert "swa_cache" in wrong(backend, batch="3q1s200", padding_tokens=1)


def test_a_row_written_after_the_pool_is_caught(wrong: Wrong) -> None:
    def after_the_pool(args: Args, result: None) -> None:
        cache = args["cache"]
        poked(cache, cache.shape[0] * cache.stride(0))

    assert "compressed_cache" in wrong(after(INSERT_COMPRESSED, change=after_the_pool))


def test_a_cache_read_from_the_start_of_its_storage_is_caught(wrong: Wrong) -> None:
    class StorageStart(TorchBackend):
        def decode(self, args: DecodeArguments) -> list[Tensor]:
            moved = args.kv.as_strided(args.kv.shape, args.kv.stride(), 0)
            return super().decode(replace(args, kv=moved))

    assert "lse_decode" in wrong(StorageStart())


def test_rope_dims_of_a_token_that_is_not_there_are_caught(wrong: Wrong) -> None:
    """Two store paths, of which one forgets where the tokens end."""

    def past(args: Args, result: Any) -> Any:
        out = args["out_fp8"]
        if out.untyped_storage().nbytes() > out.numel():  # not one the op allocated
            poked(out, out.numel() + 3584)
        return result

    backend = after(DECODE, change=past)
    assert "canaries" in wrong(backend, batch="3q1s300")


# ---- what an op was given ------------------------------------------------------------------------


@pytest.mark.parametrize("op", [DECODE, PREFILL])
def test_positions_that_an_op_leaves_changed_are_caught(op: str, wrong: Wrong) -> None:
    def changed(args: Args, result: Any) -> Any:
        args["token_positions"] += 1
        return result

    assert wrong(after(op, change=changed)) == ["inputs_unchanged"]


@pytest.mark.parametrize("row", [-1, 0])
def test_a_row_of_the_rotation_table_that_changes_is_caught(row: int, wrong: Wrong) -> None:
    """By an ulp, in a row the step uses or in one it does not."""

    def changed(args: Args, result: Any) -> Any:
        table = args["cos_sin_cache"]
        table[row] = torch.nextafter(table[row], torch.tensor(2.0))
        return result

    assert "inputs_unchanged" in wrong(after(DECODE, change=changed))


def test_a_fingerprint_sees_top_bits_and_words_that_change_places() -> None:
    data = torch.arange(8 * 4099 * 4, dtype=torch.int64).to(torch.uint8)
    words, first = data.view(torch.int64), fingerprint(data)
    data[7] ^= 0x80
    assert fingerprint(data) != first
    data[7] ^= 0x80
    one, other = words[1].clone(), words[4099].clone()
    assert one != other
    words[1], words[4099] = other, one
    assert fingerprint(data) != first


class DenseByAddress(TorchBackend):
    """Keeps a weight's dense form by where the weight is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[int, Tensor] = {}

    def dense(self, weight: Tensor, scale: Tensor) -> Tensor:
        made = dequantize_mxfp8(weight, scale)
        return self.kept.setdefault(weight.data_ptr(), made)

    def linear(self, x: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        operand = dequantize_mxfp8(*quantize_activation(x))
        return (operand @ self.dense(w, sw).T).bfloat16()


def test_a_weight_kept_by_its_address_is_stale_after_a_reload(make_case: Any) -> None:
    store = Store(CPU)
    store.add_backend("own", DenseByAddress())
    row = examine(make_case(), "own", CPU, store)
    assert row.reason.startswith("wq_b_linear"), row.reason


class BreaksInTheEinsum(TorchBackend):
    """Raises where a reload uses other weights at a layer's addresses."""

    def fp8_einsum(self, *operands: Any, **options: Any) -> None:
        raise RuntimeError("no such instruction")


def test_a_reload_that_breaks_leaves_the_weights_as_they_were(make_case: Any) -> None:
    workload = build_workload(make_case(), CPU)
    layer = make_layer(workload, BreaksInTheEinsum(), checkpoint(workload.geometry, 0, None, CPU))
    before = fingerprint(layer.wo_a.weight)
    with pytest.raises(RuntimeError, match="no such instruction"):
        reload_weights(layer)
    assert fingerprint(layer.wo_a.weight) == before


# ---- what an op gives back -----------------------------------------------------------------------


def test_an_lse_in_float64_is_caught(wrong: Wrong) -> None:
    backend = after(DECODE, change=lambda args, result: [*result[:-1], result[-1].double()])
    assert "lse_decode" in wrong(backend)


def test_an_lse_of_live_heads_alone_is_caught(wrong: Wrong) -> None:
    backend = after(PREFILL, change=lambda args, result: [*result[:-1], result[-1][:, :16]])
    assert "lse_prefill" in wrong(backend)


@pytest.mark.parametrize("part", [0, 1])
def test_lists_or_lengths_in_int64_are_caught(part: int, wrong: Wrong) -> None:
    class Wide(TorchBackend):
        def compute_global_topk_indices_and_lens(self, *args: Any) -> Any:
            pair = [*super().compute_global_topk_indices_and_lens(*args)]
            pair[part] = pair[part].long()
            return tuple(pair)

        def decode(self, args: DecodeArguments) -> list[Tensor]:
            lists, lens = args.extra_indices, args.extra_topk_length
            assert lists is not None
            assert lens is not None
            narrow = replace(args, extra_indices=lists.int(), extra_topk_length=lens.int())
            return super().decode(narrow)

    assert "indices_decode" in wrong(Wide())


def test_another_pair_than_the_one_written_is_caught(wrong: Wrong) -> None:
    backend = after(
        DECODE, change=lambda args, r: [torch.empty_like(r[0]).copy_(r[0].float() * 0), *r[1:]]
    )
    assert wrong(backend) == ["holed_lists"]


def test_an_op_that_cannot_allocate_its_output_is_caught(wrong: Wrong) -> None:
    class Needy(TorchBackend):
        def decode(self, args: DecodeArguments) -> list[Tensor]:
            assert args.out_fp8 is not None
            return super().decode(args)

    assert wrong(Needy()) == ["holed_lists"]


class Reuses(TorchBackend):
    """Right: what a linear returns is its own again when the step has ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def linear(self, x: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        made = super().linear(x, w, sw)
        return self.kept.setdefault(tuple(made.shape), torch.empty_like(made)).copy_(made)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_result_whose_memory_the_next_step_takes_is_right(tp: int, wrong: Wrong) -> None:
    assert wrong(Reuses(), tp=tp) == []


# ---- called as no layer does ---------------------------------------------------------------------


def test_rows_taken_to_follow_each_other_without_a_gap_are_caught(wrong: Wrong) -> None:
    class Pitch(TorchBackend):
        def decode(self, args: DecodeArguments) -> list[Tensor]:
            lists = args.indices
            dense = lists.as_strided(lists.shape, (lists.shape[1], 1))
            return super().decode(replace(args, indices=dense))

    assert wrong(Pitch(), batch="3q1s300") == ["holed_lists"]


def changes_topk(op: str, change: Callable[[Tensor], Tensor]) -> TorchBackend:
    def before(args: Args) -> None:
        args["topk_indices"] = change(args["topk_indices"])

    return faulty(Fault("own", "", (op,), before=before))


def closes_gaps(rows: Tensor) -> Tensor:
    return rows.gather(1, (rows < 0).int().argsort(dim=1, stable=True))


def stops_at_a_hole(rows: Tensor) -> Tensor:
    return rows.masked_fill((rows < 0).int().cumsum(1) > 0, -1)


@pytest.mark.parametrize("op", [GLOBAL_TOPK, COMBINE])
@pytest.mark.parametrize("change", [closes_gaps, stops_at_a_hole])
def test_an_index_op_that_mistakes_a_hole_is_caught(
    op: str, change: Callable[[Tensor], Tensor], wrong: Wrong
) -> None:
    assert wrong(changes_topk(op, change)) == ["holed_lists"]


def test_a_row_past_the_workspace_that_is_not_struck_is_caught(wrong: Wrong) -> None:
    def before(args: Args) -> None:
        rows = args["topk_indices"]
        args["topk_indices"] = torch.where(rows >= args["N"], 0, rows)

    assert wrong(faulty(Fault("own", "", (COMBINE,), before=before))) == ["holed_lists"]


class Identity(TorchBackend):
    """Takes standard order for the kernel's."""

    def permute_q_b_proj(self, q_b_proj: Tensor, scale_factors: Tensor, *sizes: int) -> Any:
        return [q_b_proj.clone(), scale_factors.clone()]


class CodesAlone(TorchBackend):
    """Leaves the scales of wo_a's columns where they were."""

    def permute_wv_proj(self, wv_proj: Tensor, scale_factors: Tensor, *sizes: int) -> Any:
        return [super().permute_wv_proj(wv_proj, scale_factors, *sizes)[0], scale_factors]


@pytest.mark.parametrize("kind", [Identity, CodesAlone])
def test_an_op_that_permutes_wrongly_is_caught_though_the_layer_does_not_call_it(
    kind: type[TorchBackend], wrong: Wrong
) -> None:
    assert wrong(kind()) == ["weights"]
