// What a block of a product has: which item and which tiles; and the sizes of tiles.
#pragma once
#include "batch_chain.cuh"

// Registers of a version for items of up to TILE tokens: what lets so many warps in that they hide each other's waits.
// Blocks are of any number of warps up to the bound.
#ifndef MOE_BATCH_WARPS  // of small tiles, that a multiprocessor should hold
#define MOE_BATCH_WARPS (QUADPAIR ? 16 : 20)
#endif
#define BATCH_BOUNDS(tile) __launch_bounds__((tile) <= 16 ? 16 * MOE_BATCH_WARPS : 384, (tile) <= 16 ? 2 : 1)

// Block n has item n / parts and the n % parts'th part of its tiles: `rounds` for each warp.
struct Share {
  Item item;
  int tile;  // of this warp, its first
  bool any;

  __device__ __forceinline__ Share(const Lists& lists, int parts, int rounds) {
    const int number = blockIdx.x / parts, part = blockIdx.x - number * parts;
    const int warps = blockDim.x >> 5;
    any = number < *lists.count;
    if (any) item = lists.items[number];
    tile = part * rounds * warps + (threadIdx.x >> 5);
  }
};

// The product for the eights of tokens that the item has. They are few versions, since each is a loop of its own: fewest
// where steps are of four parts each, and take longest to compile, and for banks that are not the usual ones.
template <int TILE, class Finish>
__device__ __forceinline__ void product_of(const Bank& bank, const Rows<TILE>& rows, u8* warp, int tile, int tiles,
                                           int rounds, bool resident, Finish finish) {
  const int eights = (rows.count + 7) >> 3;
  if constexpr (TILE == 64 && MOE_ORDER == OCTET32)
    if (eights <= 4) return product<TILE, 4>(bank, rows, warp, tile, tiles, rounds, resident, finish);
  if constexpr (TILE == 32 && !QUADPAIR && MOE_ORDER == OCTET32)
    if (eights <= 3) return product<TILE, 3>(bank, rows, warp, tile, tiles, rounds, resident, finish);
  product<TILE, TILE / 8>(bank, rows, warp, tile, tiles, rounds, resident, finish);
}
