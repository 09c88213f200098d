"""megabench: validation and roofline benchmarks for DeepSeek V4.1 mega attention."""

from typing import TYPE_CHECKING, Any

from megabench.version import __version__

if TYPE_CHECKING:
    from megabench.backends import get_backend
    from megabench.flashmla_ops import register_flashmla_ops

__all__ = ["__version__", "get_backend", "register_flashmla_ops"]


def __getattr__(name: str) -> Any:
    """Import torch only when a backend is asked for, so that the command line starts at once."""
    if name == "get_backend":
        from megabench.backends import get_backend

        return get_backend
    if name == "register_flashmla_ops":
        from megabench.flashmla_ops import register_flashmla_ops

        return register_flashmla_ops
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
