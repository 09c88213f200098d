"""What a check sees of an op's copy: bits, whatever they mean, and a cache that is put back."""

from __future__ import annotations

import pytest
import torch

from megabench.bench.copies import Copy, same
from megabench.bench.ops import Target, flip_
from megabench.bench.recheck import Expected


def test_nan_outputs_are_compared_by_their_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert same([nan.view(torch.uint8)], [nan.clone().view(torch.uint8)])
    assert not same([nan.view(torch.uint8)], [(-nan).view(torch.uint8)])


def test_equal_numbers_of_another_size_are_other_bits() -> None:
    assert not same([torch.ones(3, dtype=torch.int16)], [torch.ones(3, dtype=torch.int32)])


@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("size", [1, 8, 24, 27])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_one_bit_anywhere_is_a_difference(start: int, size: int, dtype: torch.dtype) -> None:
    """Whether memory divides into words or not, and beside a clone that lies closer."""
    bits = torch.arange(64).to(dtype)[start : start + size]
    sparse = torch.arange(64).to(dtype).view(8, 8)[:, :start]
    seen = [bits, sparse]
    plain = [bits.clone(), sparse.contiguous()]
    assert same(seen, plain)
    for flat in plain[0], plain[1].view(-1):
        for index in range(flat.numel()):
            flat[index] ^= 64
            assert not same(seen, plain)
            flat[index] ^= 64


def test_a_cache_written_in_place_is_put_back() -> None:
    cache = torch.arange(4 * 2 * 8, dtype=torch.uint8).view(4, 2, 8)
    before = cache.clone()
    target = Target(cache, pages=torch.tensor([1]))
    copy = Copy(lambda: [cache[1, 0].fill_(7)], [target])
    seen = Expected(copy).plain[0].view(1, 2, 8)
    assert seen[0, 0].tolist() == [7] * 8
    assert seen[0, 1].tolist() == [0x5A] * 8
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_flipping_the_sign_twice_is_the_identity(dtype: torch.dtype) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    negated = (-x.to(torch.float32)).to(dtype)
    flipped = x.clone()
    flip_(flipped)
    assert torch.equal(flipped.view(torch.uint8), negated.view(torch.uint8))
    flip_(flipped)
    assert torch.equal(flipped.view(torch.uint8), x.view(torch.uint8))


def test_a_run_that_fails_leaves_the_cache_as_it_was() -> None:
    cache = torch.arange(12, dtype=torch.uint8).view(4, 3)
    before = cache.clone()

    def fails() -> list[torch.Tensor]:
        assert not torch.equal(cache, before)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Expected(Copy(fails, [Target(cache, torch.tensor([1, 2]))]))
    assert torch.equal(cache, before)
