"""The hash is a plain function of label and counter, computed alike everywhere."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.hashing import Stream, permutation

CPU = torch.device("cpu")


def finalise(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def plain_words(count: int, *labels: str) -> list[int]:
    digest = hashlib.sha256("\x1f".join(labels).encode()).digest()
    first, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))
    return [finalise(finalise(i ^ first) ^ second) for i in range(count)]


@settings(deadline=None, max_examples=20)
@given(st.text(max_size=8), st.integers(0, 300))
def test_words_equal_the_same_hash_in_unbounded_integers(label: str, count: int) -> None:
    words = Stream.of(label, "x").words(count, device=CPU)
    assert [w & 0xFFFFFFFF for w in words.tolist()] == plain_words(count, label, "x")


def test_labels_make_independent_streams() -> None:
    a, b = (Stream.of("a", n).words(4096, device=CPU) for n in (0, 1))
    equal_bits = sum((~(a ^ b) >> i & 1).sum().item() for i in range(32))
    assert abs(equal_bits / (4096 * 32) - 0.5) < 0.01


def test_normals_have_the_moments_of_a_normal_and_bounded_tails() -> None:
    x = Stream.of("n").normals(200_000, device=CPU).to(torch.float64)
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1) < 0.02
    assert abs((x**4).mean() - 2.7) < 0.05  # kurtosis of a sum of four uniforms
    assert x.abs().max() < 3.47


def test_longer_tensors_begin_with_the_shorter_ones() -> None:
    stream = Stream.of("prefix")
    assert torch.equal(stream.normals(7, 33, device=CPU)[:5], stream.normals(5, 33, device=CPU))
    assert torch.equal(stream.bytes(103, device=CPU)[:50], stream.bytes(50, device=CPU))


def test_bounded_draws_reach_every_value_below_their_bound() -> None:
    bound = torch.arange(1, 6).repeat(400)
    drawn = Stream.of("below").below(bound)
    assert all(set(drawn[bound == b].tolist()) == set(range(b)) for b in range(1, 6))


@pytest.mark.parametrize("count", [0, 1, 2, 257])
def test_a_permutation_names_every_index_once(count: int) -> None:
    order = permutation(Stream.of("p"), count)
    assert sorted(order.tolist()) == list(range(count))
    assert count < 200 or order.tolist() != list(range(count))


def test_more_words_than_a_counter_can_number_are_refused() -> None:
    with pytest.raises(ValueError, match="2\\^31"):
        Stream.of("x").words(1 << 31, device=CPU)
