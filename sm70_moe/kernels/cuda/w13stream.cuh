// W13 for layers with many columns: a block takes several octets of one expert, one after the other.
//
// Bits, columns of the tensor-core step and the choice of whom a block serves are those of w13.cuh. A warp
// keeps its part of K, with the activations in registers, and goes through the block's octets: it asks for all of the
// next octet, then multiplies this one, so that its loads never stop and nothing but the decoding and the product is
// done again for each octet. All of an octet at once: a multiprocessor waits for loads by six counters a warp, and
// loads that are asked for one by one, between the products, come to share them with those that are needed first.
//
// The quad-pair step would need 64 registers for its activations: there, octets are just done one by one.
#pragma once
#include "w13.cuh"

#ifndef MOE_W13_STREAM_RESIDENT  // warps that a multiprocessor should hold: what registers are kept low for
#define MOE_W13_STREAM_RESIDENT 16
#endif

template <int MOST>
struct W13StreamCut {
  using C = W13Cut<MOST>;
  static constexpr int kOctetFloats = kMostParts * 8 * C::kServed;
  // octets whose sums are kept in shared memory at once, an even number: 32 KB, or two
  static constexpr int kBatch = kOctetFloats * 8 <= 8192 ? 8 : kOctetFloats * 4 <= 8192 ? 4 : 2;
  static constexpr int kFloats = kOctetFloats * kBatch;
  static constexpr int kBlocks = MOE_W13_STREAM_RESIDENT / C::kWarps < 1 ? 1 : MOE_W13_STREAM_RESIDENT / C::kWarps;
};

// SwiGLU of some octets' sums, and their places in the intermediate: a thread takes a column and a token.
template <int MOST>
__device__ __forceinline__ void finish_octets(const float* sums, const Served& served, u16* intermediate, int slot,
                                              int octet, int count, int parts, int top_k, int inner) {
  constexpr int TOKENS = W13Cut<MOST>::kServed;
  for (int i = threadIdx.x; i < count * 4 * TOKENS; i += 32 * W13Cut<MOST>::warps()) {
    const int token = i % TOKENS, column = i / TOKENS % 4, at = i / (4 * TOKENS);
    const float* const own = sums + at * parts * 8 * TOKENS + 2 * column * TOKENS + token;
    float gate = 0.0f, up = 0.0f;
#pragma unroll(SPECIALISED ? kMostParts : 4)
    for (int p = 0; p < parts; p++) gate += own[p * 8 * TOKENS], up += own[p * 8 * TOKENS + TOKENS];
    const u16 value = swiglu(gate, up);
    u16* const result = intermediate + (u32)(octet + at) * 4 + column;
    if (TOKENS == 1) {
      result[(u32)slot * INNER] = value;
    } else {
      for (u32 slots = served.slots[token]; slots; slots &= slots - 1)
        result[(served.token[token] * TOP_K + __ffs(slots) - 1) * INNER] = value;
    }
  }
}

template <int MOST>
__device__ __forceinline__ void w13_stream(const u16* x, const int* ids, const void* words, const void* groups,
                                           const void* zeros, u16* intermediate, int tokens, int top_k, int hidden,
                                           int inner, int experts, int group, int slot) {
#if QUADPAIR
  const int octets = INNER / 4, each = (octets + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * each, end = min(begin + each, octets);
#pragma unroll 1
  for (int octet = begin; octet < end; octet++) {
    w13<MOST>(x, ids, words, groups, zeros, intermediate, tokens, top_k, hidden, inner, experts, group, octet, slot);
    sync_task<kW13, W13Cut<MOST>::kThreads>();  // the sums in shared memory are read
  }
#else
  using C = W13Cut<MOST>;
  using S = W13StreamCut<MOST>;
  constexpr int TOKENS = C::kServed;
  __shared__ float sums[S::kFloats];
  __shared__ Served served;
  const int warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int units = HIDDEN / 32, parts = (units + kPartUnits - 1) / kPartUnits;
  const int octets = INNER / 4, each = (octets + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * each, end = min(begin + each, octets);
  wait_for_previous();  // see w13.cuh
  const Ids<MOST> all(ids, MOST > 1 ? tokens * TOP_K : 0);
  const int expert = ids[slot];
  if ((u32)expert >= (u32)experts) {
    for (int i = begin * 4 + threadIdx.x; i < end * 4; i += 32 * C::warps()) intermediate[slot * INNER + i] = 0;
    return;
  }
  bool known = true;
  if (TOKENS > 1) {
    known = !kOneScans || !all.first(expert, slot);
    if (known) {
      if (!kOneScans || warp == 0) scan(served, all, expert, slot, tokens * TOP_K, top_k);
      sync_task<kW13, C::kThreads>();
      if (!served.any) return;
    }
  }

  const Matrix matrix = Matrix::of(words, groups, zeros, expert, units, 2 * INNER, GROUP);
  const int first = warp * C::kWarpParts, unit = first * kPartUnits + quad;
  Matrix::Place place = matrix.at(begin, unit, row);
  uint4 codes[2][kQuads][kSets];
  Matrix::Raw raw[2][kQuads][kSets];
  auto request = [&](int h, int octet) {
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
#pragma unroll
      for (int s = 0; s < kSets; s++) {
        const int ahead = s * kPartUnits + 4 * j;
        const bool there = octet < end && (C::kWhole || unit + ahead < units);
        codes[h][j][s] = matrix.codes_at(place, ahead, there);
        raw[h][j][s] = matrix.raw_at(place, ahead, there);
      }
    }
    matrix.next_octets(place, octet, unit, row, 1);
  };
  request(0, begin);
  if (TOKENS > 1 && !known && warp == 0) scan(served, all, expert, slot, tokens * TOP_K, top_k);
  sync_task<kW13, C::kThreads>();  // keeps the loads in front
  let_next_start();

  // this lane's column: a token, and the part that it belongs to
  bool serves = C::token(row) == 0;
  int token = slot / TOP_K;
  if (TOKENS > 1) {
    serves = C::token(row) < TOKENS && served.slots[C::token(row) % TOKENS];
    token = serves ? served.token[C::token(row)] : 0;
  }
  const int own = (first + C::half(row)) * kPartUnits + quad;
  const u16* activations = x + token * HIDDEN + own * 32;
  asm volatile("" : "+l"(activations));  // one address, not one for each load
  uint4 operand[4 * kQuads];
#pragma unroll
  for (int i = 0; i < 4 * kQuads; i++)
    operand[i] = read_activations(activations + i / 4 * 128 + i % 4 * 8,
                                  serves && (C::kWhole || own + i / 4 * 4 < units));

  const int batch = SPECIALISED ? S::kBatch : min(8, S::kFloats / (parts * 8 * TOKENS) & ~1);
#pragma unroll 1
  for (int start = begin; start < end; start += batch) {
    const int count = min(batch, end - start);
#pragma unroll 1
    for (int pair = 0; pair < count; pair += 2) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = pair + h, octet = start + at;
        if (h && at >= count) break;  // the last batch may be odd
        request(1 - h, octet + 1);
        Sums sum;
#pragma unroll
        for (int j = 0; j < kQuads; j++) {
          Scale scale[kSets];
#pragma unroll
          for (int s = 0; s < kSets; s++) scale[s] = raw[h][j][s].scale(row);
#pragma unroll
          for (int w = 0; w < 4; w++) {
            u32 weights[kSets][4];
#pragma unroll
            for (int s = 0; s < kSets; s++) decode(word_of(codes[h][j][s], w), scale[s], weights[s]);
            sum.add(weights, operand[4 * j + w]);
          }
        }
        sum.join();
        keep_part((float(*)[8][TOKENS])(sums + at * parts * 8 * TOKENS), first, parts, C::kWhole, sum.c[0]);
      }
    }
    sync_task<kW13, C::kThreads>();
    finish_octets<MOST>(sums, served, intermediate, slot, start, count, parts, top_k, inner);
    if (start + batch < end) sync_task<kW13, C::kThreads>();
  }
#endif
}
