"""Checks of a backend's other ops on the GPU of this machine: cache writes, gathers, index lists
and permutes against eager torch, byte for byte; matrix products against the golden model.
"""

from __future__ import annotations

import torch
import triton_cases
from attention_checks import DEVICE, Check, backend, call

import reference.linear
from megabench.backends.torch_eager import TorchBackend
from megabench.quant import (
    alloc_mega_attn_output,
    pack_mn_major,
    quantize_kv_mxfp8,
)


def equal(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    same = all(
        a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )
    return 0.0 if same else float("inf")


def inserts() -> float:
    """Bytes equal to the eager backend's, whose rotation does not contract multiply-adds: the few
    codes that may differ by one are counted against one in a hundred thousand."""
    g = torch.Generator(DEVICE).manual_seed(0)
    table = triton_cases.table(DEVICE)
    wrong, total = 0, 0
    for layout in ("interleaved", "page_split"):
        for tokens, live in ((1, 8), (33, 64), (700, 16)):
            q = torch.randn(tokens, live, 512, generator=g, device=DEVICE).bfloat16()
            kv = triton_cases.latents(tokens, g).bfloat16()
            positions = torch.randint(0, 4096, (tokens,), generator=g, device=DEVICE)
            slots = torch.randperm(1024, generator=g, device=DEVICE)[:tokens]
            slots[::7] = -1
            for nbytes, page in ((528, 32), (288, 64), (528, 64)):
                made = []
                for made_by in (backend(layout), TorchBackend(layout)):  # type: ignore[arg-type]
                    storage = torch.full(
                        (32 * (page * nbytes + 48),), 7, dtype=torch.uint8, device=DEVICE
                    )
                    cache = storage.as_strided((32, page, nbytes), (page * nbytes + 48, nbytes, 1))
                    if page == 32:
                        padded = made_by.pad_q_and_insert_kv(
                            q, kv, cache, slots, positions, table, 64
                        )
                    else:
                        made_by.insert_compressed(kv, positions, table, cache, slots, 2)
                    made.append((storage, padded))
                wrong += int((made[0][0] != made[1][0]).sum())
                total += made[0][0].numel()
                if equal((made[0][1], made[1][1])):
                    return float("inf")
    return wrong / total * 1e5


def gathers() -> float:
    one = call(s_q=2)
    worst = 0.0
    table = torch.randperm(64, device=DEVICE).view(4, 16).int()
    for nbytes, layout in (
        (528, "interleaved"),
        (288, "interleaved"),
        (528, "page_split"),
        (288, "page_split"),
    ):
        g = torch.Generator(DEVICE).manual_seed(1)
        rows = triton_cases.latents(4096, g)
        cache = triton_cases.paged_pool(
            rows, torch.arange(4096, device=DEVICE), 64, 64, nbytes, layout, 32
        )
        lens = torch.tensor([1000, 0, 1024, 5], dtype=torch.int32, device=DEVICE)
        tails = torch.tensor([130, 0, 1024, 5], dtype=torch.int32, device=DEVICE)
        for gather in (None, tails):
            made = []
            for made_by in (backend(layout), TorchBackend(layout)):  # type: ignore[arg-type]
                out = torch.full((4, 1200, 512), 3.0, dtype=torch.bfloat16, device=DEVICE)
                made_by.dequantize_and_gather_k_cache(out, cache, lens, gather, table, 64, 100)
                made.append(out)
            worst = max(worst, equal((made[0], made[1])))
    del one
    return worst


def index_ops() -> float:
    g = torch.Generator(DEVICE).manual_seed(2)
    tokens, topk = 300, 512
    rows = torch.randint(-1, 640, (tokens, topk), generator=g, device=DEVICE).int()
    request = torch.randint(0, 8, (tokens,), generator=g, device=DEVICE).int()
    table = torch.randperm(8 * 10, generator=g, device=DEVICE).view(8, 10).int()
    valid = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    made = [
        b.compute_global_topk_indices_and_lens(rows, request, table, 64, valid)
        for b in (backend(), TorchBackend())
    ]
    start = torch.tensor([20, 120, 121, 320], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([100, 900, 700], dtype=torch.int32, device=DEVICE)
    tails = torch.tensor([100, 128, 327], dtype=torch.int32, device=DEVICE)
    more = [
        b.combine_topk_swa_indices(rows, start, lens, tails, 128, 2, 512, 900, 500)
        for b in (backend(), TorchBackend())
    ]
    return equal(*zip(*made, strict=True), *zip(*more, strict=True))


def permutes() -> float:
    g = torch.Generator(DEVICE).manual_seed(3)

    def fp8(*shape: int) -> torch.Tensor:
        return (
            torch.randint(0, 256, shape, generator=g, device=DEVICE)
            .to(torch.uint8)
            .view(torch.float8_e4m3fn)
        )

    def scales(*shape: int) -> torch.Tensor:
        return pack_mn_major(
            torch.randint(0, 255, shape, generator=g, device=DEVICE).to(torch.uint8)
        )

    q_args = (fp8(64 * 512, 1280), scales(1, 64 * 512, 40)[0], 64, 512)
    wv_args = (fp8(8, 1024, 4096), scales(8, 1024, 128), 8, 512)
    ours, eager = backend(), TorchBackend()
    return equal(
        *zip(ours.permute_q_b_proj(*q_args), eager.permute_q_b_proj(*q_args), strict=True),
        *zip(ours.permute_wv_proj(*wv_args), eager.permute_wv_proj(*wv_args), strict=True),
    )


def linears() -> float:
    g = torch.Generator(DEVICE).manual_seed(4)
    worst = 0.0
    for n, k in ((4096, 1280), (5120, 8192), (512, 1312)):
        w, sw = quantize_kv_mxfp8(torch.randn(n, k, generator=g, device=DEVICE) * 0.05)
        under_test, weight = backend(), w.view(torch.float8_e4m3fn)
        under_test.prepare(weight, sw)
        for tokens in (1, 5, 16, 33, 64, 65, 130, 300):
            x = (
                triton_cases.latents(tokens * 32, g)
                .flatten()[: tokens * k]
                .view(tokens, k)
                .bfloat16()
            )
            got = under_test.linear(x, weight, sw)
            worst = max(worst, triton_cases.matmul_excess(got, reference.linear.linear(x, w, sw)))
    return worst


def einsums() -> float:
    g = torch.Generator(DEVICE).manual_seed(5)
    w, sw = quantize_kv_mxfp8(torch.randn(8, 1024, 4096, generator=g, device=DEVICE) * 0.05)
    packed = pack_mn_major(sw)
    whole = w.view(torch.float8_e4m3fn)
    under_test = backend()
    under_test.prepare(whole, packed)
    worst = 0.0
    for tokens, groups in (
        (1, 8),
        (3, 8),
        (17, 2),
        (33, 8),
        (65, 8),
        (130, 1),
        (513, 8),
        (1030, 8),
    ):
        x = alloc_mega_attn_output(tokens, 8, torch.device(DEVICE))
        codes, scale = quantize_kv_mxfp8(torch.randn(tokens, 8, 4096, generator=g, device=DEVICE))
        x.data.copy_(codes.view(torch.float8_e4m3fn))
        x.scale.copy_(scale.view(torch.int32))
        z = torch.full((tokens, groups, 1024), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        weights = (whole, packed) if groups == 8 else (whole[:groups], packed[:groups])
        under_test.fp8_einsum(
            "bhr,hdr->bhd",
            (x.data[:, :groups], x.scale[:, :groups]),
            weights,
            z,
            (1, 1, 32),
        )
        for group in range(groups):
            dense = reference.linear.dequantize_weight(w[group], sw[group])
            a = reference.linear.dequantize_mxfp8(codes[:, group], scale[:, group], torch.float32)
            bound = reference.linear.gamma(4096) * (
                a.norm(dim=1)[:, None] * dense.value.norm(dim=1)[None]
            )
            want = reference.linear.Bounded(a.double() @ dense.value.double().T, bound)
            worst = max(worst, triton_cases.matmul_excess(z[:, group], want))
    return worst


OP_CHECKS: dict[str, Check] = {
    "inserts": inserts,
    "gathers": gathers,
    "index ops": index_ops,
    "permutes": permutes,
    "linears": linears,
    "einsums": einsums,
}
