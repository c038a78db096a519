// The tensor-core step of a batch: a warp has 32 rows of weights ("tile": four octets of columns) and tokens as
// columns, eight at a time.
//
// A "block" of K is four units of 32. A lane holds four pieces of it, each one unit of one column:
// - m16n8k16 (sm_80 and later): lane (row, quad) has column `row` of each of the four octets, unit `quad`. Two
//   octets are the 16 rows of a step; the four lanes of a row meet in one dot product.
// - m8n8k4 (sm_70, sm_75): lane (row, quad) has column `row` of octet `quad`, all four units. Each quad pair is a
//   product of its own octet, so that nothing is left to be summed.
#pragma once
#ifndef MOE_VOLTA_STEP
#define MOE_VOLTA_STEP 0
#endif
#define QUADPAIR (MOE_VOLTA_STEP || __CUDA_ARCH__ < 800)
#define ASYNC !QUADPAIR  // copies to shared memory that nobody waits for
#include "batch_copy.cuh"
#include "decode.cuh"

constexpr int kPieces = 4;
constexpr int kTileRows = 32;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

#if QUADPAIR
__device__ __forceinline__ int lane_row() { return (threadIdx.x & 3) | (threadIdx.x >> 2 & 4); }
__device__ __forceinline__ int lane_quad() { return threadIdx.x >> 2 & 3; }
#else
__device__ __forceinline__ int lane_row() { return threadIdx.x >> 2 & 7; }
__device__ __forceinline__ int lane_quad() { return threadIdx.x & 3; }
#endif

// A lane's sums of 8 * COUNT tokens, and where they belong.
template <int COUNT>
struct Sums {
  float c[COUNT][8];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) c[n][i] = 0.0f;
  }

  // Column (of the tile's 32) and token (of eight) of sum `i`.
  __device__ __forceinline__ static int column(int i) {
#if QUADPAIR
    return lane_quad() * 8 + (threadIdx.x & 1) + (i & 2) + (threadIdx.x >> 2 & 4);
#else
    return (i >> 1) * 8 + lane_row();
#endif
  }
  __device__ __forceinline__ static int token(int i) {
#if QUADPAIR
    return (i & 4) + (threadIdx.x & 2) + (i & 1);
#else
    return lane_quad() * 2 + (i & 1);
#endif
  }
};

// One word of K of the lane's pieces (m16n8k16: of all four; m8n8k4: of one) times that of 8 * COUNT tokens, which
// `words(n)` gives. Steps that add to the same sums stand apart, since each waits for the one before.
#ifndef MOE_BATCH_APART
#define MOE_BATCH_APART 4
#endif
constexpr int kApart = MOE_BATCH_APART;

template <int COUNT, class Words>
#if QUADPAIR
__device__ __forceinline__ void multiply_word(Sums<COUNT>& sums, const u32 (&a)[4], Words words) {
#else
__device__ __forceinline__ void multiply_word(Sums<COUNT>& sums, const u32 (&a)[kPieces][4], Words words) {
#endif
#pragma unroll
  for (int from = 0; from < COUNT; from += kApart) {
    uint4 x[kApart];
#pragma unroll
    for (int j = 0; j < kApart; j++)
      if (from + j < COUNT) x[j] = words(from + j);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int j = 0; j < kApart; j++) {
        if (from + j >= COUNT) continue;
        float(&c)[8] = sums.c[from + j];
        const u32 low = half ? x[j].z : x[j].x, high = half ? x[j].w : x[j].y;
#if QUADPAIR
        step_884(c, a[2 * half], a[2 * half + 1], low, high);
#else
        step_16816(c[0], c[1], c[2], c[3], a[0][2 * half], a[1][2 * half], a[0][2 * half + 1], a[1][2 * half + 1],
                   low, high);
        step_16816(c[4], c[5], c[6], c[7], a[2][2 * half], a[3][2 * half], a[2][2 * half + 1], a[3][2 * half + 1],
                   low, high);
#endif
      }
    }
  }
}

__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
