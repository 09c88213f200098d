"""Backends that are right while nobody times them, and cheat the clock each in another way."""

from __future__ import annotations

import time
from typing import Any

import torch

from megabench.backends import TorchBackend
from megabench.backends.base import Pair

SPIN_CYCLES = 2_000_000
"""About a millisecond: work that is late is seen to be late."""


class Forever(TorchBackend):
    """Keeps its first answer to wq_b and gives it again, whatever comes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[object, torch.Tensor] = {}

    def key(self, x: torch.Tensor, w: torch.Tensor) -> object:
        return tuple(w.shape)

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        key = self.key(x, w)
        if key not in self.kept:
            self.kept[key] = super().linear(x, w, sw)
        return self.kept[key].clone()


class ByPointer(Forever):
    """Knows its inputs by their addresses, as a cache of outputs might."""

    def key(self, x: torch.Tensor, w: torch.Tensor) -> object:
        return x.data_ptr(), w.data_ptr()


class FirstOnly(TorchBackend):
    """Computes wo_a for the first caller and leaves the others' buffers as they were."""

    called = False

    def fp8_einsum(self, *args: Any, **named: Any) -> None:
        if not self.called:
            super().fp8_einsum(*args, **named)
        self.called = True


class Remembers(TorchBackend):
    """Keeps the last wq_b and wo_b with their inputs, and computes nothing twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        known, made = self.kept.get(w.data_ptr(), (None, x))
        if known is None or not torch.equal(known, x):
            made = super().linear(x, w, sw)
            self.kept[w.data_ptr()] = x.clone(), made
        return made.clone()


class LooksAtTheEnd(Forever):
    """Knows its inputs by the last number of every row."""

    def key(self, x: torch.Tensor, w: torch.Tensor) -> object:
        return w.data_ptr(), tuple(x[:, -1].tolist())


class HonestOnceWatched(Forever):
    """Keeps its answer until the input is written to, and computes from then on."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        first = self.kept.setdefault((w.data_ptr(), "written"), torch.tensor(x._version))
        if int(first) != x._version:
            return TorchBackend.linear(self, x, w, sw)
        return super().linear(x, w, sw)


class UnlessPoisoned(TorchBackend):
    """Looks at the buffer of wo_a, and computes where it finds something to hide."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written: dict[int, torch.Tensor] = {}

    def fp8_einsum(
        self, equation: str, x: Pair, w: Pair, out: torch.Tensor, recipe: tuple[int, int, int]
    ) -> None:
        left = self.written.get(out.data_ptr())
        if left is None or not torch.equal(left, out):
            super().fp8_einsum(equation, x, w, out, recipe)
            self.written[out.data_ptr()] = out.clone()


class KeptSlots(TorchBackend):
    """Keeps the slots it found by the address of the rows asked for, as if tables never changed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[int, Pair] = {}

    def compute_global_topk_indices_and_lens(self, rows: torch.Tensor, *args: Any) -> Pair:
        if rows.data_ptr() not in self.kept:
            made = super().compute_global_topk_indices_and_lens(rows, *args)
            self.kept[rows.data_ptr()] = made
        indices, lens = self.kept[rows.data_ptr()]
        return indices.clone(), lens.clone()


class Generator(TorchBackend):
    """Returns the slots as something that has yet to be asked for them."""

    def compute_global_topk_indices_and_lens(self, *args: Any) -> Any:
        return (tensor for tensor in TorchBackend.compute_global_topk_indices_and_lens(self, *args))


class Lazy(torch.Tensor):
    """A tensor that may be anything until it is read."""


class Later(TorchBackend):
    """Returns a subclass of a tensor from wq_b and wo_b."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        return super().linear(x, w, sw).as_subclass(Lazy)


class MoreThreads(TorchBackend):
    """Takes more threads in wo_a than the run is pinned to, and keeps them."""

    def fp8_einsum(self, *args: Any, **named: Any) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)
        super().fp8_einsum(*args, **named)


class SlowClock(TorchBackend):
    """Puts a clock of its own in place of the host's."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        time.perf_counter_ns = lambda: 0
        return super().linear(x, w, sw)


class NotInGraphs(TorchBackend):
    """Computes wo_a except while a graph is captured, so that replays do nothing."""

    def fp8_einsum(self, *args: Any, **named: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():
            super().fp8_einsum(*args, **named)


class OtherStream(TorchBackend):
    """Starts wq_b on a stream that nobody waits for."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super().linear(x, w, sw)
        with torch.cuda.stream(side_stream()):
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            return super().linear(x, w, sw)


class OtherStreamUngraphed(OtherStream):
    """The same, and synchronizes, so that no graph can be captured of it."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        float(x[0, 0])
        return super().linear(x, w, sw)


class ForkAndJoin(TorchBackend):
    """Honest: another stream, and whoever comes after waits for it."""

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        side, here = side_stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            made = super().linear(x, w, sw)
        here.wait_stream(side)
        return made


_side: list[torch.cuda.Stream] = []


def side_stream() -> torch.cuda.Stream:
    """One stream beside the current one for the whole process. It has another priority: two of one
    may share a hardware queue, where the clock would wait for both."""
    if not _side:
        _side.append(torch.cuda.Stream(priority=-1))  # type: ignore[no-untyped-call]
    return _side[0]
