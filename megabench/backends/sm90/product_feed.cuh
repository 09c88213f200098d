// The two feeding roles of the product: quantized operands into the ring, activations to bf16.
#pragma once

#include "product.cuh"

DEVICE void copy16_once(u32 dst, const void* src, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(policy)
               : "memory");
}

// Weight rows, then tokens, eight threads a row. Tokens past the last become zeros, unread.
DEVICE void load_role(const Params& p, u32 smem, int thread, const Share& share) {
  const int line = thread / 8, chunk = thread % 8;
  const u32 place = line * kColumns + ((chunk ^ (line & 7)) << 4);
  StageRing ring;
  const u64 policy = once_policy();
#pragma unroll 1
  for (int tile = share.first_tile; tile < p.tiles; tile += share.tile_step) {
    const Tile t(p, tile);
    const u8* w = p.w + t.group * p.w_group + (t.row + line) * p.w_row + chunk * 16;
    const u8* x = p.x + t.group * p.x_group + (t.token + line) * p.x_token + chunk * 16;
    const u32* w_scale = p.w_scale + t.group * p.w_scale_group + (t.row + thread) * p.w_scale_row;
    const u32* x_scale =
        p.x_scale + t.group * p.x_scale_group + (t.token + thread) * p.x_scale_token;
    const int live = p.tokens - t.token;
#pragma unroll 1
    for (int word = share.first_word; word < share.last_word; word++, ring.advance()) {
      mbar_wait(smem + kBarFree + 8 * ring.slot, ring.parity ^ 1);
      const u32 raw = smem + ring.slot * kRawBytes + place;
      const u32 scales = smem + kSmemScales + ring.slot * kScaleBytes + thread * 4;
      const i64 column = (i64)word * kColumns;
#pragma unroll
      for (int i = 0; i < kRows / 16; i++)
        copy16_once(raw + i * 16 * kColumns, w + column + i * 16 * p.w_row, policy);
#pragma unroll
      for (int i = 0; i < kTokens / 16; i++)
        copy16(raw + (kRows + i * 16) * kColumns, x + column + i * 16 * p.x_token,
               line + i * 16 < live ? 16 : 0);
      if (thread < kRows) copy4(scales, w_scale + word * p.w_scale_word);
      if (thread < kTokens)
        copy4(scales + kRows * 4, x_scale + word * p.x_scale_word, thread < live ? 4 : 0);
      arrive_after_copies(smem + kBarFull + 8 * ring.slot);
    }
  }
}

// Activations -> bf16 operands, in the order of columns of mxfp8.cuh. A thread takes 16 columns of
// tokens kLines apart. Lanes 8r..8r+7 are the halves of two tokens' words, arranged so that neither
// loads nor stores meet in a bank.
struct Converter {
  static constexpr int kLines = 16 * kConvertGroups, kPieces = kTokens / kLines;
  static constexpr int kBatch = kPieces < 4 ? kPieces : 4;
  int chunk, token;
  u32 from, to;

  DEVICE explicit Converter(int thread) {
    chunk = thread % 8;
    token = (thread / 8) ^ (chunk >> 2);
    from = token * kColumns + ((chunk ^ (token & 7)) << 4);
    to = (chunk >> 2) * kTokens * 128 + token * 128 + (((2 * (chunk & 3)) ^ (token & 7)) << 4);
  }

  DEVICE void widen_stage(u32 raw, u32 scales, u32 operand) const {
#pragma unroll
    for (int batch = 0; batch < kPieces; batch += kBatch) {
      u32 codes[kBatch][4], scale[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        load_shared4(raw + from + (batch + i) * kLines * kColumns, codes[i]);
        scale[i] = load_shared_byte(scales + (token + (batch + i) * kLines) * 4 + (chunk >> 1));
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        u32 even[4], odd[4];
        widen16(codes[i], scale[i], even, odd);
        const u32 at = operand + to + (batch + i) * kLines * 128;
        store_shared4(at, even);
        store_shared4(at ^ 16, odd);
      }
    }
  }
};

DEVICE void convert_role(const Params& p, u32 smem, int thread, const Share& share) {
  const Converter converter(thread);
  StageRing ring;
  OperandRing operands;
#pragma unroll 1
  for (int tile = share.first_tile; tile < p.tiles; tile += share.tile_step) {
#pragma unroll 1
    for (int word = share.first_word; word < share.last_word;
         word++, ring.advance(), operands.advance()) {
      mbar_wait(smem + kBarFull + 8 * ring.slot, ring.parity);
      mbar_wait(smem + kBarOperandFree + 8 * operands.slot, operands.parity ^ 1);
      converter.widen_stage(smem + ring.slot * kRawBytes + kRows * kColumns,
                            smem + kSmemScales + ring.slot * kScaleBytes + kRows * 4,
                            smem + kSmemOperand + operands.slot * kOperandBytes);
      fence_async_proxy();
      __syncwarp();
      if (thread % 32 == 0) {
        mbar_arrive(smem + kBarOperandFull + 8 * operands.slot);
        mbar_arrive(smem + kBarFree + 8 * ring.slot);
      }
    }
  }
}
