"""Guards that need a GPU: graphs that must follow their inputs."""

from __future__ import annotations

import pytest
import torch

from megabench.backends import TorchBackend
from megabench.backends.triton.backend import TritonBackend
from megabench.cases import Case, load_suite
from megabench.results import StageResult
from megabench.validate import Store, validate_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
(MODEL,) = {case.model for case in load_suite("faults").cases}


@pytest.fixture(scope="module")
def store() -> Store:
    return Store(CUDA)


def stages(store: Store, backend: TorchBackend, batch: str) -> dict[str, StageResult]:
    store.add_backend("own", backend)
    case = Case(model=MODEL, kv_cache="nvfp4_ds_mla", batch=batch)
    return {stage.name: stage for stage in validate_case(case, "own", CUDA, store)}


@pytest.mark.parametrize("batch", ["3q1s300", "1q1s300_2q3s140"])
def test_a_step_of_our_kernels_is_captured_and_follows_its_inputs(store: Store, batch: str) -> None:
    found = stages(store, TritonBackend(), batch)
    assert [stage.message for stage in found.values() if not stage.ok] == []
    assert found["replay"].detail["note"] == "a captured graph replayed"
    assert found["replay"].checked > 1000


class Frozen(TritonBackend):
    """Lengths are taken from the host's memory of the first call, as a graph would freeze them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def fused_norm_rope_attn_rope_cast_decode(  # type: ignore[no-untyped-def]
        self, q, kv, indices, sm_scale, d_v, attn_sink, topk_length, *rest
    ):
        key = topk_length.data_ptr(), len(topk_length)
        lens = self.kept.setdefault(key, topk_length.clone())
        return super().fused_norm_rope_attn_rope_cast_decode(
            q, kv, indices, sm_scale, d_v, attn_sink, lens, *rest
        )


class Waiting(TritonBackend):
    """Right, and asks the device for a number in the middle of a step."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        assert bool(x.isfinite().all())
        return super().linear(x, w, sw)


def test_lengths_frozen_at_the_first_call_are_caught(store: Store) -> None:
    assert not stages(store, Frozen(), "3q1s300")["replay"].ok


def test_a_step_that_cannot_be_captured_is_called_again_and_says_why(store: Store) -> None:
    found = stages(store, Waiting(), "3q1s300")
    assert [stage.message for stage in found.values() if not stage.ok] == []
    note = found["replay"].detail["note"]
    assert note.startswith("called again, for it cannot be captured: "), note
    again = stages(store, TritonBackend(), "3q1s300")
    assert again["replay"].detail["note"] == "a captured graph replayed"
