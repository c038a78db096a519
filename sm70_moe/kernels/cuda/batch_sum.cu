// The weighted sum of a batch: the slots' results (M, k, columns) -> out (M, H), in the router's order.
//
// A thread has eight columns of a token. A slot without an expert is left out; its row of intermediate is
// cleared here, since no product has it.
#include "bits.cuh"

constexpr int kThreads = 128;
constexpr int kTogether = 5;  // slots whose results are requested together

__device__ __forceinline__ u32 half_pair(float low, float high) { return to_activation(low) | (u32)to_activation(high) << 16; }

extern "C" __global__ void __launch_bounds__(kThreads)
    batch_sum(const int* ids, const float* weights, const u8* scratch, u16* intermediate, u16* out, int tokens,
              int top_k, int hidden, int inner, int experts, long long products_at, int first_column, int columns) {
  wait_for_previous();
  let_next_start();
  const int chunks = columns >> 3;
  const u32 number = blockIdx.x * (u32)kThreads + threadIdx.x;
  const int token = number / (u32)chunks, chunk = number - token * chunks;
  if (token >= tokens) return;
  const u16* const products = (const u16*)(scratch + products_at) + (u64)token * (u32)(top_k * columns) + chunk * 8;
  float sums[8] = {};
  for (int from = 0; from < top_k; from += kTogether) {
    uint4 given[kTogether];
    float weight[kTogether];
    bool valid[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int slot = token * top_k + from + j;
      const bool there = from + j < top_k;
      valid[j] = there && read_word(ids + slot, there) < (u32)experts;
      weight[j] = __uint_as_float(read_word(weights + slot, there));
      given[j] = read_activations(products + (u64)(from + j) * (u32)columns, valid[j]);
      if (there && !valid[j] && first_column == 0)
        for (int c = chunk; c < inner >> 3; c += chunks)
          *(uint4*)(intermediate + ((u64)(u32)slot * (u32)inner + c * 8)) = make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (!valid[j]) continue;
      const u32 word[4] = {given[j].x, given[j].y, given[j].z, given[j].w};
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i] = fmaf(weight[j], to_float((u16)(word[i >> 1] >> (i & 1) * 16)), sums[i]);
    }
  }
  *(uint4*)(out + ((u64)(u32)token * (u32)hidden + (u32)(first_column + chunk * 8))) =
      make_uint4(half_pair(sums[0], sums[1]), half_pair(sums[2], sums[3]), half_pair(sums[4], sums[5]),
                 half_pair(sums[6], sums[7]));
}
