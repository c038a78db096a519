// W13, SwiGLU for 2 to 8 tokens, as a stream (sm_90 and later): the same sums, bit for bit, as
// decode_w13.cu.
//
// Blocks of one-shot kernels load, then multiply; where they cannot all be resident at once, the memory
// waits for the product. Here a few blocks stay. Each takes tiles of two octets of one expert, one after
// the other, through a ring of stages in shared memory: one thread requests a whole tile with two or
// three bulk copies (its bytes are contiguous), several tiles ahead.
//
// What to do is found by every block itself, from the ids: the slots that are the first with their
// expert, in order. It costs a quarter of a microsecond, once.
#include "banks.cuh"
#include "geometry.cuh"
#include "swiglu.cuh"
#include "tensor.cuh"

constexpr int kTokens = 8;
constexpr int kQuads = 2, kPartUnits = 4 * kQuads;  // as in decode_w13.cu
constexpr int kUnits = HIDDEN / 32, kParts = kUnits / kPartUnits;
static_assert(kUnits % kPartUnits == 0 && kParts <= 16, "a warp for each part");
constexpr int kThreads = 32 * kParts;
constexpr int kSlots = kTokens * TOP_K, kWords = divide_up(kSlots, 32);
constexpr int kTiles = INNER / 8;

constexpr int kGroups = kUnits >> (GROUP >> 6);
constexpr int kCodeBytes = 2 * kUnits * 128;
constexpr int kGroupBytes = 2 * kGroups * 8 * (MOE_METADATA == 4 ? 4 : 2);
constexpr int kZeroBytes = MOE_METADATA == 4 ? 0 : MOE_METADATA == 3 ? 2 * kGroups * 8 : 2 * kGroups * 4;
constexpr int kStageBytes = kCodeBytes + kGroupBytes + kZeroBytes;
#ifndef MOE_STAGES
#define MOE_STAGES 3
#endif
constexpr int kStages = MOE_STAGES;
#ifndef MOE_STREAM_BLOCKS
#define MOE_STREAM_BLOCKS 2
#endif

// Barriers of stages. `parity` is the count of earlier completions, modulo 2.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_create(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

extern "C" __global__ void __launch_bounds__(kThreads, MOE_STREAM_BLOCKS)
    w13_stream(const u16* x, const int* ids, const void* w13_words, const void* w13_metadata, const void* w13_scales,
               const void* w13_zeros, u16* intermediate, int tokens, int experts) {
  extern __shared__ __align__(128) u8 stages[];
  __shared__ float sums[2][kParts][16][8];
  __shared__ u32 chosen[kSlots][8];  // of a first slot: for each token, its slots with that expert
  __shared__ int expert_of[kSlots];
  __shared__ bool leads[32 * kWords];
  __shared__ u8 live[kSlots];
  __shared__ int live_count;
  __shared__ u64 full[kStages];
  const int lane = lane_id(), warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int slots = tokens * TOP_K;

  // the first slot of each expert, and who chose it
  int id[kWords];
#pragma unroll
  for (int w = 0; w < kWords; w++) id[w] = 32 * w + lane < slots ? ids[32 * w + lane] : -1;
  for (int slot = warp; slot < 32 * kWords; slot += kParts) {
    int own = -1;
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      const int there = __shfl_sync(~0u, id[w], slot & 31);
      if (slot >> 5 == w) own = there;
    }
    u32 mine = 0, earlier = 0;
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      const u32 same = __ballot_sync(~0u, id[w] == own);
      const int ahead = lane * TOP_K - 32 * w;
      mine |= shift_right(same, ahead) | shift_left(same, -ahead);
      earlier |= same & ~shift_left(~0u, max(slot - 32 * w, 0));
    }
    const bool valid = (u32)own < (u32)experts;
    if (lane == 0) leads[slot] = valid && !earlier;
    if (slot < slots) {
      if (lane < 8) chosen[slot][lane] = mine & ((1u << TOP_K) - 1);
      if (lane == 0) expert_of[slot] = own;
      if (!valid && slot % gridDim.x == blockIdx.x)  // a row of zeros
        for (int i = lane; i < INNER / 2; i += 32) ((u32*)intermediate)[slot * (INNER / 2) + i] = 0;
    }
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_create(&full[i]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == 0) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      const bool leads_here = leads[32 * w + lane];
      const u32 all = __ballot_sync(~0u, leads_here);
      if (leads_here) live[count + __popc(all & ((1u << lane) - 1))] = 32 * w + lane;
      count += __popc(all);
    }
    if (lane == 0) live_count = count;
  }
  __syncthreads();

  const int total = live_count * kTiles, stride = gridDim.x;
  auto request = [&](int item, int stage) {
    const int tile = item % kTiles;
    const u64 at = (u64)expert_of[live[item / kTiles]] * kTiles + tile;
    u8* const to = stages + stage * kStageBytes;
    barrier_expect(&full[stage], kStageBytes);
    copy(to, (const u8*)w13_words + at * kCodeBytes, kCodeBytes, &full[stage]);
    copy(to + kCodeBytes, (const u8*)GROUPS(w13_metadata, w13_scales) + at * kGroupBytes, kGroupBytes, &full[stage]);
    if (kZeroBytes)
      copy(to + kCodeBytes + kGroupBytes, (const u8*)w13_zeros + at * kZeroBytes, kZeroBytes, &full[stage]);
  };
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages; i++)
      if (blockIdx.x + i * stride < total) request(blockIdx.x + i * stride, i);

  int stage = 0, parity = 0, turn = 0;
  for (int item = blockIdx.x; item < total; item += stride) {
    const int slot = live[item / kTiles], tile = item % kTiles;
    const bool serves = chosen[slot][row];
    const u16* activations = x + row * HIDDEN + (warp * kPartUnits + quad) * 32;
    asm volatile("" : "+l"(activations));
    uint4 operand[4 * kQuads];
#pragma unroll
    for (int i = 0; i < 4 * kQuads; i++) operand[i] = read_activations(activations + i / 4 * 128 + i % 4 * 8, serves);
    const u8* const from = stages + stage * kStageBytes;
    barrier_wait(&full[stage], parity);

    Sums sum;
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
      uint4 codes[2];
      Scale scale[2];
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const int unit = warp * kPartUnits + quad + 4 * j, group = s * kGroups + (unit >> (GROUP >> 6));
        codes[s] = *(const uint4*)(from + ((s * kUnits + unit) * 8 + row) * 16);
        const u8* const groups = from + kCodeBytes;
        const u8* const zeros = groups + kGroupBytes;
#if MOE_METADATA == 4
        scale[s] = from_pair(*(const u32*)(groups + (group * 8 + row) * 4));
#elif MOE_METADATA == 3
        scale[s] = from_zero(*(const u16*)(groups + (group * 8 + row) * 2), zeros[group * 8 + row]);
#else
        scale[s] = from_zero(*(const u16*)(groups + (group * 8 + row) * 2),
                             *(const u32*)(zeros + group * 4) >> (4 * row) & 15);
#endif
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        u32 weights[2][4];
#pragma unroll
        for (int s = 0; s < 2; s++) decode(word_of(codes[s], w), scale[s], weights[s]);
        sum.add(weights, operand[4 * j + w]);
      }
    }
    sum.join();
    const float(&c)[4] = sum.c[0];
    *(float2*)&sums[turn][warp][row][2 * quad] = make_float2(c[0], c[1]);
    *(float2*)&sums[turn][warp][row + 8][2 * quad] = make_float2(c[2], c[3]);
    __syncthreads();  // the stage is free, the sums are there; those of two turns ago have been used

    const int next = item + kStages * stride;
    if (next < total) {
      if (threadIdx.x == 0) request(next, stage);
    } else {
      let_next_start();
    }
    if (threadIdx.x < 64) {
      const int who = threadIdx.x & 7, column = threadIdx.x >> 3;
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int p = 0; p < kParts; p++) gate += sums[turn][p][2 * column][who], up += sums[turn][p][2 * column + 1][who];
      const u16 value = swiglu(gate, up);
      for (u32 left = chosen[slot][who]; left; left &= left - 1)
        intermediate[(who * TOP_K + __ffs(left) - 1) * INNER + tile * 8 + column] = value;
    }
    turn ^= 1;
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
}
