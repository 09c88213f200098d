"""Faults of which rows are read: lists, lengths, windows, pages and their strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabench.faults.base import Args, after, before, fault
from megabench.faults.kernel import Kernel, Pair, kernel
from megabench.faults.triggers import IDLE, MIXED, POOL, SPACED, TWO, UNEVEN
from megabench.validate.trace import COMBINE, DECODE, GATHER, GLOBAL_TOPK, PREFILL

INT32_END = 2**31


@fault("G1", "an index of -1 is read as row 0", MIXED, "holed_lists")
@kernel
class MinusOneIsRowZero(Kernel):
    def named(self, slots: Tensor, length: Tensor) -> Tensor:
        return torch.arange(slots.shape[1], device=slots.device) < length[:, None]

    def rows(self, args: Args) -> Pair:
        clamped = {
            name: value.clamp(min=0)
            for name, value in args.items()
            if name in ("indices", "extra_indices") and value is not None
        }
        return super().rows({**args, **clamped})


@fault("G2", "an index past the rows counts, with a K of zero", MIXED, "holed_lists")
@kernel
class BeyondTheRows(Kernel):
    def rows(self, args: Args) -> Pair:
        rows, valid = super().rows(args)
        if "extra_kv" in args:
            return rows, valid
        index = args["indices"][:, 0]
        beyond = self.named(index, args["topk_length"]) & (index >= len(args["kv"]))
        return torch.where(beyond[..., None], 0.0, rows), valid | beyond


@fault("G3a", "one row too many is read: the length is off by +1", MIXED, "holed_lists")
@before(DECODE, PREFILL)
def one_row_more(args: Args) -> None:
    args["topk_length"] = args["topk_length"] + 1


@fault(
    "G3b", "one row too few is read: the length is off by -1", MIXED, "lse_decode", "lse_prefill"
)
@before(DECODE, PREFILL)
def one_row_less(args: Args) -> None:
    args["topk_length"] = (args["topk_length"] - 1).clamp(min=0)


@fault("G3c", "lengths are ignored: every index that is not -1 is read", MIXED, "holed_lists")
@before(DECODE, PREFILL)
def lengths_ignored(args: Args) -> None:
    args["topk_length"] = torch.full_like(args["topk_length"], args["indices"].shape[-1])


@fault("G4", "the extra list's length is the next token's", UNEVEN, "lse_decode")
@before(DECODE)
def length_of_the_next_row(args: Args) -> None:
    args["extra_topk_length"] = args["extra_topk_length"].roll(-1)


@fault(
    "G5",
    "pages are taken to follow each other without padding",
    SPACED,
    "gathered_rows",
    "lse_decode",
)
@before(DECODE, GATHER)
def stride_without_padding(args: Args) -> None:
    for name in ("kv", "extra_kv", "k_cache"):
        if args.get(name) is not None:
            cache = args[name]
            strides = (cache.shape[1] * cache.shape[-1], *cache.stride()[1:])
            args[name] = cache.as_strided(cache.shape, strides)


@fault(
    "G6",
    "the byte offset of a page wraps at 2^31: later pages read page 0",
    POOL,
    "lse_decode",
    needs="cuda",
)
@before(DECODE)
def page_offset_wraps(args: Args) -> None:
    for cache, lists in (("kv", "indices"), ("extra_kv", "extra_indices")):
        page, stride, slots = args[cache].shape[1], args[cache].stride(0), args[lists]
        reached = slots.long() // page * stride < INT32_END
        args[lists] = torch.where(reached, slots, slots % page)


@fault("G7a", "a slot of the extra cache is split by 64 rows a page, not by 128", TWO, "lse_decode")
@before(DECODE)
def slots_of_64_row_pages(args: Args) -> None:
    cache, slots = args["extra_kv"], args["extra_indices"]
    blocks, page = cache.shape[:2]
    half = slots // (page // 2) % blocks * page + slots % (page // 2)
    args["extra_indices"] = torch.where(slots >= 0, half, slots)


@fault("G7b", "a page has half its rows where top-k rows become slots", TWO, "indices_decode")
@before(GLOBAL_TOPK)
def half_a_page(args: Args) -> None:
    args["block_size"] //= 2


@fault("G8a", "the window has 127 keys", MIXED, "indices_prefill")
@before(COMBINE)
def window_of_127(args: Args) -> None:
    args["window_size"] -= 1


@fault("G8b", "the window has 129 keys", MIXED, "indices_prefill")
@before(COMBINE)
def window_of_129(args: Args) -> None:
    args["window_size"] += 1


@fault("G8c", "a decode's window starts one key late", MIXED, "lse_decode")
@before(DECODE)
def decode_window_of_127(args: Args) -> None:
    args["indices"] = args["indices"].roll(-1, 1)
    args["topk_length"] = args["topk_length"] - 1


@fault("G9", "a token reads the lists of the token before it", MIXED, "lse_prefill")
@before(DECODE, PREFILL)
def lists_of_the_token_before(args: Args) -> None:
    args["indices"] = args["indices"].roll(1, 0)


@fault("G10", "the top-k length counts one entry less", TWO, "indices_decode")
@after(GLOBAL_TOPK)
def topk_length_short(args: Args, pair: Any) -> Any:
    return pair[0], pair[1] - 1


@fault("G11", "a missing top-k row becomes row 0 of the workspace", MIXED, "indices_prefill")
@after(COMBINE)
def missing_row_is_row_zero(args: Args, pair: Any) -> Any:
    pair[0].clamp_(min=0)
    return pair


@fault("G12", "the gather reads the pages of the request's next block", MIXED, "gathered_rows")
@before(GATHER)
def pages_of_the_next_block(args: Args) -> None:
    args["block_table"] = args["block_table"].roll(1, -1)


@fault("G13", "a token that pads the batch has a top-k length", IDLE, "indices_decode")
@after(GLOBAL_TOPK)
def padding_token_has_a_length(args: Args, pair: Any) -> Any:
    return pair[0], pair[1].clamp(min=1)
