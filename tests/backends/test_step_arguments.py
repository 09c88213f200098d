"""Misuse of the inserts, the gather and the index ops names the argument and writes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megabench.backends import TorchBackend
from megabench.backends.triton.backend import TritonBackend

TABLE = torch.rand(64, 64)
T = 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(op: str) -> dict[str, Any]:
    """A right call of an op; every tensor it may write holds nines."""
    rows = torch.randn(T, 512).bfloat16()
    place = {"slot_mapping": torch.arange(T), "positions": torch.arange(T), "cos_sin_cache": TABLE}
    match op:
        case "pad_q_and_insert_kv":
            q, cache = torch.randn(T, 8, 512).bfloat16(), torch.full((2, 32, 528), 9).byte()
            return {"q": q, "kv": rows, "swa_cache": cache, **place, "padded_heads": 64}
        case "insert_compressed":
            cache = torch.full((2, 64, 288), 9).byte()
            return {"latent": rows, "cache": cache, **place, "compress_ratio": 2}
        case "dequantize_and_gather_k_cache":
            return {
                "out": torch.full((2, 16, 512), 9).bfloat16(),
                "k_cache": torch.ones(4, 32, 528).byte(),
                "seq_lens": ints(5, 6),
                "gather_lens": None,
                "block_table": torch.zeros(2, 2, dtype=torch.int32),
                "block_size": 32,
                "offset": 2,
            }
        case "compute_global_topk_indices_and_lens":
            return {
                "topk_indices": torch.zeros(T, 8, dtype=torch.int32),
                "token_to_req_indices": torch.zeros(T, dtype=torch.int32),
                "block_table": torch.zeros(1, 2, dtype=torch.int32),
                "block_size": 64,
                "is_valid_token": torch.ones(T, dtype=torch.bool),
            }
        case _:
            return {
                "topk_indices": torch.zeros(T, 8, dtype=torch.int32),
                "query_start_loc": ints(0, T),
                "seq_lens": ints(9),
                "gather_lens": ints(9),
                "window_size": 128,
                "compress_ratio": 1,
                "topk": 8,
                "M": 20,
                "N": 9,
                "out": (torch.full((T, 256), 9).int(), torch.full((T,), 9).int()),
            }


F = torch.zeros
WRONG: dict[str, list[tuple[str, Any]]] = {
    "pad_q_and_insert_kv": [
        ("q", F(T, 8, 512)),
        ("q", F(T, 8, 256).bfloat16()),
        ("kv", F(T, 512)),
        ("kv", F(T + 1, 512).bfloat16()),
        ("kv", F(512, T).bfloat16().t()),
        ("swa_cache", F(2, 32, 528)),
        ("swa_cache", F(2, 32, 288).byte()),
        ("swa_cache", F(2, 32, 100).byte()),
        ("swa_cache", F(2, 32, 529).byte()[:, :, :528]),
        ("slot_mapping", torch.arange(T - 1)),
        ("slot_mapping", torch.arange(T).int()),
        ("positions", F(T)),
        ("positions", torch.arange(2 * T)[::2]),
        ("cos_sin_cache", TABLE[:, :32]),
        ("cos_sin_cache", TABLE.double()),
        ("padded_heads", 4),
        ("padded_heads", 72),
    ],
    "insert_compressed": [
        ("latent", F(T, 512)),
        ("latent", F(T, 500).bfloat16()),
        ("positions", torch.arange(T + 1)),
        ("slot_mapping", F(T)),
        ("cos_sin_cache", TABLE.bfloat16()),
        ("cache", F(2, 64, 584).byte()),
        ("cache", F(2, 64, 288)),
        ("compress_ratio", 0),
    ],
    "dequantize_and_gather_k_cache": [
        ("out", F(2, 16, 512)),
        ("out", F(2, 16, 256).bfloat16()),
        ("k_cache", F(4, 32, 100).byte()),
        ("k_cache", F(4, 32, 528)),
        ("seq_lens", F(2)),
        ("seq_lens", ints(5)),
        ("gather_lens", ints(1)),
        ("block_table", F(2, 2)),
        ("block_table", F(1, 2).int()),
        ("block_size", 64),
        ("offset", 17),
        ("offset", -1),
    ],
    "compute_global_topk_indices_and_lens": [
        ("topk_indices", F(T, 8)),
        ("topk_indices", F(T, 8).long()),
        ("token_to_req_indices", ints(0, 0)),
        ("block_table", F(1, 2)),
        ("block_size", 0),
        ("is_valid_token", torch.ones(2, dtype=torch.bool)),
        ("is_valid_token", torch.ones(T)),
    ],
    "combine_topk_swa_indices": [
        ("topk_indices", F(T, 8)),
        ("topk_indices", F(T, 4).int()),
        ("query_start_loc", ints(0, 2, T)),
        ("query_start_loc", F(2)),
        ("gather_lens", F(1)),
        ("seq_lens", F(1)),
        ("window_size", 0),
        ("compress_ratio", -1),
        ("topk", -1),
        ("out", (F(T, 128).int(), F(T).int())),
        ("out", (F(T, 256).long(), F(T).int())),
        ("out", (F(T, 256).int(), F(T - 1).int())),
    ],
}


@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend()], ids=lambda b: str(b.name))
@pytest.mark.parametrize(
    ("op", "argument", "value"),
    [
        pytest.param(op, *wrong, id=f"{op}-{wrong[0]}{i}")
        for op, all_wrong in WRONG.items()
        for i, wrong in enumerate(all_wrong)
    ],
)
def test_a_misused_argument_is_named_before_anything_is_written(
    backend: TorchBackend, op: str, argument: str, value: Any
) -> None:
    given = arguments(op)
    written = [given.get(name) for name in ("swa_cache", "cache", "out")]
    with pytest.raises(ValueError, match=rf"^{argument}(\[\d\])?: "):
        getattr(backend, op)(**(given | {argument: value}))
    for target in written:
        for tensor in target if isinstance(target, tuple) else (target,):
            assert tensor is None or (tensor == 9).all()


@pytest.mark.parametrize("op", WRONG)
def test_the_calls_that_are_spoilt_are_right_as_they_stand(op: str) -> None:
    getattr(TorchBackend(), op)(**arguments(op))


@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend()], ids=lambda b: str(b.name))
def test_compressed_rows_land_alike_whatever_the_width_of_slots_and_positions(
    backend: TorchBackend,
) -> None:
    call, caches = arguments("insert_compressed"), []
    for dtype in (torch.int64, torch.int32):
        cache = call["cache"].clone()
        narrowed = {name: call[name].to(dtype) for name in ("slot_mapping", "positions")}
        backend.insert_compressed(**(call | narrowed | {"cache": cache}))
        caches.append(cache)
    assert not torch.equal(caches[0], call["cache"])
    assert torch.equal(*caches)
