"""The production layer: DeepSeek V4.1 attention on one fused mega-attention kernel.

One op does Q RoPE, sparse attention over the paged quantized caches, the inverse RoPE of the output
and its FP8 cast, straight into the buffer the grouped wo_a einsum reads. wq_b rows and wo_a columns
are permuted once at load, so that no step shuffles anything. Class, method and function names
follow vLLM's `flash_mla_mega_attn.py`; the backend object takes the place of its op library.
"""

from __future__ import annotations

import torch

from megabench.backends.base import EINSUM, EINSUM_RECIPE
from megabench.formats import HEAD_DIM, NVFP4
from megabench.geometry import topology_problem
from megabench.layer.config import LayerConfig, resolve_compressed_record
from megabench.layer.decode import DecodePath
from megabench.layer.prefill import PrefillPath
from megabench.quant import QuantizedActivation, alloc_mega_attn_output
from megabench.quant import token_slice as _token_slice


class DeepseekV4MegaAttnAttention(PrefillPath, DecodePath):
    """Mega-attention layer for DeepSeek V4.1, one tensor-parallel rank.

    Life: construct, `load_weights`, `finalize_loaded_weights`, `bind_kv_cache`, `bind_topk`, then
    `forward` once a step inside `metadata.forward_context`.
    """

    @classmethod
    def is_available_for(cls, config: LayerConfig) -> bool:
        """Whether this layer can serve the configured model on this device; never raises."""
        if topology_problem(config.geometry, config.tp_size):
            return False
        try:
            record = resolve_compressed_record(config.kv_cache_dtype, NVFP4.name)  # type: ignore[arg-type]
            return config.backend.supports(config.geometry, config.device, record).ok
        except Exception:
            return False

    def forward(
        self,
        qr: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        latent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step of this rank -> its partial sum bf16 [T, hidden_size].

        qr bf16 [T, q_lora_rank] and kv bf16 [T, 512], both normed; latent bf16 [T, 512] on
        compressed layers; positions int64 [T]. Decode tokens come first.
        """
        self._require_fused_layouts()
        swa, compressed = self._step_metadata()
        q = self.backend.linear(qr, self.wq_b.weight, self.wq_b.weight_scale)
        no_slots = torch.full_like(positions, -1) if swa is None else swa.slot_mapping
        q_padded = self.backend.pad_q_and_insert_kv(
            q.view(-1, self.n_local_heads, HEAD_DIM),
            kv,
            self.swa_cache_layer.kv_cache,
            no_slots,
            positions,
            self.cos_sin_cache,
            self.padded_heads,
        )
        if compressed is not None:
            assert latent is not None, "a compressed layer needs its latent"
            self.backend.insert_compressed(
                latent,
                positions,
                self.cos_sin_cache,
                self._compressed_kv_cache(),
                compressed.slot_mapping,
                self.compress_ratio,
            )
        attn_out = self._alloc_attn_out(qr.shape[0], qr)
        self.forward_mqa(q_padded, kv, positions, attn_out)
        return self._o_proj(attn_out, positions)

    def _alloc_attn_out(self, num_tokens: int, hidden_states: torch.Tensor) -> QuantizedActivation:
        return alloc_mega_attn_output(num_tokens, self.n_wv_group, hidden_states.device)

    def _alloc_latent(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """What wo_a writes: bf16 [T, groups, o_lora_rank]."""
        shape = (num_tokens, self.n_local_groups, self.o_lora_rank)
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    def _o_proj(self, attn_out: QuantizedActivation, positions: torch.Tensor) -> torch.Tensor:
        """Grouped wo_a, then wo_b, over the kernel's quantized output -> bf16 [T, hidden].

        The kernel rotated and cast its output, and wo_a is permuted for its layout, so `positions`
        is unused and nothing is repacked.
        """
        groups = self.n_local_groups
        z = self._alloc_latent(attn_out.data.shape[0], attn_out.data.device)
        self.backend.fp8_einsum(
            EINSUM,
            (attn_out.data[:, :groups], attn_out.scale[:, :groups]),
            (self.wo_a.weight, self.wo_a_packed_scale),
            z,
            EINSUM_RECIPE,
        )
        return self.backend.linear(z.flatten(1), self.wo_b.weight, self.wo_b.weight_scale)

    def forward_mqa(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        output: QuantizedActivation,
    ) -> None:
        """Attend the step's tokens into `output`: prefills first, then decodes.

        q bf16 [T, padded_heads, 512], padded by the fused insert, which also wrote `kv`.
        RuntimeError before the weights were permuted.
        """
        self._require_fused_layouts()
        swa, compressed = self._step_metadata()
        if swa is None:
            # Warm-up: reserve the prefill workspace, produce zeros.
            self._reserve_prefill_workspace(q)
            output.data.zero_()
            output.scale.zero_()
            return
        assert q.shape[1] == self.padded_heads
        positions_int32 = positions.to(torch.int32)
        decoded = swa.num_decode_tokens
        if swa.num_prefills > 0:
            self._forward_prefill_mega(
                q[decoded:], positions_int32[decoded:], compressed, swa, output, decoded
            )
        if swa.num_decodes > 0:
            self._forward_decode_mega(
                q[:decoded],
                positions_int32[:decoded],
                compressed,
                swa,
                _token_slice(output, 0, decoded),
            )
