"""What the vendor's libraries on this machine do with our exact arguments.

On a device they were not built for, the contract still can be checked short of the launch: the
schemas are compared, and each op is called as the backend calls it and must be refused for the
architecture alone. An op that runs (all do on SM100 and SM103, vLLM's permutes on SM90 too) is
compared with eager torch, codes and scales bit for bit. Every call has a process of its own, since
a missing kernel image is an error that stays with the CUDA context and would fail the next call.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megabench.backends.base import EINSUM, EINSUM_RECIPE
from megabench.backends.flashmla.backend import DEVICE_FAMILY, VendorOps
from megabench.backends.flashmla.binding import (
    SOURCES,
    AttentionLibrary,
    LibraryAbsentError,
    LibraryUnfitError,
    first_line,
)
from megabench.backends.flashmla.gemm import compiler, compiler_problem, find_gemm
from megabench.backends.flashmla.schemas import DECODE, PERMUTE_Q_B, PERMUTE_WV, PREFILL, SCHEMAS
from megabench.backends.torch_eager import TorchBackend
from megabench.formats import FP8, HEAD_DIM, NVFP4, QUANT_GROUP, ROPE_DIM, WV_GROUP_SIZE
from megabench.layout_probe import ramp_page
from megabench.quant import alloc_mega_attn_output, pack_mn_major

REFUSALS = ("only supported on SM100f", "no kernel image is available", "Unknown SF transformation")
"""What the ops say on a device they were not built for: attention, permutes, DeepGEMM (which knows
packed per-32 scales on SM100 alone)."""
GEMM_CALLS = ("fp8_einsum", "linear")
CALL_SECONDS = 180.0
TOKENS, HEADS, TOPK, EXTRA_TOPK = 2, 64, 128, 512

Check = tuple[str, bool, str]
"""(what was checked, whether it holds, what was found)"""


@dataclass(frozen=True)
class Called:
    """What one op did in its process: it ran and was equal, it ran and differed, or it raised."""

    ran: bool
    equal: bool
    error: str


# ---- the calls, in the child process ---------------------------------------------


def arguments(name: str, device: torch.device) -> list[Any]:
    """Arguments of one op as the layer passes them, out tensors included.

    Each token of an attention op names one row and stands at position 0, so that its output is that
    row whatever the order of summation.
    """
    if name == "fp8_einsum":
        x = alloc_mega_attn_output(TOKENS, 2, device)
        x.data.view(torch.uint8).copy_(_ramp(tuple(x.data.shape), device))
        x.scale.fill_(0x7F7F7F7F)
        w = _codes((2, 128, WV_GROUP_SIZE * HEAD_DIM), device)
        scale = pack_mn_major(_ramp((2, 128, w.shape[2] // QUANT_GROUP), device))
        z = torch.empty((TOKENS, 2, 128), dtype=torch.bfloat16, device=device)
        return [EINSUM, (x.data, x.scale), (w, scale), z, EINSUM_RECIPE]
    if name == "linear":
        row = torch.linspace(-3, 3, TOKENS * 256, dtype=torch.bfloat16, device=device)
        return [row.view(TOKENS, 256), _codes((128, 256), device), _ramp((128, 8), device)]
    if name == PERMUTE_Q_B:
        scale = pack_mn_major(_ramp((1, 8 * HEAD_DIM, 8), device)).squeeze(0)
        return [_codes((8 * HEAD_DIM, 256), device), scale, 8, HEAD_DIM]
    if name == PERMUTE_WV:
        width = WV_GROUP_SIZE * HEAD_DIM
        scale = pack_mn_major(_ramp((2, 128, width // QUANT_GROUP), device))
        return [_codes((2, 128, width), device), scale, WV_GROUP_SIZE, HEAD_DIM]
    groups = HEADS // WV_GROUP_SIZE
    table = torch.zeros((4, ROPE_DIM), dtype=torch.float32, device=device)
    table[:, : ROPE_DIM // 2] = 1.0
    out = alloc_mega_attn_output(TOKENS, groups, device)
    q = torch.zeros((TOKENS, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device)
    sink = torch.full((HEADS,), -torch.inf, device=device)
    positions = torch.zeros(TOKENS, dtype=torch.int32, device=device)
    rest = [False, 0.0, positions, False, ROPE_DIM, table, groups, QUANT_GROUP, True, True, True]
    scale_v = [HEAD_DIM**-0.5, HEAD_DIM, sink]
    if name == PREFILL:
        kv = TorchBackend()
        rows = torch.empty((1, 32, HEAD_DIM), dtype=torch.bfloat16, device=device)
        lens = torch.full((1,), 32, dtype=torch.int32, device=device)
        block = torch.zeros((1, 1), dtype=torch.int32, device=device)
        kv.dequantize_and_gather_k_cache(rows, ramp_page(FP8, device), lens, None, block, 32, 0)
        indices, length = _one_row(TOPK, device)
        attention = [q, rows.view(-1, 1, HEAD_DIM), indices.unsqueeze(1), *scale_v, length]
        return [*attention, *rest, out.data, out.scale]
    assert name == DECODE
    indices, length = _one_row(TOPK, device)
    nothing = torch.full((TOKENS, EXTRA_TOPK), -1, dtype=torch.int32, device=device)
    extra = [ramp_page(NVFP4, device).unsqueeze(2), nothing, torch.zeros_like(length)]
    attention = [q, ramp_page(FP8, device).unsqueeze(2), indices, *scale_v, length, *extra]
    return [*attention, *rest, out.data, out.scale]


def _ramp(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=device) % 97 + 16).to(torch.uint8).view(shape)


def _codes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return _ramp(shape, device).view(torch.float8_e4m3fn)


def _one_row(topk: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Index rows whose first entry alone is valid, a different one for each token."""
    indices = torch.full((TOKENS, topk), -1, dtype=torch.int32, device=device)
    indices[:, 0] = torch.arange(TOKENS, device=device) * 9 + 5
    return indices, torch.ones(TOKENS, dtype=torch.int32, device=device)


def call(source: str, name: str, device: torch.device) -> Called:
    """Call one op of one library through the backend and compare with eager torch."""
    backend = VendorOps()
    if name in SCHEMAS:
        backend._vendor = SOURCES[source]("interleaved")
    expected = _results(TorchBackend(), name, device)
    try:
        got = _results(backend, name, device)
        equal = all(_same(a, b) for a, b in zip(got, expected, strict=True))
    except Exception as error:  # the refusal is what is looked at
        return Called(False, False, str(error).strip() or type(error).__name__)
    return Called(True, equal, "")


def _results(backend: TorchBackend, name: str, device: torch.device) -> list[torch.Tensor]:
    given = arguments(name, device)
    result = getattr(backend, name)(*given)
    if name in GEMM_CALLS:
        return [given[3] if result is None else result]
    return list(result)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bytes of codes and scales are equal; lse and max_logits to float32's last place, products to
    bf16's."""
    if a.dtype == torch.bfloat16:
        return torch.allclose(a.float(), b.float(), rtol=2.0**-7, atol=0)
    if a.dtype == torch.float32:
        return torch.allclose(a, b, rtol=0, atol=1e-6)
    return torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


# ---- the verdicts, in the parent -------------------------------------------------


def probe_flashmla(device: torch.device | None = None) -> list[Check]:
    """Check every vendor library here, and call its ops on `device` (the first GPU by default).

    Without a device the ops are not called, and say so with False.
    """
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda")
    checks: list[Check] = []
    found: list[str] = []
    for source, find in SOURCES.items():
        ok, detail = _schemas(find)
        checks.append((f"{source}: library and schemas", ok, detail))
        if ok:
            found.append(source)
    gemm = find_gemm()
    name = gemm.library.name if gemm.library else "deep_gemm"
    checks.append((f"{name}: library", gemm.library is not None, _gemm_detail()))
    problem = compiler_problem()
    checks.append((f"{name}: compiler", problem is None, problem or f"{compiler()} is there"))
    calls = [(source, op) for source in found for op in SCHEMAS]
    calls += [(name, op) for op in GEMM_CALLS if gemm.library is not None]
    return checks + _calls(calls, device)


def _schemas(find: Callable[..., AttentionLibrary]) -> tuple[bool, str]:
    try:
        library = find("interleaved")
    except (LibraryAbsentError, LibraryUnfitError) as error:
        return False, str(error)
    kind = "out tensors taken" if library.in_place else "outputs allocated"
    return True, f"{library.version}: four ops with the known schemas, {kind}"


def _gemm_detail() -> str:
    search = find_gemm()
    return search.library.version if search.library else search.reason


def _calls(pairs: list[tuple[str, str]], device: torch.device | None) -> list[Check]:
    if device is None:
        return [(f"{s}: call of {n}", False, "not called: no CUDA device") for s, n in pairs]
    command = [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__]
    children = [
        subprocess.Popen(
            [*command, source, name, str(device)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, name in pairs
    ]
    return [
        (f"{source}: call of {name}", *_verdict(child, device))
        for (source, name), child in zip(pairs, children, strict=True)
    ]


def _verdict(child: subprocess.Popen[str], device: torch.device) -> tuple[bool, str]:
    try:
        output, errors = child.communicate(timeout=CALL_SECONDS)
        called = Called(**json.loads(output.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False, f"no answer in {CALL_SECONDS:.0f} s"
    except (ValueError, IndexError, TypeError):
        last = (errors.strip().splitlines() or ["no output"])[-1]
        return False, f"the process ended with {child.returncode}: {last[:200]}"
    if called.ran:
        return (
            called.equal,
            "ran, as eager torch" if called.equal else "ran, and differs",
        )
    refusal = next((text for text in REFUSALS if text in called.error), None)
    if refusal and not _built_for(device):
        return True, f'our arguments bind; refused for the architecture alone ("{refusal}")'
    return False, first_line(RuntimeError(called.error))


def _built_for(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == DEVICE_FAMILY


def main(source: str, name: str, device: str) -> None:
    """The child: print what one call did as a line of JSON."""
    print(json.dumps(asdict(call(source, name, torch.device(device)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
