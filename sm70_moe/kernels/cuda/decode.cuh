// Codes to FP16 weights: round16(q * scale + bias), one rounding (CONTRACT 8.2).
#pragma once
#include "bits.cuh"

// One group's scale and bias for one column, each in both halves.
struct Scale {
  u32 scale, bias;
};

// (word & mask) | 0x64006400 in one instruction.
__device__ __forceinline__ u32 offset(u32 word, u32 mask) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(0x64006400u));
  return d;
}

// Word of 8 consecutive K -> FP16 pairs of K (0,1), (2,3), (4,5), (6,7).
//
// Nibbles i and i + 4 hold K 2i and 2i + 1. A code in the low bits of 1024 = 0x6400 makes 1024 + q;
// four bits higher it makes 1024 + 16 q. Both are brought to q itself first, exactly, because
// q * scale + bias must round once: folding 1024 into the bias would round twice.
__device__ __forceinline__ void decode(u32 word, Scale group, u32 (&weights)[4]) {
  const u32 low = 0x000f000fu, high = 0x00f000f0u;
  const u32 minus_1024 = 0xe400e400u, sixteenth = 0x2c002c00u, minus_64 = 0xd400d400u;
  const u32 upper = word >> 8;
  weights[0] = add2(offset(word, low), minus_1024);
  weights[1] = fma2(offset(word, high), sixteenth, minus_64);
  weights[2] = add2(offset(upper, low), minus_1024);
  weights[3] = fma2(offset(upper, high), sixteenth, minus_64);
#pragma unroll
  for (int i = 0; i < 4; i++) weights[i] = fma2(weights[i], group.scale, group.bias);
}

// bias = half(-zero * scale), one rounding (CONTRACT 8.1). Zero 0 under a positive scale gives -0.
// `offset`: 1024 + zero, as an FP16 number in both halves.
__device__ __forceinline__ Scale from_zero(u32 scale, u32 offset) {
  const u32 both = spread(scale, 0x1010);
  return {both, negated_mul2(add2(offset, 0xe400e400u), both)};
}

__device__ __forceinline__ Scale from_pair(u32 word) { return {spread(word, 0x1010), spread(word, 0x3232)}; }
