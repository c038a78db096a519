// The plan of a batch: ids (M, k) -> the valid slots sorted by expert, and items of at most `tile` of them.
//
// One block. Each of its warps has a stretch of the slots and counts of its own, so that a slot's place depends on
// the ids before it alone: no atomics, the same order in every call.
#include "batch_items.cuh"
#include "batch_scan.cuh"

constexpr int kThreads = kScanThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kCounts = 8192;       // words of shared memory for counts: warps times experts
constexpr int kTogether = 8;        // ids of a lane that are requested together

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    batch_plan(const int* ids, u8* scratch, int tokens, int top_k, int experts, int tile, long long order_at,
               long long ranks_at) {
  __shared__ u32 counts[kCounts];
  __shared__ Segments segments;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slots = tokens * top_k;
  const int warps = min(min(kWarps, kCounts / experts), (slots + 31) >> 5);
  const int stretch = ((slots + warps * 32 - 1) / (warps * 32)) * 32, from = warp * stretch;
  const int end = warp < warps ? min(from + stretch, slots) : 0;
  const int bits = 32 - __clz(experts);  // of ids, and of what stands for those that are none
  u32* const mine = counts + warp * experts;
  u32* const ranks = (u32*)(scratch + ranks_at);  // a slot's place among those of its stretch and expert
  for (int i = threadIdx.x; i < warps * experts; i += kThreads) counts[i] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();

  for (int at = from; at < end; at += 32 * kTogether) {
    u32 id[kTogether], same[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int slot = at + 32 * j + lane;
      id[j] = read_word(ids + slot, slot < end);
      if (slot >= end || id[j] >= (u32)experts) id[j] = experts;
      same[j] = ~0u;
    }
    // as `lanes_with`, for all of them at once: a vote takes its time
    for (int bit = 0; bit < bits; bit++) {
#pragma unroll
      for (int j = 0; j < kTogether; j++) {
        const bool set = id[j] >> bit & 1;
        const u32 voted = __ballot_sync(~0u, set);
        same[j] &= set ? voted : ~voted;
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (at + 32 * j >= end) break;
      const bool valid = id[j] < (u32)experts;
      const u32 before = __popc(same[j] & ~(~0u << lane));
      const u32 rank = (valid ? mine[id[j]] : 0) + before;
      __syncwarp();
      if (valid && before == 0) mine[id[j]] = rank + __popc(same[j]);
      if (valid) ranks[at + 32 * j + lane] = rank;
      __syncwarp();
    }
  }
  __syncthreads();

  const int expert = threadIdx.x;
  u32 total = 0;
  if (expert < experts) {
    for (int w = 0; w < warps; w++) {
      const u32 count = counts[w * experts + expert];
      counts[w * experts + expert] = total;
      total += count;
    }
  }
  list_items(segments, scratch, experts, tile, total);

  // what was written above in `ranks` is read by the lanes that wrote it
  int* const order = (int*)(scratch + order_at);
  for (int at = from; at < end; at += 32 * kTogether) {
    u32 id[kTogether], rank[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int slot = at + 32 * j + lane;
      id[j] = slot < end ? read_word(ids + slot, slot < end) : ~0u;
      rank[j] = read_word(ranks + slot, slot < end);
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++)
      if (id[j] < (u32)experts) order[segments.begin[id[j]] + mine[id[j]] + rank[j]] = at + 32 * j + lane;
  }
}
