"""A whole step against a token-by-token computation over a dictionary of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import codes, layer, linear, records, rope
from reference.model import Model

HEADS, GROUPS, RANK, GROUP_OUT, HIDDEN, TOPK = 16, 2, 64, 64, 96, 12
PAGES = 8
REQUESTS = [
    layer.Request(1, 150, True),
    layer.Request(1, 1, True),
    layer.Request(5, 133, False),
    layer.Request(3, 3, False),
]


def random_bytes(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def weights(seed: int = 0) -> layer.Weights:
    g = torch.Generator().manual_seed(seed)

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        sign = random_bytes(g, 0, 2, *shape) << 7
        code = random_bytes(g, 0x20, 0x48, *shape) | sign
        return code, random_bytes(g, 122, 126, *shape[:-1], shape[-1] // 32)

    return layer.Weights(
        *pair(HEADS * 512, RANK),
        *pair(GROUPS, GROUP_OUT, 4096),
        *pair(HIDDEN, GROUPS * GROUP_OUT),
        torch.randn(HEADS, generator=g) + 4,
    )


def pool(blocks: int, page: int, nbytes: int, pad: int = 0) -> Tensor:
    """Random valid records cannot be random bytes: encode random rows; pads hold NaN bytes."""
    g = torch.Generator().manual_seed(blocks * page)
    storage = torch.full((blocks, page * nbytes + pad), 0x7F, dtype=torch.uint8)
    cache = storage.as_strided((blocks, page, 1, nbytes), (storage.stride(0), nbytes, nbytes, 1))
    rows = torch.randn(blocks * page, 512, generator=g)
    encoded = records.encode_rows(rows, nbytes)
    records.write_record(cache, torch.arange(blocks * page), encoded)
    return cache


def to_layout(cache: Tensor, layout: str) -> Tensor:
    slots = torch.arange(cache.shape[0] * cache.shape[1])
    out = cache.clone()
    records.write_record(out, slots, records.read_record(cache, slots), layout)
    return out


def make_step(ratio: int, nbytes: int = 528, pad: int = 0, padding: int = 0) -> layer.Step:
    g = torch.Generator().manual_seed(ratio)
    tokens = layer.tokens_of(REQUESTS, sum(r.query_len for r in REQUESTS) + padding)
    count = len(tokens.position)
    table = torch.randperm(len(REQUESTS) * PAGES, generator=g).view(len(REQUESTS), PAGES).int()
    topk = torch.full((count, TOPK), -1, dtype=torch.int32)
    if ratio:
        for t in range(count):
            held = int(tokens.position[t] + 1) // ratio
            chosen = torch.randperm(max(held, 1), generator=g)[: min(held, TOPK)]
            topk[t, : len(chosen)] = chosen.int()
    compressed: dict[str, Any] = {}
    if ratio:
        compressed = {
            "compressed_cache": pool(len(REQUESTS) * PAGES, 128 // ratio, nbytes, pad),
            "compressed_block_table": table.flip(1),
            "latent": torch.randn(count, 512, generator=g).bfloat16(),
            "topk": topk,
        }
    return layer.Step(
        tokens=tokens,
        seq_lens=torch.tensor([r.seq_len for r in REQUESTS]),
        qr=torch.randn(count, RANK, generator=g).bfloat16(),
        kv=torch.randn(count, 512, generator=g).bfloat16(),
        table=rope.cos_sin_table(160, ratio > 0),
        swa_cache=pool(len(REQUESTS) * PAGES, 32, 528, pad),
        swa_block_table=table,
        weights=weights().prepare(torch.float64),
        compress_ratio=ratio,
        **compressed,
    )


def row_at(cache: Tensor, table_row: Tensor, number: int) -> Tensor:
    page = cache.shape[1]
    slot = int(table_row[number // page]) * page + number % page
    return records.decode_rows(records.read_record(cache, torch.tensor([slot])))[0].double()


def by_hand(step: layer.Step, q: Tensor, t: int) -> Tensor:
    """Attention of token t over caches that hold the whole step, one row and head at a time."""
    position, request = int(step.tokens.position[t]), int(step.tokens.request[t])
    swa, compressed = step.swa_cache.clone(), step.compressed_cache
    compressed = None if compressed is None else compressed.clone()
    for u in range(len(step.tokens.position)):
        p, r = int(step.tokens.position[u]), int(step.tokens.request[u])
        jobs = [(swa, step.swa_block_table[r], p, p, step.kv[u])]
        ratio = step.compress_ratio
        if compressed is not None and (p + 1) % ratio == 0:
            assert step.latent is not None
            assert step.compressed_block_table is not None
            row_table = step.compressed_block_table[r]
            jobs.append((compressed, row_table, p // ratio, p // ratio * ratio, step.latent[u]))
        for cache, table_row, number, angle, row in jobs:
            page = cache.shape[1]
            slot = int(table_row[number // page]) * page + number % page
            turned = rope.on_rope_dims(
                row.float(), rope.rotate(row[-64:].float(), step.table[angle])
            )
            encoded = records.encode_rows(turned[None], cache.shape[-1])
            records.write_record(cache, torch.tensor([slot]), encoded)
    keys = [
        row_at(swa, step.swa_block_table[request], p)
        for p in range(max(0, position - 127), position + 1)
    ]
    if compressed is not None:
        assert step.topk is not None
        assert step.compressed_block_table is not None
        table_row = step.compressed_block_table[request]
        keys += [row_at(compressed, table_row, int(i)) for i in step.topk[t] if i >= 0]
    kv = torch.stack(keys)
    outputs = []
    for h in range(q.shape[1]):
        turned = codes.round_bf16(rope.rotate(q[t, h, -64:].double(), step.table[position]))
        query = torch.cat([q[t, h, :-64].double(), turned])
        score = (kv @ query) * 512**-0.5
        sink = step.weights.sinks[h].double()
        weight = score.exp() / (score.exp().sum() + sink.exp())
        o = weight @ kv
        outputs.append(rope.on_rope_dims(o, rope.unrotate(o[-64:], step.table[position])))
    return torch.stack(outputs)


@pytest.mark.parametrize(("ratio", "nbytes"), [(0, 528), (1, 528), (2, 528), (1, 288), (2, 288)])
def test_a_mixed_step_attends_like_the_loop_over_rows(ratio: int, nbytes: int) -> None:
    step = make_step(ratio, nbytes)
    result = layer.rank_step(step, torch.float64)
    for t in range(len(step.tokens.position)):
        torch.testing.assert_close(
            result.attended.o[t], by_hand(step, result.q, t), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("ratio", [0, 2])
def test_page_layout_and_page_padding_do_not_change_a_single_bit(ratio: int) -> None:
    step = make_step(ratio, 288)
    plain = layer.rank_step(step)
    padded = layer.rank_step(make_step(ratio, 288, pad=96))
    caches: dict[str, Any] = {"swa_cache": to_layout(step.swa_cache, "page_split")}
    if step.compressed_cache is not None:
        caches["compressed_cache"] = to_layout(step.compressed_cache, "page_split")
    split = layer.rank_step(replace(step, page_layout="page_split", **caches))
    for other in (padded, split):
        assert torch.equal(other.attended.o, plain.attended.o)
        assert torch.equal(other.output, plain.output)
    slots = torch.arange(step.swa_cache.shape[0] * 32)
    assert torch.equal(
        records.read_record(split.swa.cache, slots, "page_split"),
        records.read_record(plain.swa.cache, slots),
    )


def test_padding_tokens_write_nothing_and_attend_to_nothing() -> None:
    bare = layer.rank_step(make_step(2))
    step = make_step(2, padding=3)
    count = len(bare.q)
    for name in ("qr", "kv", "latent"):  # the same live tokens as without padding
        getattr(step, name)[:count] = getattr(make_step(2), name)
    assert step.topk is not None
    live = make_step(2).topk
    assert live is not None
    step.topk[:count] = live
    step.topk[count:] = 7  # unspecified rows must not be read
    padded = layer.rank_step(step)
    assert padded.compressed is not None
    assert bare.compressed is not None
    assert torch.equal(padded.swa.cache, bare.swa.cache)
    assert torch.equal(padded.compressed.cache, bare.compressed.cache)
    assert (padded.attended.o[count:] == 0).all()
    assert (padded.scales[count:] == 105).all()
    assert (padded.attended.lse[count:] == torch.inf).all()
    torch.testing.assert_close(padded.attended.o[:count], bare.attended.o)


def test_a_step_leaves_its_input_caches_alone() -> None:
    step = make_step(1)
    before = step.swa_cache.clone()
    result = layer.rank_step(step)
    assert torch.equal(step.swa_cache, before)
    assert not torch.equal(result.swa.cache, before)


def test_a_step_without_tokens_gives_empty_results() -> None:
    step = make_step(2)
    none = slice(0, 0)
    assert step.latent is not None
    assert step.topk is not None
    empty = replace(
        step,
        tokens=layer.Tokens(*(t[none] for t in step.tokens)),
        qr=step.qr[none],
        kv=step.kv[none],
        latent=step.latent[none],
        topk=step.topk[none],
    )
    result = layer.rank_step(empty, bounds=True)
    assert result.output.shape == (0, HIDDEN)
    assert result.attended.bound.shape == (0, HEADS, 512)
    assert torch.equal(result.swa.cache, step.swa_cache)


def test_a_layer_that_shares_a_compressed_cache_only_reads_it() -> None:
    owner = layer.rank_step(make_step(2))
    assert owner.compressed is not None
    sharing = replace(make_step(2), latent=None, compressed_cache=owner.compressed.cache)
    result = layer.rank_step(sharing)
    assert result.compressed is None
    assert torch.equal(result.attended.o, owner.attended.o)


def test_ranks_sum_to_the_undivided_layer() -> None:
    step = make_step(2)
    whole = layer.rank_step(step, torch.float64)
    ranks = [
        layer.rank_step(
            replace(step, weights=weights().shard(2, rank).prepare(torch.float64)), torch.float64
        )
        for rank in range(2)
    ]
    assert torch.equal(torch.cat([r.q for r in ranks], dim=1), whole.q)
    assert torch.equal(torch.cat([r.codes for r in ranks], dim=1), whole.codes)
    assert torch.equal(torch.cat([r.z for r in ranks], dim=1), whole.z)
    total = layer.tp_sum([r.output for r in ranks])
    exact = linear.linear(whole.z.flatten(1), step.weights.wo_b).value
    roundings = sum(r.output.double().abs() for r in ranks) * 2.0**-8
    assert ((total.value - exact).abs() <= roundings).all()


def test_the_sum_of_two_ranks_is_exact_and_of_more_allows_partial_roundings() -> None:
    outputs = [torch.tensor([[x]]).bfloat16() for x in (1.0, 2.0, -4.0)]
    assert layer.tp_sum(outputs[:2]).bound.item() == pytest.approx(3 * 2 * 2.0**-24)
    three = layer.tp_sum(outputs)
    assert three.value.item() == -1
    assert three.bound.item() == pytest.approx(7 * (2.0**-8 + 3 * 2.0**-24))


def test_tokens_are_numbered_within_their_sequences_and_padding_is_invalid() -> None:
    tokens = layer.tokens_of([layer.Request(2, 10, True), layer.Request(3, 3, False)], total=7)
    assert tokens.position.tolist() == [8, 9, 0, 1, 2, 0, 0]
    assert tokens.request.tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert tokens.is_decode.tolist() == [True, True, False, False, False, False, False]
    assert tokens.valid.tolist() == [True] * 5 + [False] * 2


def test_a_decode_after_a_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="decodes must come before"):
        layer.tokens_of([layer.Request(2, 2, False), layer.Request(1, 5, True)])


def test_a_compressed_layer_without_its_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="compressed_cache"):
        layer.rank_step(replace(make_step(2), compressed_cache=None))


def test_a_128_head_geometry_needs_nothing_but_its_weights() -> None:
    step = replace(make_step(1), model=Model(num_heads=128, o_groups=16))
    many = weights(1)
    wide = replace(
        many,
        wq_b=many.wq_b.repeat(8, 1),
        wq_b_scale=many.wq_b_scale.repeat(8, 1),
        wo_a=many.wo_a.repeat(8, 1, 1),
        wo_a_scale=many.wo_a_scale.repeat(8, 1, 1),
        wo_b=many.wo_b.repeat(1, 8),
        wo_b_scale=many.wo_b_scale.repeat(1, 8),
        sinks=many.sinks.repeat(8),
    )
    result = layer.rank_step(replace(step, weights=wide.prepare()))
    assert result.codes.shape[1] == 128
    assert torch.equal(result.codes[:, :16], result.codes[:, 112:])
