"""Faults of the layer's step: prefill chunks, slices of a mixed step, the gather workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megabench.faults.base import Args, Right, after, fault, instead, patch, replaced
from megabench.faults.triggers import CHUNKS, MIXED, ODD, SHORT
from megabench.formats import HEAD_DIM
from megabench.layer import prefill
from megabench.layer.attention import DeepseekV4MegaAttnAttention
from megabench.layer.decode import DecodePath
from megabench.layer.prefill import PrefillPath
from megabench.metadata import DeepseekSparseSWAMetadata
from megabench.quant import token_slice
from megabench.validate.trace import COMBINE, DECODE

ROW_BYTES = 2 * HEAD_DIM


@fault(
    "P1", "a prefill chunk's slice leaves out the decodes before it", MIXED, "output_codes_prefill"
)
@patch(PrefillPath, "_forward_prefill_mega")
def slice_without_decodes(right: Any) -> Any:
    def forward(self: Any, *args: Any) -> None:
        base = args[-1]

        def early(out: Any, start: int, end: int) -> Any:
            return token_slice(out, start - base, end - base)

        with replaced(prefill, "_token_slice", early):
            right(self, *args)

    return forward


@fault(
    "P2", "padding of the decodes overwrites the first prefill row", MIXED, "output_codes_prefill"
)
@after(DECODE)
def decode_padding_overwrites(args: Args, result: Any) -> Any:
    codes, words = args["out_fp8"].view(torch.uint8), args["out_sf"]
    for tensor, value in ((codes, 0), (words, 0x69696969)):
        end = tensor.storage_offset() + len(tensor) * tensor.stride(0)
        if end + tensor[0].numel() > tensor.untyped_storage().nbytes() // tensor.element_size():
            return result  # called outside a step: nothing follows
        tensor.as_strided((1, *tensor.shape[1:]), tensor.stride(), end).fill_(value)
    return result


@fault("P3", "a later chunk reads the rows gathered for the one before", CHUNKS, "gathered_rows")
@patch(PrefillPath, "_gather_chunk")
def gathered_once(right: Any) -> Any:
    def gather(self: Any, kv: Any, compressed: Any, swa: Any, requests: slice, rows: int) -> None:
        if requests.start == 0:
            right(self, kv, compressed, swa, requests, rows)

    return gather


@fault(
    "P4",
    "rows of the combined list are topk + window apart, not rounded up to 128",
    MIXED,
    "indices_prefill",
)
@after(COMBINE)
def pitch_not_rounded(args: Args, pair: Any) -> Any:
    lists = pair[0]
    made, pitch = lists.clone(), args["topk"] + args["window_size"]
    lists.fill_(-1)
    for token, row in enumerate(made):
        lists.view(-1)[token * pitch : token * pitch + pitch] = row[:pitch]
    return pair


@fault(
    "P5",
    "seq_len // ratio is rounded up in the chunk plan",
    ODD,
    "gathered_rows",
    "indices_prefill",
)
@patch(DeepseekSparseSWAMetadata, "get_prefill_chunk_plan")
def compressed_rows_rounded_up(right: Any) -> Any:
    def plan(self: Any, *args: Any, **named: Any) -> Any:
        return [replace(c, N=c.N + 1, M=c.M + 1) for c in right(self, *args, **named)]

    return plan


@fault(
    "P6",
    "the workspace is one row short: the next buffer starts in its last row",
    MIXED,
    "gathered_rows",
)
@patch(PrefillPath, "_prefill_workspace")
def workspace_a_row_short(right: Any) -> Any:
    def workspace(self: Any, requests: int, rows: int) -> Any:
        kv, lists, lens = right(self, requests, rows)
        start = kv.numel() * kv.element_size() - ROW_BYTES
        raw = self.workspace.buffer[start : start + 4 * lists.numel()]
        return kv, raw.view(torch.int32).view(lists.shape), lens

    return workspace


@fault("P7", "a request of one token in a prefill chunk is dropped", SHORT, "indices_prefill")
@after(COMBINE)
def single_token_dropped(args: Args, pair: Any) -> Any:
    starts = args["query_start_loc"] - args["query_start_loc"][0]
    single = starts[:-1][starts.diff() == 1].long()
    pair[0][single], pair[1][single] = -1, 0
    return pair


@fault("P8", "the last chunk is never attended", CHUNKS, "indices_prefill")
@patch(DeepseekSparseSWAMetadata, "get_prefill_chunk_plan")
def last_chunk_left_out(right: Any) -> Any:
    return lambda self, *args, **named: right(self, *args, **named)[:-1]


@fault("P9", "decodes are attended at the position before their own", MIXED, "lse_decode")
@patch(DecodePath, "_forward_decode_mega")
def decodes_a_position_early(right: Any) -> Any:
    return lambda self, q, positions, *rest: right(self, q, positions - 1, *rest)


@fault("P10", "the layer's output is halved after wo_b", MIXED, "layer_output")
@patch(DeepseekV4MegaAttnAttention, "_o_proj")
def output_halved(right: Any) -> Any:
    return lambda self, *args: right(self, *args) / 2


@fault(
    "P11",
    "the chunk's base is left out of the second request's rows",
    "r0-nvfp4-tp1-5q2s200",
    "indices_prefill",
)
@instead(COMBINE)
def base_of_the_first_request(args: Args, right: Right) -> Any:
    lists, lens = right(args)
    lists.copy_(torch.where(lists >= 0, lists % args["M"], lists))
    return lists, lens
