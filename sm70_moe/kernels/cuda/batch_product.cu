// Both products of a batch, item by item of the plan:
// W13 and SwiGLU: x (M, H) -> intermediate (M, k, I);
// W2: intermediate -> the slots' own results, FP16, (M, k, columns) in scratch.
//
// One kernel, since only its ends differ: where rows come from, and what becomes of a tile's sums. Two would be
// compiled twice. Of W2, columns `first_column` to `first_column + columns - 1` of H: the caller may take H in parts,
// so that what lies between it and the weighted sum is bounded.
#include "batch_kernel.cuh"
#include "swiglu.cuh"

// What becomes of an item's sums, in shared memory: the loop over K has no registers to spare for it.
struct Results {
  u16* to;
  int count, width, first;  // results of a slot; tile of the first
  bool second;

  __device__ __forceinline__ void store(int slot, int at, uint4 eight) const {
    u16* const row = to + (u64)(u32)slot * (u32)width;
    if (second) {
      *(uint4*)(row + at * 8) = eight;
      return;
    }
    u32 value[4];
#pragma unroll
    for (int i = 0; i < 4; i++) value[i] = swiglu_rounded((u16)word_of(eight, i), (u16)(word_of(eight, i) >> 16));
    *(uint2*)(row + at * 4) = make_uint2(value[0] | value[1] << 16, value[2] | value[3] << 16);
  }
};

// Takes a tile's sums: rounds them, turns 32 columns of 8 tokens from lanes with a column each to lanes with eight of a
// token, and stores these, or what four pairs of gate and up give.
struct Finish {
  const Results* results;
  const int* slot;
  u16* staged;

  template <int COUNT>
  __device__ __forceinline__ void operator()(int tile, const Sums<COUNT>& sums) const {
    const int row = lane_id() >> 2, quarter = lane_id() & 3;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      stage(staged, sums.c[n]);
      __syncwarp();
      const uint4 eight = *(const uint4*)(staged + row * 40 + quarter * 8);
      const int token = n * 8 + row;
      if (token < results->count) results->store(slot[token], (tile - results->first) * 4 + quarter, eight);
      __syncwarp();
    }
  }
};

struct Sizes {
  int top_k, hidden, inner, group, metadata;
};

// `words`, `metadata`, `scales`, `zeros`: those of the matrix; `from` its rows, `to` where results go.
template <int TILE>
__device__ __forceinline__ void batch_product(const u16* from, const void* words, const void* metadata,
                                              const void* scales, const void* zeros, u16* to, const u8* scratch,
                                              long long order_at, const Sizes& sizes, bool second, int parts,
                                              int rounds, int buffers, int first_column, int columns) {
  wait_for_previous();
  const Lists lists(scratch, order_at);
  const Share share(lists, parts, rounds);
  let_next_start();
  if (!share.any) return;
  const int depth = second ? sizes.inner : sizes.hidden, units = depth >> 5, first = first_column >> 5;
  const Bank bank(words, metadata, scales, zeros, share.item.expert, units, second ? sizes.hidden : 2 * sizes.inner,
                  sizes.group, Kind{sizes.metadata});
  const Shared shared(ASYNC ? kAhead<TILE> + 1 : 0, bank.kind.block_bytes());
  __shared__ Results results;
  if (threadIdx.x == 0) results = {to, share.item.count, second ? columns : sizes.inner, first, second};
  for (int i = threadIdx.x; i < share.item.count; i += blockDim.x) {
    const int slot = lists.order[share.item.begin + i];
    shared.slot[i] = slot;
    shared.from[i] = (u32)(second ? slot : slot / sizes.top_k) * (u32)(depth >> 3);
  }
  __syncthreads();
  const Rows<TILE> rows{shared.buffers, shared.from, (const u8*)from, share.item.count, units};
  product_of<TILE>(bank, rows, shared.warp, first + share.tile, first + (columns >> 5), rounds, 4 * buffers >= units,
                   Finish{&results, shared.slot, (u16*)shared.warp});
}

// `second`: W2 and not W13. Columns of W13 are all of them, from 0 on.
#define KERNEL(most)                                                                                                  \
  extern "C" __global__ void BATCH_BOUNDS(most) batch_product_##most(                                                 \
      const u16* x, const void* w13_words, const void* w13_metadata, const void* w13_scales, const void* w13_zeros,   \
      const void* w2_words, const void* w2_metadata, const void* w2_scales, const void* w2_zeros, u8* scratch,        \
      u16* intermediate, int top_k, int hidden, int inner, int group, int metadata, int second, long long order_at,   \
      long long products_at, int parts, int rounds, int buffers, int first_column, int columns) {                     \
    batch_product<most>(second ? intermediate : x, second ? w2_words : w13_words,                                     \
                        second ? w2_metadata : w13_metadata, second ? w2_scales : w13_scales,                         \
                        second ? w2_zeros : w13_zeros, second ? (u16*)(scratch + products_at) : intermediate,         \
                        scratch, order_at, Sizes{top_k, hidden, inner, group, metadata}, second != 0, parts, rounds,  \
                        buffers, first_column, columns);                                                              \
  }
KERNEL(8)
KERNEL(16)
KERNEL(32)
KERNEL(64)
