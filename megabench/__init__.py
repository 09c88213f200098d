"""megabench: validation and roofline benchmarks for DeepSeek V4.1 mega attention."""

from megabench.version import __version__

__all__ = ["__version__"]
