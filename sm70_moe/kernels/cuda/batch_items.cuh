// What the plan of a batch writes and its products read: lists in scratch memory.
//
// `order` has the valid slots (token * k + j), sorted by expert and, within one, by number. An item is a run of
// at most a tile's tokens in it, all of one expert. Which slots share an item is decided by the ids alone, so
// that a call gives the same bits whenever it is repeated.
#pragma once
#include "bits.cuh"

struct __align__(16) Item {
  int expert, begin, count, unused;
};

// The head of scratch: how many items there are, then the items. `order` and whatever follows stand where the
// host says.
struct Lists {
  const int* count;
  const Item* items;
  const int* order;

  __device__ __forceinline__ Lists(const u8* scratch, long long order_at)
      : count((const int*)scratch), items((const Item*)(scratch + 64)), order((const int*)(scratch + order_at)) {}
};
