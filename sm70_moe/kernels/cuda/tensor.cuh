// The tensor-core step: weights are the row operand, tokens (or slots) the columns.
//
// A step takes one word half, 4 K, of each lane. Lane (row, quad) holds column `row` of an octet for
// unit `quad` of four. Two kinds:
// - m16n8k16 (sm_80 and later): the four lanes of a row meet in one dot product of 16 K. Rows 8 to 15
//   are a second set of weights; both sets share the token operand.
// - m8n8k4 (sm_70, sm_75): each quad pair of lanes is a matrix product of its own, with its own sums.
//   Native there; on sm_80 and later every one is a routine of about 95 instructions, so it is built
//   for those only to be tested.
#pragma once
#include "bits.cuh"

#ifndef MOE_VOLTA_STEP
#define MOE_VOLTA_STEP 0
#endif
#define QUADPAIR (MOE_VOLTA_STEP || __CUDA_ARCH__ < 800)

// Registers. Volta: 64, as if 1,024 threads were to be resident (80 in W2's version for any geometry).
// Elsewhere: what lets `blocks` blocks in.
#if QUADPAIR
#define BOUNDS(threads, blocks) __launch_bounds__(threads, (SPECIALISED || threads > 256 ? 1024 : 768) / (threads))
#else
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#endif

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

// Waits for the `THREADS` threads of a task: a whole block, except where blocks have warps to spare. Those are
// ahead of the others, so each product has a barrier of its own there.
enum Task { kW13 = 1, kW2 = 2 };
template <Task TASK, int THREADS>
__device__ __forceinline__ void sync_task() {
#ifdef MOE_ONE_LAUNCH
  asm volatile("bar.sync %0, %1;" ::"n"((int)TASK), "n"(THREADS) : "memory");
#else
  __syncthreads();
#endif
}

#if QUADPAIR
constexpr int kSets = 1;   // sets of weights in one step
constexpr int kSums = 8;   // accumulators of a lane
constexpr int kChains = 1;  // independent accumulations

__device__ __forceinline__ int lane_row() { return (threadIdx.x & 3) | (threadIdx.x >> 2 & 4); }
__device__ __forceinline__ int lane_quad() { return threadIdx.x >> 2 & 3; }

__device__ __forceinline__ void step(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// Sums over the four quad pairs, (0 + 1) + (2 + 3), of columns 0 to 7. Two stay in each lane:
// rows `summed_row()`, columns `summed_column()` and the next.
__device__ __forceinline__ void sum_quads(float (&c)[8]) {
  const bool odd = threadIdx.x & 4, upper = threadIdx.x & 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float keep = odd ? c[i + 4] : c[i], give = odd ? c[i] : c[i + 4];
    c[i] = keep + __shfl_xor_sync(~0u, give, 4);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float keep = upper ? c[i + 2] : c[i], give = upper ? c[i] : c[i + 2];
    c[i] = keep + __shfl_xor_sync(~0u, give, 8);
  }
}
__device__ __forceinline__ int summed_row() {
  return (threadIdx.x & 1) | (threadIdx.x >> 2 & 2) | (threadIdx.x >> 2 & 4);
}
__device__ __forceinline__ int summed_column() { return threadIdx.x & 6; }

// The same for column 0 only, whose rows 0 and 2 (or 1 and 3, ...) are c[0] and c[2].
__device__ __forceinline__ void sum_quads_first(float (&c)[8]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    c[i] += __shfl_xor_sync(~0u, c[i], 4);
    c[i] += __shfl_xor_sync(~0u, c[i], 8);
  }
}
#else
constexpr int kSets = 2;
constexpr int kSums = 4;
constexpr int kChains = 2;

__device__ __forceinline__ int lane_row() { return threadIdx.x >> 2 & 7; }
__device__ __forceinline__ int lane_quad() { return threadIdx.x & 3; }

__device__ __forceinline__ void step(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#ifdef MOE_BFLOAT16
// BF16 activations meet FP16 weights: neither format holds the other's numbers, TF32 holds both, whatever they are.
// m16n8k8 gives a lane two K where m16n8k16 gives it four, so a pair of halves is one step.
__device__ __forceinline__ void step_pair(float (&c)[4], u32 first, u32 second, u32 x) {
  float a0, a1, a2, a3;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(a0), "=f"(a2) : "r"(first));
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(a1), "=f"(a3) : "r"(second));
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(x << 16), "r"(x & 0xffff0000u));
}
#endif
#endif

// 32 K of each lane: four words of each set against 32 activations.
struct Sums {
  float c[kChains][kSums];

  __device__ __forceinline__ Sums() { clear(); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kChains; i++)
#pragma unroll
      for (int j = 0; j < kSums; j++) c[i][j] = 0.0f;
  }

  __device__ __forceinline__ void add(const u32 (&a)[kSets][4], uint4 x) {
#if QUADPAIR
    step(c[0], a[0][0], a[0][1], x.x, x.y);
    step(c[0], a[0][2], a[0][3], x.z, x.w);
#elif defined MOE_BFLOAT16
    step_pair(c[0], a[0][0], a[1][0], x.x), step_pair(c[0], a[0][1], a[1][1], x.y);
    step_pair(c[1], a[0][2], a[1][2], x.z), step_pair(c[1], a[0][3], a[1][3], x.w);
#else
    step(c[0], a[0][0], a[1][0], a[0][1], a[1][1], x.x, x.y);
    step(c[1], a[0][2], a[1][2], a[0][3], a[1][3], x.z, x.w);
#endif
  }

  // Both chains in one.
  __device__ __forceinline__ void join() {
#pragma unroll
    for (int i = 1; i < kChains; i++)
#pragma unroll
      for (int j = 0; j < kSums; j++) c[0][j] += c[i][j];
  }
};

__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
