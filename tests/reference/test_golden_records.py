"""Records and page layouts, byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference import codes, quantize, records, rope, rows
from reference.cache import acceptable, accepts, compressed_slot, inserted_rows

WIDTHS = [528, 288, 584]
TABLE = rope.cos_sin_table(5000, compressed=True)


def random_rows(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(2 * torch.randn(count, 512, generator=generator))
    return torch.randn(count, 512, generator=generator) * size


def byte_pool(blocks: int, page: int, nbytes: int, pad: int) -> tuple[Tensor, Tensor]:
    """A cache over a storage of distinct-ish bytes, and that storage ``[blocks, stride]``."""
    storage = torch.arange(blocks * (page * nbytes + pad)).mul(131).remainder(251)
    storage = storage.to(torch.uint8).view(blocks, -1)
    shape, stride = (blocks, page, 1, nbytes), (storage.stride(0), nbytes, nbytes, 1)
    return storage.as_strided(shape, stride), storage


@pytest.mark.parametrize("nbytes", WIDTHS)
@pytest.mark.parametrize("pad", [0, 160])
def test_reading_a_slot_follows_the_layouts_offsets(nbytes: int, pad: int) -> None:
    blocks, page = 3, 4
    cache, storage = byte_pool(blocks, page, nbytes, pad)
    data = records.RECORDS[nbytes].data
    tail = nbytes - data
    for slot in range(blocks * page):
        block, offset = divmod(slot, page)
        line = storage[block]
        whole = line[offset * nbytes : (offset + 1) * nbytes]
        scales = page * data + offset * tail
        split = torch.cat([line[offset * data :][:data], line[scales : scales + tail]])
        where = torch.tensor([slot])
        assert torch.equal(records.read_record(cache, where, "interleaved")[0], whole)
        assert torch.equal(records.read_record(cache, where, "page_split")[0], split)


@pytest.mark.parametrize("nbytes", WIDTHS)
@pytest.mark.parametrize("layout", records.LAYOUTS)
def test_writing_then_reading_returns_the_rows_and_touches_nothing_else(
    nbytes: int, layout: str
) -> None:
    cache, storage = byte_pool(5, 8, nbytes, 64)
    before = storage.clone()
    slots = torch.tensor([39, 0, -1, 17, -1, 8])
    encoded = records.encode_rows(random_rows(1, 6), nbytes)
    records.write_record(cache, slots, encoded, layout)
    named = slots >= 0
    assert torch.equal(records.read_record(cache, slots[named], layout), encoded[named])
    assert (storage != before).sum() <= 4 * nbytes
    others = torch.tensor([s for s in range(40) if s not in slots.tolist()])
    pristine = before.as_strided(cache.shape, cache.stride())
    assert torch.equal(
        records.read_record(cache, others, layout), records.read_record(pristine, others, layout)
    )
    assert torch.equal(storage[:, 8 * nbytes :], before[:, 8 * nbytes :])


def test_an_528_byte_record_is_512_codes_then_16_scales() -> None:
    row = torch.zeros(528, dtype=torch.uint8)
    row[33], row[512 + 1] = 0x38, 130  # 1.0 in the second block, scaled by 8
    values = records.decode_rows(row)
    assert values.nonzero().tolist() == [[33]]
    assert values[33] == 8


def test_a_288_byte_record_keeps_the_even_element_in_the_low_nibble() -> None:
    row = torch.zeros(288, dtype=torch.uint8)
    row[8] = 0x2 | 0xF << 4  # elements 16 and 17: code 2 = 1.0 and code 15 = -6
    row[256 + 1] = 0x40  # e4m3 2.0, the scale of dims 16..31
    values = records.decode_rows(row)
    assert values[16] == 2
    assert values[17] == -12
    assert values.count_nonzero() == 2


def test_a_584_byte_record_holds_bf16_rope_dims_and_ignores_its_last_byte() -> None:
    row = torch.zeros(584, dtype=torch.uint8)
    row[70] = 0xB8  # -1.0 in the second block of 64
    row[576 + 1] = 128
    rope_dims = torch.arange(64).bfloat16() * 0.37
    row[448:576] = rope_dims.view(torch.uint8)
    row[583] = 0xFF
    values = records.decode_rows(row)
    assert values[70] == -2
    assert torch.equal(values[448:], rope_dims.float())


@pytest.mark.parametrize("nbytes", WIDTHS)
def test_encoded_rows_decode_to_the_quantizers_values_exactly_in_bf16(nbytes: int) -> None:
    row = random_rows(2, 20)
    encoded = records.encode_rows(row, nbytes)
    decoded = records.decode_rows(encoded)
    assert torch.equal(decoded, decoded.bfloat16().float())
    if nbytes == 528:
        expected = quantize.dequantize_mxfp8(*quantize.kv_mxfp8(row))
    elif nbytes == 288:
        code, scale = quantize.nvfp4(row)
        expected = codes.decode_e2m1(code) * codes.decode_e4m3(scale).repeat_interleave(16, -1)
    else:
        nope = quantize.dequantize_mxfp8(*quantize.kv_mxfp8(row[:, :448], 64), block=64)
        expected = torch.cat([nope, row[:, 448:].bfloat16().float()], dim=-1)
    assert torch.equal(decoded, expected)
    assert torch.equal(records.pack(*records.unpack(encoded), nbytes), encoded)


@pytest.mark.parametrize("slot", [-1, 12])
def test_a_slot_outside_the_pool_is_refused(slot: int) -> None:
    cache, _ = byte_pool(3, 4, 528, 0)
    with pytest.raises(ValueError, match="slots must lie"):
        records.decode_slots(cache, torch.tensor([slot]))


def test_unknown_widths_layouts_and_torn_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="530 bytes"):
        records.record_of(530)
    cache, _ = byte_pool(3, 4, 528, 0)
    with pytest.raises(ValueError, match="page layout"):
        records.read_record(cache, torch.tensor([0]), "planar")
    with pytest.raises(ValueError, match="contiguous"):
        records.read_record(cache[:, ::2], torch.tensor([0]))


def test_paged_rows_honour_lengths_holes_and_the_pools_end() -> None:
    encoded = records.encode_rows(random_rows(3, 12), 528)
    cache = encoded.view(3, 4, 528)
    slots = torch.tensor([[5, -1, 11, 3], [12, 0, 7, 7]])
    source = rows.paged_rows([rows.Paged(cache, slots, torch.tensor([3, 4]))])
    values, valid = source(slice(0, 2))
    assert valid.tolist() == [[True, False, True, False], [False, True, True, True]]
    assert torch.equal(values[valid], records.decode_slots(cache, slots[valid]))
    two = rows.paged_rows([rows.Paged(cache, slots, torch.tensor([3, 4]))] * 2)
    assert torch.equal(two(slice(1, 2))[0], torch.cat([values[1:], values[1:]], dim=1))


def test_paged_rows_read_large_pools_without_decoding_them_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = records.encode_rows(random_rows(4, 12), 288).view(3, 4, 288)
    part = rows.Paged(cache, torch.tensor([[5, -1, 11], [2, 0, 7]]), torch.tensor([3, 2]))
    dense, dense_valid = rows.paged_rows([part])(slice(0, 2))
    monkeypatch.setattr(rows, "_DENSE_ROWS", 2)
    direct, valid = rows.paged_rows([part])(slice(0, 2))
    assert torch.equal(valid, dense_valid)
    assert torch.equal(direct[valid], dense[valid])


def test_workspace_rows_skip_indices_outside_it() -> None:
    kv = random_rows(5, 6).bfloat16()[:, None]
    indices = torch.tensor([[[0, 6, -1, 5]], [[2, 2, 1, 0]]], dtype=torch.int32)
    values, valid = rows.workspace_rows(kv, indices, torch.tensor([4, 2]))(slice(0, 2))
    assert valid.tolist() == [[True, False, False, True], [True, True, False, False]]
    assert torch.equal(values[1, 0], kv[2, 0])


@pytest.mark.parametrize("nbytes", WIDTHS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_float32_rotation_with_or_without_fma_is_accepted(nbytes: int, fused: bool) -> None:
    kv, positions = random_rows(6, 200).bfloat16(), torch.arange(200) * 23
    expected = inserted_rows(kv, positions, TABLE, nbytes)
    part, cos_sin = kv[:, -64:].float(), TABLE[positions]
    turned = rope.rotate(part, cos_sin)
    if fused:  # one product exact, one rounding of the sum, as a fused multiply-add does it
        even, odd = part[:, 0::2], part[:, 1::2]
        cos, sin = cos_sin.chunk(2, dim=-1)
        first = even.double() * cos.double() - (odd * sin).double()
        second = odd.double() * cos.double() + (even * sin).double()
        turned = torch.stack([first, second], dim=-1).flatten(-2).float()
    encoded = records.encode_rows(rope.on_rope_dims(kv.float(), turned), nbytes)
    assert accepts(expected, encoded).all()
    if not fused:
        assert torch.equal(encoded, expected.bytes)


@pytest.mark.parametrize("nbytes", WIDTHS)
def test_any_changed_nope_code_or_scale_is_refused(nbytes: int) -> None:
    kv, positions = random_rows(7, 1).bfloat16(), torch.tensor([777])
    expected = inserted_rows(kv, positions, TABLE, nbytes)
    record = records.RECORDS[nbytes]
    nope = 448 if nbytes != 288 else 224
    touched = [*range(nope), *range(record.data, record.data + record.groups)]
    for byte in touched:
        for change in (1, 0x10, 0x80):
            actual = expected.bytes.clone()
            actual[0, byte] ^= change
            assert not accepts(expected, actual)[0], byte


def test_rotating_after_a_bf16_rounding_is_refused() -> None:
    kv, positions = random_rows(8, 50).bfloat16(), torch.arange(50) + 100
    expected = inserted_rows(kv, positions, TABLE, 528)
    turned = rope.rotate(kv[:, -64:].float(), TABLE[positions]).bfloat16().float()
    rounded = records.encode_rows(rope.on_rope_dims(kv.float(), turned), 528)
    good = acceptable(expected, rounded)
    assert good[:, :448].all()
    assert not good.all()
    # The rounding moves ties only: few codes differ, so a tolerance on values would miss it.
    assert (~good).float().mean() < 0.02


def test_a_rope_code_may_differ_by_one_only_beside_a_tie() -> None:
    cos_sin = torch.zeros(1, 64)
    cos_sin[:, :32], cos_sin[:, 32:] = 1.0, 2.0**-12
    kv = torch.zeros(2, 512).bfloat16()
    kv[:, 448] = 400.0  # the block's scale byte is 127: codes stand for the values themselves
    kv[:, 450] = torch.tensor([17.0, 17.125])  # halfway between 16 and 18, and not
    expected = inserted_rows(kv, torch.zeros(2, dtype=torch.long), cos_sin, 528)
    assert expected.may_differ[:, 450].tolist() == [True, False]
    sixteen = int(codes.round_e4m3(torch.tensor(16.0)))
    for code, verdicts in ((sixteen, [True, False]), (sixteen + 1, [True, True])):
        actual = expected.bytes.clone()
        actual[:, 450] = code
        assert accepts(expected, actual).tolist() == verdicts
    actual[:, 450] = sixteen + 2
    assert not accepts(expected, actual).any()


def test_position_zero_leaves_no_doubt() -> None:
    kv = random_rows(9, 100).bfloat16()
    expected = inserted_rows(kv, torch.zeros(100, dtype=torch.long), TABLE, 528)
    assert not expected.may_differ.any()
    assert torch.equal(expected.bytes, records.encode_rows(kv.float(), 528))


def test_a_compressed_row_is_roped_at_its_groups_first_position() -> None:
    kv = random_rows(10, 4).bfloat16()
    closing = inserted_rows(kv, torch.tensor([1, 3, 5, 4001]), TABLE, 288, compress_ratio=2)
    first = inserted_rows(kv, torch.tensor([0, 2, 4, 4000]), TABLE, 288)
    assert torch.equal(closing.bytes, first.bytes)


def test_a_compressed_row_goes_to_its_page_only_when_it_closes() -> None:
    table = torch.tensor([7, 3, 9])
    position = torch.tensor([0, 1, 2, 127, 128, 129, 255])
    slots = compressed_slot(position, 2, table, 64)
    assert slots.tolist() == [-1, 7 * 64, -1, 7 * 64 + 63, -1, 3 * 64, 3 * 64 + 63]
    every = compressed_slot(position, 1, table.expand(7, 3), 128)
    assert every.tolist() == [896, 897, 898, 1023, 384, 385, 511]
