"""Backends: the protocol and registry, and the eager baseline users subclass."""
