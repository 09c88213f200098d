// The two feeding roles of the product: the weight's codes into the ring, activations to bf16.
#pragma once

#include "product.cuh"

// Counts this thread's earlier copies on `bar` when they have landed.
DEVICE void arrive_after_copies(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// 16 bytes with an L2 policy.
DEVICE void copy16_with(u32 dst, const void* src, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(policy)
               : "memory");
}
// What is read once leaves L2 first.
DEVICE u64 weight_policy(bool once) {
  u64 first, normal;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}

// Weight rows, eight threads a row.
DEVICE void load_role(const Params& p, u32 smem, int thread, const Tile& t) {
  const Operands& o = p.o;
  const int line = thread / 8, chunk = thread % 8;
  const u32 place = smem + line * kColumns + ((chunk ^ (line & 7)) << 4);
  const u64 policy = weight_policy(p.token_tiles == 1);
  const i64 step = 16 * o.w_row;
  const u8* w = o.w + t.group * o.w_group + (t.row + line) * o.w_row + chunk * 16 +
                (i64)t.first_word * kColumns;
  const u32* scale = o.w_scale + t.group * o.w_scale_group + (t.row + thread) * o.w_scale_row +
                     t.first_word * o.w_scale_word;
  StageRing ring;
#pragma unroll 1
  for (int word = t.first_word; word < t.last_word; word++, ring.advance()) {
    mbar_wait(smem + kBarFree + 8 * ring.slot, ring.parity ^ 1);
    const u32 to = place + ring.slot * kRawBytes;
    const u8* from = w;
#pragma unroll
    for (int i = 0; i < kRows / 16; i++, from += step)
      copy16_with(to + i * 16 * kColumns, from, policy);
    if (thread < kRows) copy4(smem + kSmemScales + ring.slot * kScaleBytes + thread * 4, scale);
    arrive_after_copies(smem + kBarFull + 8 * ring.slot);
    w += kColumns;
    scale += o.w_scale_word;
  }
}

// Activations -> bf16 operands, in the order of columns of mxfp8.cuh. A thread takes 16 columns of
// tokens kLines apart, a stage ahead in registers. Lanes 8r..8r+7 are the halves of two tokens'
// words, arranged so that their stores do not meet in a bank. Tokens past the last are zeros.
struct Converter {
  static constexpr int kLines = 16 * kConvertGroups, kPieces = (kTokens + kLines - 1) / kLines;
  const Operands& o;
  int token, chunk, live;
  u32 to;
  const u8* x;
  const u32* scale;
  struct Set {
    uint4 codes[kPieces];
    u32 scales[kPieces];
  };

  DEVICE Converter(const Params& p, int thread, const Tile& t) : o(p.o) {
    chunk = thread % 8;
    token = (thread / 8) ^ (chunk >> 2);
    to = (chunk >> 2) * kTokens * 128 + token * 128 + (((2 * (chunk & 3)) ^ (token & 7)) << 4);
    live = token < kTokens ? o.tokens - t.token - token : 0;
    x = o.x + t.group * o.x_group + (t.token + token) * o.x_token + chunk * 16 +
        (i64)t.first_word * kColumns;
    scale = o.x_scale + t.group * o.x_scale_group + (t.token + token) * o.x_scale_token +
            t.first_word * o.x_scale_word;
  }
  // The next word's codes.
  DEVICE void fetch(Set& set) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const bool inside = i * kLines < live;
      set.codes[i] = inside ? __ldg((const uint4*)(x + i * kLines * o.x_token)) : uint4();
      set.scales[i] = inside ? __ldg(scale + i * kLines * o.x_scale_token) : 0;
    }
    x += kColumns;
    scale += o.x_scale_word;
  }
  DEVICE void widen_stage(const Set& set, u32 operand) const {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const u32 v[4] = {set.codes[i].x, set.codes[i].y, set.codes[i].z, set.codes[i].w};
      const u32 byte = set.scales[i] >> (chunk / 2 * 8) & 0xff, factor = first_factor(byte);
      u32 even[4], odd[4];
#pragma unroll
      for (int s = 0; s < 4; s++) widen(v[s], factor, even[s], odd[s]);
      if (__any_sync(~0u, has_large(byte))) {
        const u32 rest = rest_factor(byte);
#pragma unroll
        for (int s = 0; s < 4; s++)
          even[s] = mul_bf16x2(even[s], rest), odd[s] = mul_bf16x2(odd[s], rest);
      }
      store_shared4(operand + to + i * kLines * 128, even);
      store_shared4((operand + to + i * kLines * 128) ^ 16, odd);
    }
  }
};

DEVICE void convert_role(const Params& p, u32 smem, int thread, const Tile& t) {
  const bool works = kTokens >= Converter::kLines || thread < 8 * kTokens;
  Converter converter(p, thread, t);
  Converter::Set sets[2];  // take words in turn
  OperandRing ring;
  auto convert = [&](Converter::Set& set, int word) {
    mbar_wait(smem + kBarOperandFree + 8 * ring.slot, ring.parity ^ 1);
    if (works) converter.widen_stage(set, smem + kSmemOperand + ring.slot * kOperandBytes);
    fence_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) mbar_arrive(smem + kBarOperandFull + 8 * ring.slot);
    ring.advance();
    if (word + 2 < t.last_word) converter.fetch(set);
  };
  if (t.first_word < t.last_word) converter.fetch(sets[0]);
  if (t.first_word + 1 < t.last_word) converter.fetch(sets[1]);
#pragma unroll 1
  for (int word = t.first_word; word < t.last_word; word += 2) {
    convert(sets[0], word);
    if (word + 1 < t.last_word) convert(sets[1], word + 1);
  }
}
