"""Faults of running: launches that never happened, order, repeats, memory that others own."""

from __future__ import annotations

from typing import Any

import torch

from megabench.faults.base import Args, Op, Right, after, before, fault, fresh, instead, rolled
from megabench.faults.triggers import IDLE, LONG, MIXED, TWO
from megabench.validate.trace import DECODE, EINSUM, PREFILL

GRID = 65535
"""The most blocks of a grid's second dimension."""
CODES = ("output_codes_decode",)
CYCLES = 200_000_000


@fault("X1a", "a launch fails and nobody asks: the output keeps what it held", TWO, *CODES)
@instead(DECODE)
def launch_never_happened(args: Args, right: Right) -> Any:
    lse = torch.full(args["q"].shape[:2], torch.nan, device=args["q"].device)
    return [args["out_fp8"], args["out_sf"], lse]


@fault(
    "X1b",
    "tokens past the grid's 65535 are never attended",
    LONG,
    "output_codes_prefill",
    needs="cuda",
)
@instead(PREFILL)
def tokens_past_the_grid(args: Args, right: Right) -> Any:
    kept = [args[name][GRID:].clone() for name in ("out_fp8", "out_sf")]
    result = right(args)
    for name, old in zip(("out_fp8", "out_sf"), kept, strict=True):
        args[name][GRID:].copy_(old)
    return result


@fault("X2", "a replayed op keeps the positions of its first call", TWO, "holed_lists")
@fresh(DECODE, PREFILL)
def positions_of_the_first_call() -> Op:
    kept: dict[int, torch.Tensor] = {}

    def faulty(args: Args, right: Right) -> Any:
        first = kept.setdefault(len(args["q"]), args["token_positions"].clone())
        return right({**args, "token_positions": first})

    return faulty


@fault("X3", "a result drifts from launch to launch", TWO, "repeatable")
@fresh(DECODE)
def drifts() -> Op:
    calls = 0

    def faulty(args: Args, right: Right) -> Any:
        nonlocal calls
        calls += 1
        *rest, lse = right(args)
        lse[0, 0] += calls * 2.0**-20
        return [*rest, lse]

    return faulty


@fault("X4", "an op runs on another stream without waiting", TWO, *CODES, needs="cuda")
@instead(DECODE)
def on_another_stream(args: Args, right: Right) -> Any:
    cuda: Any = torch.cuda
    other = cuda.Stream()
    for tensor in args.values():
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(other)  # late it may be, but not into memory given away
    with cuda.stream(other):
        cuda._sleep(CYCLES)
        return right(args)


@fault("X5a", "the query is changed in place", TWO, "inputs_unchanged")
@after(DECODE)
def query_changed(args: Args, result: Any) -> Any:
    args["q"].mul_(0.5)
    return result


@fault("X5b", "an index list is changed in place", TWO, "inputs_unchanged")
@after(DECODE)
def list_changed(args: Args, result: Any) -> Any:
    args["indices"][:, 0] = 0
    return result


@fault(
    "X6",
    "the next layer's attention writes this layer's output before it is read",
    TWO,
    *CODES,
    "inputs_unchanged",
)
@before(EINSUM)
def shared_output(args: Args) -> None:
    for tensor in args["x"]:
        tensor.copy_(rolled(tensor, 1, 0))


@fault("X7", "codes depend on what the output buffer held", MIXED, *CODES)
@instead(DECODE, PREFILL)
def added_to_the_old(args: Args, right: Right) -> Any:
    old = args["out_fp8"].view(torch.uint8)[..., 0].clone()
    result = right(args)
    args["out_fp8"].view(torch.uint8)[..., 0] ^= old & 1
    return result


@fault("X8", "tokens that pad the batch are left unwritten", IDLE, "padding_tokens")
@after(DECODE)
def padding_tokens_unwritten(args: Args, result: Any) -> Any:
    args["out_fp8"].view(torch.uint8)[-1] = 0x41
    return result
