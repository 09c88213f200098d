"""Lists with holes: what the ops are called with a second time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.validate.stages.holes import holed

HOLES = torch.tensor([-1, -7], dtype=torch.int32)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 128), min_size=1, max_size=4), st.sampled_from([128, 448, 640]))
def test_only_a_tokens_own_rows_are_named_and_only_after_whole_tiles(
    lengths: list[int], width: int
) -> None:
    lens = torch.tensor(lengths, dtype=torch.int32)
    rows = torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width)
    lists, new = holed(rows, lens, HOLES)
    assert lists.dtype == new.dtype == torch.int32
    for own, count, made in zip(rows, lengths, lists, strict=True):
        assert made[-2:].tolist() == [2**31 - 1] * 2
        made = made[:-2]
        named = made[made >= 0]
        assert set(named.tolist()) <= set(own[:count].tolist())
        assert (len(named) == 0) == (count == 0)
        assert (made[: width * 3 // 4] < 0).all()
        assert set(made[made < 0].tolist()) <= {-1, -7}


def test_rows_stand_past_the_length_and_every_second_token_has_none() -> None:
    lens = torch.full((4,), 128, dtype=torch.int32)
    rows = torch.arange(4 * 128, dtype=torch.int32).view(4, 128)
    lists, new = holed(rows, lens, HOLES)
    assert new.tolist() == [123, 0, 123, 0]
    assert set(lists[0, 123:126].tolist()) > {123, 125}
    assert (lists[0, 96:123] < 0).any()
    assert (lists[0, 96:123] >= 0).any()
