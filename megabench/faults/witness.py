"""Whether a fault changed anything: a digest of every byte that ops gave back or could write."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from megabench.backends import Backend
from megabench.backends.base import for_live_heads
from megabench.validate.guards import fingerprint
from megabench.validate.judgement import Judgement
from megabench.validate.stages import Evidence
from megabench.validate.trace import OPS, whole

_LARGE = 64 << 20
"""Bytes of a storage that are summed where they lie, not copied and hashed."""


class Witness:
    """A backend that behaves like the one it wraps and hashes what its ops see and give back.

    Arguments are hashed after the call, with the storage around them: what an op was given wrongly
    counts, and so does a byte written where none belongs.
    """

    def __init__(self, backend: Backend) -> None:
        self._wrapped = backend
        self._hash = hashlib.blake2b(digest_size=16)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        return self._watched(name, found) if name in OPS else found

    def for_live_heads(self, live_heads: int) -> Witness:
        """One that adds to the same digest."""
        narrowed = Witness(for_live_heads(self._wrapped, live_heads))
        narrowed._hash = self._hash
        return narrowed

    def as_backend(self) -> Backend:
        """Itself, typed as what it stands in for."""
        return cast(Backend, self)

    def rank(self, evidence: Evidence, judgements: list[Judgement]) -> None:
        """Take in what a rank's layer returned."""
        self._add(evidence.run.output)

    def digest(self) -> bytes:
        return self._hash.digest()

    def _watched(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            result = op(*positional, **named)
            self._hash.update(name.encode())
            for tensor in _tensors(result):  # not what lies around it, where an op allocates
                self._add(tensor.contiguous())
            for tensor in _tensors((positional, tuple(named.values()))):
                self._add(tensor)
            return result

        return call

    def _add(self, tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes() > _LARGE:
            self._hash.update(str(fingerprint(tensor)).encode())
        else:
            self._hash.update(whole(tensor).view(torch.uint8).cpu().numpy().data)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
