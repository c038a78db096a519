// How a bank's bytes lie: the orders "octet32" and "tile32x8", and the three kinds of metadata.
//
// Both orders are read by the same lanes in the same K order, so that they give the same bits: a lane
// takes one column and a "unit" of 32 consecutive K at a time, as four words.
#pragma once
#include "decode.cuh"

#define OCTET32 0
#define TILE32X8 1

#ifndef MOE_ORDER
#define MOE_ORDER OCTET32
#endif
#ifndef MOE_METADATA
#define MOE_METADATA 4  // 4 = FP16 scale and bias; 3 = scale and 8-bit zero; 2 = scale and 4-bit zero
#endif

// The plane that holds the scales: all metadata of a column together, or scales alone.
#if MOE_METADATA == 4 || (MOE_METADATA == 3 && MOE_ORDER == TILE32X8)
#define GROUPS(metadata, scales) metadata
#else
#define GROUPS(metadata, scales) scales
#endif

// One expert's matrix: `units` of K, `columns` of N.
struct Matrix {
  const u8* words;
  const u8* groups;  // metadata, or scales
  const u8* zeros;
  int units, columns, shift;  // a group has 1 << shift units

  __device__ __forceinline__ static Matrix of(const void* words, const void* groups, const void* zeros, int expert,
                                              int units, int columns, int group) {
    Matrix m;
    m.units = units, m.columns = columns, m.shift = group >> 6;  // 32, 64, 128 -> 0, 1, 2
    const u64 pairs = (u64)expert * (u32)((units >> m.shift) * columns);
    const int padded = MOE_ORDER == TILE32X8 ? (columns + 31) & ~31 : columns;
    m.words = (const u8*)words + (u64)expert * (u32)(units * padded) * 16u;
#if MOE_METADATA == 4
    m.groups = (const u8*)groups + pairs * 4;
    m.zeros = nullptr;
#elif MOE_METADATA == 3 && MOE_ORDER == TILE32X8
    m.groups = (const u8*)groups + pairs * 3;
    m.zeros = nullptr;
#else
    m.groups = (const u8*)groups + pairs * 2;
    m.zeros = (const u8*)zeros + (MOE_METADATA == 3 ? pairs : pairs >> 1);
#endif
    return m;
  }

  // Raw metadata of a column in a unit's group: one or two registers.
  struct Raw {
    u32 first, second;
    __device__ __forceinline__ Scale scale(int row) const {
#if MOE_METADATA == 4
      return from_pair(first);
#elif MOE_METADATA == 3 && MOE_ORDER == TILE32X8
      // three bytes of eight columns are 24 bytes: this column's start in `first`, may end in `second`
      const u32 three = __funnelshift_r(first, second, (3 * row & 3) * 8);
      return from_zero(three, __byte_perm(three, 0x64, 0x4242));
#elif MOE_METADATA == 3
      return from_zero(first, __byte_perm(second, 0x64, 0x4040 + 0x0101 * (row & 3)));
#else
      return from_zero(first, (second >> (4 * row) & 15) * 0x00010001u + 0x64006400u);
#endif
    }
  };

  // A place in the matrix: column `row` of an octet, from a unit on. Another place at a distance that
  // the compiler knows costs no addresses of its own.
  struct Place {
    const u8 *codes, *groups, *zeros;

#if MOE_ORDER == TILE32X8
    static constexpr int kUnit = 4 * 32 * 4;
    __device__ __forceinline__ uint4 read(int offset, bool there) const {
      const u8* const p = codes + offset;
      return make_uint4(read_word(p, there), read_word(p + 128, there), read_word(p + 256, there),
                        read_word(p + 384, there));
    }
#else
    static constexpr int kUnit = 8 * 16;
    __device__ __forceinline__ uint4 read(int offset, bool there) const { return read_codes(codes + offset, there); }
#endif
  };

  __device__ __forceinline__ Place at(int octet, int unit, int row) const {
    const int group = unit >> shift, count = units >> shift;
#if MOE_ORDER == TILE32X8
    const u8* const codes = words + (((octet >> 2) * units + unit) * 128 + (octet & 3) * 8 + row) * 4;
    const int place = group * columns + octet * 8, eighth = group * (columns >> 3) + octet;
#else
    const u8* const codes = words + ((octet * units + unit) * 8 + row) * 16;
    const int eighth = octet * count + group, place = eighth * 8;
#endif
#if MOE_METADATA == 4
    return {codes, groups + (place + row) * 4, nullptr};
#elif MOE_METADATA == 3 && MOE_ORDER == TILE32X8
    const u8* const eight = groups + place * 3;
    return {codes, eight + (3 * row & ~3), eight + (3 * row + 2 & ~3)};
#elif MOE_METADATA == 3
    return {codes, groups + (place + row) * 2, zeros + place + (row & 4)};
#else
    return {codes, groups + (place + row) * 2, zeros + eighth * 4};
#endif
  }

  // All of it only if `there`. Codes of the place that lies `ahead` units further in the same column.
  __device__ __forceinline__ uint4 codes_at(const Place& place, int ahead, bool there) const {
    return place.read(ahead * Place::kUnit, there);
  }

  // Metadata of the place that lies `by` units further; `by` is a whole number of groups.
  __device__ __forceinline__ void advance(Place& place, int by) const {
    const int place_step = (by >> shift) * (MOE_ORDER == TILE32X8 ? columns : 8);
#if MOE_METADATA == 4
    place.groups += place_step * 4;
#elif MOE_METADATA == 3 && MOE_ORDER == TILE32X8
    place.groups += place_step * 3, place.zeros += place_step * 3;
#elif MOE_METADATA == 3
    place.groups += place_step * 2, place.zeros += place_step;
#else
    place.groups += place_step * 2, place.zeros += place_step / 2;
#endif
  }

  // The same place `by` octets on.
  __device__ __forceinline__ void next_octets(Place& place, int octet, int unit, int row, int by) const {
#if MOE_ORDER == TILE32X8
    place = at(octet + by, unit, row);
#else
    place.codes += by * units * 128;
    const int eighths = by * (units >> shift);
    place.groups += eighths * (MOE_METADATA == 4 ? 32 : 16);
    if (MOE_METADATA == 3) place.zeros += eighths * 8;
    if (MOE_METADATA == 2) place.zeros += eighths * 4;
#endif
  }

  // Metadata of the same; `ahead` is a multiple of a group's units, or the place is in unit 0.
  __device__ __forceinline__ Raw raw_at(const Place& place, int ahead, bool there) const {
    const int place_step = (ahead >> shift) * (MOE_ORDER == TILE32X8 ? columns : 8);
#if MOE_METADATA == 4
    return {read_word(place.groups + place_step * 4, there), 0};
#elif MOE_METADATA == 3 && MOE_ORDER == TILE32X8
    return {read_word(place.groups + place_step * 3, there), read_word(place.zeros + place_step * 3, there)};
#elif MOE_METADATA == 3
    return {read_half(place.groups + place_step * 2, there), read_word(place.zeros + place_step, there)};
#else
    return {read_half(place.groups + place_step * 2, there), read_word(place.zeros + place_step / 2, there)};
#endif
  }
};
