// W2 for layers with much to read: a block takes several octets of one token's output, one after the other.
//
// Runs, places and bits are those of w2.cuh. A warp keeps its places - slots and their runs - and goes through
// the block's octets, two units at a time: it asks for the next two, then multiplies these (w13stream.cuh says why).
// Each token has its own block, since a slot's weights serve that slot only.
//
// For the quad-pair step and for runs that no warp can have in registers, octets are just done one by one.
#pragma once
#include "w2.cuh"

#ifndef MOE_W2_STREAM_RESIDENT  // warps that a multiprocessor should hold: what registers are kept low for
#define MOE_W2_STREAM_RESIDENT 20
#endif
#ifndef MOE_W2_STREAM_EARLY  // operands of a unit that are loaded before the first is used
#define MOE_W2_STREAM_EARLY 4
#endif

struct W2StreamCut {
  using C = W2Cut<1, false>;
#if SPECIALISED
  static constexpr int kSteps = C::kWarpRuns * C::kRunUnits;  // of a warp in an octet
  static constexpr bool kStreams = !QUADPAIR && kSteps <= 8 && (kSteps == 1 || kSteps % 2 == 0) && C::kSlots * C::kRuns <= 336;
  static constexpr int kItems = C::kSlots * C::kRuns;
#else
  static constexpr bool kStreams = false;
  static constexpr int kItems = 1;
#endif
  // octets whose sums are kept in shared memory at once: 42 KB at most
  static constexpr int kBatch = !kStreams ? 1 : kItems <= 128 ? 8 : 4;
  static constexpr int kFloats = kStreams ? kBatch * kItems * 8 : 1;
  static constexpr int kBlocks = MOE_W2_STREAM_RESIDENT / C::kWarps < 1 ? 1 : MOE_W2_STREAM_RESIDENT / C::kWarps;
};

#if SPECIALISED
// Sums of `count` octets' runs -> their columns of the output.
__device__ __forceinline__ void finish_outputs(float (*sums)[8], const float* factor, const int* chosen, u16* out,
                                               int octet, int count, int experts) {
  using C = W2StreamCut::C;
  constexpr int kThreads = C::kThreads, kItems = W2StreamCut::kItems;
#pragma unroll 1
  for (int i = threadIdx.x; i < count * C::kSlots * 8; i += kThreads) {
    float(*const slot)[8] = sums + (i >> 3) / C::kSlots * kItems + (i >> 3) % C::kSlots * C::kRuns;
    float dot = slot[0][i & 7];
#pragma unroll(C::kRuns <= 16 ? C::kRuns : 8)
    for (int r = 1; r < C::kRuns; r++) dot += slot[r][i & 7];
    slot[0][i & 7] = to_float(to_activation(dot));
  }
  sync_task<kW2, kThreads>();
#pragma unroll 1
  for (int i = threadIdx.x; i < count * 8; i += kThreads) {
    float(*const own)[8] = sums + (i >> 3) * kItems;
    float sum = 0.0f;
#pragma unroll 10
    for (int j = 0; j < TOP_K; j++)
      if ((u32)chosen[j] < (u32)experts) sum = fmaf(factor[j], own[j * C::kRuns][i & 7], sum);
    out[octet * 8 + i] = to_activation(sum);
  }
}

// `never` is 0, which the compiler does not know.
__device__ __forceinline__ void w2_octets(const W2Call& call, const float* weights, u16* out, int begin, int end,
                                          u32 never) {
  using C = W2StreamCut::C;
  using S = W2StreamCut;
  constexpr int kSteps = S::kSteps, kRun = C::kRunUnits, kUnits = C::kUnits;
  constexpr int kShift = GROUP >> 6, kEach = kRun < 1 << kShift ? kRun : 1 << kShift;
  constexpr bool kAligned = kEach == 1 << kShift;
  // units that are asked for together, and octets until both buffers have had their turn
  constexpr int kPair = kSteps == 1 ? 1 : 2, kFirst = kSteps / kPair % 2 + 1;
  __shared__ float sums[S::kBatch * S::kItems][8];
  __shared__ float factor[TOP_K];
  __shared__ int chosen[TOP_K];
  const int warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int first = C::kList ? warp * kStepSlots : warp / C::kRanges * kStepSlots;
  const int start = C::kList ? 0 : warp % C::kRanges * C::kWarpRuns;  // first run
  const int places = C::kList ? TOP_K * C::kRuns : TOP_K;

  Matrix matrix[kSets];
  Matrix::Place place[kSets];
  bool there[kSets];
  int from[kSets];
#pragma unroll
  for (int s = 0; s < kSets; s++) {
    const int at = first + 4 * s + quad, slot = C::kList ? at / C::kRuns : at;
    const int expert = call.expert(slot, at < places);
    there[s] = (u32)expert < (u32)call.experts;
    from[s] = (C::kList ? at % C::kRuns : start) * kRun;
    matrix[s] = call.matrix(expert, kUnits);
    place[s] = matrix[s].at(call.octet, kAligned ? from[s] : 0, row);
    if (!kAligned) place[s].codes += from[s] * Matrix::Place::kUnit;
  }
  const int mine = first + (QUADPAIR ? quad : row);
  const bool serves = (QUADPAIR ? row == 0 : quad == (row & 3)) && mine < places;
  const int own = (C::kList ? mine % C::kRuns : start) * kRun;
  const u16* activations = call.intermediate + (C::kList ? mine / C::kRuns : mine) * INNER + own * 32;
  asm volatile("" : "+l"(activations));  // one address, not one for each load

  uint4 codes[2][kPair][kSets];
  Matrix::Raw raw[2][kPair][kSets];
  // The units from `t` on, counted from the octet of the places, which may lie in the next one.
  auto request = [&](int held, int t, bool more) {
#pragma unroll
    for (int u = 0; u < kPair; u++) {
      const int unit = (t + u) % kSteps;
#pragma unroll
      for (int s = 0; s < kSets; s++) {
        const bool needed = more && there[s] && (C::kWhole || from[s] + unit < kUnits);
        Matrix::Place at = place[s];
        matrix[s].next_octets(at, 0, 0, 0, (t + u) / kSteps);
        codes[held][u][s] = matrix[s].codes_at(at, unit, needed);
        if (u == 0 || unit % kEach == 0)
          raw[held][u][s] = matrix[s].raw_at(at, kAligned ? unit : from[s] + unit, needed);
        else
          raw[held][u][s] = raw[held][u - 1][s];
      }
    }
  };
  request(0, 0, begin < end);
#pragma unroll 1
  for (int i = threadIdx.x; i < TOP_K; i += C::kThreads) chosen[i] = call.ids[i], factor[i] = weights[i];
  Previous{}();
  sync_task<kW2, C::kThreads>();  // keeps the loads in front

  // one octet, whose first units are in buffer `held`
  auto octet_of = [&](int held, float(*to)[8], bool more) {
    Sums sum;
#pragma unroll
    for (int t = 0; t < kSteps; t++) {
      const int h = (held + t / kPair) & 1, u = t % kPair;
      if (u == 0) request(1 - h, t + kPair, t + kPair < kSteps || more);
      // Not before the codes are there: else operands of all units would be asked for at once and take the
      // registers that hold codes on their way.
      const u16* const from_here = activations + (codes[h][u][0].x & never);
      uint4 operand[4];
      auto load = [&](int w) {
        operand[w] = read_activations(from_here + t * 32 + w * 8, serves && (C::kWhole || own + t < kUnits));
      };
#pragma unroll
      for (int w = 0; w < MOE_W2_STREAM_EARLY; w++) load(w);
      Scale scale[kSets];
#pragma unroll
      for (int s = 0; s < kSets; s++) scale[s] = raw[h][u][s].scale(row);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        if (w + MOE_W2_STREAM_EARLY < 4) load(w + MOE_W2_STREAM_EARLY);
        u32 decoded[kSets][4];
#pragma unroll
        for (int s = 0; s < kSets; s++) decode(word_of(codes[h][u][s], w), scale[s], decoded[s]);
        sum.add(decoded, operand[w]);
      }
      if ((t + 1) % kRun == 0) {
        float dot, next;
        const int run = start + t / kRun;
        own_sums(sum, dot, next);
        if (C::kList)
          keep(to, 1, first, places, dot, next);
        else if (run < C::kRuns)
          keep(to + run, C::kRuns, first, TOP_K, dot, next);
        sum.clear();
      }
    }
  };
#pragma unroll 1
  for (int octet = begin; octet < end; octet += S::kBatch) {
    const int count = min(S::kBatch, end - octet);
#pragma unroll 1
    for (int at = 0; at < count; at += kFirst) {
#pragma unroll
      for (int h = 0; h < kFirst; h++) {
        if (h == 0 || at + h < count) {
          octet_of(h, sums + (at + h) * S::kItems, octet + at + h + 1 < end);
#pragma unroll
          for (int s = 0; s < kSets; s++) matrix[s].next_octets(place[s], 0, 0, 0, 1);
        }
      }
    }
    sync_task<kW2, C::kThreads>();
    finish_outputs(sums, factor, chosen, out, octet, count, call.experts);
    if (octet + S::kBatch < end) sync_task<kW2, C::kThreads>();
  }
}
#endif

__device__ __forceinline__ void w2_stream(const u16* intermediate, const int* ids, const float* weights,
                                          const void* words, const void* groups, const void* zeros, u16* out,
                                          int tokens, int top_k, int hidden, int inner, int experts, int group,
                                          int token) {
  using C = W2StreamCut::C;
  const int octets = HIDDEN / 8, each = (octets + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * each, end = min(begin + each, octets);
#if SPECIALISED
  if constexpr (W2StreamCut::kStreams) {
    const W2Call call = {intermediate + (u64)token * TOP_K * INNER,
                         ids + token * TOP_K,
                         words,
                         groups,
                         zeros,
                         TOP_K,
                         top_k,
                         hidden,
                         inner,
                         experts,
                         group,
                         begin};
    w2_octets(call, weights + token * TOP_K, out + (u64)token * HIDDEN, begin, end, (u32)tokens >> 8);
    return;
  }
#endif
#pragma unroll 1
  for (int octet = begin; octet < end; octet++) {
    w2<1, false>(intermediate, ids, weights, words, groups, zeros, out, tokens, top_k, hidden, inner, experts, group,
                 octet, token, Previous{});
    sync_task<kW2, C::kThreads>();  // the sums in shared memory are read
  }
}
