"""A case made tensors: inputs, caches with valid history, metadata. Same case, same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megabench.cases import Case, Request
from megabench.formats import COMPRESSED_BLOCK, FP8, SWA_PAGE, KVRecord, round_up
from megabench.geometry import Geometry
from megabench.hashing import Stream
from megabench.metadata import DeepseekSparseSWAMetadata, DeepseekV4FlashMLAMetadata, StepMetadata
from megabench.workload.families import cache_rows, key_values, query_values
from megabench.workload.paging import Pool, RowBytes, Rows, build_pool, concatenate, ranges
from megabench.workload.tokens import (
    Tokens,
    compressed_metadata,
    lay_out_tokens,
    sinks,
    swa_metadata,
    top_k_rows,
    valid_keys,
)

_STORAGE_AXES = ("tp", "kv_cache", "page_layout", "page_padding", "padding_tokens", "sink")
POISON = 0xFF
"""Default fill of every byte nobody owns: NaN as an e4m3 code, out of contract as a scale."""


@dataclass(frozen=True)
class Workload:
    """Everything one step of one case reads; caches as they are before the step.

    T tokens, padding included; tensors on `device` unless said otherwise.
    """

    case: Case
    geometry: Geometry
    device: torch.device
    requests: list[Request]
    """Decodes first."""
    positions: torch.Tensor
    """int64 [T]"""
    qr: torch.Tensor
    """bf16 [T, q_lora_rank]"""
    kv: torch.Tensor
    """bf16 [T, 512]"""
    latent: torch.Tensor | None
    """bf16 [T, 512] on compressed layers."""
    topk_indices: torch.Tensor | None
    """int32 [T, topk], request-local, distinct, -1 only at the tail."""
    attn_sink: torch.Tensor
    """float32 [num_heads], every rank's."""
    swa_cache: torch.Tensor
    """uint8 [blocks, 32, 528]"""
    compressed_cache: torch.Tensor | None
    """uint8 [blocks, 128/ratio, record bytes]"""
    swa_block_table: torch.Tensor
    """int32 [requests, pages]; 0, the poisoned null page, where a step may not look."""
    compressed_block_table: torch.Tensor | None
    swa_metadata: DeepseekSparseSWAMetadata
    compressed_metadata: DeepseekV4FlashMLAMetadata | None
    token_to_req: torch.Tensor
    """int32 [T]"""
    is_valid: torch.Tensor
    """bool [T]"""
    max_model_len: int
    max_num_batched_tokens: int

    def step_metadata(self, swa_prefix: str, compressed_prefix: str | None) -> StepMetadata:
        """The forward context's metadata, under a layer's cache prefixes."""
        metadata: StepMetadata = {swa_prefix: self.swa_metadata}
        if compressed_prefix is not None and self.compressed_metadata is not None:
            metadata[compressed_prefix] = self.compressed_metadata
        return metadata


def build_workload(
    case: Case, device: torch.device, poison: int | tuple[int, ...] = POISON
) -> Workload:
    """Make a case's tensors on `device`. Deterministic by the case's content, seed included.

    `poison` fills every cache byte that no request owns, the rows this step is to write included,
    several bytes record by record in turn; no result may depend on it. GeometryError for an
    unreadable model.
    """
    geometry = Geometry.load(case.model)
    ratio = case.compress_ratio
    tokens = lay_out_tokens(case.requests, case.padding_tokens)
    maker = _Maker(case, device, (poison,) if isinstance(poison, int) else poison)
    swa = maker.swa_pool(geometry.window_size)
    topk = compressed = None
    if ratio:
        stream = maker.stream("topk")
        topk = top_k_rows(tokens, ratio, geometry.index_topk, stream, device)
        compressed = maker.compressed_pool(_named_rows(tokens, topk), ratio)
    keys = valid_keys(tokens, geometry.window_size, ratio, geometry.index_topk)
    max_model_len = case.max_seq_len
    swa_step = swa_metadata(tokens, swa, geometry.window_size, max_model_len, device)
    compressed_step = compressed_metadata(tokens, compressed, ratio, device) if compressed else None
    return Workload(
        case=case,
        geometry=geometry,
        device=device,
        requests=case.requests,
        positions=tokens.position.to(device),
        qr=maker.queries(geometry.q_lora_rank),
        kv=maker.latents("kv"),
        latent=maker.latents("latent") if ratio else None,
        topk_indices=topk,
        attn_sink=sinks(case.sink, keys, geometry.num_heads, maker.stream("sink")).to(device),
        swa_cache=swa.cache,
        compressed_cache=compressed.cache if compressed else None,
        swa_block_table=swa_step.block_table,
        compressed_block_table=compressed_step.block_table if compressed_step else None,
        swa_metadata=swa_step,
        compressed_metadata=compressed_step,
        token_to_req=swa_step.token_to_req_indices,
        is_valid=swa_step.is_valid_token,
        max_model_len=max_model_len,
        max_num_batched_tokens=swa_step.max_num_batched_tokens,
    )


def _named_rows(tokens: Tokens, topk: torch.Tensor) -> Rows:
    """The distinct compressed rows the decodes' top-k lists name."""
    decoded = topk[: tokens.num_decode_tokens].to(torch.int64)
    owner = tokens.request[: tokens.num_decode_tokens].to(topk.device)[:, None]
    width = max((request.seq_len for request in tokens.requests), default=1)
    keys = torch.unique((owner * width + decoded)[decoded >= 0])
    return Rows(keys // width, keys % width)


class _Maker:
    """Draws the parts of one case, each from a stream of its own."""

    def __init__(self, case: Case, device: torch.device, poison: tuple[int, ...]) -> None:
        self.case, self.device, self.poison = case, device, poison
        # What only says how a step is stored or split must not change its values, so that cases
        # which differ in nothing else can be compared.
        stored = {name: Case.model_fields[name].default for name in _STORAGE_AXES}
        self.label = case.model_copy(update=stored).hash
        requests = case.requests
        self.lengths = torch.tensor([r.seq_len for r in requests], device=device).long()
        self.prefixes = torch.tensor([r.prefix_len for r in requests], device=device).long()
        self.decodes = torch.tensor([r.is_decode for r in requests], device=device).bool()

    def stream(self, *labels: object) -> Stream:
        return Stream.of(self.label, *labels)

    def queries(self, width: int) -> torch.Tensor:
        tokens, stream = self.case.num_tokens, self.stream("qr")
        values = query_values(self.case.family, stream, tokens, width, self.device)
        return values.to(torch.bfloat16)

    def latents(self, name: str) -> torch.Tensor:
        tokens, stream = self.case.num_tokens, self.stream(name)
        return key_values(self.case.family, stream, tokens, self.device).to(torch.bfloat16)

    def swa_pool(self, window: int) -> Pool:
        """The SWA cache: the window of the step's first token, and the rows the step writes."""
        starts = (self.prefixes - (window - 1)).clamp_min(0)
        pages = ranges(starts, self.lengths).unique_pages(SWA_PAGE, self._width(SWA_PAGE))
        pool = self._pool("swa", pages, SWA_PAGE, SWA_PAGE, FP8)
        pool.write(ranges(starts, self.prefixes), self._history("swa", FP8))
        return pool

    def compressed_pool(self, named: Rows, ratio: int) -> Pool:
        """The compressed cache: rows that decodes name, all of a prefill's, and rows that close."""
        page = COMPRESSED_BLOCK // ratio
        before, after = self.prefixes // ratio, self.lengths // ratio
        gathered = ranges(torch.zeros_like(after), torch.where(self.decodes, 0, after))
        read = concatenate(named, gathered)
        touched = concatenate(read, ranges(before, after))
        pages = touched.unique_pages(page, self._width(COMPRESSED_BLOCK))
        record = self.case.record
        pool = self._pool("compressed", pages, page, COMPRESSED_BLOCK, record)
        history = read.where(read.row < before[read.request])
        pool.write(history, self._history("compressed", record))
        return pool

    def _width(self, tokens_a_page: int) -> int:
        return round_up(self.case.max_seq_len, tokens_a_page) // tokens_a_page

    def _pool(
        self, name: str, pages: Rows, page: int, tokens_a_page: int, record: KVRecord
    ) -> Pool:
        return build_pool(
            pages,
            requests=len(self.lengths),
            width=self._width(tokens_a_page),
            page=page,
            record=record,
            layout=self.case.page_layout,
            padding=self.case.page_padding,
            poison=self.poison,
            stream=self.stream(name, "pages"),
            device=self.device,
        )

    def _history(self, name: str, record: KVRecord) -> RowBytes:
        def draw(chunk: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            stream = self.stream(name, "history", chunk)
            return cache_rows(self.case.family, stream, rows, record, self.device)

        return draw
