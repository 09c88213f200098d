"""The decode path: one op over the paged quantized caches."""

from __future__ import annotations

import torch

from megabench.formats import HEAD_DIM, QUANT_GROUP, ROPE_DIM
from megabench.layer.state import NO_Q_NORM, SF_FLAGS, LayerState
from megabench.metadata import DeepseekSparseSWAMetadata, DeepseekV4FlashMLAMetadata
from megabench.quant import QuantizedActivation


class DecodePath(LayerState):
    """Methods of the layer that serve a step's decode tokens."""

    def _decode_compressed_kv_and_topk(
        self,
        flashmla_metadata: DeepseekV4FlashMLAMetadata | None,
        swa_metadata: DeepseekSparseSWAMetadata,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The compressed cache [blocks, page, 1, bytes], its slots [n, topk] and lengths [n]."""
        if self.compress_ratio == 0:
            return None, None, None
        assert flashmla_metadata is not None
        decoded = swa_metadata.num_decode_tokens
        indices, lens = self.backend.compute_global_topk_indices_and_lens(
            self._topk()[:decoded],
            swa_metadata.token_to_req_indices,
            flashmla_metadata.block_table[: swa_metadata.num_decodes],
            flashmla_metadata.block_size // self.compress_ratio,
            swa_metadata.is_valid_token[:decoded],
        )
        return self._compressed_kv_cache().unsqueeze(-2), indices, lens

    def _forward_decode_mega(
        self,
        q: torch.Tensor,
        positions_int32: torch.Tensor,
        flashmla_metadata: DeepseekV4FlashMLAMetadata | None,
        swa_metadata: DeepseekSparseSWAMetadata,
        out: QuantizedActivation,
    ) -> None:
        """Mega attention over the paged quantized caches, in place into `out`."""
        extra_cache, extra_indices, extra_lens = self._decode_compressed_kv_and_topk(
            flashmla_metadata, swa_metadata
        )
        assert swa_metadata.decode_swa_indices is not None
        self.backend.fused_norm_rope_attn_rope_cast_decode(
            q,
            self.swa_cache_layer.kv_cache.unsqueeze(-2),
            swa_metadata.decode_swa_indices.view(q.shape[0], -1),
            self.scale,
            HEAD_DIM,
            self.attn_sink,
            swa_metadata.decode_swa_lens,
            extra_cache,
            extra_indices,
            extra_lens,
            *NO_Q_NORM,
            positions_int32,
            False,  # is_rope_neox_style
            ROPE_DIM,
            self.cos_sin_cache,
            self.n_wv_group,
            QUANT_GROUP,
            *SF_FLAGS,
            out.data,
            out.scale,
        )
