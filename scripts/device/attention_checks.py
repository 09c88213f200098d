"""Checks of a backend's attention ops against the golden model, on the GPU of this machine.

Lists, lengths, holes, sinks, head counts and layouts of the contract; unnamed slots and outputs are
poisoned first. A check returns its worst error over its bound.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton_cases
from triton_cases import Call

from megabench.backends import get_backend
from megabench.backends.triton import attention
from megabench.backends.triton.backend import TritonBackend

S_Q = (0, 1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513)
S_Q_LARGE = (1023, 4097)
LENS = (0, 1, 3, 4, 5, 63, 64, 65, 95, 96, 97, 127, 128)
EXTRA_LENS = (0, 1, 63, 64, 511, 512)
PATTERNS = ("leading", "middle", "trailing", "alternating", "none")
REPEATS = 1000
DEVICE = "cuda"
Check = Callable[[], float]
"""Worst error / bound; an exact check gives 0 or inf."""

chosen = "triton"
"""Name of the backend under test; its attention must be `triton`'s or inherit from it."""


def backend(layout: str = "interleaved") -> TritonBackend:
    made = get_backend(chosen, layout)  # type: ignore[arg-type]
    assert isinstance(made, TritonBackend)
    return made


def call(**changes: object) -> Call:
    return Call(device=DEVICE, slots=4096, **changes)  # type: ignore[arg-type]


def decode(**changes: object) -> float:
    """Into a slice of a poisoned buffer, which must stay untouched outside the slice."""
    one = call(**changes)
    whole = one.output(before=3, after=2)
    part = slice(3, 3 + one.s_q)
    inner = type(whole)(
        whole.data[part], whole.scale[part], whole.orig_dtype, whole.data[part].shape
    )
    got = one.decode(backend(one.layout), inner)
    outside = [*whole.data.view(torch.uint8)[:3], *whole.data.view(torch.uint8)[part.stop :]]
    scales = torch.cat((whole.scale[:3], whole.scale[part.stop :]))
    if not all(bool((row == triton_cases.POISON).all()) for row in outside):
        return float("inf")
    if not bool((scales == -1).all()):
        return float("inf")
    return triton_cases.decode_excess(one, got)


def prefill(under_test: TritonBackend | None = None, **changes: object) -> float:
    one = call(topk=640, extra=0, **changes)
    workspace = one.workspace()
    got = one.prefill(under_test or backend(), workspace)
    return triton_cases.prefill_excess(one, workspace, got)


def decode_sweep(extra_bytes: int, layout: str) -> float:
    tokens = S_Q if layout == "interleaved" else (1, 5, 33, 129)
    return max(
        decode(
            s_q=s_q,
            extra_bytes=extra_bytes,
            layout=layout,
            lens=LENS,
            extra_lens=EXTRA_LENS,
            seed=s_q,
        )
        for s_q in tokens
    )


def large(extra_bytes: int) -> float:
    return max(decode(s_q=s_q, extra_bytes=extra_bytes, lens=LENS, seed=s_q) for s_q in S_Q_LARGE)


def patterns(extra_bytes: int) -> float:
    return max(
        decode(s_q=s_q, extra_bytes=extra_bytes, pattern=pattern, seed=s_q)
        for pattern in PATTERNS
        for s_q in (2, 140)
    )


def sinks() -> float:
    values = torch.tensor([float("-inf"), float("inf"), 1e3, -1e3, 3e38, -3e38, 0.0, 5.0]).repeat(8)
    one = {"sinks": values.to(DEVICE), "lens": (0, 128)}
    return max(decode(s_q=3, **one), decode(s_q=140, **one), prefill(s_q=5, **one))


def swa_only() -> float:
    return max(decode(s_q=s_q, extra=0, lens=LENS) for s_q in (1, 13, 200))


def wide_heads() -> float:
    return max(
        decode(s_q=7, heads=128, lens=LENS),
        decode(s_q=150, heads=128, extra_bytes=288),
        prefill(s_q=7, heads=128),
    )


def live_heads() -> float:
    worst = 0.0
    for live in (8, 16, 32):
        narrow = backend().for_live_heads(live)
        for s_q, extra_bytes in ((1, 288), (130, 528), (65, 288)):
            one = call(s_q=s_q, extra_bytes=extra_bytes, lens=LENS, extra_lens=EXTRA_LENS)
            worst = max(worst, triton_cases.decode_excess(one, one.decode(narrow), live))
    return worst


def q_norm() -> float:
    return max(decode(s_q=3, q_norm_eps=1e-6), prefill(s_q=3, q_norm_eps=1e-6))


def prefill_sweep() -> float:
    return max(
        prefill(s_q=s_q, lens=(0, 1, 64, 127, 640, 500), seed=s_q) for s_q in (*S_Q, *S_Q_LARGE)
    )


def prefill_patterns() -> float:
    return max(prefill(s_q=4, pattern=pattern) for pattern in PATTERNS)


def prefill_plain() -> float:
    """Triton's kernel of other architectures, on this one."""
    fits, attention._fits_sm90 = attention._fits_sm90, lambda *_: False
    try:
        lens = (0, 1, 64, 127, 640, 500)
        return max(prefill(TritonBackend(), s_q=s_q, lens=lens) for s_q in (7, 300))
    finally:
        attention._fits_sm90 = fits


def far_pages() -> float:
    """A pool whose last pages lie beyond 2^31 bytes."""
    one = call(s_q=5, topk=128, extra=0)
    blocks = (2**31 + 2**28) // (32 * 528)
    far = torch.full((blocks, 32, 528), triton_cases.POISON, dtype=torch.uint8, device=DEVICE)
    first = blocks - one.kv.shape[0]
    far[first:] = one.kv
    near, slots = one.kv, one.indices
    one.kv, one.indices = far, slots + first * 32
    got = one.decode(backend())
    one.kv, one.indices = near, slots
    return triton_cases.decode_excess(one, got)


def repeats() -> float:
    """Every byte of every repeat equals the first's."""
    one = call(s_q=200, topk=640, extra=0)
    workspace = one.workspace()
    runs = [lambda: one.prefill(backend(), workspace)]
    for s_q in (1, 33, 200):
        for extra_bytes in (288, 528):
            paged = call(s_q=s_q, extra_bytes=extra_bytes)
            runs.append(lambda paged=paged: paged.decode(backend()))
    for run in runs:
        first = [t.clone() for t in run()]
        same = torch.ones((), dtype=torch.bool, device=DEVICE)
        for _ in range(REPEATS):
            for a, b in zip(first, run(), strict=True):
                same &= (words(a) == words(b)).all()
        if not same:
            return float("inf")
    return 0.0


def words(x: torch.Tensor) -> torch.Tensor:
    """Bits as integers, so that NaNs and zeros of either sign compare."""
    return x.view({1: torch.uint8, 4: torch.int32}[x.element_size()])


def graph_replay() -> float:
    """A captured call, replayed on other inputs."""
    return max(replayed(s_q) for s_q in (1, 7, 150))


def replayed(s_q: int) -> float:
    one, other = call(s_q=s_q, seed=1), call(s_q=s_q, seed=2)
    out = one.output()
    under_test = backend()
    one.decode(under_test, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = one.decode(under_test, out)
    for name in ("q", "positions", "kv", "extra_kv", "indices", "extra_indices", "sinks"):
        getattr(one, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    return triton_cases.decode_excess(other, got)


ATTENTION_CHECKS: dict[str, Check] = {
    "decode fp8": lambda: decode_sweep(528, "interleaved"),
    "decode fp4": lambda: decode_sweep(288, "interleaved"),
    "decode fp8 page_split": lambda: decode_sweep(528, "page_split"),
    "decode fp4 page_split": lambda: decode_sweep(288, "page_split"),
    "decode large": lambda: max(large(528), large(288)),
    "decode patterns fp8": lambda: patterns(528),
    "decode patterns fp4": lambda: patterns(288),
    "sinks": sinks,
    "swa only": swa_only,
    "128 heads": wide_heads,
    "live heads": live_heads,
    "q norm": q_norm,
    "far pages": far_pages,
    "repeats": repeats,
    "graph replay": graph_replay,
    "prefill": prefill_sweep,
    "prefill patterns": prefill_patterns,
    "prefill plain": prefill_plain,
}
