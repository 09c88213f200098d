"""The layer under its engine's names: the class, its config, and the functions around it."""

from megabench.layer.attention import DeepseekV4MegaAttnAttention
from megabench.layer.config import (
    LayerConfig,
    SWACacheLayer,
    is_flashmla_mega_attn_supported,
    resolve_compressed_record,
)
from megabench.layout import permute_wo_a_, permute_wq_b_
from megabench.quant import QuantizedActivation, alloc_mega_attn_output
from megabench.quant import token_slice as _token_slice

__all__ = [
    "DeepseekV4MegaAttnAttention",
    "LayerConfig",
    "QuantizedActivation",
    "SWACacheLayer",
    "_token_slice",
    "alloc_mega_attn_output",
    "is_flashmla_mega_attn_supported",
    "permute_wo_a_",
    "permute_wq_b_",
    "resolve_compressed_record",
]
