// The index cursor: turns slot ids into record offsets, kLookahead blocks before the scores, and
// brings the records into L2. Run by the score warps while their tensor work is in flight.
#pragma once

#include "layout.cuh"

struct Cursor {
  const Params& p;
  u32 smem;
  int row, half;        // this lane's row of a block; two lanes share one
  int rank, step;
  int item, block, end; // next block of the current item; items past the last give masked blocks
  int rows[2], first_extra;
  int next_length[2];   // raw lengths of the next item, loaded one item early
  u32 slot, meta;       // ring slot to publish into
  int index;            // slot id read for it

  DEVICE Cursor(const Params& params, u32 smem_base, Lane me, int first_item, int item_step, int r)
      : p(params), smem(smem_base), row(16 * me.warp + (me.lane >> 1)), half(me.lane & 1), rank(r),
        step(item_step), item(first_item - item_step), block(0), end(0), slot(0), meta(0),
        index(-1) {
    load_lengths(first_item);
  }

  DEVICE void load_lengths(int of_item) {
    const bool live = of_item < p.items;
    const int token = live ? of_item / p.head_tiles : 0;
#pragma unroll
    for (int k = 0; k < 2; k++)
      next_length[k] = !live ? 0 : p.lengths[k] ? load_index(p.lengths[k] + token) : p.topk[k];
  }

  DEVICE void next_item() {
    item += step;
#pragma unroll
    for (int k = 0; k < 2; k++) rows[k] = min(max(next_length[k], 0), p.topk[k]);
    load_lengths(item + step);
    first_extra = (rows[0] + kBlock - 1) / kBlock;
    const int blocks = first_extra + (rows[1] + kBlock - 1) / kBlock;
    block = blocks * rank / p.split;
    end = blocks * (rank + 1) / p.split;
    if (block == end) {  // nothing to do: one masked block keeps every role in step
      rows[0] = rows[1] = 0;
      first_extra = ++end;
    }
  }

  // Reads the slot ids of the next block.
  DEVICE void fetch() {
    if (block == end) next_item();
    const int extra = block >= first_extra;
    const int column = (block - (extra ? first_extra : 0)) * kBlock + row;
    index = -1;
    if (column < (extra ? rows[1] : rows[0]))
      index = load_index(p.indices[extra] + (i64)(item / p.head_tiles) * p.index_stride[extra] +
                         column);
    block++;
    meta = (extra ? kMetaExtra : 0) | (block == end ? kMetaLast : 0);
  }

  // Publishes the block that `fetch` read.
  DEVICE void publish() {
    const int extra = meta & kMetaExtra;
    const bool fp4 = extra && p.extra_fp4;
    u32 offset = kNoRow;
    if ((u32)index < p.slots[extra]) {
      const u32 page = (u32)index / p.page[extra], inside = (u32)index - page * p.page[extra];
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
    if (half == 0)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem + kSmemOffsets + (slot * kBlock + row) * 4),
                   "r"(offset)
                   : "memory");
    if (row == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem + kSmemMeta + slot * 4), "r"(meta)
                               : "memory");
    slot = (slot + 1) % kSlots;
  }
};
