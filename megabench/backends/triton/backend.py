"""The `triton` backend: every op of the contract as Triton kernels.

Runs on NVIDIA GPUs from SM80 on, and on a CPU under Triton's interpreter. Nothing waits for the
device; every op can be captured in a CUDA graph once a first call compiled it.
"""

from __future__ import annotations

import copy
from typing import Self

import torch

from megabench.backends.arguments import DecodeArguments, PrefillArguments
from megabench.backends.base import EINSUM, EINSUM_RECIPE, Pair, Support
from megabench.backends.checks import check_tensor, require
from megabench.backends.step_arguments import (
    check_combine,
    check_gather,
    check_global_topk,
    check_insert_compressed,
    check_pad_and_insert,
)
from megabench.backends.torch_eager import TorchBackend
from megabench.backends.triton import (
    attention,
    gather,
    indices,
    insert,
    permute,
    products,
)
from megabench.backends.triton.target import interpreting
from megabench.formats import QUANT_GROUP, V4_FP8, WV_GROUP_SIZE, KVRecord, PageLayout
from megabench.geometry import Geometry

MIN_CAPABILITY = (8, 0)


class TritonBackend(TorchBackend):
    """Triton kernels for every op. Docstrings of the ops are the protocol's (backends/base.py)."""

    name = "triton"

    def __init__(self, page_layout: PageLayout = "interleaved") -> None:
        super().__init__(page_layout)
        self.live_heads: int | None = None

    def for_live_heads(self, live_heads: int) -> Self:
        """This backend with attention computed for the first `live_heads` heads only.

        Outputs of the other padded heads are left as they were, which the contract allows.
        """
        require(
            live_heads % WV_GROUP_SIZE == 0, "live_heads", f"{live_heads} is not a multiple of 8"
        )
        narrowed = copy.copy(self)
        narrowed.live_heads = live_heads
        return narrowed

    def supports(self, geometry: Geometry, device: torch.device, record: KVRecord) -> Support:
        if record is V4_FP8:
            return Support(False, f"the triton kernels read no {record.name} records")
        if interpreting():
            return Support(True)
        if device.type != "cuda" or not torch.cuda.is_available():
            return Support(False, "Triton needs a CUDA device, or TRITON_INTERPRET=1 on a CPU")
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return Support(False, "the triton kernels need compute capability 8.0 or later")
        return Support(True)

    # ---- attention ----------------------------------------------------------

    def decode(self, args: DecodeArguments) -> list[torch.Tensor]:
        args.check()
        return attention.decode(args, self.page_layout, self.live_heads)

    def prefill(self, args: PrefillArguments) -> list[torch.Tensor]:
        args.check()
        return attention.prefill(args, self.live_heads)

    # ---- weights ------------------------------------------------------------

    def permute_q_b_proj(
        self, q_b_proj: torch.Tensor, scale_factors: torch.Tensor, h_q: int, d_q: int
    ) -> list[torch.Tensor]:
        return permute.permute_q_b_proj(q_b_proj, scale_factors, h_q, d_q)

    def permute_wv_proj(
        self, wv_proj: torch.Tensor, scale_factors: torch.Tensor, wv_group_size: int, d_o: int
    ) -> list[torch.Tensor]:
        return permute.permute_wv_proj(wv_proj, scale_factors, wv_group_size, d_o)

    # ---- caches -------------------------------------------------------------

    def pad_q_and_insert_kv(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        swa_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        padded_heads: int,
    ) -> torch.Tensor:
        check_pad_and_insert(q, kv, swa_cache, slot_mapping, positions, cos_sin_cache, padded_heads)
        return insert.pad_q_and_insert_kv(
            q,
            kv,
            swa_cache,
            slot_mapping,
            positions,
            cos_sin_cache,
            padded_heads,
            self.page_layout,
        )

    def insert_compressed(
        self,
        latent: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        compress_ratio: int,
    ) -> None:
        check_insert_compressed(
            latent, positions, cos_sin_cache, cache, slot_mapping, compress_ratio
        )
        insert.insert_compressed(
            latent, positions, cos_sin_cache, cache, slot_mapping, compress_ratio, self.page_layout
        )

    def dequantize_and_gather_k_cache(
        self,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor | None,
        block_table: torch.Tensor,
        block_size: int,
        offset: int,
    ) -> None:
        check_gather(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset)
        gather.dequantize_and_gather_k_cache(
            out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, self.page_layout
        )

    # ---- index lists --------------------------------------------------------

    def compute_global_topk_indices_and_lens(
        self,
        topk_indices: torch.Tensor,
        token_to_req_indices: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        is_valid_token: torch.Tensor,
    ) -> Pair:
        check_global_topk(
            topk_indices, token_to_req_indices, block_table, block_size, is_valid_token
        )
        return indices.compute_global_topk_indices_and_lens(
            topk_indices, token_to_req_indices, block_table, block_size, is_valid_token
        )

    def combine_topk_swa_indices(
        self,
        topk_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: torch.Tensor,
        window_size: int,
        compress_ratio: int,
        topk: int,
        M: int,
        N: int,
        out: Pair | None = None,
    ) -> Pair:
        check_combine(
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            window_size,
            compress_ratio,
            topk,
            out,
        )
        return indices.combine_topk_swa_indices(
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            window_size,
            compress_ratio,
            topk,
            M,
            N,
            out,
        )

    # ---- matrix products ----------------------------------------------------

    def prepare(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep a bf16 form on a GPU, for steps of many tokens; few read e4m3."""
        if weight.device.type == "cuda":
            self._dense.prepare(weight, scale)

    def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        check_tensor("w", w, torch.float8_e4m3fn, (None, None), x.device)
        check_tensor("x", x, torch.bfloat16, (None, w.shape[1]), x.device)
        check_tensor("sw", sw, torch.uint8, (w.shape[0], w.shape[1] // QUANT_GROUP), x.device)
        return self.checked_linear(x, w, sw)

    def checked_linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
        return products.linear(x, w, sw, self._dense.kept(w, sw))

    def fp8_einsum(
        self, equation: str, x: Pair, w: Pair, out: torch.Tensor, recipe: tuple[int, int, int]
    ) -> None:
        require(equation == EINSUM, "equation", f"only {EINSUM!r} is supported, got {equation!r}")
        require(tuple(recipe) == EINSUM_RECIPE, "recipe", f"only {EINSUM_RECIPE} is supported")
        (data, scale), (weight, weight_scale) = x, w
        check_tensor("x[0]", data, torch.float8_e4m3fn, (None, None, None), data.device)
        (b, h, r), d = data.shape, weight.shape[1]
        words = r // (4 * QUANT_GROUP)
        check_tensor("x[1]", scale, torch.int32, (b, h, words), data.device)
        check_tensor("w[0]", weight, torch.float8_e4m3fn, (h, d, r), data.device)
        check_tensor("w[1]", weight_scale, torch.int32, (h, d, words), data.device)
        check_tensor("out", out, torch.bfloat16, (b, h, d), data.device)
        self.checked_einsum(x, w, out)

    def checked_einsum(self, x: Pair, w: Pair, out: torch.Tensor) -> None:
        products.fp8_einsum(*x, *w, out, self._dense.kept(*w))
