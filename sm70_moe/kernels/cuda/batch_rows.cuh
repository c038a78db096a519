// Activations of an item's tokens in shared memory, a block of K (128) at a time.
//
// 16 bytes ("chunk") of a row are what a lane takes for one word of weights. A warp's reads meet in no bank: eight
// lanes have two rows and either four units or four chunks of a unit (m8n8k4: four rows), so chunks are swapped
// within eight by the row's and the unit's number. Rows beyond the item's count are not written; whatever stands
// there ends up in columns of the product that nobody reads.
#pragma once
#include "batch_step.cuh"

constexpr int kRowBytes = 256;

__device__ __forceinline__ int turned(int row) { return 6 * (row & 1) ^ (row >> 1 & 1); }
__device__ __forceinline__ int placed(int chunk) { return chunk ^ (chunk >> 3 & 1); }  // then ^ turned(row)

template <int TILE>
struct Rows {
  static constexpr int kBytes = TILE * kRowBytes;  // of a buffer
  u8* buffers;
  const u32* from;  // where each row starts in `source`, in chunks
  const u8* source;
  int count, units;

  // A block has an even number of warps: rows of a thread are a multiple of four apart, so they are turned alike.
  __device__ __forceinline__ void copy(int block, int buffer) const {
    const int chunk = threadIdx.x & 15, step = blockDim.x >> 4;
    int row = threadIdx.x >> 4;
    if (chunk >= 4 * (units - 4 * block)) return;
    u8* to = buffers + buffer * kBytes + row * kRowBytes + (placed(chunk) ^ turned(row)) * 16;
    const u8* const base = source + (block * 16 + chunk) * 16;
#pragma unroll 4
    for (; row < count; row += step, to += step * kRowBytes) copy_16(to, base + (u64)from[row] * 16);
  }
};

// What a lane reads of a buffer: rows `lane_row()` of eight, and chunks by number.
struct Reads {
  const u8* row;
  int turn;

  __device__ __forceinline__ Reads(const u8* buffer) : row(buffer + lane_row() * kRowBytes), turn(turned(lane_row())) {}

  __device__ __forceinline__ uint4 chunk(int number, int eights) const {
    return *(const uint4*)(row + ((placed(number) ^ turn) << 4) + eights * 8 * kRowBytes);
  }
};
