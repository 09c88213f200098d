"""The eager attention ops against the golden model, and what they must not do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import reference.attention
import reference.cast
import reference.codes
import reference.layouts
import reference.rows
from megabench.backends import TorchBackend
from megabench.formats import FP8, NVFP4, KVRecord, PageLayout
from megabench.geometry import Geometry, cos_sin_cache
from megabench.quant import alloc_mega_attn_output

HEADS = 64
TABLE = cos_sin_cache(Geometry.load(), 256, compressed=True)


def pool(record: KVRecord, blocks: int, page: int, pad: int = 0) -> torch.Tensor:
    """A cache of valid random records whose page pads are NaN bytes."""
    stride = page * record.nbytes + pad
    storage = torch.full((blocks, stride), 0xFF, dtype=torch.uint8)
    cache = storage.as_strided((blocks, page, record.nbytes), (stride, record.nbytes, 1))
    # Any byte is a legal nibble pair; codes and scales are kept clear of NaN.
    codes = torch.randint(0, 0x70, (blocks, page, record.data_bytes), dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8) << 7
    scales = (116, 120) if record is FP8 else (0x20, 0x30)
    cache[..., : record.data_bytes] = codes
    cache[..., record.data_bytes :] = torch.randint(
        *scales, (blocks, page, record.scale_bytes), dtype=torch.uint8
    )
    return cache


@dataclass
class DecodeCall:
    """Arguments of one decode call, in the op's order."""

    s_q: int = 3
    topk: int = 8
    extra: KVRecord | None = NVFP4
    pad: int = 0
    sinks: torch.Tensor = field(default_factory=lambda: torch.randn(HEADS) + 2)

    def __post_init__(self) -> None:
        self.q = torch.randn(self.s_q, HEADS, 512).to(torch.bfloat16)
        self.kv = pool(FP8, 4, 32, self.pad)
        self.indices = torch.randint(0, 128, (self.s_q, self.topk), dtype=torch.int32)
        self.lens = torch.full((self.s_q,), self.topk, dtype=torch.int32)
        self.positions = torch.randint(0, 256, (self.s_q,), dtype=torch.int32)
        self.extra_kv = pool(self.extra, 3, 64, self.pad) if self.extra else None
        self.extra_indices = torch.randint(0, 192, (self.s_q, 16), dtype=torch.int32)
        self.extra_lens = torch.full((self.s_q,), 16, dtype=torch.int32)

    def arguments(self) -> dict[str, Any]:
        return {
            "q": self.q,
            "kv": self.kv.unsqueeze(2),
            "indices": self.indices,
            "sm_scale": 512**-0.5,
            "d_v": 512,
            "attn_sink": self.sinks,
            "topk_length": self.lens,
            "extra_kv": None if self.extra_kv is None else self.extra_kv.unsqueeze(2),
            "extra_indices": None if self.extra_kv is None else self.extra_indices,
            "extra_topk_length": None if self.extra_kv is None else self.extra_lens,
            "enable_q_norm": False,
            "rms_norm_eps": 0.0,
            "token_positions": self.positions,
            "is_rope_neox_style": False,
            "rope_dim": 64,
            "cos_sin_cache": TABLE,
            "n_wv_group": 8,
            "num_per_channels": 32,
            "use_tma_aligned_col_major_sf": True,
            "round_sf": True,
            "use_packed_ue8m0": True,
        }

    def run(self, layout: PageLayout = "interleaved", **changes: Any) -> list[torch.Tensor]:
        backend = TorchBackend(layout)
        return backend.fused_norm_rope_attn_rope_cast_decode(**(self.arguments() | changes))

    def golden(
        self, layout: PageLayout = "interleaved", q_norm_eps: float | None = None
    ) -> reference.attention.Attended:
        parts = [reference.rows.Paged(self.kv, self.indices, self.lens, layout)]
        if self.extra_kv is not None:
            parts.append(
                reference.rows.Paged(self.extra_kv, self.extra_indices, self.extra_lens, layout)
            )
        heads = reference.layouts.heads_from_padded_q(self.q, HEADS)
        rows = reference.rows.paged_rows(parts)
        return reference.attention.attend(
            heads, self.positions, TABLE, rows, self.sinks, 512**-0.5, torch.float64, q_norm_eps
        )


def assert_right(outputs: list[torch.Tensor], golden: reference.attention.Attended) -> None:
    """Every live value lies within golden's bound of what its code may stand for."""
    out_fp8, out_sf, lse = outputs[0], outputs[1], outputs[-1]
    codes, scales = reference.layouts.output_meaning(out_fp8, out_sf)
    low, high = reference.codes.e4m3_interval(codes, torch.float64)
    unit = reference.codes.decode_ue8m0(scales, torch.float64).repeat_interleave(32, -1)
    assert (golden.o >= low * unit - golden.bound).all()
    assert (golden.o <= high * unit + golden.bound).all()
    # Infinities must agree exactly, the rest within the bound.
    assert torch.equal(lse.isinf(), golden.lse.isinf())
    finite = golden.lse.isfinite()
    assert ((lse - golden.lse).abs() <= golden.lse_bound)[finite].all()


@pytest.mark.parametrize("layout", ["interleaved", "page_split"])
@pytest.mark.parametrize("extra", [None, FP8, NVFP4])
@pytest.mark.parametrize("pad", [0, 48])
def test_decode_is_golden_for_every_record_layout_and_page_stride(
    layout: PageLayout, extra: KVRecord | None, pad: int
) -> None:
    torch.manual_seed(1)
    call = DecodeCall(extra=extra, pad=pad)
    if layout == "page_split":
        # The pool's bytes mean other rows there; scale bytes must stay in the contract.
        for cache in (call.kv, call.extra_kv):
            if cache is not None:
                cache.copy_(torch.randint(0x70, 0x78, cache.shape, dtype=torch.uint8))
    assert_right(call.run(layout), call.golden(layout))


def test_decode_scales_scores_by_the_q_norm_when_asked() -> None:
    torch.manual_seed(2)
    call = DecodeCall()
    outputs = call.run(enable_q_norm=True, rms_norm_eps=1e-3)
    assert_right(outputs, call.golden(q_norm_eps=1e-3))
    assert not torch.equal(outputs[0].view(torch.uint8), call.run()[0].view(torch.uint8))


@pytest.mark.parametrize("hole", [slice(0, 5), slice(2, 6), slice(5, 8), slice(0, 8, 2)])
def test_holes_anywhere_in_the_index_row_are_skipped(hole: slice) -> None:
    torch.manual_seed(3)
    call = DecodeCall()
    call.indices[:, hole] = -1
    assert_right(call.run(), call.golden())


def test_entries_outside_the_pool_are_dropped() -> None:
    torch.manual_seed(4)
    call = DecodeCall()
    call.indices[:, 3] = 128
    call.extra_indices[:, 0] = 2**31 - 1
    call.extra_indices[:, 1] = -7
    dropped = DecodeCall()
    dropped.__dict__.update(call.__dict__)
    dropped.indices, dropped.extra_indices = call.indices.clone(), call.extra_indices.clone()
    dropped.indices[:, 3] = -1
    dropped.extra_indices[:, :2] = -1
    for got, want in zip(call.run(), dropped.run(), strict=True):
        assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (got, want)))


def test_slots_beyond_the_length_may_name_nan_rows() -> None:
    torch.manual_seed(5)
    call = DecodeCall()
    call.kv[3] = 0xFF
    call.indices = torch.randint(0, 96, call.indices.shape, dtype=torch.int32)
    call.indices[:, 5:] = 96
    call.lens[:] = 5
    assert_right(call.run(), call.golden())


def test_a_token_without_a_valid_row_has_infinite_lse_zero_codes_and_byte_105() -> None:
    torch.manual_seed(6)
    call = DecodeCall()
    call.lens[1] = 0
    call.extra_indices[1] = -1
    out_fp8, out_sf, lse = call.run()
    assert (lse[1] == torch.inf).all()
    assert not out_fp8[1].view(torch.uint8).any()
    assert (out_sf[1].contiguous().view(torch.uint8) == 105).all()
    assert lse[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("sink", "zero"), [(-torch.inf, False), (torch.inf, True), (3e38, True), (-1e3, False)]
)
def test_extreme_sinks_scale_the_output_and_never_touch_lse(sink: float, zero: bool) -> None:
    torch.manual_seed(7)
    call = DecodeCall(sinks=torch.full((HEADS,), sink))
    out_fp8, _, lse = call.run()
    call_without = call.run(attn_sink=None)
    assert torch.equal(lse, call_without[2])
    same = torch.equal(out_fp8.view(torch.uint8), call_without[0].view(torch.uint8))
    assert same is not zero
    assert ((out_fp8.view(torch.uint8) & 0x7F) == 0).all().item() is zero


def test_a_duplicate_counts_twice() -> None:
    torch.manual_seed(8)
    call = DecodeCall(extra=None)
    call.indices[:] = call.indices[:, :1]
    once = DecodeCall(extra=None)
    once.__dict__.update({**call.__dict__, "lens": torch.ones_like(call.lens)})
    assert torch.allclose(call.run()[2], once.run()[2] + torch.tensor(8.0).log(), atol=1e-5)


def test_outputs_go_into_the_callers_slice_and_nowhere_else() -> None:
    torch.manual_seed(9)
    call = DecodeCall(s_q=3)
    whole = alloc_mega_attn_output(7, 8, torch.device("cpu"))
    whole.data.view(torch.uint8).fill_(0x5A)
    storage = whole.scale.as_strided((8 * 32 * 8,), (1,), 0)
    storage.fill_(0x5A5A5A5A)
    out = call.run(out_fp8=whole.data[2:5], out_sf=whole.scale[2:5])
    fresh = call.run()
    assert torch.equal(whole.data[2:5].view(torch.uint8), fresh[0].view(torch.uint8))
    assert torch.equal(whole.scale[2:5], fresh[1])
    assert out[0].data_ptr() == whole.data[2:5].data_ptr()
    untouched = torch.cat((whole.data[:2], whole.data[5:])).view(torch.uint8)
    assert (untouched == 0x5A).all()
    columns = storage.view(8 * 32, 8)
    assert (columns[:, [0, 1, 5, 6, 7]] == 0x5A5A5A5A).all()


def test_no_tokens_give_empty_outputs() -> None:
    out_fp8, out_sf, lse = DecodeCall(s_q=0).run()
    assert (out_fp8.shape, out_sf.shape, lse.shape) == ((0, 8, 4096), (0, 8, 32), (0, HEADS))


def prefill_arguments(call: DecodeCall, kv: torch.Tensor, indices: torch.Tensor) -> dict[str, Any]:
    arguments = call.arguments() | {"kv": kv, "indices": indices.unsqueeze(1)}
    return {k: v for k, v in arguments.items() if not k.startswith("extra_")}


def test_prefill_is_golden_and_skips_entries_outside_the_workspace() -> None:
    torch.manual_seed(10)
    call = DecodeCall(s_q=4)
    kv = torch.randn(40, 1, 512).to(torch.bfloat16)
    kv[7] = torch.nan
    indices = torch.randint(8, 40, (4, 128), dtype=torch.int32)
    indices[:, ::3] = torch.tensor([-1, 40, 2**30, -9], dtype=torch.int32)[:, None]
    indices[:, 90:] = 7
    call.lens = torch.tensor([90, 1, 64, 0], dtype=torch.int32)
    outputs = TorchBackend().fused_norm_rope_attn_rope_cast_fwd(
        **prefill_arguments(call, kv, indices)
    )
    golden = reference.attention.attend(
        reference.layouts.heads_from_padded_q(call.q, HEADS),
        call.positions,
        TABLE,
        reference.rows.workspace_rows(kv, indices, call.lens),
        call.sinks,
        512**-0.5,
        torch.float64,
    )
    assert_right(outputs, golden)
    max_logits = outputs[2]
    assert torch.equal(max_logits.isinf(), golden.max_logits.isinf())
    finite = golden.max_logits.isfinite()
    assert ((max_logits - golden.max_logits).abs() <= golden.max_logits_bound)[finite].all()


MISUSE: list[tuple[str, dict[str, Any]]] = [
    ("q", {"q": torch.zeros(3, 64, 512)}),
    ("q", {"q": torch.zeros(3, 32, 512, dtype=torch.bfloat16)}),
    ("q", {"q": torch.zeros(3, 128, 512, dtype=torch.bfloat16)[:, ::2]}),
    ("kv", {"kv": torch.zeros(4, 32, 1, 500, dtype=torch.uint8)}),
    ("kv", {"kv": torch.zeros(4, 32, 1, 288, dtype=torch.uint8)}),
    ("indices", {"indices": torch.zeros(3, 8, dtype=torch.int64)}),
    ("topk_length", {"topk_length": torch.zeros(4, dtype=torch.int32)}),
    ("indices", {"indices": None}),
    ("token_positions", {"token_positions": [0, 1, 2]}),
    ("d_v", {"d_v": 448}),
    ("attn_sink", {"attn_sink": torch.zeros(8)}),
    ("extra_indices", {"extra_indices": None}),
    ("extra_topk_length", {"extra_kv": None, "extra_indices": None}),
    ("token_positions", {"token_positions": torch.zeros(3, dtype=torch.int64)}),
    ("is_rope_neox_style", {"is_rope_neox_style": True}),
    ("rope_dim", {"rope_dim": 128}),
    ("cos_sin_cache", {"cos_sin_cache": torch.zeros(10, 128)}),
    ("n_wv_group", {"n_wv_group": 16}),
    ("num_per_channels", {"num_per_channels": 128}),
    ("use_tma_aligned_col_major_sf", {"use_tma_aligned_col_major_sf": False}),
    ("round_sf", {"round_sf": False}),
    ("use_packed_ue8m0", {"use_packed_ue8m0": False}),
    ("out_sf", {"out_fp8": torch.zeros(3, 8, 4096).to(torch.float8_e4m3fn)}),
]


@pytest.mark.parametrize(("argument", "changes"), MISUSE)
def test_misuse_is_a_value_error_that_names_the_argument(
    argument: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"^{argument}:|^cache:"):
        DecodeCall().run(**changes)


def test_a_bad_scale_buffer_is_refused_before_anything_is_written() -> None:
    out = alloc_mega_attn_output(3, 8, torch.device("cpu"))
    out.data.view(torch.uint8).fill_(0x5A)
    row_major = torch.zeros(3, 8, 32, dtype=torch.int32)
    with pytest.raises(ValueError, match="out_sf: token stride"):
        DecodeCall().run(out_fp8=out.data, out_sf=row_major)
    assert (out.data.view(torch.uint8) == 0x5A).all()
