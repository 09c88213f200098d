"""Small launches of the sm90 and the Triton kernels, for compute-sanitizer.

    PYTHONPATH=.:tests/backends python scripts/device/small_launches.py [--every-lane] [NAME ...]

The fewest tokens and rows with which every role works, every ring comes round and a persistent CTA
meets several items. Results are not looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import attention_checks
import decode_calls
import op_checks
import product_calls
import sm90_decode
import sm90_prefill
import torch
from every_lane import every_lane_sources

from megabench.backends.base import EINSUM, EINSUM_RECIPE
from megabench.backends.sm90 import nvrtc, product_launch
from megabench.backends.sm90 import products as sm90_products
from megabench.backends.sm90.backend import Sm90Backend
from megabench.backends.sm90.decode_launch import DecodeKernel, Shape, decode_kernel
from megabench.backends.sm90.kernel import kernel
from megabench.backends.triton import attention, products
from megabench.backends.triton.backend import TritonBackend
from megabench.formats import FP8, NVFP4, KVRecord

DECODE_SHAPES = {Shape(10, 1): 512, Shape(4, 8): 128, Shape(2, 4): 320, Shape(3, 1): 320}
"""With the width of the extra list: one block a CTA, one and enough CTAs to meet early, several."""
DECODE_LENGTHS = (
    ((128, 100, 0, 65, 128), (192, 130, 0, 1, 192)),
    ((128, 128, 128, 0, 1), (192, 192, 192, 9, 0)),
    ((64, 1, 0, 33, 0), (0, 0, 64, 0, 0)),
)
"""Of both lists: items of many blocks, each CTA's last of one, and all of one."""
EINSUM_ROWS = 256


@contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Kernels are loaded anew inside, and believe in a smaller GPU."""
    few = SimpleNamespace(multi_processor_count=count)
    decode_kernel.cache_clear()
    kernel.cache_clear()
    properties = patch.object(torch.cuda, "get_device_properties", return_value=few)
    with properties, patch.object(sm90_products, "MULTIPROCESSORS", count):
        yield


def decode_clusters(record: KVRecord, shape: Shape) -> None:
    """One token over clusters and replicas."""
    call = decode_calls.make_call(1, 1, record=record, topk=DECODE_SHAPES[shape], blocks=16)
    with patch.object(DecodeKernel, "shape_for", return_value=shape):
        launch, _ = sm90_decode.launcher(call, ())
    launch()
    torch.cuda.synchronize()


def decode_persistent(record: KVRecord) -> None:
    """Five items on two CTAs, up to five blocks each: more than the offset ring has slots, with
    holes, empty lists and references that are raised; then with items of one block."""
    call = decode_calls.make_call(
        5, 2, record=record, topk=192, holes=0.2, lengths=True, blocks=16, gain=3.0, q_gain=3.0
    )
    for swa, extra in DECODE_LENGTHS:
        call = replace(
            call,
            swa_lengths=torch.tensor(swa, dtype=torch.int32, device="cuda"),
            extra_lengths=torch.tensor(extra, dtype=torch.int32, device="cuda"),
        )
        with multiprocessors(2), patch.object(DecodeKernel, "shape_for", return_value=Shape()):
            launch, _ = sm90_decode.launcher(call, ())
        launch()
        torch.cuda.synchronize()


def prefill() -> None:
    """Six items on one CTA, up to two blocks each: all rings come round, references are raised."""
    call = sm90_prefill.make_call(
        3, 1, heads=128, topk=128, holes=0.2, lengths=True, gain=3.0, q_gain=3.0
    )
    assert call.lengths is not None
    call = replace(call, lengths=call.lengths.new_tensor([128, 1, 100]))
    launch, _ = sm90_prefill.launcher(call, ())
    with multiprocessors(1):
        launch()
    torch.cuda.synchronize()


def einsum(tokens: int) -> None:
    """The kernel for so many tokens, its columns shared by a cluster where it can, and not."""
    for splits in (product_launch.SPLITS, ()):
        with patch.object(product_launch, "SPLITS", splits), multiprocessors(2):
            multiply(Sm90Backend(), tokens)


def multiply(backend: TritonBackend, tokens: int) -> None:
    """The einsum of one group with few weight rows."""
    with patch.object(product_calls, "ROWS", EINSUM_ROWS):
        weight = product_calls.make_weight(1, 0)
        call = product_calls.make_call(tokens, 1, weight, groups=1)
    backend.prepare(*weight)
    backend.fp8_einsum(EINSUM, call.x, weight, call.out, EINSUM_RECIPE)
    torch.cuda.synchronize()


def linear(backend: TritonBackend, tokens: int) -> None:
    """Quantization of the tokens, and their product."""
    backend.linear(product_calls.make_rows(tokens, 1280), *product_calls.make_linear(128, 1280))
    torch.cuda.synchronize()


def triton_decode(extra_bytes: int) -> None:
    """Two tokens, their rows by one program and by two."""
    for splits in (1, 2):
        with patch.object(attention, "split_count", return_value=splits):
            attention_checks.decode(s_q=2, extra=128, extra_bytes=extra_bytes, lens=(100, 5))


def triton_prefill() -> None:
    """Three tokens of few rows, in roles and without."""
    attention_checks.prefill(s_q=3, lens=(200, 1, 0))
    with patch.object(attention, "_fits_sm90", return_value=False):
        attention_checks.prefill(s_q=3, lens=(200, 1, 0))


def triton_products() -> None:
    """Every way the einsum and the linears go, but for the library's product: racecheck makes it
    fail."""
    with patch.object(products, "_dense_product"):
        for tokens in (1, 17, 65, 130):
            multiply(TritonBackend(), tokens)
            linear(TritonBackend(), tokens)


def triton_ops() -> None:
    """Cache writes, gathers, index lists and permutes."""
    for check in (op_checks.inserts, op_checks.gathers, op_checks.index_ops, op_checks.permutes):
        check()


LAUNCHES: dict[str, Callable[[], None]] = {
    **{
        f"decode-{name}-{shape.split}x{shape.replicas}": partial(decode_clusters, record, shape)
        for name, record in (("fp8", FP8), ("fp4", NVFP4))
        for shape in DECODE_SHAPES
    },
    "decode-fp8-persistent": lambda: decode_persistent(FP8),
    "decode-fp4-persistent": lambda: decode_persistent(NVFP4),
    "prefill": prefill,
    **{f"einsum-{tokens}": partial(einsum, tokens) for tokens in (1, 2, 3, 5, 9, 17, 33, 65, 257)},
    "linear": lambda: linear(Sm90Backend(), 3),
    "triton-decode-fp8": lambda: triton_decode(528),
    "triton-decode-fp4": lambda: triton_decode(288),
    "triton-prefill": triton_prefill,
    "triton-products": triton_products,
    "triton-ops": triton_ops,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(LAUNCHES))
    parser.add_argument("--every-lane", action="store_true", help="see every_lane.py")
    chosen = parser.parse_args()
    torch.zeros(1, device="cuda")  # while the GPU still has all its multiprocessors
    sources = nvrtc.sources
    changed = (lambda entry: every_lane_sources(sources(entry))) if chosen.every_lane else sources
    with patch.object(nvrtc, "sources", changed):
        for name in chosen.names:
            LAUNCHES[name]()
            print("launched", name, flush=True)


if __name__ == "__main__":
    main()
