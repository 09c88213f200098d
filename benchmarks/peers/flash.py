"""FlashMLA's SM90 kernels as arms: attention alone, and the pipeline that is not fused around it.

The calls are those of `sgl-flash-mla` 1.0 with `use_legacy=True`, where SM90 lives. Decode reads
584-byte V4 records (records.py); its schedule is made by the first call and reused, as an engine
reuses it over the layers of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.peers.kernels import cast_output, rope_queries
from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.formats import HEAD_DIM
from megabench.layout import heads_of
from megabench.quant import QuantizedActivation

Attend = Callable[[torch.Tensor], torch.Tensor]
"""RoPE'd q bf16 [T, H, 512] in natural order -> o bf16 [T, H, 512], before the inverse RoPE."""


def flash_problem() -> str | None:
    """Why FlashMLA's SM90 kernels cannot be called here; None when they can."""
    if find_spec("flash_mla") is None:
        return "not installed: pip install --no-deps 'sgl-flash-mla>=1.0'"
    try:
        module: Any = import_module("flash_mla")
    except Exception as error:
        return f"does not import: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None if module.has_legacy() else "installed without its SM90 (legacy) kernels"


def flash_version() -> str:
    """The installed distribution's version."""
    try:
        return metadata.version("sgl-flash-mla")
    except metadata.PackageNotFoundError:
        return "of unknown version"


@dataclass
class DecodeAttention:
    """`flash_mla_with_kvcache` over the V4 forms of a decode call's caches."""

    args: DecodeArguments
    swa: torch.Tensor
    """uint8 [blocks, page, 1, 584]"""
    extra: torch.Tensor
    _schedule: Any = field(default=None, repr=False)

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        flash: Any = import_module("flash_mla")
        if self._schedule is None:
            self._schedule = flash.get_mla_metadata()[0]
        args = self.args
        assert args.extra_indices is not None
        out, _ = flash.flash_mla_with_kvcache(
            q.unsqueeze(1),
            self.swa,
            None,
            None,
            HEAD_DIM,
            self._schedule,
            softmax_scale=args.sm_scale,
            is_fp8_kvcache=True,
            indices=args.indices.unsqueeze(1),
            topk_length=args.topk_length,
            attn_sink=args.attn_sink,
            extra_k_cache=self.extra,
            extra_indices_in_kvcache=args.extra_indices.unsqueeze(1),
            extra_topk_length=args.extra_topk_length,
            use_legacy=True,
        )
        o: torch.Tensor = out.squeeze(1)
        return o


@dataclass
class PrefillAttention:
    """`flash_mla_sparse_fwd` over a prefill call's gathered rows."""

    args: PrefillArguments

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        flash: Any = import_module("flash_mla")
        args = self.args
        o: torch.Tensor = flash.flash_mla_sparse_fwd(
            q,
            args.kv,
            args.indices,
            args.sm_scale,
            HEAD_DIM,
            args.attn_sink,
            args.topk_length,
            use_legacy=True,
        )[0]
        return o


@dataclass
class Unfused:
    """Q RoPE, FlashMLA's attention, inverse RoPE and cast: three launches and a combine."""

    args: DecodeArguments | PrefillArguments
    attend: Attend
    q: torch.Tensor
    """bf16 [T, H, 512] in natural order, not rotated."""
    rotated: torch.Tensor
    """Where the rotated dims go; its others are q's. May be q, where q is made afresh each run."""
    out: QuantizedActivation

    def __call__(self) -> list[torch.Tensor]:
        args = self.args
        rope_queries(self.q, self.rotated, args.token_positions, args.cos_sin_cache)
        o = self.attend(self.rotated)
        cast_output(o, args.token_positions, args.cos_sin_cache, self.out)
        return [self.out.data, self.out.scale]


def unfused(args: DecodeArguments | PrefillArguments, attend: Attend) -> Unfused:
    """The pipeline of a call's own Q, on an output pair of its own."""
    q = heads_of(args.q)
    own = type(args)(*args.inputs())
    return Unfused(args, attend, q, q.clone(), own.output())


class UnfusedBackend:
    """A backend with the pipeline in place of the decode op, for a layer whose wq_b rows were left
    in natural order; everything else is the backend's it wraps."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.caches: tuple[torch.Tensor, torch.Tensor] | None = None
        """V4 forms of the layer's sliding-window and compressed cache, after its inserts."""
        self._attend: DecodeAttention | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def fused_norm_rope_attn_rope_cast_decode(self, *given: Any) -> list[torch.Tensor]:
        args = DecodeArguments(*given)
        assert self.caches is not None
        if self._attend is None:
            self._attend = DecodeAttention(args, *self.caches)
        self._attend.args = args
        return Unfused(args, self._attend, args.q, args.q, args.output())()
