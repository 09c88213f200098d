"""Calls of `torch.ops._flashmla_C` as an engine's layer makes them, judged by the golden model.

Run in a process of its own: what it registers stays there. Arguments: a backend's name.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

import megabench
from megabench.backends import get_backend
from megabench.flashmla_ops import FlashmlaOpsWarning
from megabench.formats import FP8, NVFP4, KVRecord
from megabench.geometry import Geometry, cos_sin_cache
from megabench.quant import alloc_mega_attn_output, quantize_kv_mxfp8, quantize_nvfp4
from reference.attention import Attended, attend
from reference.codes import decode_ue8m0, e4m3_interval
from reference.layouts import heads_from_padded_q, output_meaning
from reference.rows import Paged, paged_rows, workspace_rows

ROPE_ARGS = (False, 64)
SF_ARGS = (32, True, True, True)
HEADS, SCALE = 64, 512**-0.5
TABLE = cos_sin_cache(Geometry.load(), 256, compressed=True)


def pool(record: KVRecord, blocks: int, page: int) -> Tensor:
    encode = quantize_kv_mxfp8 if record is FP8 else quantize_nvfp4
    return torch.cat(encode(torch.randn(blocks, page, 512)), -1)


def assert_golden(out_fp8: Tensor, out_sf: Tensor, lse: Tensor, golden: Attended) -> None:
    codes, scales = output_meaning(out_fp8, out_sf)
    low, high = e4m3_interval(codes, torch.float64)
    unit = decode_ue8m0(scales, torch.float64).repeat_interleave(32, -1)
    assert (golden.o >= low * unit - golden.bound).all()
    assert (golden.o <= high * unit + golden.bound).all()
    assert ((lse - golden.lse).abs() <= golden.lse_bound).all()


def judge(s_q: int = 5) -> None:
    """Two decodes and three prefill tokens of one step into one output pair."""
    q = torch.randn(s_q, HEADS, 512).to(torch.bfloat16)
    positions = torch.randint(0, 256, (s_q,), dtype=torch.int32)
    sink, out = torch.randn(HEADS), alloc_mega_attn_output(s_q, 8, torch.device("cpu"))
    swa, extra = pool(FP8, 4, 32), pool(NVFP4, 3, 64)
    indices = torch.randint(0, 128, (2, 128), dtype=torch.int32)
    extra_indices = torch.randint(-1, 192, (2, 64), dtype=torch.int32)
    lens, extra_lens = (torch.tensor(n, dtype=torch.int32) for n in ([100, 128], [64, 10]))
    *_, lse = torch.ops._flashmla_C.fused_norm_rope_attn_rope_cast_decode(
        q[:2],
        swa.unsqueeze(-2),
        indices.view(2, -1),
        SCALE,
        512,
        sink,
        lens,
        extra.unsqueeze(-2),
        extra_indices,
        extra_lens,
        False,
        0.0,
        positions[:2],
        *ROPE_ARGS,
        TABLE,
        8,
        *SF_ARGS,
        out.data[:2],
        out.scale[:2],
    )
    rows = paged_rows([Paged(swa, indices, lens), Paged(extra, extra_indices, extra_lens)])
    heads = heads_from_padded_q(q, HEADS)
    golden = attend(heads[:2], positions[:2], TABLE, rows, sink, SCALE, torch.float64)
    assert_golden(out.data[:2], out.scale[:2], lse, golden)

    kv = torch.randn(80, 1, 512).to(torch.bfloat16)
    rows_of = torch.randint(-1, 80, (3, 1, 128), dtype=torch.int32)
    taken = torch.tensor([128, 3, 77], dtype=torch.int32)
    *_, max_logits, lse = torch.ops._flashmla_C.fused_norm_rope_attn_rope_cast_fwd(
        q[2:],
        kv,
        rows_of,
        SCALE,
        512,
        sink,
        taken,
        False,
        0.0,
        positions[2:],
        *ROPE_ARGS,
        TABLE,
        8,
        *SF_ARGS,
        out.data[2:],
        out.scale[2:],
    )
    rows = workspace_rows(kv, rows_of, taken)
    golden = attend(heads[2:], positions[2:], TABLE, rows, sink, SCALE, torch.float64)
    assert_golden(out.data[2:], out.scale[2:], lse, golden)
    assert ((max_logits - golden.max_logits).abs() <= golden.max_logits_bound).all()


def main(name: str) -> None:
    torch.manual_seed(0)
    assert not hasattr(torch.ops._flashmla_C, "permute_q_b_proj")
    registration = megabench.register_flashmla_ops(name)
    expected = get_backend(name).name if name != "auto" else registration.backends["cpu"]
    assert registration.active
    assert registration.backends["cpu"] == expected
    judge()
    registration.undo()
    assert not hasattr(torch.ops._flashmla_C, "permute_q_b_proj")

    # The vendor's library can be loaded once ours are gone; ours then stand over it.
    import flashmla_c

    vendor = flashmla_c.register()
    with megabench.register_flashmla_ops(name) as over:
        assert "in place of the vendor's" in over.message
        judge()
    flashmla_c.KERNELS.clear()
    vendor._destroy()
    print(f"golden through torch.ops by {registration.backends['cpu']}")


if __name__ == "__main__":
    warnings.simplefilter("error", FlashmlaOpsWarning)
    main(sys.argv[1])
