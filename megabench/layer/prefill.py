"""The prefill path: gather a chunk of requests to bf16 rows, list what each token reads, attend."""

from __future__ import annotations

import torch

from megabench.formats import (
    COMBINED_TOPK_MULTIPLE,
    HEAD_DIM,
    QUANT_GROUP,
    ROPE_DIM,
    round_up,
)
from megabench.layer.state import NO_Q_NORM, SF_FLAGS, LayerState
from megabench.metadata import (
    DeepseekSparseSWAMetadata,
    DeepseekV4FlashMLAMetadata,
    prefill_workspace_rows,
)
from megabench.quant import QuantizedActivation
from megabench.quant import token_slice as _token_slice


class PrefillPath(LayerState):
    """Methods of the layer that serve a step's prefill tokens."""

    def _top_k(self) -> int:
        return self._topk().shape[-1] if self.compress_ratio else 0

    def _combined_width(self) -> int:
        return round_up(self._top_k() + self.window_size, COMBINED_TOPK_MULTIPLE)

    def _prefill_workspace(
        self, requests: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gathered rows bf16 [requests, rows, 512], index lists and lengths of a chunk."""
        tokens = self.max_num_batched_tokens
        kv, indices, lens = self.workspace.get_simultaneous(
            ((requests, rows, HEAD_DIM), torch.bfloat16),
            ((tokens, self._combined_width()), torch.int32),
            ((tokens,), torch.int32),
        )
        return kv, indices, lens

    def _reserve_prefill_workspace(self, q: torch.Tensor) -> None:
        """Grow the workspace to what the chunk plan may ever ask for."""
        rows = prefill_workspace_rows(
            self.max_model_len, self.compress_ratio, self.window_size, self.max_num_batched_tokens
        )
        self._prefill_workspace(self.PREFILL_CHUNK_SIZE, rows)

    def _forward_prefill_mega(
        self,
        q: torch.Tensor,
        positions_int32: torch.Tensor,
        flashmla_metadata: DeepseekV4FlashMLAMetadata | None,
        swa_metadata: DeepseekSparseSWAMetadata,
        out: QuantizedActivation,
        token_base: int,
    ) -> None:
        """Gather each chunk of requests to bf16 rows and attend them into their token slice."""
        plan = swa_metadata.get_prefill_chunk_plan(
            compress_ratio=self.compress_ratio,
            prefill_chunk_size=self.PREFILL_CHUNK_SIZE,
            has_compressed=self.compress_ratio != 0,
        )
        assert plan, "prefill chunk plan must be non-empty when num_prefills > 0"
        decodes, starts = swa_metadata.num_decodes, swa_metadata.query_start_loc_cpu
        for chunk in plan:
            kv, indices, lens = self._prefill_workspace(chunk.end - chunk.start, chunk.M)
            first, last = decodes + chunk.start, decodes + chunk.end
            qs, qe = (int(starts[i] - starts[decodes]) for i in (first, last))
            requests = slice(chunk.start, chunk.end)
            self._gather_chunk(kv, flashmla_metadata, swa_metadata, requests, chunk.N)
            assert swa_metadata.prefill_seq_lens is not None
            assert swa_metadata.prefill_gather_lens is not None
            combined = self.backend.combine_topk_swa_indices(
                self._prefill_topk(token_base + qs, token_base + qe),
                swa_metadata.query_start_loc[first : last + 1],
                swa_metadata.prefill_seq_lens[requests],
                swa_metadata.prefill_gather_lens[requests],
                self.window_size,
                self.compress_ratio,
                self._top_k(),
                chunk.M,
                chunk.N,
                out=(indices[: qe - qs], lens[: qe - qs]),
            )
            chunk_out = _token_slice(out, token_base + qs, token_base + qe)
            self.backend.fused_norm_rope_attn_rope_cast_fwd(
                q[qs:qe],
                kv.view(-1, 1, HEAD_DIM),
                combined[0].unsqueeze(1),
                self.scale,
                HEAD_DIM,
                self.attn_sink,
                combined[1],
                *NO_Q_NORM,
                positions_int32[qs:qe],
                False,  # is_rope_neox_style
                ROPE_DIM,
                self.cos_sin_cache,
                self.n_wv_group,
                QUANT_GROUP,
                *SF_FLAGS,
                chunk_out.data,
                chunk_out.scale,
            )

    def _prefill_topk(self, start: int, end: int) -> torch.Tensor:
        """The indexer's rows of step tokens [start, end); empty rows on SWA-only layers."""
        if self.compress_ratio == 0:
            return torch.empty((end - start, 0), dtype=torch.int32, device=self.device)
        return self._topk()[start:end]

    def _gather_chunk(
        self,
        kv: torch.Tensor,
        flashmla_metadata: DeepseekV4FlashMLAMetadata | None,
        swa_metadata: DeepseekSparseSWAMetadata,
        requests: slice,
        compressed_rows: int,
    ) -> None:
        """Dequantize a chunk's compressed rows to [0, N) and its SWA rows from N on."""
        decodes = swa_metadata.num_decodes
        assert swa_metadata.prefill_seq_lens is not None
        assert swa_metadata.prefill_gather_lens is not None
        seq_lens = swa_metadata.prefill_seq_lens[requests]
        if self.compress_ratio:
            assert flashmla_metadata is not None
            self.backend.dequantize_and_gather_k_cache(
                kv[:, :compressed_rows],
                self._compressed_kv_cache(),
                seq_lens // self.compress_ratio,
                None,
                flashmla_metadata.block_table[decodes:][requests],
                flashmla_metadata.block_size // self.compress_ratio,
                0,
            )
        self.backend.dequantize_and_gather_k_cache(
            kv,
            self.swa_cache_layer.kv_cache,
            seq_lens,
            swa_metadata.prefill_gather_lens[requests],
            swa_metadata.block_table[decodes:][requests],
            swa_metadata.block_size,
            compressed_rows,
        )
