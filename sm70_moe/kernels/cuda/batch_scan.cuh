// One block of a batch's plan: from slots by expert to items, and votes on ids.
#pragma once
#include "batch_items.cuh"

constexpr int kScanThreads = 1024;
constexpr int kMostExperts = 1024;  // as the manifests say: a thread for each

struct Segments {
  int begin[kMostExperts];  // of each expert's slots
  int item[kMostExperts];   // its first item
  u64 partial[kScanThreads / 32];
};

// Lanes with the same number, of so many bits. (The instruction that finds them takes one number after the other.)
__device__ __forceinline__ u32 lanes_with(u32 number, int bits) {
  u32 same = ~0u;
  for (int bit = 0; bit < bits; bit++) {
    const bool set = number >> bit & 1;
    const u32 voted = __ballot_sync(~0u, set);
    same &= set ? voted : ~voted;
  }
  return same;
}

// Sum of the values of all threads before this one, and of all. Two numbers at once, in the halves of a word.
__device__ __forceinline__ u64 sum_before(u64 value, u64* partial, u64& all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 sum = value;
#pragma unroll
  for (int by = 1; by < 32; by <<= 1) {
    const u64 other = __shfl_up_sync(~0u, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  u64 before = lane < warp ? partial[lane] : 0, whole = partial[lane];
#pragma unroll
  for (int by = 16; by; by >>= 1) {
    before += __shfl_xor_sync(~0u, before, by);
    whole += __shfl_xor_sync(~0u, whole, by);
  }
  all = whole;
  return before + sum - value;
}

// Thread e has the number of expert e's slots. Writes where they begin, and the list of items.
__device__ __forceinline__ void list_items(Segments& segments, u8* scratch, int experts, int tile, u32 total) {
  const int expert = threadIdx.x;
  const u32 tiles = (total + tile - 1) / tile;
  u64 all;
  const u64 before = sum_before((u64)tiles << 32 | total, segments.partial, all);
  if (expert < experts) segments.begin[expert] = (u32)before, segments.item[expert] = (int)(before >> 32);
  const int items = (int)(all >> 32), valid = (int)(u32)all;
  if (expert == 0) *(int*)scratch = items;
  __syncthreads();

  Item* const list = (Item*)(scratch + 64);
  for (int i = threadIdx.x; i < items; i += kScanThreads) {
    int low = 0, high = experts;  // the last expert whose first item is not behind this one
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if (segments.item[middle] <= i) low = middle;
      else high = middle;
    }
    const int first = segments.begin[low] + (i - segments.item[low]) * tile;
    const int last = low + 1 < experts ? segments.begin[low + 1] : valid;
    list[i] = Item{low, first, min(tile, last - first), 0};
  }
}
