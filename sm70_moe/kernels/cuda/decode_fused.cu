// One token in one launch: W13 and SwiGLU, a barrier of the whole grid, W2 and the weighted sum.
//
// The bodies are those of the two launches, so a token has the same bits. All blocks have to be resident at once
// (cooperative launch); there may be fewer of them than tasks, then each takes several.
//
// A block takes its tasks of W13, arrives at the barrier, asks for the weights of its first task of W2, whatever
// the others do meanwhile, and only then waits for their activations. It arrives whatever the ids are: tasks of
// invalid slots end early, blocks do not.
//
// The barrier is one word of the layer's scratch: generation in the upper half, arrivals in the lower. Block 0
// adds 2^16 - (blocks - 1) and each other block 1. So a whole launch adds exactly 2^16, for any number of blocks:
// the last to arrive, whichever it is, carries into the generation and leaves no arrivals. Waiting is for another
// generation than at the start, not for a number of arrivals, which would depend on the grids before. Only whole
// launches change the word: one that is refused does not start, and a fault takes the context and the scratch along.
#define MOE_ONE_LAUNCH  // blocks are as large as the larger of the two tasks, and nothing depends on them
// Volta: tasks of W2 of 6 warps beside 5 of W13 in the first contract, so that its 400 blocks are 5 on each
// of 80 multiprocessors. How W2 is cut does not change its bits.
#define MOE_W2_WARPS (QUADPAIR ? 6 : 16)
#include "w13.cuh"
#include "w2.cuh"

using First = W13Cut<1>;
using Second = W2Cut<1, false>;

#ifndef MOE_FUSED_RESIDENT  // warps that a multiprocessor should hold: what registers are kept low for
#define MOE_FUSED_RESIDENT 28  // not below: every task of the first contract has a block on an H200
#endif
constexpr int kWarpsNeeded = First::kWarps > Second::kWarps ? First::kWarps : Second::kWarps;
constexpr int kBlockThreads = 32 * kWarpsNeeded;
constexpr int kBlocksHeld = MOE_FUSED_RESIDENT / kWarpsNeeded < 1 ? 1 : MOE_FUSED_RESIDENT / kWarpsNeeded;
constexpr int kOctets = 2 * INNER / 8;  // of W13, for each slot

// What is read after it is not older than what was written before the arrivals that it has seen.
__device__ __forceinline__ u32 generation(const u32* barrier) {
  u32 word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(barrier) : "memory");
  return word >> 16;
}

// What the calling thread wrote or has seen written stands before the arrival.
__device__ __forceinline__ void arrive(u32* barrier) {
  const u32 others = gridDim.x - 1, share = blockIdx.x ? 1 : 0x10000 - others;
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(barrier), "r"(share) : "memory");
}

// Everybody's activations are there when all blocks have arrived.
struct AllArrived {
  const u32* barrier;
  u32 before;  // the generation in which this block arrived

  __device__ __forceinline__ void operator()() const {
    if (threadIdx.x == 0) {
      while (generation(barrier) == before) {
      }
    }
    sync_task<kW2, Second::kThreads>();  // what one thread has seen, the others see behind this
  }
};

extern "C" __global__ void BOUNDS(kBlockThreads, kBlocksHeld)
    fused_1(const u16* x, const int* ids, const float* weights, const void* w13_words, const void* w13_metadata,
            const void* w13_scales, const void* w13_zeros, const void* w2_words, const void* w2_metadata,
            const void* w2_scales, const void* w2_zeros, u16* intermediate, u16* out, u32* scratch, int tokens,
            int experts) {
  u32 before = 0;
  if (threadIdx.x == 0) before = generation(scratch);

  if (threadIdx.x < First::kThreads) {
#pragma unroll 1
    for (int task = blockIdx.x; task < kOctets * TOP_K; task += gridDim.x) {
      w13<1>(x, ids, w13_words, GROUPS(w13_metadata, w13_scales), w13_zeros, intermediate, tokens, TOP_K, HIDDEN,
             INNER, experts, GROUP, task % kOctets, task / kOctets);
      sync_task<kW13, First::kThreads>();  // the sums in shared memory are read
    }
    if (threadIdx.x == 0) arrive(scratch);
  }

  if (threadIdx.x < Second::kThreads) {
#pragma unroll 1
    for (int task = blockIdx.x; task < HIDDEN / 8; task += gridDim.x) {
      w2<1, false>(intermediate, ids, weights, w2_words, GROUPS(w2_metadata, w2_scales), w2_zeros, out, tokens, TOP_K,
                   HIDDEN, INNER, experts, GROUP, task, 0, AllArrived{scratch, before});
      sync_task<kW2, Second::kThreads>();  // the sums in shared memory are read
    }
  }
}
