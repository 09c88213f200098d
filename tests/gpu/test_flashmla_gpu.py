"""Our kernels under `torch.ops._flashmla_C` on a GPU: golden, captured, undone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))

from vllm_style import Step

import megabench
from megabench.backends import BackendError
from megabench.backends.flashmla import ownership
from megabench.backends.flashmla.binding import LibraryAbsentError, load_vllm_ops
from megabench.backends.flashmla.gemm import pack_rows
from megabench.backends.flashmla.quantize import quantize_packed
from megabench.flashmla_ops import Registration
from megabench.quant import quantize_activation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
OURS = [
    "megabench.backends.triton.backend:TritonBackend",
    "megabench.backends.sm90.backend:Sm90Backend",
    "auto",
]


def built_for_this_device() -> bool:
    return torch.cuda.get_device_capability()[0] == 10


@pytest.fixture(params=OURS)
def registration(request: pytest.FixtureRequest) -> Iterator[Registration]:
    """Ours in place, over the vendor's library where one is installed."""
    if built_for_this_device():
        pytest.skip("the vendor's kernels run here")
    with contextlib.suppress(LibraryAbsentError):
        load_vllm_ops()
    try:
        done = megabench.register_flashmla_ops(request.param)
    except BackendError as reason:
        pytest.skip(str(reason))
    with done:
        yield done


def test_an_engines_calls_are_golden_on_the_gpu(registration: Registration) -> None:
    torch.manual_seed(0)
    step = Step(CUDA)
    for _ in range(5):
        step.judge(step.run())
        step.redraw()


def test_a_captured_step_follows_its_inputs(registration: Registration) -> None:
    torch.manual_seed(1)
    step = Step(CUDA)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logs = step.run()
    for _ in range(5):
        step.redraw()
        graph.replay()
        torch.cuda.synchronize()
        step.judge(logs)
        captured = (step.out.data.view(torch.uint8).clone(), step.out.scale.clone())
        step.run()
        assert torch.equal(step.out.data.view(torch.uint8), captured[0])
        assert torch.equal(step.out.scale, captured[1])


def test_undoing_over_the_vendors_library_gives_its_refusal_back() -> None:
    try:
        load_vllm_ops()
    except LibraryAbsentError as reason:
        pytest.skip(str(reason))
    if built_for_this_device():
        pytest.skip("the vendor's kernels run here")
    step = Step(CUDA)
    with pytest.raises(RuntimeError, match="only supported on SM100f"):
        step.run()
    with megabench.register_flashmla_ops() as done:
        assert "in place of the vendor's" in done.message
        step.judge(step.run())
    assert not ownership.ours()
    with pytest.raises(RuntimeError, match="only supported on SM100f"):
        step.run()


@pytest.mark.parametrize(("tokens", "columns"), [(1, 1280), (5, 160), (513, 8192), (64, 1056)])
def test_the_packing_quantizer_is_exact_on_the_gpu(tokens: int, columns: int) -> None:
    torch.manual_seed(2)
    spread = torch.exp2(torch.randint(-30, 30, (tokens, 1), device=CUDA).float())
    x = (torch.randn(tokens, columns, device=CUDA) * spread).to(torch.bfloat16)
    x[:1, :32] = 0
    codes, words = quantize_packed(x)
    expected_codes, scales = quantize_activation(x)
    assert torch.equal(codes.view(torch.uint8), expected_codes)
    assert torch.equal(words, pack_rows(scales))
