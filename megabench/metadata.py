"""Step metadata, the prefill chunk plan, the workspace, and the forward context.

The names follow vLLM 0.33.0: a step carries one SWA metadata and, on compressed layers, one
compressed metadata; `attn_metadata` maps cache prefixes to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

WORKSPACE_ALIGNMENT = 256


@dataclass(frozen=True)
class PrefillChunk:
    """Requests [start, end) of the prefills gathered together; N compressed rows and M rows in all
    a request in the workspace."""

    start: int
    end: int
    N: int
    M: int


@dataclass
class DeepseekSparseSWAMetadata:
    """A step as the sliding-window cache sees it. Decodes come first; requests in the order of
    `query_start_loc`. Device tensors unless named cpu.
    """

    num_decodes: int
    num_decode_tokens: int
    """Includes padding tokens, whose `is_valid_token` is False."""
    num_prefills: int
    num_prefill_tokens: int
    query_start_loc: torch.Tensor
    """int32 [requests + 1]"""
    query_start_loc_cpu: torch.Tensor
    block_table: torch.Tensor
    """int32 [requests, pages]"""
    block_size: int
    """Tokens a page: 32."""
    slot_mapping: torch.Tensor
    """int64 [T]; -1 writes nothing."""
    token_to_req_indices: torch.Tensor
    """int32 [T]"""
    is_valid_token: torch.Tensor
    """bool [T]"""
    decode_swa_indices: torch.Tensor | None
    """int32 [num_decode_tokens, window]: slots of [max(0, pos-127), pos], then -1."""
    decode_swa_lens: torch.Tensor | None
    """int32 [num_decode_tokens]; 0 for padding tokens."""
    prefill_seq_lens: torch.Tensor | None
    """int32 [num_prefills], lengths after the step."""
    prefill_gather_lens: torch.Tensor | None
    """int32 [num_prefills]: query_len + min(prefix, window - 1)."""
    prefill_seq_lens_cpu: list[int] = field(default_factory=list)
    prefill_gather_lens_cpu: list[int] = field(default_factory=list)
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    window_size: int = 128

    def get_prefill_chunk_plan(
        self, compress_ratio: int, prefill_chunk_size: int, has_compressed: bool
    ) -> list[PrefillChunk]:
        """Split the prefills into chunks whose gathered rows fit the reserved workspace.

        limit = chunk_size * (ceil(max_model_len / ratio) or 0 + window + max_num_batched_tokens);
        a chunk grows while requests * (max compressed + max gather) <= limit; the first always
        enters.
        """
        compressed_rows = _compressed_limit(self.max_model_len, compress_ratio, has_compressed)
        limit = prefill_chunk_size * (
            compressed_rows + self.window_size + self.max_num_batched_tokens
        )
        plan: list[PrefillChunk] = []
        start = n = gather = 0
        for i, (seq_len, gather_len) in enumerate(
            zip(self.prefill_seq_lens_cpu, self.prefill_gather_lens_cpu, strict=True)
        ):
            rows = seq_len // compress_ratio if has_compressed else 0
            grown_n, grown_gather = max(n, rows), max(gather, gather_len)
            if i > start and (i - start + 1) * (grown_n + grown_gather) > limit:
                plan.append(PrefillChunk(start, i, n, n + gather))
                start, grown_n, grown_gather = i, rows, gather_len
            n, gather = grown_n, grown_gather
        if self.prefill_seq_lens_cpu:
            plan.append(PrefillChunk(start, len(self.prefill_seq_lens_cpu), n, n + gather))
        return plan


@dataclass
class DeepseekV4FlashMLAMetadata:
    """A step as the compressed cache sees it."""

    block_table: torch.Tensor
    """int32 [requests, blocks], decodes first."""
    block_size: int
    """Tokens a block covers: 128; its page has block_size / ratio rows."""
    slot_mapping: torch.Tensor
    """int64 [T]; the slot of the row that closes at this token, else -1."""


StepMetadata = dict[str, DeepseekSparseSWAMetadata | DeepseekV4FlashMLAMetadata]


def _compressed_limit(max_model_len: int, compress_ratio: int, has_compressed: bool) -> int:
    return -(-max_model_len // compress_ratio) if has_compressed else 0


def prefill_workspace_rows(
    max_model_len: int, compress_ratio: int, window_size: int, max_num_batched_tokens: int
) -> int:
    """Rows a request of the reserved workspace has: a quarter of the chunk plan's limit."""
    compressed = _compressed_limit(max_model_len, compress_ratio, compress_ratio != 0)
    return compressed + window_size + max_num_batched_tokens


@dataclass(frozen=True)
class ForwardContext:
    """What the layer may ask about the step in progress; None metadata is a warm-up run."""

    attn_metadata: StepMetadata | None


_CONTEXT: ContextVar[ForwardContext] = ContextVar("megabench_forward_context")


@contextmanager
def forward_context(attn_metadata: StepMetadata | None) -> Iterator[None]:
    """Make `attn_metadata` the current step's for the code inside."""
    token = _CONTEXT.set(ForwardContext(attn_metadata))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def get_forward_context() -> ForwardContext:
    """The current step's context; LookupError outside `forward_context`."""
    return _CONTEXT.get()


class Workspace:
    """One byte buffer, re-sliced from 0 by every call, so that a step never allocates.

    Growth is allowed until `lock()` (the end of warm-up); after that it raises.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self.locked = False

    def lock(self) -> None:
        self.locked = True

    def get_simultaneous(
        self, *wanted: tuple[tuple[int, ...], torch.dtype]
    ) -> tuple[torch.Tensor, ...]:
        """Disjoint uninitialised tensors of the given (shape, dtype), valid until the next call.

        RuntimeError when they need more than the buffer holds after warm-up.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        if end > self.buffer.numel():
            if self.locked:
                raise RuntimeError(
                    f"workspace of {self.buffer.numel()} bytes must not grow to {end} after warm-up"
                )
            self.buffer = torch.empty(end, dtype=torch.uint8, device=self.buffer.device)
        return tuple(
            self.buffer[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, wanted, strict=True)
        )


__all__ = [
    "DeepseekSparseSWAMetadata",
    "DeepseekV4FlashMLAMetadata",
    "ForwardContext",
    "PrefillChunk",
    "StepMetadata",
    "Workspace",
    "forward_context",
    "get_forward_context",
    "prefill_workspace_rows",
]
