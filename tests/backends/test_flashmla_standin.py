"""The `flashmla` backend on stand-ins that demand what the vendor demands: ops and whole steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

from loading import PACKAGES, on_path, vllm_ops
from standin_backend import StandinBackend

import reference.layouts
import reference.linear
from megabench.backends import TorchBackend
from megabench.backends.flashmla.binding import adapt_wheel
from megabench.backends.flashmla.gemm import PackedScales, pack_rows
from megabench.cases import Case
from megabench.formats import FP8, NVFP4, KVRecord
from megabench.geometry import Geometry, cos_sin_cache
from megabench.quant import (
    alloc_mega_attn_output,
    pack_mn_major,
    quantize_activation,
    quantize_kv_mxfp8,
    quantize_nvfp4,
    unpack_scales,
)
from megabench.validate import validate_case

CPU = torch.device("cpu")
TABLE = cos_sin_cache(Geometry.load(), 64, compressed=True)
MODEL = "deepseek-v4.1-flash.config.json"
LIBRARIES = ("vllm", "flash_mla")
PACKAGE = ("decode", "prefill", "permute_q_b_proj", "permute_wv_proj")


@pytest.fixture(params=LIBRARIES)
def backend(request: pytest.FixtureRequest) -> Iterator[StandinBackend]:
    """The backend bound to vLLM's ops, then to the package; DeepGEMM beside both."""
    with ExitStack() as stack:
        stack.enter_context(on_path(PACKAGES))
        if request.param == "vllm":
            stack.enter_context(vllm_ops())
        bound = StandinBackend()
        assert bound.version is not None
        assert bound.version.startswith("vllm" if request.param == "vllm" else "flash_mla")
        yield bound


def pool(record: KVRecord, blocks: int, page: int) -> torch.Tensor:
    encode = quantize_kv_mxfp8 if record is FP8 else quantize_nvfp4
    rows = torch.cat(encode(torch.randn(blocks, page, 512)), -1)
    return rows.unsqueeze(2)


def decode_arguments(s_q: int = 3, extra: KVRecord | None = NVFP4) -> dict[str, Any]:
    """A decode call as the layer makes it."""
    return {
        "q": torch.randn(s_q, 64, 512).to(torch.bfloat16),
        "kv": pool(FP8, 2, 32),
        "indices": torch.randint(0, 64, (s_q, 128), dtype=torch.int32),
        "sm_scale": 512**-0.5,
        "d_v": 512,
        "attn_sink": torch.randn(64),
        "topk_length": torch.full((s_q,), 100, dtype=torch.int32),
        "extra_kv": pool(extra, 2, 64) if extra else None,
        "extra_indices": torch.randint(0, 128, (s_q, 64), dtype=torch.int32) if extra else None,
        "extra_topk_length": torch.full((s_q,), 50, dtype=torch.int32) if extra else None,
        "enable_q_norm": False,
        "rms_norm_eps": 0.0,
        "token_positions": torch.randint(0, 64, (s_q,), dtype=torch.int32),
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": TABLE,
        "n_wv_group": 8,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
    }


def prefill_arguments(s_q: int = 3) -> dict[str, Any]:
    arguments = {k: v for k, v in decode_arguments(s_q).items() if not k.startswith("extra_")}
    kv = torch.randn(70, 1, 512).to(torch.bfloat16)
    return arguments | {"kv": kv, "indices": torch.randint(-1, 70, (s_q, 1, 128)).int()}


def close(ours: list[torch.Tensor], vendor: list[torch.Tensor]) -> None:
    """Two right implementations: values within what bf16 probabilities and e4m3 codes allow."""
    for mine, theirs in zip(ours[2:], vendor[2:], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)
    values = []
    for out_fp8, out_sf, *_ in (ours, vendor):
        codes, scales = reference.layouts.output_meaning(out_fp8, out_sf)
        unit = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
        values.append(codes.view(torch.float8_e4m3fn).float() * unit)
    torch.testing.assert_close(values[0], values[1], atol=0.02, rtol=0.15)


@pytest.mark.parametrize("extra", [None, FP8, NVFP4])
def test_decode_passes_every_argument_to_its_place(
    backend: StandinBackend, extra: KVRecord | None
) -> None:
    torch.manual_seed(1)
    arguments = decode_arguments(extra=extra)
    vendor = backend.fused_norm_rope_attn_rope_cast_decode(*arguments.values())
    close(TorchBackend().fused_norm_rope_attn_rope_cast_decode(**arguments), vendor)


def test_prefill_passes_every_argument_to_its_place(backend: StandinBackend) -> None:
    torch.manual_seed(2)
    arguments = prefill_arguments() | {"enable_q_norm": True, "rms_norm_eps": 1e-3}
    vendor = backend.fused_norm_rope_attn_rope_cast_fwd(*arguments.values())
    close(TorchBackend().fused_norm_rope_attn_rope_cast_fwd(**arguments), vendor)


@pytest.mark.parametrize("op", ["decode", "fwd"])
def test_outputs_land_in_the_callers_slice_and_nowhere_else(
    backend: StandinBackend, op: str
) -> None:
    torch.manual_seed(3)
    arguments = decode_arguments() if op == "decode" else prefill_arguments()
    run = getattr(backend, f"fused_norm_rope_attn_rope_cast_{op}")
    whole = alloc_mega_attn_output(7, 8, CPU)
    whole.data.view(torch.uint8).fill_(0x5A)
    whole.scale.fill_(0x5A5A5A5A)
    given = run(*arguments.values(), whole.data[2:5], whole.scale[2:5])
    fresh = run(*arguments.values())
    assert given[0].data_ptr() == whole.data[2:5].data_ptr()
    assert given[1].data_ptr() == whole.scale[2:5].data_ptr()
    assert torch.equal(whole.data[2:5].view(torch.uint8), fresh[0].view(torch.uint8))
    assert torch.equal(whole.scale[2:5], fresh[1])
    assert all(torch.equal(a, b) for a, b in zip(given[2:], fresh[2:], strict=True))
    outside = torch.tensor([0, 1, 5, 6])
    assert (whole.data.view(torch.uint8)[outside] == 0x5A).all()
    assert (whole.scale[outside] == 0x5A5A5A5A).all()


def test_one_output_without_the_other_is_refused(backend: StandinBackend) -> None:
    arguments = decode_arguments()
    out = alloc_mega_attn_output(3, 8, CPU)
    with pytest.raises((RuntimeError, ValueError), match="out_sf"):
        backend.fused_norm_rope_attn_rope_cast_decode(*arguments.values(), out.data, None)


@pytest.mark.parametrize("op", ["decode", "fwd"])
def test_outputs_by_name_are_the_same_ones(backend: StandinBackend, op: str) -> None:
    torch.manual_seed(7)
    arguments = decode_arguments() if op == "decode" else prefill_arguments()
    run = getattr(backend, f"fused_norm_rope_attn_rope_cast_{op}")
    fresh = run(*arguments.values())
    for positional, named in ((arguments, {}), ({}, arguments)):
        out = alloc_mega_attn_output(3, 8, CPU)
        pair = {"out_sf": out.scale, "out_fp8": out.data}
        given = run(*positional.values(), **dict(reversed(named.items())), **pair)
        assert given[0].data_ptr() == out.data.data_ptr()
        assert torch.equal(out.data.view(torch.uint8), fresh[0].view(torch.uint8))
        assert torch.equal(out.scale, fresh[1])


@pytest.mark.parametrize("op", ["decode", "fwd"])
def test_a_wrong_number_of_arguments_is_refused(backend: StandinBackend, op: str) -> None:
    arguments = decode_arguments() if op == "decode" else prefill_arguments()
    run = getattr(backend, f"fused_norm_rope_attn_rope_cast_{op}")
    for wrong in ([*arguments.values()][:-1], [*arguments.values(), None, None, None]):
        with pytest.raises((TypeError, RuntimeError), match="argument"):
            run(*wrong)


@pytest.mark.parametrize("op", ["decode", "fwd"])
def test_a_call_as_the_layer_makes_it_takes_few_steps_of_python(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """What benchmarks/adapter_overhead.py times, told without a clock: the arguments of a call to
    the package are not bound one by one."""
    arguments = [*(decode_arguments() if op == "decode" else prefill_arguments()).values()]
    made = [torch.empty(0)] * (3 if op == "decode" else 4)
    fused: Any = SimpleNamespace(**dict.fromkeys(PACKAGE, lambda *args: made))
    backend = StandinBackend()
    monkeypatch.setattr(backend, "_vendor", adapt_wheel(fused, "", {}))
    run = getattr(backend, f"fused_norm_rope_attn_rope_cast_{op}")
    steps: list[str] = []
    sys.setprofile(lambda frame, event, argument: steps.append(event))
    try:
        run(*arguments)
    finally:
        sys.setprofile(None)
    assert len([event for event in steps if event in ("call", "c_call")]) < 12


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("h_q", {"q": torch.zeros(3, 32, 512, dtype=torch.bfloat16)}),
    ("contiguous within each token", {"q": torch.zeros(3, 128, 512).bfloat16()[:, ::2]}),
    ("whole block", {"kv": torch.zeros(2, 64, 1, 528, dtype=torch.uint8)[:, ::2]}),
    (
        "stride",
        {
            "kv": torch.zeros(2, 33 * 528 - 16, dtype=torch.uint8).as_strided(
                (2, 32, 1, 528), (33 * 528 - 16, 528, 528, 1)
            )
        },
    ),
    ("fp4", {"kv": torch.zeros(2, 32, 1, 288, dtype=torch.uint8)}),
    ("extra_indices", {"extra_indices": None}),
    ("32B", {"indices": torch.zeros(3, 132, dtype=torch.int32)[:, :128]}),
    ("multiple of 8", {"indices": torch.zeros(3, 128, dtype=torch.int32)[:, :100]}),
    ("token_positions: last dim", {"token_positions": torch.zeros(6).int()[::2]}),
    ("d_v", {"d_v": 448}),
    ("num_per_channels", {"num_per_channels": 128}),
    ("round_sf", {"round_sf": False}),
    ("n_wv_group", {"n_wv_group": 7}),
]


@pytest.mark.parametrize(("text", "changes"), REFUSED)
def test_the_standin_refuses_what_the_vendor_refuses(text: str, changes: dict[str, Any]) -> None:
    arguments = decode_arguments() | changes
    with on_path(PACKAGES), vllm_ops():
        decode = StandinBackend().fused_norm_rope_attn_rope_cast_decode
        with pytest.raises(RuntimeError, match=text):
            decode(*arguments.values())


def scale(*shape: int) -> torch.Tensor:
    return torch.randint(110, 125, shape, dtype=torch.uint8)


def weight(*shape: int) -> torch.Tensor:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)


def test_permutes_are_those_of_our_own_layouts(backend: StandinBackend) -> None:
    torch.manual_seed(4)
    q_b, q_scale = weight(8 * 512, 256), pack_mn_major(scale(1, 8 * 512, 8)).squeeze(0)
    wv, wv_scale = weight(2, 5, 4096), pack_mn_major(scale(2, 5, 128))
    for name, arguments in (
        ("permute_q_b_proj", (q_b, q_scale, 8, 512)),
        ("permute_wv_proj", (wv, wv_scale, 8, 512)),
    ):
        vendor = getattr(backend, name)(*arguments)
        ours = getattr(TorchBackend(), name)(*arguments)
        assert torch.equal(vendor[0].view(torch.uint8), ours[0].view(torch.uint8))
        assert torch.equal(vendor[1], ours[1])


@pytest.mark.parametrize(("tokens", "columns"), [(1, 1280), (5, 160), (4, 32), (0, 64)])
def test_linears_are_golden_for_any_number_of_scale_words(
    backend: StandinBackend, tokens: int, columns: int
) -> None:
    torch.manual_seed(5)
    x = torch.randn(tokens, columns).to(torch.bfloat16)
    w, sw = weight(96, columns), scale(96, columns // 32)
    out = backend.linear(x, w, sw)
    golden = reference.linear.linear(x, w.view(torch.uint8), sw, torch.float64)
    slack = golden.bound + golden.value.abs() * 2.0**-8
    assert ((out.double() - golden.value).abs() <= slack).all()


def test_the_einsum_reads_live_groups_of_a_padded_buffer(backend: StandinBackend) -> None:
    torch.manual_seed(6)
    out = alloc_mega_attn_output(5, 8, CPU)
    out.data.view(torch.uint8).copy_(weight(5, 8, 4096).view(torch.uint8))
    out.scale.copy_(scale(5, 8, 128).view(torch.int32))
    out.scale[:, 2:] = -1
    w, sw = weight(2, 64, 4096), pack_mn_major(scale(2, 64, 128))
    z = torch.empty(5, 2, 64, dtype=torch.bfloat16)
    x = (out.data[:, :2], out.scale[:, :2])
    backend.fp8_einsum("bhr,hdr->bhd", x, (w, sw), z, (1, 1, 32))
    ours = torch.empty_like(z)
    TorchBackend().fp8_einsum("bhr,hdr->bhd", x, (w, sw), ours, (1, 1, 32))
    torch.testing.assert_close(z, ours, atol=0, rtol=2.0**-7)


def test_packed_scales_follow_a_weight_that_changes() -> None:
    kept, w, sw = PackedScales(), weight(8, 128), scale(8, 4)
    kept.prepare(w, sw)
    first = kept.get(w, sw)
    assert first is kept.get(w, sw)
    sw[0, 0] += 1
    assert torch.equal(kept.get(w, sw), pack_rows(sw))
    assert not torch.equal(kept.get(w, sw), first)


def test_spare_bytes_of_the_last_scale_word_are_a_factor_of_one() -> None:
    words = pack_rows(scale(3, 5))
    assert words.shape == (3, 2)
    assert (unpack_scales(words)[:, 5:] == 127).all()


def test_operands_are_quantized_as_the_contract_says() -> None:
    with on_path(PACKAGES), vllm_ops():
        x = torch.randn(6, 256).to(torch.bfloat16)
        codes, words = StandinBackend().quantize(x)
    expected = quantize_activation(x)
    assert torch.equal(codes.view(torch.uint8), expected[0])
    assert torch.equal(unpack_scales(words), expected[1])
    assert words.stride() == (1, 8)


@pytest.mark.parametrize(("ratio", "kv_cache"), [(0, "auto"), (1, "fp8_ds_mla"), (2, "auto")])
def test_a_whole_step_of_the_layer_is_golden_at_every_stage(
    backend: StandinBackend, tmp_path: Path, ratio: int, kv_cache: str
) -> None:
    """Two decodes and a prefill through the real head layout, narrow linears around it."""
    config = json.loads((resources.files("megabench.data") / MODEL).read_text())
    text = config.get("text_config", config)
    text |= {"hidden_size": 64, "q_lora_rank": 64, "o_lora_rank": 32}
    (tmp_path / MODEL).write_text(json.dumps(config))
    case = Case(
        model=str(tmp_path / MODEL), batch="2q1s70_q40", compress_ratio=ratio, kv_cache=kv_cache
    )
    stages = validate_case(case, "standin_backend:StandinBackend", CPU)
    assert len(stages) > 10
    assert not [stage for stage in stages if not stage.ok]


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("x", {"x": torch.zeros(2, 64)}),
        ("x", {"x": torch.zeros(2, 96, dtype=torch.bfloat16)}),
        ("w", {"w": torch.zeros(8, 64, dtype=torch.uint8)}),
        ("sw", {"sw": torch.zeros(8, 3, dtype=torch.uint8)}),
        ("sw", {"sw": torch.zeros(8, 2)}),
    ],
)
def test_a_wrong_linear_is_a_value_error_that_names_the_argument(
    backend: StandinBackend, argument: str, changes: dict[str, torch.Tensor]
) -> None:
    right = {"x": torch.zeros(2, 64).bfloat16(), "w": weight(8, 64), "sw": scale(8, 2)}
    with pytest.raises(ValueError, match=f"^{argument}:"):
        backend.linear(**(right | changes))


def test_packed_scales_die_with_their_weight() -> None:
    kept, w, sw = PackedScales(), weight(8, 128), scale(8, 4)
    kept.prepare(w, sw)
    assert len(kept._made) == 1
    del w
    assert not kept._made
