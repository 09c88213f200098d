"""vLLM's own mega-attention layer code on our kernels, judged by the golden model.

    python scripts/device/flashmla_engine.py VLLM [--device cuda] [--backend auto]

VLLM is a vllm package's folder (0.33.0), or any folder that holds these of its files at their
places: models/deepseek_v41/nvidia/flash_mla_mega_attn.py, models/deepseek_v41/common/ops/
cache_utils.py and fused_layout.py. They are loaded by path and every other module they import is a
stub, so vLLM itself need not be importable. `forward_mqa` of a DeepseekV4MegaAttnAttention without
`__init__` then serves whole steps, decodes and prefills, through `torch.ops._flashmla_C`, where
`megabench.register_flashmla_ops()` put ours. Exits 1 when any step's output is not golden's.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import megabench
from megabench.backends import TorchBackend, get_backend
from megabench.cases import Case
from megabench.formats import HEAD_DIM
from megabench.layer import DeepseekV4MegaAttnAttention, QuantizedActivation
from megabench.quant import alloc_mega_attn_output
from megabench.validate.truth import Truth, truth_of
from megabench.workload import Workload, bind, build_weights, build_workload, make_layer
from reference.attention import attend
from reference.codes import decode_ue8m0, e4m3_interval
from reference.layouts import heads_from_padded_q, output_meaning
from reference.rows import Paged, paged_rows

LAYER = "models/deepseek_v41/nvidia/flash_mla_mega_attn.py"
OPS = "models/deepseek_v41/common/ops/cache_utils.py"
LAYOUTS = "models/deepseek_v41/common/ops/fused_layout.py"
INDEX_OPS = (
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "dequantize_and_gather_k_cache",
)
BATCHES = ("3q1s300", "2q40s200", "1q1s70_q33_2q20s150", "5q1s129_6q9s400")
"""Decodes alone, prefills alone, and steps of both; the last one's prefills take two chunks."""


# ---- vLLM's files among stubs ---------------------------------------------------


class _Jit:
    """The base of vLLM's JIT kernels, of which only `kernel` and `__call__` are used here."""

    def __class_getitem__(cls, key: object) -> type:
        return cls


def _nothing(*_: object, **__: object) -> None:
    return None


def _stubs(context: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """What the loaded files take from modules that are not loaded."""
    import triton
    import triton.language as tl

    platform = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True)
    return {
        "vllm.forward_context": {"get_forward_context": lambda: context.forward},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: context.workspace},
        "vllm.model_executor.layers.fusion.quant_activation": {
            "QuantizedActivation": QuantizedActivation
        },
        "vllm.model_executor.warmup.jit_warmup": {"VllmJitKernel": _Jit, "zip_inputs": _nothing},
        "vllm.models.deepseek_v41.nvidia.flashmla": {
            "DeepseekV4FlashMLAAttention": type("Base", (), {"PREFILL_CHUNK_SIZE": 4})
        },
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils.import_utils": {"has_cutedsl": lambda: False},
        "vllm.utils.math_utils": {
            "cdiv": lambda a, b: -(-a // b),
            "round_up": lambda a, b: -(-a // b) * b,
            "next_power_of_2": triton.next_power_of_2,
        },
    }


class StubVllm(MetaPathFinder, Loader):
    """Serves `vllm` and all below it: files that are named from disk, everything else a stub whose
    unknown attributes are empty classes."""

    def __init__(self, root: Path, files: dict[str, str], stubs: dict[str, dict[str, Any]]) -> None:
        self.root, self.files, self.stubs = root, files, stubs

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.root / self.files[name])
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.stubs.get(module.__name__, {}))
        vars(module)["__getattr__"] = lambda name: type(name, (), {})


def load_layer(root: Path, context: SimpleNamespace, device: torch.device) -> type:
    """vLLM's DeepseekV4MegaAttnAttention; its index and gather kernels too where there is a GPU,
    ours in eager torch in their place elsewhere."""
    ops = "vllm.models.deepseek_v41.common.ops"
    layer = "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn"
    files = {layer: LAYER, f"{ops}.cache_utils": OPS, f"{ops}.fused_layout": LAYOUTS}
    finder = StubVllm(root, files, _stubs(context))
    sys.meta_path.insert(0, finder)
    source: Any = TorchBackend()
    if device.type == "cuda":
        source = importlib.import_module(f"{ops}.cache_utils")
    package = importlib.import_module(ops)
    vars(package).update({name: getattr(source, name) for name in INDEX_OPS})
    found: type = importlib.import_module(layer).DeepseekV4MegaAttnAttention
    return found


# ---- one step -------------------------------------------------------------------


class _Metadata:
    """Our SWA metadata under vLLM's interface, whose chunk plan is made of tuples."""

    def __init__(self, ours: Any) -> None:
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def get_prefill_chunk_plan(self, **asked: Any) -> list[tuple[int, int, int, int]]:
        plan = self._ours.get_prefill_chunk_plan(**asked)
        return [(chunk.start, chunk.end, chunk.N, chunk.M) for chunk in plan]


def stand_in_self(cls: type, ours: DeepseekV4MegaAttnAttention) -> Any:
    """An instance of vLLM's class that never saw `__init__`, with our layer's state."""
    topk = ours.topk_indices_buffer
    if topk is None:  # vLLM's SWA-only layers hold the model's buffer too, and do not read it
        shape = (ours.max_num_batched_tokens, ours.config.geometry.index_topk)
        topk = torch.full(shape, -1, dtype=torch.int32, device=ours.device)
    layer = cls.__new__(cls)
    vars(layer).update(
        prefix=ours.prefix,
        compress_ratio=ours.compress_ratio,
        window_size=ours.window_size,
        max_model_len=ours.max_model_len,
        max_num_batched_tokens=ours.max_num_batched_tokens,
        padded_heads=ours.padded_heads,
        n_wv_group=ours.n_wv_group,
        scale=ours.scale,
        attn_sink=ours.attn_sink,
        rotary_emb=SimpleNamespace(cos_sin_cache=ours.cos_sin_cache),
        swa_cache_layer=ours.swa_cache_layer,
        compressed_cache_prefix=ours.compressed_cache_prefix,
        topk_indices_buffer=topk,
        _compressed_kv_cache=ours._compressed_kv_cache,
    )
    return layer


def queries(ours: DeepseekV4MegaAttnAttention, work: Workload) -> Tensor:
    """What comes before `forward_mqa`: wq_b, the Q pad, and this step's cache rows."""
    q = ours.backend.linear(work.qr, ours.wq_b.weight, ours.wq_b.weight_scale)
    padded = ours.backend.pad_q_and_insert_kv(
        q.view(-1, ours.n_local_heads, HEAD_DIM),
        work.kv,
        ours.swa_cache_layer.kv_cache,
        work.swa_metadata.slot_mapping,
        work.positions,
        ours.cos_sin_cache,
        ours.padded_heads,
    )
    if work.latent is not None and work.compressed_metadata is not None:
        ours.backend.insert_compressed(
            work.latent,
            work.positions,
            ours.cos_sin_cache,
            ours._compressed_kv_cache(),
            work.compressed_metadata.slot_mapping,
            ours.compress_ratio,
        )
    return padded


def worst_ratio(
    out: QuantizedActivation, q: Tensor, ours: DeepseekV4MegaAttnAttention, truth: Truth
) -> float:
    """Largest distance of golden's value from what a written code stands for, over its bound."""
    parts = [Paged(ours.swa_cache_layer.kv_cache, *truth.swa_selected, layout=truth.layout)]
    if truth.compressed_selected is not None:
        cache = ours._compressed_kv_cache()
        parts.append(Paged(cache, *truth.compressed_selected, layout=truth.layout))
    golden = attend(
        heads_from_padded_q(q, ours.n_local_heads),
        truth.tokens.position,
        ours.cos_sin_cache,
        paged_rows(parts),
        ours.attn_sink[: ours.n_local_heads],
        ours.scale,
        torch.float64,
        sums_rounded_p=True,
    )
    live = slice(0, ours.n_local_heads)
    codes, scales = (part[:, live] for part in output_meaning(out.data, out.scale))
    low, high = e4m3_interval(codes, torch.float64)
    unit = decode_ue8m0(scales, torch.float64).repeat_interleave(32, -1)
    below, above = low * unit - golden.o, golden.o - high * unit
    outside = torch.maximum(below, above).clamp_min(0)
    ratio = torch.where(outside > 0, outside / golden.bound, 0)
    return float(ratio.nan_to_num(torch.inf).max())


def run_step(
    cls: type, context: SimpleNamespace, ours: DeepseekV4MegaAttnAttention, work: Workload
) -> float:
    """One step through vLLM's `forward_mqa` -> its worst error over the bound."""
    bind(ours, work)
    q = queries(ours, work)
    metadata: dict[str, Any] = dict(
        work.step_metadata(ours.swa_cache_layer.prefix, ours.compressed_cache_prefix)
    )
    metadata[ours.swa_cache_layer.prefix] = _Metadata(work.swa_metadata)
    context.forward = SimpleNamespace(attn_metadata=metadata)
    context.workspace = ours.workspace
    out = alloc_mega_attn_output(len(q), ours.n_wv_group, q.device)
    out.data.view(torch.uint8).fill_(0x7F)
    out.scale.fill_(-1)
    stand_in_self(cls, ours).forward_mqa(q, work.kv, work.positions, out)
    return worst_ratio(out, q, ours, truth_of(work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vllm", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--model", default="deepseek-v4.1-flash")
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    device = torch.device(options.device)
    registration = megabench.register_flashmla_ops(options.backend)
    print(registration.message, flush=True)
    context = SimpleNamespace(forward=None, workspace=None)
    cls = load_layer(options.vllm, context, device)
    named = registration.backends[device.type]
    backend = get_backend(named if options.backend == "auto" else options.backend)
    checkpoint, donor, bad = None, None, 0
    for ratio, cache in ((0, "auto"), (1, "fp8_ds_mla"), (2, "nvfp4_ds_mla")):
        for batch in BATCHES:
            case = Case(
                model=options.model,
                batch=batch,
                compress_ratio=ratio,
                kv_cache=cache,
                tp=options.tp,
            )
            work = build_workload(case, device)
            if checkpoint is None:
                checkpoint = build_weights(work.geometry, 0, device)
            ours = donor = make_layer(work, backend, checkpoint, donor=donor)
            worst = run_step(cls, context, ours, work)
            bad += worst > 1
            print(
                f"{'ok ' if worst <= 1 else 'BAD'} ratio {ratio} {cache:13} {batch:22} {worst:.3f}"
            )
    sys.exit(int(bad > 0))


if __name__ == "__main__":
    main()
