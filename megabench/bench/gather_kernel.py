"""Random whole-row gather in Triton, for the ceiling that paged attention reads against."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _gather(pool, index, out, total, WORDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = word < total
    row = tl.load(index + word // WORDS, mask=live, other=0)
    tl.store(out + word, tl.load(pool + row * WORDS + word % WORDS, mask=live), mask=live)


def gather_rows(pool: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[i] = pool[index[i]]: pool int64 [N, words], index int64 [n], out int64 [n, words]."""
    total = out.numel()
    grid = (triton.cdiv(total, BLOCK),)
    _gather[grid](pool, index, out, total, WORDS=pool.shape[1], BLOCK=BLOCK, num_warps=8)
    return out
