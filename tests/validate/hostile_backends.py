"""Kernels that are right on whatever their author tried: each has one blind spot, and none of it is
in the fault catalogue. `CASES` names a case of ci.yaml that shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megabench.backends import TorchBackend, eager_attention, eager_matmul, torch_eager
from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.backends.base import Pair
from megabench.backends.eager_attention import Attended, attend
from megabench.faults.base import replaced
from megabench.quant import quantize_kv_mxfp8


def _elsewhere(args: DecodeArguments, **changes: Any) -> DecodeArguments:
    """The same call into buffers of its own."""
    return replace(args, out_fp8=None, out_sf=None, **changes)


class PagesInARow(TorchBackend):
    """Gathers as if a request's pages followed each other: only its first table entry is read."""

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        k_cache: Tensor,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        block_size: int,
        offset: int,
    ) -> None:
        page = torch.arange(block_table.shape[1], device=block_table.device)
        first = torch.where(block_table > 0, block_table - page, len(k_cache)).amin(1, keepdim=True)
        table = (first + page).clamp(0, len(k_cache) - 1).to(block_table.dtype)
        super().dequantize_and_gather_k_cache(
            out, k_cache, seq_lens, gather_lens, table, block_size, offset
        )


class OneKeyShortcut(TorchBackend):
    """A token with one key takes its row as it is, without the sink."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        right, bare = super().decode(args), super().decode(_elsewhere(args, attn_sink=None))
        keys = args.topk_length + (0 if args.extra_topk_length is None else args.extra_topk_length)
        for mine, other in zip(right[:2], bare[:2], strict=True):
            mine[keys == 1] = other[keys == 1]
        return right


class RowPastTheTile(TorchBackend):
    """A last tile that lacks one row of 64 is taken for full."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        assert args.topk_length is not None
        lens = args.topk_length
        return super().decode(replace(args, topk_length=lens + (lens % 64 == 63).int()))


class RowAfterTheTile(TorchBackend):
    """A single row beyond a tile of 64 is left out."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        assert args.topk_length is not None
        lens = args.topk_length
        return super().decode(replace(args, topk_length=torch.where(lens == 65, 64, lens)))


class TableOfTheFirstLayer(TorchBackend):
    """One cos/sin table for all layers: the first that came."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        if self.table is None or len(self.table) < len(args.cos_sin_cache):
            self.table = args.cos_sin_cache
        return super().decode(replace(args, cos_sin_cache=self.table))


class ResultsByPointer(TorchBackend):
    """Remembers what an activation at an address came to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def linear(self, x: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        key = x.data_ptr(), len(x), w.data_ptr()
        return self.kept.setdefault(key, super().linear(x, w, sw)).clone()


class SumInHalf(TorchBackend):
    """Combines the window and the top-k through bf16, as if each had been stored."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        result = super().decode(args)
        if args.extra_kv is not None:
            result[2].copy_(result[2].bfloat16())
        return result


class PromptsStartAtZero(TorchBackend):
    """Counts a prefill's positions from its first token."""

    def prefill(self, args: PrefillArguments) -> list[Tensor]:
        first = args.token_positions[:1]
        return super().prefill(replace(args, token_positions=args.token_positions - first))


class SixtyFourTokens(TorchBackend):
    """Blocks of 64 tokens: those after the first take its positions."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        positions = args.token_positions.clone()
        positions[64:] = positions[: max(len(positions) - 64, 0)][: len(positions[64:])]
        return super().decode(replace(args, token_positions=positions))


class EveryTokenLikeTheFirst(TorchBackend):
    """Loads one sink vector and one length for the whole batch."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        assert args.topk_length is not None
        lens = args.topk_length[:1].expand_as(args.topk_length).contiguous()
        return super().decode(replace(args, topk_length=lens))


class LastPageIsFull(TorchBackend):
    """Writes the whole page of a row it inserts, from a copy taken at the start."""

    def insert_compressed(
        self,
        latent: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        compress_ratio: int,
    ) -> None:
        super().insert_compressed(
            latent, positions, cos_sin_cache, cache, slot_mapping, compress_ratio
        )
        written = slot_mapping[slot_mapping >= 0]
        if len(written) and int(written[-1]) % cache.shape[1] + 1 < cache.shape[1]:
            block, row = int(written[-1]) // cache.shape[1], int(written[-1]) % cache.shape[1]
            cache[block, row + 1] = cache[block, row]


class EinsumInEights(TorchBackend):
    """Loops over tokens in eights and leaves the rest of the last eight unfinished."""

    def fp8_einsum(
        self, equation: str, x: Pair, w: Pair, out: Tensor, recipe: tuple[int, int, int]
    ) -> None:
        super().fp8_einsum(equation, x, w, out, recipe)
        if len(out) > 8 and len(out) % 8:
            out[len(out) // 8 * 8 :, :, 0] *= 1.02


class QueryAsScratch(TorchBackend):
    """Uses half of the query's memory as its own once attention has read it."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        result = super().decode(args)
        args.q[: (len(args.q) + 1) // 2].zero_()
        return result


class CleansItsLists(TorchBackend):
    """Strikes slots outside the pool from the list it was given, not from a copy."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        args.indices.masked_fill_(args.indices >= args.kv.shape[0] * args.kv.shape[1], -1)
        return super().decode(args)


class OneLseForAll(TorchBackend):
    """Returns a prefill's lse in memory that the next prefill writes."""

    kept: Tensor | None = None

    def prefill(self, args: PrefillArguments) -> list[Tensor]:
        *others, lse = super().prefill(args)
        if self.kept is None or self.kept.numel() < lse.numel():
            self.kept = torch.empty_like(lse)
        return [*others, self.kept.flatten()[: lse.numel()].view_as(lse).copy_(lse)]


class GlobalTopk(TorchBackend):
    """The op that makes lists of slots, with what a subclass takes its inputs for."""

    def rows(self, topk_indices: Tensor) -> Tensor:
        return topk_indices

    def pages(self, block_table: Tensor) -> Tensor:
        return block_table

    def valid(self, is_valid_token: Tensor) -> Tensor:
        return is_valid_token

    def compute_global_topk_indices_and_lens(
        self,
        topk_indices: Tensor,
        token_to_req_indices: Tensor,
        block_table: Tensor,
        block_size: int,
        is_valid_token: Tensor,
    ) -> Pair:
        return super().compute_global_topk_indices_and_lens(
            self.rows(topk_indices),
            token_to_req_indices,
            self.pages(block_table),
            block_size,
            self.valid(is_valid_token),
        )


class PaddingReadsToo(GlobalTopk):
    """Counts the top-k rows of tokens that pad the batch."""

    def valid(self, is_valid_token: Tensor) -> Tensor:
        return torch.ones_like(is_valid_token)


class EmptyTimesInfinity(TorchBackend):
    """Of two empty lists and a sink of +inf it makes NaN."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        codes, scales, lse = super().decode(args)
        assert args.attn_sink is not None
        if args.extra_kv is not None:
            undefined = (lse.isinf() & (args.attn_sink == torch.inf)).any(1)
            codes.view(torch.uint8)[undefined] = 0x7F
        return [codes, scales, lse]


class FirstByPointer(TorchBackend):
    """Reads what stands at an address once; nothing is wrong with that by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[tuple[int, int], Tensor] = {}

    def first(self, tensor: Tensor) -> Tensor:
        return self.read.setdefault((tensor.data_ptr(), tensor.numel()), tensor.clone())


class PagesAsTheyWere(FirstByPointer, GlobalTopk):
    """Keeps the block table."""

    def pages(self, block_table: Tensor) -> Tensor:
        return self.first(block_table)


class WindowsAsTheyWere(FirstByPointer):
    """Keeps the windows' slots."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        return super().decode(replace(args, indices=self.first(args.indices)))


class SixteenBitPositions(TorchBackend):
    """Packs the positions of a prefill into half words."""

    def prefill(self, args: PrefillArguments) -> list[Tensor]:
        return super().prefill(replace(args, token_positions=args.token_positions & 0xFFFF))


class SixteenBitRows(GlobalTopk):
    """Packs the rows of a top-k list into half words."""

    def rows(self, topk_indices: Tensor) -> Tensor:
        return torch.where(topk_indices < 0, topk_indices, topk_indices & 0xFFFF)


class RoundsPrefillsTwice(TorchBackend):
    """Rounds a prefill's output to bf16 before the cast; its decode does not."""

    def prefill(self, args: PrefillArguments) -> list[Tensor]:
        def attended(*given: Any) -> Attended:
            right = attend(*given)
            return replace(right, out=right.out.bfloat16().float())

        with replaced(torch_eager, "attend", attended):
            return super().prefill(args)


class BlocksBelowZero(TorchBackend):
    """Takes a prefill's block without a value above zero for one of zeros."""

    def prefill(self, args: PrefillArguments) -> list[Tensor]:
        def quantized(x: Tensor) -> Pair:
            some = (x.unflatten(-1, (-1, 32)) > 0).any(-1)
            return quantize_kv_mxfp8(torch.where(some.repeat_interleave(32, -1), x, 0.0))

        with replaced(eager_attention, "quantize_kv_mxfp8", quantized):
            return super().prefill(args)


class ActivationsWithAFloor(TorchBackend):
    """Quantizes activations with the amax floor that is the cache's alone."""

    def linear(self, x: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        with replaced(eager_matmul, "quantize_activation", lambda x: quantize_kv_mxfp8(x.float())):
            return super().linear(x, w, sw)


class OneBlockOfTokens(TorchBackend):
    """Decodes the first 128 tokens of a step."""

    def decode(self, args: DecodeArguments) -> list[Tensor]:
        right = super().decode(args)
        right[0].view(torch.uint8)[128:] = 0
        return right


CASES: dict[type[TorchBackend], tuple[str, ...]] = {
    PagesInARow: ("r1-nvfp4-tp1-1q1s200_1q3s150_1q2",),
    OneKeyShortcut: ("r0-nvfp4-tp1-1q1s2",),
    RowPastTheTile: ("r0-nvfp4-tp1-1q1s127",),
    RowAfterTheTile: ("r0-nvfp4-tp1-1q1s65",),
    TableOfTheFirstLayer: ("r0-nvfp4-tp1-3q1s300", "r1-nvfp4-tp1-3q1s300"),
    ResultsByPointer: ("r1-nvfp4-tp1-3q1s300",),
    SumInHalf: ("r1-nvfp4-tp1-3q1s300",),
    PromptsStartAtZero: ("r0-nvfp4-tp1-2q3s140",),
    SixtyFourTokens: ("r1-nvfp4-tp1-60q1s130_5q1s77",),
    EveryTokenLikeTheFirst: ("r1-nvfp4-tp1-3q1s200-pt1",),
    LastPageIsFull: ("r1-nvfp4-tp1-3q1s300",),
    EinsumInEights: ("r1-nvfp4-tp1-q33",),
    QueryAsScratch: ("r1-nvfp4-tp1-3q1s300",),
    CleansItsLists: ("r0-nvfp4-tp1-1q1s64",),
    OneLseForAll: ("r1-nvfp4-tp1-12q2s200",),
    PaddingReadsToo: ("r1-nvfp4-tp1-3q1s200-pt1",),
    EmptyTimesInfinity: ("r1-nvfp4-tp1-3q1s200-sink.inf-pt1",),
    PagesAsTheyWere: ("r1-nvfp4-tp1-3q1s300",),
    WindowsAsTheyWere: ("r1-nvfp4-tp1-3q1s300",),
    SixteenBitPositions: ("r0-nvfp4-tp1-q3s65540",),
    SixteenBitRows: ("r1-nvfp4-tp1-1q1s260k",),
    RoundsPrefillsTwice: ("r0-auto-tp1-1q1s64_1q3s128-sink.none-equal_logits",),
    BlocksBelowZero: ("r0-nvfp4-tp1-2q1s300_1q3s140-one_hot",),
    ActivationsWithAFloor: ("r0-nvfp4-tp1-2q1s300_1q3s140-tiny",),
    OneBlockOfTokens: ("r1-nvfp4-tp1-130q1s3",),
}
