// Weights of a batch on their way from memory: one block of K of a tile's four octets.
//
// Both orders of banks have versions, and so have pairs of scale and bias; the two compact kinds of metadata are told
// apart while the kernel runs. (Telling all three apart so made layers of few tokens 10 % slower.)
#pragma once
#include "batch_step.cuh"

#define OCTET32 0
#define TILE32X8 1
#ifndef MOE_ORDER
#define MOE_ORDER OCTET32
#endif
#ifndef MOE_PAIRS
#define MOE_PAIRS 1  // 4-byte metadata: FP16 scale and bias
#endif

// What a call says of metadata: 4 = FP16 scale and bias; 3 = scale and 8-bit zero; 2 = scale and 4-bit zero.
struct Kind {
  int bytes;

  // Three bytes of a column that lie together (CONTRACT 7).
  __device__ __forceinline__ bool together() const { return MOE_ORDER == TILE32X8 && bytes == 3; }
  __device__ __forceinline__ bool pairs() const { return MOE_PAIRS; }

  // Of a block of K in shared memory: codes, a first word of metadata for each column and unit, and a second one.
  __device__ __forceinline__ int block_bytes() const { return kPieces * (512 + (pairs() ? 128 : 256)); }

  // Eight columns of a group: bytes of what has the scales and of what has the zeros, and where in them the word of
  // column `row` stands. Every kind is loaded as whole words: of half words two lanes have the same.
  __device__ __forceinline__ int first_each() const { return pairs() ? 32 : together() ? 24 : 16; }
  __device__ __forceinline__ int second_each() const { return together() ? 24 : bytes == 3 ? 8 : 4; }
  __device__ __forceinline__ int first_at(int row) const {
    return pairs() ? 4 * row : together() ? 3 * row & ~3 : 2 * row & ~3;
  }
  __device__ __forceinline__ int second_at(int row) const {
    return together() ? 3 * row + 2 & ~3 : bytes == 3 ? row & 4 : 0;
  }
};

// The words of a column; the second one only where a kind has two.
struct Raw {
  u32 first, second;

  __device__ __forceinline__ Scale scale(Kind kind, int row) const {
    if (kind.together()) {
      // three bytes of eight columns are 24 bytes: this column's start in `first`, may end in `second`
      const u32 three = __funnelshift_r(first, second, (3 * row & 3) * 8);
      return from_zero(three, __byte_perm(three, 0x64, 0x4242));
    }
    if (kind.pairs()) return from_pair(first);
    const bool whole = kind.bytes == 3;  // a zero has a byte, else four bits
    const u32 zero = second >> (whole ? 8 * (row & 3) : 4 * row) & (whole ? 255 : 15);
    return from_zero(first >> 16 * (row & 1), zero * 0x00010001u + 0x64006400u);
  }
};

struct Piece {
  uint4 codes;
  Raw raw;
};

// One expert's matrix: `units` of K, `columns` of N.
struct Bank {
  const u8 *words, *first, *second;
  int units, columns, shift;  // a group has 1 << shift units
  Kind kind;

  __device__ __forceinline__ Bank(const void* words_, const void* metadata, const void* scales, const void* zeros,
                                  int expert, int units, int columns, int group, Kind kind)
      : units(units), columns(columns), shift(group >> 6), kind(kind) {  // 32, 64, 128 -> 0, 1, 2
    const u64 eights = (u64)expert * (u32)((units >> shift) * (columns >> 3));
    words = (const u8*)words_ + (u64)expert * (u32)(units * columns) * 16u;
    first = (const u8*)(kind.pairs() || kind.together() ? metadata : scales) + eights * kind.first_each();
    second = (const u8*)(kind.together() ? metadata : zeros) + eights * kind.second_each();
  }

  // The eight columns of an octet in a unit's group, by number.
  __device__ __forceinline__ u32 eighth(int octet, int unit) const {
    const u32 group = unit >> shift;
    return MOE_ORDER == TILE32X8 ? group * (columns >> 3) + octet : octet * (units >> shift) + group;
  }
};

// Goes through the blocks of K of a tile, then of the tile `stride` further on.
struct Reader {
  Bank bank;
  int tile, tiles, stride;
  int unit;  // of the next block, its first

  __device__ __forceinline__ Reader(const Bank& given, int tile, int tiles, int stride)
      : bank(given), tile(tile), tiles(tiles), stride(stride), unit(0) {
    const int row = ASYNC ? lane_id() & 7 : lane_row();
    bank.first += bank.kind.first_at(row), bank.second += bank.kind.second_at(row);
  }

  __device__ __forceinline__ void advance() {
    unit += 4;
    if (unit >= bank.units) unit = 0, tile += stride;
  }

#if ASYNC
  // Copies a block into this warp's shared memory as it lies in memory, so that eight lanes ask for a whole line. (A
  // lane that took its own column's would ask for parts of lines, each a request of its own.) A lane has 16 bytes of
  // each octet, or of each word of the tile's columns. Places are swapped within a unit, for `codes` to meet no bank
  // twice.
  static constexpr int kFirst = kPieces * 512, kSecond = kFirst + kPieces * 128;

  __device__ __forceinline__ void request(u8* to) {
    const int lane = lane_id(), mine = lane >> 3, row = lane & 7;
    if (tile < tiles && mine < bank.units - unit) {
#if MOE_ORDER == TILE32X8
      const u8* from = bank.words + ((u32)(tile * bank.units + unit + mine) * 512u + row * 16);
      const u32 apart = 128;
#else
      const u8* from = bank.words + ((u32)(4 * tile * bank.units + unit) * 128u + lane * 16);
      const u32 apart = bank.units * 128;
#endif
      u8* const codes = to + mine * 128 + ((row ^ 2 * mine) << 4);
      u8* const words = to + kFirst + lane * 4;
#pragma unroll
      for (int i = 0; i < kPieces; i++) {
        const u32 eighth = bank.eighth(4 * tile + i, unit + mine);
        copy_16(codes + i * 512, from + i * apart);
        copy_4(words + i * 128, bank.first + eighth * bank.kind.first_each());
        if (!bank.kind.pairs())
          copy_4(words + kSecond - kFirst + i * 128, bank.second + eighth * bank.kind.second_each());
      }
    }
    advance();
  }

  // Of what was copied: a unit, or a word of it, of this lane's column of an octet.
  __device__ __forceinline__ static u32 word(const u8* block, int octet, int unit, int word) {
#if MOE_ORDER == TILE32X8
    const int chunk = 2 * octet + (lane_row() >> 2);
    return ((const u32*)(block + word * 512 + unit * 128 + ((chunk ^ 2 * unit) << 4)))[lane_row() & 3];
#else
    return ((const u32*)(block + octet * 512 + unit * 128 + ((lane_row() ^ 2 * unit) << 4)))[word];
#endif
  }
  __device__ __forceinline__ static uint4 codes(const u8* block, int octet, int unit) {
#if MOE_ORDER == TILE32X8
    return make_uint4(word(block, octet, unit, 0), word(block, octet, unit, 1), word(block, octet, unit, 2),
                      word(block, octet, unit, 3));
#else
    return *(const uint4*)(block + octet * 512 + unit * 128 + ((lane_row() ^ 2 * unit) << 4));
#endif
  }
  __device__ __forceinline__ Scale scale(const u8* block, int octet, int unit) const {
    const u8* const words = block + kFirst + (octet * 32 + unit * 8 + lane_row()) * 4;
    const u32 second = bank.kind.pairs() ? 0 : *(const u32*)(words + kSecond - kFirst);
    return Raw{*(const u32*)words, second}.scale(bank.kind, lane_row());
  }
#else
  // Loads a block into registers.
  __device__ __forceinline__ void request(Piece (&pieces)[kPieces]) {
    const int row = lane_row(), octet = 4 * tile + lane_quad(), rest = tile < tiles ? bank.units - unit : 0;
#if MOE_ORDER == TILE32X8
    const u8* const from = bank.words + ((u32)(tile * bank.units + unit) * 512u + lane_quad() * 32 + row * 4);
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const u8* const p = from + i * 512;
      pieces[i].codes = make_uint4(read_word(p, i < rest), read_word(p + 128, i < rest), read_word(p + 256, i < rest),
                                   read_word(p + 384, i < rest));
    }
#else
    const u8* const from = bank.words + ((u32)(octet * bank.units + unit) * 128u + row * 16);
#pragma unroll
    for (int i = 0; i < kPieces; i++) pieces[i].codes = read_codes(from + i * 128, i < rest);
#endif
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const u32 eighth = bank.eighth(octet, unit + i);
      pieces[i].raw = {read_word(bank.first + eighth * bank.kind.first_each(), i < rest),
                       read_word(bank.second + eighth * bank.kind.second_each(), i < rest && !bank.kind.pairs())};
    }
    advance();
  }
#endif
};
