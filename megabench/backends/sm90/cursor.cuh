// The index cursor: turns slot ids into record offsets, kLookahead blocks ahead of the scores. Run
// by the score warps: on the output warps it made the whole slower. These, idle longest, bring the
// records into L2 (prefetches take long to issue).
#pragma once

#include "layout.cuh"

struct Cursor {
  const Params& p;
  u32 smem;
  int row, half;        // this lane's row of a block; two lanes share one
  int rank, step;
  int item, block, end; // next block of the current item; items past the last give masked blocks
  int rows0, rows1, first_extra;
  u32 next_lengths;     // where the next item's raw lengths are copied, one item early
  u32 published;
  u32 copied;           // first blocks whose slot ids are copied into the ring
  int index;            // slot id of this lane's row of the block to publish next
  u32 meta;

  DEVICE Cursor(const Params& params, u32 smem_base, Lane me, int first_item, int item_step, int r)
      : p(params), smem(smem_base), row(16 * me.warp + (me.lane >> 1)), half(me.lane & 1), rank(r),
        step(item_step), item(first_item), block(0), end(0), rows0(params.topk[0]),
        rows1(params.topk[1]), next_lengths(smem_base + kSmemNextLengths + 8 * me.warp),
        published(0), copied(0), index(-1), meta(0) {
    copy_lengths(first_item);
  }

  DEVICE u32 offset_at(u32 slot) const {
    return smem + kSmemOffsets + ((slot % kSlots) * kBlock + row) * 4;
  }

  // Lanes 0 and 1 of every warp copy one length each.
  DEVICE void copy_lengths(int of_item) {
    const int* lengths = pick(p.lengths, half);
    if (row % 16 == 0 && of_item < p.items) {
      if (lengths) copy4(next_lengths + 4 * half, lengths + token_of(p, of_item));
      else store_shared(next_lengths + 4 * half, pick(p.topk, half));
    }
    copy_commit();
  }
  DEVICE void read_lengths() {
    copy_wait<0>();
    __syncwarp();
    rows0 = min(max((int)load_shared(next_lengths), 0), p.topk[0]);
    rows1 = min(max((int)load_shared(next_lengths + 4), 0), p.topk[1]);
    __syncwarp();
  }

  // This CTA's blocks of an item with rows0 + rows1 rows.
  DEVICE void plan() {
    first_extra = (rows0 + kBlock - 1) / kBlock;
    const int blocks = first_extra + (rows1 + kBlock - 1) / kBlock;
    block = 0;
    end = blocks;
    if (kClustered) {
      block = quotient(blocks * rank, p.split);
      end = quotient(blocks * (rank + 1), p.split);
    }
    if (block == end) {  // nothing to do: one masked block keeps every role in step
      rows0 = rows1 = 0;
      first_extra = ++end;
    }
  }
  DEVICE void next_item() {
    item += step;
    if (item < p.items) {
      read_lengths();
      copy_lengths(item + step);
      plan();
    } else {
      rows0 = rows1 = block = 0;
      first_extra = end = 1;
    }
  }

  // Moves to the next block; where this lane's slot id is, or null for a masked row. Sets `meta`.
  DEVICE const int* next_index() {
    if (block == end) {
      if (kClustered) {  // a cluster has one item
        meta = kMetaLast;
        return nullptr;
      }
      next_item();
    }
    const int extra = block >= first_extra;
    const int column = (block - (extra ? first_extra : 0)) * kBlock + row;
    block++;
    meta = (extra ? kMetaExtra : 0) | (block == end ? kMetaLast : 0);
    if (half || column >= (extra ? rows1 : rows0)) return nullptr;
    return pick(p.indices, extra) + (i64)token_of(p, item) * pick(p.index_stride, extra) + column;
  }

  DEVICE u32 offset_of(u32 slot_id, int extra) const {
    if (slot_id >= pick(p.slots, extra)) return kNoRow;
    const u32 page = (u64)slot_id * pick(p.page_magic, extra) >> pick(p.page_shift, extra);
    return page * pick(p.page_stride, extra) +
           (slot_id - page * pick(p.page, extra)) *
               ((kExtraFp4 && extra ? kFp4Record : kFp8Record) / 16);
  }
  DEVICE void publish(u32 slot_id) {
    if (!half) {
      store_shared(offset_at(published), offset_of(slot_id, meta & kMetaExtra));
      if (row == 0) store_shared(smem + kSmemMeta + published % kSlots * 4, meta);
    }
    published++;
  }

  // Publishes block 0. The first item's first slot ids are copied into the ring, all at once and
  // beside the lengths: lists are taken to be full, which is put right where they are not. The
  // CTA's threads meet when these copies are under way.
  DEVICE void start() {
    int block0 = -1, end0 = 0, extra0 = 0;
    const int* from;
#pragma unroll 1
    while (true) {
      plan();
      if (block == block0 && end == end0 && first_extra == extra0) {
        from = next_index();
        break;
      }
      const int planned0 = rows0, planned1 = rows1;
      const bool first = block0 < 0;
      block0 = block, end0 = end, extra0 = first_extra;
      copied = min(end - block, kLookahead);
#pragma unroll 1
      for (u32 slot = 0; slot < copied; slot++) {
        const int* id = next_index();
        if (id) copy4(offset_at(slot), id);
      }
      copy_commit();
      if (first) __syncthreads();
      block = block0;
      from = next_index();  // while the copies are under way
      read_lengths();
      if (rows0 == planned0 && rows1 == planned1) break;
    }
    publish(from ? load_shared(offset_at(0)) : kNoRow);
    if (!kClustered) copy_lengths(item + step);
  }

  // Other blocks: the slot id waits in a register until the next call.
  DEVICE void fetch() {
    const int* from = next_index();
    index = -1;
    if (from) index = published < copied ? load_shared(offset_at(published)) : load_global(from);
  }
  // Another of the first kLookahead blocks.
  DEVICE void publish_next() {
    if (!kClustered || block != end) {
      fetch();
      publish(index);
    } else {  // past a cluster's last
      if (!half) store_shared(offset_at(published), kNoRow);
      if (!half && row == 0) store_shared(smem + kSmemMeta + published % kSlots * 4, kMetaLast);
      published++;
    }
  }
  DEVICE void advance() {
    publish(index);
    fetch();
  }
};

// Brings the rows of a published block into L2: each of the eight output warps has eight of them.
// Bulk prefetches stay clear of the load queue, which the converters fill.
DEVICE void prefetch_rows(const Params& p, u32 smem, u32 block, int warp, int lane) {
  if (lane >= 8) return;
  const u32 slot = block % kSlots;
  const u32 offset = load_shared(smem + kSmemOffsets + (slot * kBlock + 8 * warp + lane) * 4);
  const int extra = load_shared(smem + kSmemMeta + slot * 4) & kMetaExtra;
  if (offset != kNoRow)
    bulk_prefetch_l2(pick(p.pool, extra) + (u64)offset * 16,
                     kExtraFp4 && extra ? kFp4Record : kFp8Record);
}
