// The index cursor: turns slot ids into record offsets, kLookahead blocks ahead, and brings the
// records into L2. Run by the converter warps, each for its own rows, while they wait for a tile.
#pragma once

#include "layout.cuh"

// Row of a block that a converter warp has in place i of its 16: four of every step of P V.
DEVICE int converter_row(int warp, int i) { return kStep * (i >> 2) + 4 * warp + (i & 3); }

struct Cursor {
  const Params& p;
  u32 smem;
  int row, half;        // this lane's row of a block (see converter_row); two lanes share one
  int rank, step;
  int item, block, end; // next block of the current item; items past the last give masked blocks
  int rows0, rows1, first_extra;
  int length0, length1; // raw lengths of the next item, loaded one item early
  u32 fetched, published;

  DEVICE Cursor(const Params& params, u32 smem_base, int warp, int lane, int first_item, int item_step,
                int r)
      : p(params), smem(smem_base), row(converter_row(warp, lane >> 1)), half(lane & 1), rank(r), step(item_step), item(first_item - item_step), block(0), end(0), fetched(0), published(0) {
    load_lengths(first_item);
  }

  DEVICE u32 offset_at(u32 slot) const {
    return smem + kSmemOffsets + ((slot % kSlots) * kBlock + row) * 4;
  }
  DEVICE u32 meta_at(u32 slot) const { return smem + kSmemMeta + (slot % kSlots) * 4; }

  DEVICE void load_lengths(int of_item) {
    const bool live = of_item < p.items;
    const int token = token_of(p, of_item);
    length0 = live ? p.topk[0] : 0;
    length1 = live ? p.topk[1] : 0;
    if (live && p.lengths[0]) length0 = load_index(p.lengths[0] + token);
    if (live && p.lengths[1]) length1 = load_index(p.lengths[1] + token);
  }

  DEVICE void next_item() {
    item += step;
    rows0 = min(max(length0, 0), p.topk[0]);
    rows1 = min(max(length1, 0), p.topk[1]);
    load_lengths(item + step);
    first_extra = (rows0 + kBlock - 1) / kBlock;
    const int blocks = first_extra + (rows1 + kBlock - 1) / kBlock;
    block = blocks * rank / p.split;
    end = blocks * (rank + 1) / p.split;
    if (block == end) {  // nothing to do: one masked block keeps every role in step
      rows0 = rows1 = 0;
      first_extra = ++end;
    }
  }

  // Starts to read the slot ids of the next block into the ring; the caller commits the copy.
  DEVICE void fetch() {
    if (block == end) next_item();
    const int extra = block >= first_extra;
    const int column = (block - (extra ? first_extra : 0)) * kBlock + row;
    block++;
    if (half == 0) {
      const u32 to = offset_at(fetched);
      if (column < (extra ? rows1 : rows0))
        copy4(to, p.indices[extra] + (i64)(token_of(p, item)) * p.index_stride[extra] + column);
      else
        store_shared(to, kNoRow);
      store_shared(meta_at(fetched), (extra ? kMetaExtra : 0) | (block == end ? kMetaLast : 0));
    }
    fetched++;
  }

  // Turns the slot ids of the oldest fetched block, which must have arrived, into offsets in place.
  DEVICE void publish() {
    __syncwarp();
    const u32 at = offset_at(published), index = load_shared(at);
    const int extra = load_shared(meta_at(published)) & kMetaExtra;
    const bool fp4 = kExtraFp4 && extra;
    u32 offset = kNoRow;
    if (index < p.slots[extra]) {
      const u32 page = (u64)index * p.page_magic[extra] >> p.page_shift[extra];
      const u32 inside = index - page * p.page[extra];
      offset = page * p.page_stride[extra] + inside * ((fp4 ? kFp4Record : kFp8Record) / 16);
      const u8* line = p.pool[extra] + (u64)offset * 16 + 64 * half;
      prefetch_l2(line);
      prefetch_l2(line + 128);
      if (!fp4 || half == 0) prefetch_l2(line + 256);
      if (!fp4) {
        prefetch_l2(line + 384);
        if (half == 0) prefetch_l2(line + 512);
      }
    }
    __syncwarp();
    if (half == 0) store_shared(at, offset);
    published++;
  }
};
