"""Lists with holes: what the ops are called with a second time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabench.validate.stages.holes import holed

HOLES = torch.tensor([-1, -7], dtype=torch.int32)


FAR = 2**31 - 1


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 128), min_size=1, max_size=8), st.sampled_from([128, 448, 640]))
def test_only_a_tokens_own_rows_are_named_beside_holes_and_slots_outside_any_pool(
    lengths: list[int], width: int
) -> None:
    lens = torch.tensor(lengths, dtype=torch.int32)
    rows = torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width)
    lists, new = holed(rows, lens, HOLES)
    assert lists.dtype == new.dtype == torch.int32
    for own, count, made, length in zip(rows, lengths, lists, new.tolist(), strict=True):
        assert FAR not in made[:length]
        named = made[(made >= 0) & (made < FAR)]
        assert set(named.tolist()) <= set(own[:count].tolist())
        assert (len(named) == 0) == (count == 0)
        assert set(made[made < 0].tolist()) <= {-1, -7}


def test_a_token_has_holes_nothing_one_row_or_one_short_of_whole_tiles() -> None:
    lens = torch.full((5,), 128, dtype=torch.int32)
    rows = torch.arange(5 * 128, dtype=torch.int32).view(5, 128)
    lists, new = holed(rows, lens, HOLES)
    assert new.tolist() == [123, 0, 1, 127, 123]
    broken, _, one, short, _ = lists
    assert (broken[:96] < 0).all()
    assert (broken[96:123] < 0).any()
    assert (broken[96:123] >= 0).any()
    assert (one[0], short[127]) == (rows[2, 0], rows[3, 127])
    assert bool((short[:127] >= 0).all())


def test_rows_and_far_slots_stand_past_the_length() -> None:
    lens = torch.full((4,), 128, dtype=torch.int32)
    rows = torch.arange(4 * 128, dtype=torch.int32).view(4, 128)
    lists, _ = holed(rows, lens, HOLES)
    assert set(lists[0, 123:126].tolist()) > {123, 125}
    assert lists[2, 1:126].tolist() == rows[2, 1:126].tolist()
    assert lists[:3, -2:].tolist() == [[FAR, FAR]] * 3
