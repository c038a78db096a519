// The plan of a large batch, in three launches: what `batch_plan` does in one block takes that block too long, since
// it would store every slot's number to a line of its own.
//
// Blocks count their stretches of the slots; one block adds the counts up and lists the items; a thread for each slot
// then puts it in its place. Where a slot goes depends on the ids before it alone: no atomics.
#include "batch_items.cuh"
#include "batch_scan.cuh"

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kCounts = 8192;  // words of shared memory for counts: warps times experts
constexpr int kEach = 8;       // ids of a lane

// Warps of a block that count, and slots that it has.
__device__ __forceinline__ int counting(int experts) { return min(kWarps, kCounts / experts); }
__device__ __forceinline__ int span(int experts) { return counting(experts) * 32 * kEach; }

// Counts by block and expert to `table`, and to `ranks` each slot's place among those of its block and expert.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    batch_count(const int* ids, u8* scratch, int tokens, int top_k, int experts, long long ranks_at, long long table_at) {
  __shared__ u32 counts[kCounts];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slots = tokens * top_k, warps = counting(experts);
  const int bits = 32 - __clz(experts), from = blockIdx.x * span(experts) + warp * 32 * kEach;
  u32* const mine = counts + warp * experts;
  for (int i = threadIdx.x; i < warps * experts; i += kThreads) counts[i] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();

  u32 id[kEach], rank[kEach];
  if (warp < warps) {
#pragma unroll
    for (int j = 0; j < kEach; j++) {
      const int slot = from + 32 * j + lane;
      id[j] = read_word(ids + slot, slot < slots);
      if (slot >= slots || id[j] >= (u32)experts) id[j] = experts;
    }
#pragma unroll
    for (int j = 0; j < kEach; j++) {
      const u32 same = lanes_with(id[j], bits), before = __popc(same & ~(~0u << lane));
      const bool valid = id[j] < (u32)experts;
      rank[j] = (valid ? mine[id[j]] : 0) + before;
      __syncwarp();
      if (valid && before == 0) mine[id[j]] = rank[j] + __popc(same);
      __syncwarp();
    }
  }
  __syncthreads();

  u32* const table = (u32*)(scratch + table_at) + blockIdx.x * experts;
  for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
    u32 total = 0;
    for (int w = 0; w < warps; w++) {
      const u32 count = counts[w * experts + expert];
      counts[w * experts + expert] = total;
      total += count;
    }
    table[expert] = total;
  }
  __syncthreads();
  if (warp >= warps) return;
  u32* const ranks = (u32*)(scratch + ranks_at);
#pragma unroll
  for (int j = 0; j < kEach; j++)
    if (id[j] < (u32)experts) ranks[from + 32 * j + lane] = mine[id[j]] + rank[j];
}

// One block: counts become places, and the items are listed.
extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    batch_list(u8* scratch, int tokens, int top_k, int experts, int tile, long long table_at) {
  __shared__ Segments segments;
  wait_for_previous();
  let_next_start();
  const int expert = threadIdx.x, slots = tokens * top_k, blocks = (slots + span(experts) - 1) / span(experts);
  u32* const column = (u32*)(scratch + table_at) + expert;
  u32 total = 0;
  if (expert < experts) {
    for (int b = 0; b < blocks; b++) total += column[b * experts];
  }
  list_items(segments, scratch, experts, tile, total);
  if (expert < experts) {
    u32 place = segments.begin[expert];
    for (int b = 0; b < blocks; b++) {
      const u32 count = column[b * experts];
      column[b * experts] = place;
      place += count;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    batch_place(const int* ids, u8* scratch, int tokens, int top_k, int experts, long long order_at, long long ranks_at,
                long long table_at) {
  wait_for_previous();
  let_next_start();
  const int slot = blockIdx.x * 256 + threadIdx.x;
  if (slot >= tokens * top_k) return;
  const u32 id = (u32)ids[slot];
  if (id >= (u32)experts) return;
  const u32 place = ((const u32*)(scratch + table_at))[slot / span(experts) * experts + id];
  ((int*)(scratch + order_at))[place + ((const u32*)(scratch + ranks_at))[slot]] = slot;
}
