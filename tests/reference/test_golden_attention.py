"""Attention against closed forms, and its bounds against simulated implementations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reference import attention, rope
from reference.attention import Attended
from reference.rows import Rows

SCALE = 512**-0.5
TABLE = rope.cos_sin_table(4096, compressed=True)
DTYPES = [torch.float32, torch.float64]
NO_SINK = -math.inf


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fixed(values: Tensor, valid: Tensor | None = None) -> Rows:
    """Rows held in one tensor ``[T, n, 512]``."""
    flags = torch.ones(values.shape[:2], dtype=torch.bool) if valid is None else valid
    return lambda tokens: (values[tokens], flags[tokens])


def run(
    q: Tensor,
    values: Tensor,
    sinks: float | Tensor = NO_SINK,
    valid: Tensor | None = None,
    positions: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: float | bool | None,
) -> Attended:
    where = torch.zeros(len(q), dtype=torch.long) if positions is None else positions
    sink = torch.full((q.shape[1],), sinks) if isinstance(sinks, float) else sinks
    return attention.attend(
        q,
        where,
        TABLE,
        fixed(values, valid),
        sink,
        SCALE,
        dtype,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_returns_its_value_and_its_score(dtype: torch.dtype) -> None:
    q, kv = randn(0, 3, 8, 512), randn(1, 3, 1, 512)
    out = run(q, kv, dtype=dtype)
    assert torch.equal(out.o, kv.to(dtype).expand(3, 8, 512))
    score = (q.double() @ kv.double().transpose(1, 2))[..., 0] * SCALE
    torch.testing.assert_close(out.lse.double(), score, rtol=1e-5, atol=1e-6)
    assert torch.equal(out.lse, out.max_logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_average_to_the_value_and_lse_counts_them(dtype: torch.dtype) -> None:
    kv = randn(1, 2, 1, 512).expand(2, 64, 512)
    out = run(torch.zeros(2, 8, 512).bfloat16(), kv, dtype=dtype)
    assert torch.equal(out.o, kv[:, :1].to(dtype).expand(2, 8, 512))
    torch.testing.assert_close(out.lse, torch.full_like(out.lse, math.log(64)))
    assert (out.max_logits == 0).all()


def test_one_hot_rows_expose_each_keys_probability() -> None:
    count = 100
    kv = torch.zeros(1, count, 512)
    kv[0, torch.arange(count), torch.arange(count)] = 8.0
    q = randn(2, 1, 4, 512)
    out = run(q, kv)
    for head in range(4):
        weight = [math.exp(8 * x * SCALE) for x in q[0, head, :count].tolist()]
        total = math.fsum(weight)
        expected = torch.tensor([8 * w / total for w in weight], dtype=torch.float64)
        torch.testing.assert_close(out.o[0, head, :count], expected)
        assert (out.o[0, head, count:448] == 0).all()
        assert out.lse[0, head].item() == pytest.approx(math.log(total))


def test_adding_a_constant_to_every_score_moves_only_lse() -> None:
    q, kv = randn(3, 2, 8, 512), randn(4, 2, 40, 512)
    kv[..., 0] = 0
    plain = run(q, kv)
    q[..., 0], kv[..., 0] = 2, 64
    moved = run(q, kv)
    torch.testing.assert_close(moved.o[..., 1:], plain.o[..., 1:])
    torch.testing.assert_close(moved.lse - plain.lse, torch.full_like(plain.lse, 128 * SCALE))


def test_order_of_rows_does_not_matter_and_a_duplicate_counts_twice() -> None:
    q, kv = randn(5, 1, 8, 512), randn(6, 1, 30, 512)
    torch.testing.assert_close(run(q, kv.flip(1)).o, run(q, kv).o)
    twice = run(q, kv[:, [0, 1, 1]])
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64).log()
    score = (q.double() @ kv[:, :2].double().transpose(1, 2)) * SCALE + weight
    torch.testing.assert_close(twice.lse, score.logsumexp(-1))
    torch.testing.assert_close(twice.o, score.softmax(-1) @ kv[:, :2].double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_scales_the_output_and_leaves_lse_alone(dtype: torch.dtype) -> None:
    q, kv = randn(7, 2, 6, 512), randn(8, 2, 20, 512)
    free = run(q, kv, dtype=dtype)
    sinks = torch.tensor([-math.inf, math.inf, -1e30, 1e30, 3.0, 0.0])
    sunk = run(q, kv, sinks, dtype=dtype)
    assert torch.equal(sunk.lse, free.lse)
    assert torch.equal(sunk.max_logits, free.max_logits)
    assert torch.equal(sunk.o[:, [0, 2]], free.o[:, [0, 2]])
    assert (sunk.o[:, [1, 3]] == 0).all()
    assert sunk.bound.isfinite().all()
    for head, sink in ((4, 3.0), (5, 0.0)):
        factor = free.lse[:, head].exp() / (free.lse[:, head].exp() + math.exp(sink))
        torch.testing.assert_close(sunk.o[:, head], free.o[:, head] * factor[:, None])


def test_a_sink_equal_to_lse_halves_the_output() -> None:
    q, kv = randn(9, 1, 8, 512), randn(10, 1, 5, 512)
    free = run(q, kv)
    halved = run(q, kv, free.lse[0])
    torch.testing.assert_close(halved.o, free.o / 2)


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.inf])
def test_no_valid_row_gives_zeros_and_signed_infinities(sink: float) -> None:
    q, kv = randn(11, 2, 8, 512), randn(12, 2, 4, 512)
    valid = torch.tensor([[False] * 4, [False, False, True, False]])
    # At position 2 some cosine is negative: unrotating a zero there must not give -0.
    out = run(q, kv, sink, valid, positions=torch.tensor([2, 2]))
    assert (out.lse[0] == math.inf).all()
    assert (out.max_logits[0] == -math.inf).all()
    assert (out.o[0] == 0).all()
    assert not out.o[0].signbit().any()
    assert out.lse[1].isfinite().all()
    for bound in (out.bound, out.lse_bound, out.max_logits_bound):
        assert (bound[0] == 0).all()
        assert bound.isfinite().all()


def test_rows_of_width_zero_are_no_valid_rows() -> None:
    out = run(randn(11, 2, 8, 512), torch.zeros(2, 0, 512))
    assert (out.lse == math.inf).all()
    assert (out.o == 0).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("lead", [0, 3])
def test_rows_that_are_not_valid_may_hold_anything(poison: float, lead: int) -> None:
    q, kv = randn(13, 1, 8, 512), randn(14, 1, 8, 512).float()
    valid = torch.ones(1, 8, dtype=torch.bool)
    valid[0, lead : lead + 3] = False
    clean = run(q, kv * valid[..., None], 1.0, valid)
    kv[~valid] = poison
    for got, expected in zip(run(q, kv, 1.0, valid), clean, strict=True):
        assert torch.equal(got, expected)


def test_inverse_rope_undoes_the_keys_rope_at_the_same_position() -> None:
    positions = torch.tensor([0, 1, 127, 4095])
    latent = randn(15, 4, 1, 512).double()
    roped = rope.on_rope_dims(latent, rope.rotate(latent[..., -64:], TABLE[positions][:, None]))
    out = run(randn(16, 4, 8, 512), roped.float(), positions=positions)
    torch.testing.assert_close(out.o, latent.expand(4, 8, 512), rtol=1e-6, atol=1e-6)


def test_scores_depend_on_relative_position_only() -> None:
    q, latent = randn(17, 1, 8, 512), randn(18, 1, 6, 512).double()
    lse = []
    for base in (0, 100):
        keys = torch.arange(6) * 3 + base
        turned = rope.rotate(latent[..., -64:], TABLE[keys])
        roped = rope.on_rope_dims(latent, turned).float()
        lse.append(run(q, roped, positions=torch.tensor([base + 20])).lse)
    torch.testing.assert_close(lse[0], lse[1], rtol=0, atol=2e-2)  # q is rounded to bf16


def test_q_rope_result_is_rounded_to_bf16_and_nope_dims_are_untouched() -> None:
    q, positions = randn(19, 5, 8, 512), torch.arange(5) * 17
    turned, _ = attention.rope_q(q, TABLE[positions], torch.float64)
    assert torch.equal(turned[..., :448], q[..., :448].double())
    assert torch.equal(turned, turned.bfloat16().double())
    exact = rope.rotate(q[..., -64:].double(), TABLE[positions][:, None])
    assert ((turned[..., 448:] - exact).abs() <= 2.0**-8 * exact.abs()).all()


def test_a_q_beside_a_bf16_tie_widens_the_score_bound_by_its_step() -> None:
    angle = torch.zeros(1, 64)
    angle[0, :32], angle[0, 32:] = 1.0, 2.0**-8  # x - y · 2^-8 lands exactly between bf16 values
    q = torch.zeros(1, 2, 512).bfloat16()
    q[0, :, 448] = 1.0
    q[0, :, 449] = torch.tensor([-1.0, 0.0])
    _, step = attention.rope_q(q, angle, torch.float64)
    assert step[0, 0, 0] == 2.0**-7
    assert step[0, 1, 0] == 0
    kv = torch.full((1, 3, 512), 4.0)
    out = attention.attend(
        q, torch.zeros(1), angle, fixed(kv), torch.full((2,), NO_SINK), SCALE, torch.float64
    )
    assert out.max_logits_bound[0, 0] > 2.0**-7 * 4 * SCALE > out.max_logits_bound[0, 1]


def test_q_norm_scales_scores_by_the_un_roped_qs_rms() -> None:
    q, kv, positions = randn(20, 2, 8, 512), randn(21, 2, 9, 512), torch.tensor([5, 900])
    normed = run(q, kv, positions=positions, q_norm_eps=1e-6)
    turned, _ = attention.rope_q(q, TABLE[positions], torch.float64)
    rms = (q.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    score = torch.bmm(turned, kv.double().transpose(1, 2)) * SCALE * rms
    torch.testing.assert_close(normed.lse, score.logsumexp(-1))
    assert not torch.allclose(normed.lse, run(q, kv, positions=positions).lse)


def test_chunking_does_not_change_the_result() -> None:
    q, kv, sinks = randn(22, 9, 8, 512), randn(23, 9, 50, 512), torch.randn(8)
    valid = torch.rand(9, 50, generator=torch.Generator().manual_seed(0)) < 0.7
    positions = torch.arange(9) * 400
    rows = fixed(kv, valid)
    whole = attention.attend(q, positions, TABLE, rows, sinks, SCALE, torch.float64)
    pieces = list(
        attention.attend_chunks(
            q, positions, TABLE, rows, sinks, SCALE, torch.float64, chunk_bytes=2 << 20
        )
    )
    assert len(pieces) > 3
    for name in Attended._fields:
        joined = torch.cat([getattr(chunk, name) for _, chunk in pieces])
        torch.testing.assert_close(joined, getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_leaving_out_bounds_leaves_values_alone() -> None:
    q, kv = randn(24, 2, 8, 512), randn(25, 2, 9, 512)
    bare, full = run(q, kv, 0.0, bounds=False), run(q, kv, 0.0)
    assert torch.equal(bare.o, full.o)
    assert torch.equal(bare.lse, full.lse)
    assert bare.bound.shape == ()


def test_no_tokens_need_no_rows() -> None:
    def never(tokens: slice) -> tuple[Tensor, Tensor]:
        raise AssertionError("rows were asked for")

    q, none = torch.zeros(0, 8, 512).bfloat16(), torch.zeros(0, dtype=torch.long)
    out = attention.attend(q, none, TABLE, never, torch.zeros(8), SCALE)
    assert out.o.shape == (0, 8, 512)


FAMILIES = ["random", "outliers", "cancelling", "peaked", "far below zero", "nearly equal"]


def family(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """q bf16 [2, 8, 512], rows [2, 640, 512] and sinks [8] of a family of logits."""
    q, kv = randn(30, 2, 8, 512), randn(31, 2, 640, 512)
    if name == "outliers":
        kv[..., [7, 300, 460]] *= 64
    elif name == "cancelling":
        q[..., :224], q[..., 224:448] = 16, -16
        kv[..., :448] = kv[..., :1] * 16 + kv[..., :448]
    elif name == "peaked":
        q *= 16
    elif name == "far below zero":
        q[..., :448], kv[..., :448] = 72, kv[..., :448] - 70
    elif name == "nearly equal":
        q *= 2.0**-10
    score = torch.bmm(q.float(), kv.float().transpose(1, 2)) * SCALE
    sinks = score[0].logsumexp(-1) + torch.linspace(-2, 2, 8)
    return q, kv, sinks


def simulated(q: Tensor, kv: Tensor, sinks: Tensor, positions: Tensor, terms: int) -> Attended:
    """An implementation: float32, dot products summed ``terms`` at a time, bf16 probabilities."""
    cos_sin = TABLE[positions][:, None]
    turned = rope.rotate(q[..., -64:].float(), cos_sin).bfloat16().float()
    query, rows = rope.on_rope_dims(q.float(), turned), kv.float()
    score = torch.zeros(len(q), q.shape[1], kv.shape[1])
    for start in range(0, 512, terms):
        part = slice(start, start + terms)
        score += torch.bmm(query[..., part], rows[..., part].transpose(1, 2))
    score *= SCALE
    top = score.amax(-1)
    p = (score - top[..., None]).exp()
    total = p.sum(-1)
    lse = top + total.log()
    o = torch.bmm(p.bfloat16().float(), rows) / total[..., None]
    o = o / (1 + (sinks - lse).exp())[..., None]
    o = rope.on_rope_dims(o, rope.unrotate(o[..., -64:], cos_sin))
    none = torch.zeros(())
    return Attended(o, none, lse, none, top, none)


def excess(actual: Attended, golden: Attended) -> dict[str, float]:
    """Largest error / bound of each output."""
    pairs = {
        "o": (actual.o, golden.o, golden.bound),
        "lse": (actual.lse, golden.lse, golden.lse_bound),
        "max_logits": (actual.max_logits, golden.max_logits, golden.max_logits_bound),
    }
    return {
        name: ((a.double() - g).abs() / b.double()).max().item()
        for name, (a, g, b) in pairs.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("terms", [1, 16, 512])
def test_a_right_float32_implementation_stays_within_the_bounds(name: str, terms: int) -> None:
    q, kv, sinks = family(name)
    positions = torch.tensor([3, 4000])
    golden = run(q, kv, sinks, positions=positions)
    worst = excess(simulated(q, kv, sinks, positions, terms), golden)
    assert max(worst.values()) < 1, worst


@pytest.mark.parametrize("name", FAMILIES)
def test_golden_in_float32_stays_within_the_bounds_of_float64(name: str) -> None:
    q, kv, sinks = family(name)
    positions = torch.tensor([3, 4000])
    golden = run(q, kv, sinks, positions=positions)
    worst = excess(run(q, kv, sinks, positions=positions, dtype=torch.float32), golden)
    assert max(worst.values()) < 1, worst


def test_wrong_implementations_leave_the_bounds() -> None:
    q, kv, sinks = family("random")
    positions = torch.tensor([3, 4000])
    golden = run(q, kv, sinks, positions=positions)

    def worst(actual: Attended) -> dict[str, float]:
        return excess(actual, golden)

    assert worst(simulated(q, kv, sinks.roll(1), positions, 512))["o"] > 10
    assert worst(simulated(q, kv[:, :639], sinks, positions, 512))["lse"] > 10
    assert worst(simulated(q, kv[:, :639], sinks, positions, 512))["o"] > 1
    assert worst(simulated(q, kv, sinks, positions + 1, 512))["o"] > 10
    assert worst(simulated(q.flip(1), kv, sinks, positions, 512))["max_logits"] > 100
    sunk = run(q, kv, sinks, positions=positions)
    log2 = sunk._replace(lse=sunk.lse / math.log(2))
    assert worst(log2)["lse"] > 100


def test_an_implementation_that_sums_rounded_probabilities_gets_the_wider_bound() -> None:
    q, kv, sinks = family("random")
    tight, wide = run(q, kv, sinks), run(q, kv, sinks, sums_rounded_p=True)
    assert (wide.bound >= tight.bound).all()
    assert ((wide.bound - tight.bound)[..., :448] > 0.99 * 2.0**-8 * tight.o[..., :448].abs()).all()
    torch.testing.assert_close(
        wide.lse_bound - tight.lse_bound,
        torch.full_like(tight.lse_bound, 2.0**-8),
        rtol=1e-3,
        atol=0,
    )
