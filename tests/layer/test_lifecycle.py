"""The layer's life: availability, loading, permuting once, warm-up, reload, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megabench.layer.state
from megabench.backends import Support, TorchBackend
from megabench.geometry import Geometry
from megabench.layer import DeepseekV4MegaAttnAttention, LayerConfig
from megabench.layout import chunk_columns, chunk_rows
from megabench.metadata import forward_context
from megabench.quant import unpack_scales
from megabench.weights import linear_shapes, read_checkpoint, scale_shape

# The real head layout; the ranks around it are small so that a layer loads in milliseconds.
GEOMETRY = replace(Geometry.load(), hidden_size=64, q_lora_rank=64, o_lora_rank=32)


def checkpoint(seed: int = 0, geometry: Geometry = GEOMETRY) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {"attn_sink": torch.randn(geometry.num_heads, generator=generator)}
    for name, (rows, columns) in linear_shapes(geometry).items():
        codes = torch.randint(0, 0x7E, (rows, columns), dtype=torch.uint8, generator=generator)
        scale = torch.randint(
            100, 120, scale_shape(rows, columns), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}.weight"] = codes.view(torch.float8_e4m3fn)
        tensors[f"{name}.scale"] = scale
    return tensors


def config(**changes: object) -> LayerConfig:
    base = LayerConfig(
        geometry=GEOMETRY,
        backend=TorchBackend(),
        compress_ratio=1,
        max_model_len=256,
        max_num_batched_tokens=16,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def loaded(**changes: object) -> DeepseekV4MegaAttnAttention:
    layer = DeepseekV4MegaAttnAttention(config(**changes))
    layer.load_weights(checkpoint())
    return layer


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


class Unsupported(TorchBackend):
    def supports(self, *_: object) -> Support:
        return Support(False, "not on this device")


class Broken(TorchBackend):
    def supports(self, *_: object) -> Support:
        raise RuntimeError("driver lost")


class Narrowing(TorchBackend):
    live = 64

    def for_live_heads(self, live_heads: int) -> Narrowing:
        narrowed = Narrowing(self.page_layout)
        narrowed.live = live_heads
        return narrowed


class Transparent:
    """A wrapper that passes every attribute through."""

    def __init__(self, wrapped: TorchBackend) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> object:
        return getattr(self.wrapped, name)


@pytest.mark.parametrize("tp", [1, 8])
def test_a_backend_that_asks_for_it_is_told_the_live_heads(tp: int) -> None:
    backend = DeepseekV4MegaAttnAttention(config(backend=Narrowing(), tp_size=tp)).backend
    assert isinstance(backend, Narrowing)
    assert backend.live == 64 // tp


def test_telling_the_live_heads_bypasses_no_wrapper() -> None:
    wrapper = Transparent(Narrowing())
    assert DeepseekV4MegaAttnAttention(config(backend=wrapper)).backend is wrapper


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_layer_is_available_up_to_tp8(tp: int) -> None:
    assert DeepseekV4MegaAttnAttention.is_available_for(config(tp_size=tp))


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 16},
        {"tp_size": 3},
        {"tp_size": 0},
        {"geometry": replace(GEOMETRY, o_groups=4)},
        {"geometry": replace(GEOMETRY, num_heads=60)},
        {"backend": Unsupported()},
        {"backend": Broken()},
    ],
)
def test_availability_is_false_and_never_an_exception(changes: dict[str, object]) -> None:
    assert DeepseekV4MegaAttnAttention.is_available_for(config(**changes)) is False


def test_an_impossible_topology_is_a_value_error_naming_the_prefix() -> None:
    with pytest.raises(ValueError, match=r"^model\.layers\.7\.attn: .*TP 16"):
        DeepseekV4MegaAttnAttention(config(tp_size=16, prefix="model.layers.7.attn"))


@pytest.mark.parametrize("rank", [-1, 2, 5])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of 2"):
        DeepseekV4MegaAttnAttention(config(tp_size=2, tp_rank=rank))


def test_a_writer_and_a_reader_of_different_page_layouts_are_both_named() -> None:
    with pytest.raises(ValueError, match="written page_split, but backend torch reads interleaved"):
        DeepseekV4MegaAttnAttention(config(page_layout="page_split"))


def test_unspecific_cache_dtypes_resolve_to_nvfp4() -> None:
    names = {d: loaded(kv_cache_dtype=d).record.name for d in ("auto", "fp8", "fp8_ds_mla")}
    assert names == {"auto": "nvfp4_ds_mla", "fp8": "nvfp4_ds_mla", "fp8_ds_mla": "fp8_ds_mla"}


def test_running_before_the_permutes_is_refused_with_the_prefix() -> None:
    layer = loaded()
    q = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^model\.layers\.0\.attn: wq_b / wo_a were never"):
        layer.forward_mqa(q, q[:, 0], torch.zeros(1), layer._alloc_attn_out(1, q))


def test_finalizing_before_loading_is_refused_with_the_prefix() -> None:
    with pytest.raises(RuntimeError, match=r"^model\.layers\.0\.attn: .*before load_weights"):
        DeepseekV4MegaAttnAttention(config()).finalize_loaded_weights()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("wq_b.weight", torch.float8_e5m2),
        ("wo_a.weight", torch.int8),
        ("wo_b.scale", torch.float8_e4m3fn),
        ("attn_sink", torch.int32),
    ],
)
def test_a_tensor_of_another_dtype_is_refused_and_the_old_weights_stay(
    name: str, dtype: torch.dtype
) -> None:
    layer = loaded()
    layer.finalize_loaded_weights()
    before = layer.wq_b
    tensors = checkpoint()
    with pytest.raises(ValueError, match=rf"^{name}: expected .* {str(dtype)[6:]}$"):
        layer.load_weights({**tensors, name: tensors[name].view(dtype)})
    assert layer.wq_b is before


def test_finalizing_permutes_both_weights_with_their_scales_exactly_once() -> None:
    layer = loaded(tp_size=2, tp_rank=1)
    wq_b, wo_a = layer.wq_b, layer.wo_a
    layer.finalize_loaded_weights()
    layer.finalize_loaded_weights()
    heads = 32
    assert torch.equal(bytes_of(layer.wq_b.weight), chunk_rows(bytes_of(wq_b.weight), heads))
    assert torch.equal(layer.wq_b.weight_scale, chunk_rows(wq_b.weight_scale, heads))
    assert torch.equal(bytes_of(layer.wo_a.weight), chunk_columns(bytes_of(wo_a.weight), 8, 32))
    assert torch.equal(layer.wo_a.weight_scale, chunk_columns(wo_a.weight_scale, 8, 1))
    assert torch.equal(unpack_scales(layer.wo_a_packed_scale), layer.wo_a.weight_scale)


def test_each_rank_holds_its_rows_columns_and_sinks() -> None:
    tensors = checkpoint()
    layer = loaded(tp_size=4, tp_rank=3)
    wq_b = bytes_of(tensors["wq_b.weight"])
    assert torch.equal(bytes_of(layer.wq_b.weight), wq_b[48 * 512 :])
    expanded = tensors["wq_b.scale"].repeat_interleave(32, 0)
    assert torch.equal(layer.wq_b.weight_scale, expanded[48 * 512 :])
    assert layer.wo_a.weight.shape == (2, 32, 4096)
    assert torch.equal(bytes_of(layer.wo_b.weight), bytes_of(tensors["wo_b.weight"])[:, 6 * 32 :])
    assert torch.equal(layer.attn_sink[:16], tensors["attn_sink"][48:])
    assert (layer.attn_sink[16:] == -torch.inf).all()


def test_a_reload_of_unpermuted_weights_is_permuted_again() -> None:
    layer = loaded()
    layer.finalize_loaded_weights()
    first = layer.wq_b.weight
    layer.load_weights(checkpoint(seed=1))
    with pytest.raises(RuntimeError, match="never permuted"):
        layer._require_fused_layouts()
    layer.finalize_loaded_weights()
    fresh = DeepseekV4MegaAttnAttention(config())
    fresh.load_weights(checkpoint(seed=1))
    fresh.finalize_loaded_weights()
    assert torch.equal(bytes_of(layer.wq_b.weight), bytes_of(fresh.wq_b.weight))
    assert not torch.equal(bytes_of(layer.wq_b.weight), bytes_of(first))


def test_a_failure_half_way_through_finalizing_can_be_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = loaded()
    before = bytes_of(layer.wq_b.weight).clone()

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(megabench.layer.state, "permute_wo_a_", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            layer.finalize_loaded_weights()
    assert torch.equal(bytes_of(layer.wq_b.weight), before)
    layer.finalize_loaded_weights()
    assert torch.equal(bytes_of(layer.wq_b.weight), chunk_rows(before, 64))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("wo_b.weight", None, "wo_b.weight: missing"),
        ("wq_b.scale", torch.zeros(3, 2, dtype=torch.uint8), "wq_b.scale: expected"),
        ("wo_a.weight", torch.zeros(256, 4096, dtype=torch.bfloat16), "wo_a.weight: expected"),
        ("attn_sink", torch.zeros(63), "attn_sink: expected"),
    ],
)
def test_bad_weights_are_refused_and_leave_the_layer_as_it_was(
    name: str, value: torch.Tensor | None, said: str
) -> None:
    layer = loaded()
    layer.finalize_loaded_weights()
    kept = layer.wq_b
    tensors = checkpoint(seed=2)
    tensors.pop(name)
    if value is not None:
        tensors[name] = value
    with pytest.raises(ValueError, match=f"^{said}"):
        layer.load_weights(tensors)
    assert layer.wq_b is kept
    layer._require_fused_layouts()


def test_a_safetensors_checkpoint_loads_like_the_tensors_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    save_file(checkpoint(seed=3), path)
    layer = DeepseekV4MegaAttnAttention(config())
    layer.load_weights(read_checkpoint(path))
    assert torch.equal(bytes_of(layer.wq_b.weight), bytes_of(checkpoint(3)["wq_b.weight"]))


def test_an_unreadable_checkpoint_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"broken\.safetensors: cannot be read"):
        read_checkpoint(path)


def test_layers_of_one_shard_share_linears_and_others_may_not() -> None:
    backend = TorchBackend()
    donor = loaded(backend=backend, tp_size=2, tp_rank=1)
    donor.finalize_loaded_weights()
    other = DeepseekV4MegaAttnAttention(config(backend=backend, tp_size=2, tp_rank=1))
    sinks = torch.arange(64.0)
    other.adopt_linears(donor, sinks)
    assert other.wq_b is donor.wq_b
    assert torch.equal(other.attn_sink[:32], sinks[32:])
    with pytest.raises(ValueError, match="cannot share"):
        DeepseekV4MegaAttnAttention(config(backend=backend)).adopt_linears(donor, sinks)


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_warm_up_run_reserves_the_workspace_and_writes_zeros(ratio: int) -> None:
    layer = loaded(compress_ratio=ratio)
    layer.finalize_loaded_weights()
    swa = torch.full((2, 32, 528), 0xA5, dtype=torch.uint8)
    compressed = torch.zeros(2, 128 // ratio, 288, dtype=torch.uint8) if ratio else None
    layer.bind_kv_cache(swa, compressed)
    layer.bind_topk(torch.zeros(16, 512, dtype=torch.int32))
    rows = torch.randn(3, 64).to(torch.bfloat16), torch.randn(3, 512).to(torch.bfloat16)
    positions = torch.zeros(3, dtype=torch.int64)
    with forward_context(None):
        out = layer.forward(*rows, positions, rows[1])
        q = torch.zeros(3, 64, 512, dtype=torch.bfloat16)
        attended = layer._alloc_attn_out(3, q)
        layer.forward_mqa(q, rows[1], positions, attended)
    assert not out.any()
    assert not attended.data.view(torch.uint8).any()
    assert not attended.scale.any()
    assert (swa == 0xA5).all()
    compressed_rows = 256 // ratio if ratio else 0
    gathered = 4 * (compressed_rows + 128 + 16) * 512 * 2
    listed = 16 * (640 if ratio else 128) * 4
    assert layer.workspace.buffer.numel() == gathered + listed + 256


def test_caches_of_the_wrong_record_are_refused() -> None:
    layer = loaded()
    swa = torch.zeros(1, 32, 528, dtype=torch.uint8)
    with pytest.raises(ValueError, match="528-byte records"):
        layer.bind_kv_cache(torch.zeros(1, 32, 288, dtype=torch.uint8), None)
    with pytest.raises(ValueError, match="goes with compress_ratio"):
        layer.bind_kv_cache(swa, None)
    with pytest.raises(ValueError, match=r"pages are \[128, 288\]"):
        layer.bind_kv_cache(swa, torch.zeros(1, 64, 288, dtype=torch.uint8))
