"""Backends with one fault each: what an op is given or gives back is changed as a bug would.

A fault names the case that shows it and the first stage that must notice. `before` changes an op's
arguments in place in their dict, `after` gets the arguments and the result and may change either.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megabench.backends import Backend, TorchBackend
from megabench.quant import alloc_mega_attn_output, dequantize_mxfp8, quantize_kv_mxfp8
from megabench.validate.trace import (
    DECODE,
    PREFILL,
)

Args = dict[str, Any]
Before = Callable[[Args], None]
After = Callable[[Args, Any], Any]
ATTENTION = (DECODE, PREFILL)


@dataclass(frozen=True)
class Fault:
    """One deliberate mistake."""

    name: str
    stage: str
    ops: tuple[str, ...]
    before: Before | None = None
    after: After | None = None
    case: dict[str, object] = field(default_factory=dict)


FAULTS: list[Fault] = []


def before(stage: str, *ops: str, **case: object) -> Callable[[Before], Before]:
    """Register a fault in what ops are given."""

    def register(change: Before) -> Before:
        FAULTS.append(Fault(change.__name__, stage, ops, before=change, case=case))
        return change

    return register


def after(stage: str, *ops: str, **case: object) -> Callable[[After], After]:
    """Register a fault in what ops give back or have written."""

    def register(change: After) -> After:
        FAULTS.append(Fault(change.__name__, stage, ops, after=change, case=case))
        return change

    return register


def faulty(fault: Fault, page_layout: str = "interleaved") -> TorchBackend:
    """The torch backend with one fault."""

    def method(name: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(Backend, name))

        def call(self: TorchBackend, *positional: Any, **named: Any) -> Any:
            bound = signature.bind(self, *positional, **named)
            bound.apply_defaults()
            args = dict(bound.arguments)
            args.pop("self")
            if name in ATTENTION and args["out_fp8"] is None:
                pair = alloc_mega_attn_output(len(args["q"]), args["n_wv_group"], args["q"].device)
                args |= {"out_fp8": pair.data, "out_sf": pair.scale}
            if fault.before is not None:
                fault.before(args)
            result = getattr(TorchBackend, name)(self, *args.values())
            return result if fault.after is None else fault.after(args, result)

        return call

    kind = type("FaultyBackend", (TorchBackend,), {name: method(name) for name in fault.ops})
    return kind(page_layout)


# ---- helpers -------------------------------------------------------------------------------------


def output_values(args: Args) -> torch.Tensor:
    """What an attention op wrote, float32 [t, groups, 4096]."""
    scale = args["out_sf"].contiguous().view(torch.uint8)
    return dequantize_mxfp8(args["out_fp8"].view(torch.uint8), scale)


def recast(args: Args, values: torch.Tensor) -> None:
    """Write values [t, groups, 4096] back as codes and scales."""
    codes, scale = quantize_kv_mxfp8(values)
    args["out_fp8"].view(torch.uint8).copy_(codes)
    args["out_sf"].copy_(scale.contiguous().view(torch.int32))


def codes_of(args: Args) -> torch.Tensor:
    """The code bytes an attention op wrote, in memory order."""
    return args["out_fp8"].view(torch.uint8)


def with_scales(args: Args, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the scale bytes uint8 [t, groups, 128] an attention op wrote."""
    scale = args["out_sf"].contiguous().view(torch.uint8)
    args["out_sf"].copy_(change(scale).contiguous().view(torch.int32))


def row_bytes(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and row of the slots that are written."""
    named = slots[slots >= 0]
    return named // cache.shape[1], named % cache.shape[1]
