"""Attention calls and their golden verdicts, for the CPU tests and the device scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import reference.attention
import reference.bounds
import reference.codes
import reference.layouts
import reference.quantize
import reference.records
import reference.rows
from megabench.geometry import Geometry, cos_sin_cache
from megabench.quant import QuantizedActivation, alloc_mega_attn_output

POISON = 0xFF
"""A NaN code and a NaN scale: what every byte without a meaning holds."""
SCALE = 512**-0.5
POSITIONS = 4096


def table(device: str | torch.device) -> Tensor:
    """The compressed layers' RoPE table."""
    return cos_sin_cache(Geometry.load(), POSITIONS, compressed=True).to(device)


def paged_pool(
    rows: Tensor, used: Tensor, blocks: int, page: int, nbytes: int, layout: str, pad: int
) -> Tensor:
    """uint8 [blocks, page, nbytes] with `rows` [n, 512] in slots `used` [n] and poison elsewhere,
    `pad` bytes between pages included."""
    stride = page * nbytes + pad
    storage = torch.full((blocks * stride,), POISON, dtype=torch.uint8, device=rows.device)
    cache = storage.as_strided((blocks, page, nbytes), (stride, nbytes, 1))
    reference.records.write_record(cache, used, reference.records.encode_rows(rows, nbytes), layout)
    return cache


def latents(count: int, generator: torch.Generator) -> Tensor:
    """Rows [count, 512] whose blocks of 32 differ in size by powers of two."""
    device = generator.device
    rows = torch.randn(count, 16, 32, generator=generator, device=device)
    exponents = torch.randint(-3, 3, (count, 16, 1), generator=generator, device=device)
    return torch.ldexp(rows, exponents.float()).flatten(1)


def index_rows(tokens: int, width: int, slots: Tensor, pattern: str, g: torch.Generator) -> Tensor:
    """int32 [tokens, width] of `slots`, with -1 as `pattern` says."""
    pick = torch.randint(0, len(slots), (tokens, width), generator=g, device=g.device)
    out = slots[pick].to(torch.int32)
    column = torch.arange(width, device=g.device)
    hole = {
        "full": column < 0,
        "leading": column < width - 3,
        "middle": (column >= width // 4) & (column < width - width // 4),
        "trailing": column >= 3,
        "alternating": column % 2 == 0,
        "none": column >= 0,
    }[pattern]
    return torch.where(hole, -1, out)


@dataclass
class Call:
    """One attention call: arguments of the decode op (paged) or of the prefill op."""

    s_q: int = 3
    heads: int = 64
    topk: int = 128
    extra: int = 512
    """Width of the extra index rows; 0 leaves the extra cache out."""
    extra_bytes: int = 528
    layout: str = "interleaved"
    pad: int = 48
    pattern: str = "full"
    page: int = 64
    seed: int = 0
    device: str = "cpu"
    slots: int = 1024
    sinks: Tensor | None = None
    lens: tuple[int, ...] = ()
    """Lengths that tokens take in turn; () gives the full width."""
    extra_lens: tuple[int, ...] = ()
    q_norm_eps: float | None = None

    def __post_init__(self) -> None:
        g = torch.Generator(self.device).manual_seed(self.seed)
        q = torch.randn(self.s_q, self.heads, 512, generator=g, device=self.device)
        self.q_heads = q.to(torch.bfloat16)
        self.q = reference.layouts.pad_q(self.q_heads, self.heads)
        self.cos_sin = table(self.device)
        self.positions = torch.randint(
            0, POSITIONS, (self.s_q,), generator=g, device=self.device
        ).to(torch.int32)
        if self.sinks is None:
            self.sinks = torch.randn(self.heads, generator=g, device=self.device) + 4.0
        self.kv, used = self._pool(32, 528, g)
        self.indices = index_rows(self.s_q, self.topk, used, self.pattern, g)
        self.length = self._lengths(self.lens, self.topk)
        self.extra_kv = self.extra_indices = self.extra_length = None
        if self.extra:
            self.extra_kv, used = self._pool(self.page, self.extra_bytes, g)
            self.extra_indices = index_rows(self.s_q, self.extra, used, self.pattern, g)
            self.extra_length = self._lengths(self.extra_lens, self.extra)

    def _pool(self, page: int, nbytes: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        used = torch.randperm(self.slots, generator=g, device=self.device)[: self.slots // 2]
        rows = latents(len(used), g)
        blocks = self.slots // page
        return paged_pool(rows, used, blocks, page, nbytes, self.layout, self.pad), used

    def _lengths(self, lens: tuple[int, ...], width: int) -> Tensor:
        turns = lens or (width,)
        values = [min(turns[t % len(turns)], width) for t in range(self.s_q)]
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def output(self, before: int = 0, after: int = 0) -> QuantizedActivation:
        """A poisoned buffer pair of a step with other tokens before and after this call's."""
        total = before + self.s_q + after
        out = alloc_mega_attn_output(total, self.heads // 8, torch.device(self.device))
        out.data.view(torch.uint8).fill_(POISON)
        out.scale.fill_(-1)
        return out

    def _fixed(self) -> tuple[Any, ...]:
        return (False, 64, self.cos_sin, self.heads // 8, 32, True, True, True)

    def decode(self, backend: Any, out: QuantizedActivation | None = None) -> list[Tensor]:
        """The decode op's results."""
        pair = (out.data, out.scale) if out else (None, None)
        return backend.fused_norm_rope_attn_rope_cast_decode(
            self.q,
            self.kv.unsqueeze(2),
            self.indices,
            SCALE,
            512,
            self.sinks,
            self.length,
            None if self.extra_kv is None else self.extra_kv.unsqueeze(2),
            self.extra_indices,
            self.extra_length,
            self.q_norm_eps is not None,
            self.q_norm_eps or 0.0,
            self.positions,
            *self._fixed(),
            *pair,
        )

    def prefill(
        self, backend: Any, workspace: Tensor, out: QuantizedActivation | None = None
    ) -> list[Tensor]:
        """The prefill op's results over `workspace` [s_kv, 1, 512], indexed by this call's SWA
        index rows."""
        pair = (out.data, out.scale) if out else (None, None)
        return backend.fused_norm_rope_attn_rope_cast_fwd(
            self.q,
            workspace,
            self.indices.unsqueeze(1),
            SCALE,
            512,
            self.sinks,
            self.length,
            self.q_norm_eps is not None,
            self.q_norm_eps or 0.0,
            self.positions,
            *self._fixed(),
            *pair,
        )

    def workspace(self) -> Tensor:
        """bf16 [slots, 1, 512] of the SWA pool's rows; NaN where no index points."""
        flat = torch.full((self.slots, 512), float("nan"), device=self.device)
        used = torch.unique(self.indices[self.indices >= 0]).long()
        flat[used] = reference.records.decode_slots(self.kv, used, self.layout)
        return flat.to(torch.bfloat16).unsqueeze(1)

    def golden(self, workspace: Tensor | None = None) -> reference.attention.Attended:
        """The golden result with bounds."""
        if workspace is not None:
            rows = reference.rows.workspace_rows(workspace, self.indices, self.length)
        else:
            parts = [reference.rows.Paged(self.kv, self.indices, self.length, self.layout)]
            if self.extra_kv is not None:
                assert self.extra_indices is not None
                assert self.extra_length is not None
                parts.append(
                    reference.rows.Paged(
                        self.extra_kv, self.extra_indices, self.extra_length, self.layout
                    )
                )
            rows = reference.rows.paged_rows(parts)
        assert self.sinks is not None
        return reference.attention.attend(
            self.q_heads,
            self.positions,
            self.cos_sin,
            rows,
            self.sinks,
            SCALE,
            q_norm_eps=self.q_norm_eps,
        )


def output_excess(data: Tensor, scale: Tensor, want: reference.attention.Attended) -> float:
    """Worst error / bound of written output: a code's rounding interval under the written scale,
    widened by the bound, must contain the golden value; a scale byte must be one that an amax
    within its bound asks for. inf for a wrong byte."""
    codes, scales = reference.layouts.output_meaning(data, scale)
    o, bound = want.o.double(), want.bound.double()
    amax = o.abs().unflatten(-1, (16, 32)).amax(-1)
    slack = bound.unflatten(-1, (16, 32)).amax(-1)
    low = reference.quantize.scale_exponent((amax - slack).clamp_min(0).float())
    high = reference.quantize.scale_exponent((amax + slack).float())
    if not bool(((scales >= low) & (scales <= high)).all()):
        return float("inf")
    unit = reference.codes.decode_ue8m0(scales, torch.float64).repeat_interleave(32, -1)
    lo, hi = reference.codes.e4m3_interval(codes, torch.float64)
    if bool(lo.isnan().any()):
        return float("inf")
    error = torch.maximum(lo * unit - o, o - hi * unit).clamp_min(0)
    return float((error / bound.clamp_min(1e-300)).max()) if len(o) else 0.0


def lse_excess(got: Tensor, value: Tensor, bound: Tensor) -> float:
    """Worst |got - value| / bound; infinities must agree."""
    if not bool(
        (got.isinf() == value.isinf()).all() & (got[got.isinf()] == value[value.isinf()]).all()
    ):
        return float("inf")
    error = torch.where(value.isinf(), 0.0, got.double() - value.double()).abs()
    return float((error / bound.double().clamp_min(1e-30)).max()) if got.numel() else 0.0


def decode_excess(call: Call, got: list[Tensor], heads: int | None = None) -> float:
    """Worst error / bound of a decode call's results over the first `heads` heads."""
    want = _first_heads(call.golden(), heads or call.heads)
    groups = (heads or call.heads) // 8
    worst = output_excess(got[0][:, :groups], got[1][:, :groups], want)
    return max(worst, lse_excess(got[2][:, : heads or call.heads], want.lse, want.lse_bound))


def prefill_excess(call: Call, workspace: Tensor, got: list[Tensor]) -> float:
    """Worst error / bound of a prefill call's results."""
    want = call.golden(workspace)
    worst = output_excess(got[0], got[1], want)
    worst = max(worst, lse_excess(got[3], want.lse, want.lse_bound))
    return max(worst, lse_excess(got[2], want.max_logits, want.max_logits_bound))


def _first_heads(want: reference.attention.Attended, heads: int) -> reference.attention.Attended:
    return reference.attention.Attended(*(value[:, :heads] for value in want))


def matmul_excess(got: Tensor, want: reference.bounds.Bounded) -> float:
    """Worst error / bound of a bf16 result, its own rounding allowed for."""
    value = want.value.double()
    half_step = torch.maximum(value.abs(), got.double().abs()) * 2.0**-8
    error = (got.double() - value).abs() - half_step - 1e-40
    return float((error / want.bound.double().clamp_min(1e-30)).clamp_min(0).max())
