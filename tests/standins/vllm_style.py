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
from reference.rows import Paged, Rows, paged_rows, workspace_rows

ROPE_ARGS = (False, 64)
SF_ARGS = (32, True, True, True)
HEADS, SCALE = 64, 512**-0.5
CPU = torch.device("cpu")


def pool(record: KVRecord, blocks: int, page: int) -> Tensor:
    encode = quantize_kv_mxfp8 if record is FP8 else quantize_nvfp4
    return torch.cat(encode(torch.randn(blocks, page, 512)), -1)


class Step:
    """Two decodes and three prefill tokens of one step, written into one output pair."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.table = cos_sin_cache(Geometry.load(), 256, compressed=True).to(device)
        self.out = alloc_mega_attn_output(5, 8, device)
        self.q = torch.empty(5, HEADS, 512, dtype=torch.bfloat16, device=device)
        self.positions = self._ints(5)
        self.sink = torch.empty(HEADS, device=device)
        self.swa, self.extra = pool(FP8, 4, 32).to(device), pool(NVFP4, 3, 64).to(device)
        self.indices, self.lens = self._ints(2, 128), self._ints(2)
        self.extra_indices, self.extra_lens = self._ints(2, 64), self._ints(2)
        self.kv = torch.empty(80, 1, 512, dtype=torch.bfloat16, device=device)
        self.rows, self.taken = self._ints(3, 1, 128), self._ints(3)
        self.redraw()

    def _ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def redraw(self) -> None:
        """New values in the same tensors, and the output poisoned."""
        for tensor in (self.q, self.sink, self.kv):
            tensor.copy_(torch.randn(tensor.shape))
        for tensor, low, high in (
            (self.positions, 0, 256),
            (self.indices, 0, 128),
            (self.lens, 1, 129),
            (self.extra_indices, -1, 192),
            (self.extra_lens, 0, 65),
            (self.rows, -1, 80),
            (self.taken, 1, 129),
        ):
            tensor.copy_(torch.randint(low, high, tensor.shape))
        self.out.data.view(torch.uint8).fill_(0x7F)
        self.out.scale.fill_(-1)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """The two calls, as vLLM's `_forward_decode_mega` and `_forward_prefill_mega` make them ->
        lse of the decodes, max_logits and lse of the prefill tokens."""
        ops, out = torch.ops._flashmla_C, self.out
        rope_cast = (*ROPE_ARGS, self.table, 8, *SF_ARGS)
        *_, decoded = ops.fused_norm_rope_attn_rope_cast_decode(
            self.q[:2],
            self.swa.unsqueeze(-2),
            self.indices.view(2, -1),
            SCALE,
            512,
            self.sink,
            self.lens,
            self.extra.unsqueeze(-2),
            self.extra_indices,
            self.extra_lens,
            False,
            0.0,
            self.positions[:2],
            *rope_cast,
            out.data[:2],
            out.scale[:2],
        )
        *_, max_logits, prefilled = ops.fused_norm_rope_attn_rope_cast_fwd(
            self.q[2:],
            self.kv,
            self.rows,
            SCALE,
            512,
            self.sink,
            self.taken,
            False,
            0.0,
            self.positions[2:],
            *rope_cast,
            out.data[2:],
            out.scale[2:],
        )
        return decoded, max_logits, prefilled

    def judge(self, logs: tuple[Tensor, Tensor, Tensor]) -> None:
        """AssertionError unless the outputs and `logs` are golden's."""
        extra = Paged(self.extra, self.extra_indices, self.extra_lens)
        rows = paged_rows([Paged(self.swa, self.indices, self.lens), extra])
        self._judge(slice(0, 2), rows, logs[0])
        golden = self._judge(slice(2, 5), workspace_rows(self.kv, self.rows, self.taken), logs[2])
        assert ((logs[1] - golden.max_logits).abs() <= golden.max_logits_bound).all()

    def _judge(self, tokens: slice, rows: Rows, lse: Tensor) -> Attended:
        heads = heads_from_padded_q(self.q, HEADS)[tokens]
        positions = self.positions[tokens]
        golden = attend(
            heads,
            positions,
            self.table,
            rows,
            self.sink,
            SCALE,
            torch.float64,
            sums_rounded_p=True,
        )
        codes, scales = output_meaning(self.out.data[tokens], self.out.scale[tokens])
        low, high = e4m3_interval(codes, torch.float64)
        unit = decode_ue8m0(scales, torch.float64).repeat_interleave(32, -1)
        assert (golden.o >= low * unit - golden.bound).all()
        assert (golden.o <= high * unit + golden.bound).all()
        assert ((lse - golden.lse).abs() <= golden.lse_bound).all()
        return golden


def judge(device: torch.device = CPU) -> None:
    """One step through `torch.ops`, golden."""
    step = Step(device)
    step.judge(step.run())


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
