"""A stand-in for the `flash_mla` package of sgl-flash-mla 1.0.0: its signatures, on a CPU."""

import flashmla_c

__version__ = "1.0.0+standin"
OUT = f", {flashmla_c.OUT}"
_library = flashmla_c.register(
    "flash_mla", schemas={name: s.replace(OUT, "") for name, s in flashmla_c.SCHEMAS.items()}
)

from . import fused_norm_rope_attn_rope_cast  # noqa: E402


def has_legacy() -> bool:
    return False


__all__ = ["fused_norm_rope_attn_rope_cast", "has_legacy"]
