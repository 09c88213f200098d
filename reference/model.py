"""Model geometry, as plain numbers. Defaults are DeepSeek-V4.1-Flash (contract, section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEADS_PER_GROUP = 8
SWA_PAGE = 32
COMPRESSED_PAGE_POSITIONS = 128


@dataclass(frozen=True)
class Model:
    """Geometry of the attention layers of one model. ``compress_ratios`` has one entry a layer."""

    hidden_size: int = 5120
    num_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    index_topk: int = 512
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn_factor: float = 16.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position: int = 65536
    max_position: int = 1048576
    compress_ratios: tuple[int, ...] = (0,) * 2 + (2,) * 18 + (1,) * 20

    @property
    def softmax_scale(self) -> float:
        """head_dim ** -0.5."""
        return float(self.head_dim**-0.5)

    def compressed_page(self, ratio: int) -> int:
        """Rows in a compressed page: it covers 128 positions."""
        return COMPRESSED_PAGE_POSITIONS // ratio


def from_config(config: Mapping[str, Any]) -> Model:
    """A Hugging Face ``config.json`` (flat, or nested under ``text_config``) -> :class:`Model`.

    ``compress_ratios`` is cut to ``num_hidden_layers`` entries: the tail belongs to the draft
    layers. Raises KeyError naming the missing entry.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    scaling = text["rope_scaling"]
    return Model(
        hidden_size=text["hidden_size"],
        num_heads=text["num_attention_heads"],
        head_dim=text["head_dim"],
        rope_dim=text["qk_rope_head_dim"],
        q_lora_rank=text["q_lora_rank"],
        o_groups=text["o_groups"],
        o_lora_rank=text["o_lora_rank"],
        sliding_window=text["sliding_window"],
        index_topk=text["index_topk"],
        rms_norm_eps=text["rms_norm_eps"],
        rope_theta=float(text["rope_theta"]),
        compress_rope_theta=float(text["compress_rope_theta"]),
        yarn_factor=float(scaling["factor"]),
        yarn_beta_fast=float(scaling["beta_fast"]),
        yarn_beta_slow=float(scaling["beta_slow"]),
        yarn_original_max_position=scaling["original_max_position_embeddings"],
        max_position=text["max_position_embeddings"],
        compress_ratios=tuple(text["compress_ratios"][: text["num_hidden_layers"]]),
    )
