// The product of a batch: some tiles of an expert's rows times the tokens of an item.
//
// A warp runs over all of K for its tile, then goes on to its next tile; all warps of a block share the tokens.
// Every sum is one chain over K, in the same order whatever the tile's size and whoever else is in the item: a
// slot has the same bits in all of them.
#pragma once
#include "batch_items.cuh"
#include "batch_rows.cuh"
#include "batch_weights.cuh"

// Dynamic shared memory: where rows come from, where results go, a place of each warp to turn results, buffers.
constexpr int kMostTile = 64;
constexpr int kStagedBytes = 640;  // 8 tokens of 32 FP16, each row 80 bytes
constexpr int kListBytes = 2 * kMostTile * 4;

// Blocks of K, of weights and activations, that are on their way while one is multiplied.
#ifndef MOE_BATCH_AHEAD  // of small tiles, whose blocks are multiplied sooner than memory answers
#define MOE_BATCH_AHEAD 2
#endif
#ifndef MOE_BATCH_AHEAD_LARGE
#define MOE_BATCH_AHEAD_LARGE 1
#endif
template <int TILE>
constexpr int kAhead = !ASYNC ? 1 : TILE < 32 ? MOE_BATCH_AHEAD : MOE_BATCH_AHEAD_LARGE;

struct Shared {
  u32* from;
  int* slot;
  u8* warp;  // this warp's own: a place to turn results, then blocks of weights
  u8* buffers;

  // `blocks` of weights, of `bytes` each, are kept for a warp.
  __device__ __forceinline__ Shared(int blocks, int bytes) {
    extern __shared__ __align__(128) u8 dynamic[];
    const int each = kStagedBytes + blocks * bytes;
    from = (u32*)dynamic, slot = (int*)(dynamic + kMostTile * 4);
    warp = dynamic + kListBytes + (threadIdx.x >> 5) * each;
    buffers = dynamic + kListBytes + (blockDim.x >> 5) * each;
  }
};

// Rounds a lane's sums of eight tokens, into rows of 40: 32 columns of a token.
__device__ __forceinline__ void stage(u16* staged, const float (&c)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) staged[Sums<1>::token(i) * 40 + Sums<1>::column(i)] = to_activation(c[i]);
}

#if ASYNC
using Held = const u8*;  // a block of weights: where it stands in shared memory, or its pieces
#else
using Held = Piece[kPieces];
#endif

// A block of K of a tile times that of the tokens. `rest`: units of K from this block on.
#if !ASYNC
template <int COUNT>
__device__ __forceinline__ void multiply(Sums<COUNT>& sums, const Reader& reader, const Piece (&pieces)[kPieces],
                                         const u8* buffer, int rest) {
  const Reads reads(buffer);
#pragma unroll
  for (int i = 0; i < kPieces; i++) {
    if (i >= rest) break;
    const Scale scale = pieces[i].raw.scale(reader.bank.kind, lane_row());
#pragma unroll
    for (int w = 0; w < 4; w++) {
      u32 weights[4];
      decode(word_of(pieces[i].codes, w), scale, weights);
      multiply_word(sums, weights, [&](int n) { return reads.chunk(4 * i + w, n); });
    }
  }
}
#else
// The four lanes of a row take a unit each. Where fewer are left, they take a word each of one after the other.
template <int COUNT>
__device__ __forceinline__ void multiply(Sums<COUNT>& sums, const Reader& reader, const u8* block, const u8* buffer,
                                         int rest) {
  const Reads reads(buffer);
  const int quad = lane_quad();
  u32 weights[kPieces][4];
  if (rest >= 4) {
    uint4 codes[kPieces];
    Scale scale[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      codes[i] = Reader::codes(block, i, quad);
      scale[i] = reader.scale(block, i, quad);
    }
#pragma unroll
    for (int w = 0; w < 4; w++) {
#pragma unroll
      for (int i = 0; i < kPieces; i++) decode(word_of(codes[i], w), scale[i], weights[i]);
      multiply_word(sums, weights, [&](int n) { return reads.chunk(4 * quad + w, n); });
    }
    return;
  }
#pragma unroll 1
  for (int unit = 0; unit < rest; unit++) {
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      decode(Reader::word(block, i, unit, quad), reader.scale(block, i, unit), weights[i]);
    multiply_word(sums, weights, [&](int n) { return reads.chunk(4 * unit + quad, n); });
  }
}
#endif

// `rounds` tiles of this warp, from `tile` on, a block's warps apart. `finish(tile, sums)` takes each one's results.
// `resident`: there is a buffer for every block of K, and activations are copied once; else buffers go round, one
// more than blocks are ahead.
template <int TILE, int COUNT, class Finish>
__device__ __forceinline__ void product(const Bank& bank, const Rows<TILE>& rows, u8* warp, int tile, int tiles,
                                        int rounds, bool resident, Finish finish) {
  constexpr int AHEAD = kAhead<TILE>;
  const int stride = blockDim.x >> 5, blocks = (bank.units + 3) >> 2, total = rounds * blocks;
  Reader reader(bank, tile, tiles, stride);
  Sums<COUNT> sums;
  sums.clear();
  int block = 0, buffer = 0, next = AHEAD, coming = AHEAD % blocks;
  auto request_rows = [&](int step) {
    if (!resident && step + AHEAD < total) rows.copy(coming, next);
    coming = coming + 1 == blocks ? 0 : coming + 1;
  };
  auto use = [&](const Held& weights) {
    if (tile < tiles)  // else the warp only helps to copy
      multiply(sums, reader, weights, rows.buffers + (resident ? block : buffer) * Rows<TILE>::kBytes,
               bank.units - 4 * block);
    next = next == AHEAD ? 0 : next + 1, buffer = buffer == AHEAD ? 0 : buffer + 1;
    if (++block == blocks) {
      if (tile < tiles) finish(tile, sums);
      sums.clear();
      block = 0, tile += stride;
    }
  };
#if ASYNC
  u8* const weights = warp + kStagedBytes;
  const int each = bank.kind.block_bytes();
  for (int b = 0; b < AHEAD; b++) {  // a group of copies for each block, empty ones too
    if (b < total) reader.request(weights + b * each);
    if (!resident && b < total) rows.copy(b % blocks, b);
    if (resident && b == 0)
      for (int each = 0; each < blocks; each++) rows.copy(each, each);
    end_copies();
  }
#pragma unroll 1
  for (int step = 0; step < total; step++) {
    wait_for_copies<AHEAD - 1>();
    if (!resident || step == 0)
      __syncthreads();
    else
      __syncwarp();  // what lanes copied for each other is there, and what is copied over is used
    request_rows(step);
    if (step + AHEAD < total) reader.request(weights + next * each);
    end_copies();
    const u8* const here = weights + buffer * each;
    use(here);
  }
#else
  // The loop has a copy of its body for each set of registers: moving a value that is on its way would wait for it.
  Piece held[2][kPieces];
  reader.request(held[0]);
  for (int b = 0; b < (resident ? blocks : min(AHEAD, total)); b++) rows.copy(b % blocks, b);
#pragma unroll 1
  for (int step = 0; step < total; step += 2) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (step + h >= total) break;
      if (step + h + 1 < total) reader.request(held[1 - h]);
      if (!resident || step + h == 0) __syncthreads();
      request_rows(step + h);
      use(held[h]);
    }
  }
#endif
}
