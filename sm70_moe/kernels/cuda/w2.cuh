// W2 and the weighted sum: intermediate (M, k, I) -> out (M, H), for up to 8 tokens.
//
// One block owns one octet of output columns, for all slots of some tokens, so that it can add the
// slots in the router's order: no atomics and no scratch memory.
//
// A warp takes eight slots and some of their "runs", pieces of a dot product of one unit of 32 K (more
// where K is long: a slot has at most 8 runs). In a tensor-core step slots 0 to 3 are rows 0 to 7,
// slots 4 to 7 rows 8 to 15, and slot r has column r to itself: lane (row, quad) gives activations only
// where its quad is the slot's place. (The quad-pair step takes four slots.) A slot's runs are added in
// order, so its bits do not depend on the slots beside it: a token has the same result alone and in any
// batch. (A slot's weights meet zeros in the columns of three others, so decoded weights must be finite.)
//
// Two slots with one expert read its weights twice, the second time from L1 or L2.
#pragma once
#include "banks.cuh"
#include "geometry.cuh"
#include "tensor.cuh"

constexpr int kStepSlots = 4 * kSets;
constexpr int kMostRuns = 8;

// Choices that were measured on an H200, also by name for further measurements.
#ifndef MOE_W2_WARPS  // of a block at most, unless it has more groups of slots
#define MOE_W2_WARPS (QUADPAIR ? (TOKENS == 4 ? 16 : 10) : TOKENS == 4 ? 5 : 16)
#endif
#ifndef MOE_W2_AHEAD  // runs whose loads come before the first product
#define MOE_W2_AHEAD (QUADPAIR ? 8 : CROWDED ? 1 : 2)
#endif
#ifndef MOE_W2_STAGED  // activations through shared memory; it lost on an H200, but leaves Volta its registers
#define MOE_W2_STAGED QUADPAIR
#endif
#ifndef MOE_W2_RESIDENT  // warps that a multiprocessor should hold: what registers are kept low for
#define MOE_W2_RESIDENT \
  (!SPECIALISED ? 24 : TOKENS == 1 ? 39 : CROWDED ? 25 : kRuns <= 5 && MOE_METADATA == 4 && __CUDA_ARCH__ < 1200 ? 20 : 15)
#endif

// CROWDED: there are more blocks than multiprocessors hold, so that many resident warps are worth more than
// loads far ahead.
//
// How a block is cut: `kGroups` of slots times `kRanges` of runs, one of each for a warp.
template <int TOKENS, bool CROWDED>
struct W2Cut {
#if SPECIALISED
  static constexpr int kUnits = INNER / 32, kRunUnits = divide_up(kUnits, kMostRuns);
  static constexpr int kRuns = divide_up(kUnits, kRunUnits);
  static constexpr int kSlots = TOKENS * TOP_K, kGroups = divide_up(kSlots, kStepSlots);
  // Few slots would leave places of a step empty. Then the places take a list of all slots' runs, in order.
  static constexpr int kListWarps = divide_up(kSlots * kRuns, kStepSlots);
  static constexpr bool kList = !QUADPAIR && kRunUnits == 1 && TOKENS == 1 && kListWarps <= 16;
  static constexpr int kMost = MOE_W2_WARPS / kGroups;
  static constexpr int kRanges = kList ? kRuns : kMost < 1 ? 1 : kMost < kRuns ? kMost : kRuns;
  static constexpr int kWarpRuns = divide_up(kRuns, kRanges);
  static constexpr int kWarps = kList ? kListWarps : kGroups * kRanges;
  static constexpr int kAhead = MOE_W2_AHEAD < kWarpRuns ? MOE_W2_AHEAD : kWarpRuns;
  static constexpr bool kUnitRuns = kRunUnits == 1;
  static constexpr bool kWhole = kUnitRuns && kRuns % kRanges == 0;  // no warp has less than kWarpRuns
#else
  static constexpr int kRuns = kMostRuns, kWarps = 8, kAhead = 1;
  static constexpr int kSlots = TOKENS * 16;  // k up to 16: what the sums take in shared memory
  static constexpr int kRanges = TOKENS == 1 ? 4 : 1, kWarpRuns = divide_up(kRuns, kRanges);
  static constexpr bool kList = false, kUnitRuns = false, kWhole = false;
#endif
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRoundSlots = SPECIALISED ? 1 : kWarps / kRanges * kStepSlots;  // specialised: one round
  // Where a warp has several runs, the activations go to shared memory first: from L2 each run would wait for
  // its own. Rows are padded so that eight of them meet in no bank.
  static constexpr bool kStaged = kUnitRuns && kWarpRuns > 1 && MOE_W2_STAGED;
#if SPECIALISED
  static constexpr int kRowBytes = INNER * 2 + 16;
#else
  static constexpr int kRowBytes = 16;
#endif
  static constexpr int kStagedBytes = kStaged ? kSlots * kRowBytes : 16;
  static constexpr int kKept = kRanges == 1 ? 1 : kRuns;  // sums of a slot that are added up at the end
  // Warps that a multiprocessor should hold: what registers are kept low for.
  static constexpr int kBlocks = MOE_W2_RESIDENT / kWarps < 1 ? 1 : MOE_W2_RESIDENT / kWarps;
};

// Stores the two sums that a lane has: of slots `first` to `first + kStepSlots - 1` and their runs.
__device__ __forceinline__ void keep(float (*parts)[8], int stride, int first, int slots, float one, float two) {
  const int row = lane_row(), quad = lane_quad();
#if QUADPAIR
  const int slot = first + quad;  // rows `row & 5` and two further
  if (!(threadIdx.x & 2) && slot < slots) {
    parts[slot * stride][row & 5] = one;
    parts[slot * stride][row & 5 | 2] = two;
  }
#else
  const int slot = first + 2 * quad;  // columns 2 quad and the next
  if (slot < slots) parts[slot * stride][row] = one;
  if (slot + 1 < slots) parts[(slot + 1) * stride][row] = two;
#endif
}

// What makes sure that the activations are there: here, the end of the kernel in front.
struct Previous {
  __device__ __forceinline__ void operator()() const {
    let_next_start();
    wait_for_previous();
  }
};

template <int TOKENS, bool CROWDED, class Ready>
__device__ __forceinline__ void w2(const u16* intermediate, const int* ids, const float* weights, const void* words,
                                   const void* groups, const void* zeros, u16* out, int tokens, int top_k, int hidden,
                                   int inner, int experts, int group, int octet, int part, Ready ready) {
  using C = W2Cut<TOKENS, CROWDED>;
  __shared__ float parts[C::kSlots * C::kKept][8];
  __shared__ __align__(16) u8 staged[C::kStagedBytes];
  __shared__ float factor[C::kSlots];
  __shared__ int chosen[C::kSlots];
  const int warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int token = part * TOKENS;  // the first of this block's tokens
  const int units = INNER / 32, run_units = (units + kMostRuns - 1) / kMostRuns;
  const int runs = (units + run_units - 1) / run_units;
  const int served = TOKENS == 1 ? 1 : min(tokens - token, TOKENS), slots = served * TOP_K;
  intermediate += (u64)token * TOP_K * INNER, out += (u64)token * HIDDEN;
  ids += token * TOP_K, weights += token * TOP_K;

  for (int round = 0; round < (SPECIALISED ? 1 : slots); round += C::kRoundSlots) {
    // the places of a step: slots from `first` on and their runs from `begin` on, or list items
    const int first = C::kList ? warp * kStepSlots : round + warp / C::kRanges * kStepSlots;
    const int begin = C::kList ? 0 : warp % C::kRanges * C::kWarpRuns;
    const int places = C::kList ? slots * C::kRuns : slots;
    Matrix matrix[kSets];
    Matrix::Place place[kSets];
    bool there[kSets];
    int run[kSets];
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      const int at = first + 4 * s + quad, slot = C::kList ? at / C::kRuns : at;
      const int expert = at < places ? ids[slot] : -1;
      run[s] = C::kList ? at % C::kRuns : 0;
      there[s] = (u32)expert < (u32)experts;
      matrix[s] = Matrix::of(words, groups, zeros, expert, units, HIDDEN, GROUP);
      place[s] = matrix[s].at(octet, 0, row);
    }

    // A rolled loop holds the loads of a run and those ahead; unrolled, the compiler holds more.
    constexpr bool kRolled = CROWDED && C::kAhead < C::kWarpRuns;
    constexpr int kHeld = !C::kUnitRuns ? 1 : kRolled ? C::kAhead + 1 : C::kWarpRuns;
    uint4 codes[kHeld][kSets];
    Matrix::Raw raw[kHeld][kSets];
    auto request = [&](int i, int unit, bool more = true) {
#pragma unroll
      for (int s = 0; s < kSets; s++) {
        const int at = C::kList ? run[s] : unit;
        const bool needed = more && there[s] && (C::kWhole || unit < units);
        codes[i][s] = matrix[s].codes_at(place[s], at, needed);
        raw[i][s] = matrix[s].raw_at(place[s], at, needed);
      }
    };

    // this lane's column of a step: the activations of one slot, in one quad only
    const int mine = first + (QUADPAIR ? quad : row);
    const bool serves = (QUADPAIR ? row == 0 : quad == (row & 3)) && mine < places;
    const u16* activations = intermediate + (C::kList ? mine * 32 : mine * INNER + begin * run_units * 32);
    asm volatile("" : "+l"(activations));  // one address, not one for each load
    const u8* const row_of = staged + (serves ? mine : 0) * C::kRowBytes + begin * 64;
    auto multiply = [&](Sums& sum, int i, int unit) {
      uint4 operand[4];
#pragma unroll
      for (int w = 0; w < 4; w++)
        operand[w] = C::kStaged ? read_shared(row_of + ((unit - begin) * 4 + w) * 16, serves && (C::kWhole || unit < units))
                                : read_activations(activations + (unit - begin * run_units) * 32 + w * 8,
                                                   serves && (C::kWhole || unit < units));
      Scale scale[kSets];
#pragma unroll
      for (int s = 0; s < kSets; s++) scale[s] = raw[i][s].scale(row);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        u32 decoded[kSets][4];
#pragma unroll
        for (int s = 0; s < kSets; s++) decode(word_of(codes[i][s], w), scale[s], decoded[s]);
        sum.add(decoded, operand[w]);
      }
    };

    if (C::kUnitRuns) {
#pragma unroll
      for (int i = 0; i < C::kAhead; i++) request(i, begin + i);
    }
    if (round == 0) {
#pragma unroll 1
      for (int i = threadIdx.x; i < slots; i += C::kThreads) chosen[i] = ids[i], factor[i] = weights[i];
      ready();  // the activations are there
      if (C::kStaged) {
        const int chunks = INNER / 8;
#pragma unroll 1
        for (int n = threadIdx.x; n < slots * chunks; n += C::kThreads) {
          u8* const to = staged + n / chunks * C::kRowBytes + n % chunks * 16;
          *(uint4*)to = read_activations(intermediate + n * 8, true);
        }
      }
      sync_task<kW2, C::kThreads>();  // keeps the loads in front
    }

    float one = 0.0f, two = 0.0f;
#pragma unroll(kRolled || !C::kUnitRuns ? 1 : C::kWarpRuns)
    for (int i = 0; i < C::kWarpRuns; i++) {
      Sums sum;
      if (!C::kUnitRuns) {
        for (int piece = 0; piece < run_units; piece++) {
          request(0, (begin + i) * run_units + piece);
          multiply(sum, 0, (begin + i) * run_units + piece);
        }
      } else if (kRolled) {
        request(kHeld - 1, begin + i + C::kAhead, i + C::kAhead < C::kWarpRuns);
        multiply(sum, 0, begin + i);
#pragma unroll
        for (int h = 0; h + 1 < kHeld; h++)
#pragma unroll
          for (int s = 0; s < kSets; s++) codes[h][s] = codes[h + 1][s], raw[h][s] = raw[h + 1][s];
      } else {
        if (i + C::kAhead < C::kWarpRuns) request(i + C::kAhead, begin + i + C::kAhead);
        multiply(sum, i, begin + i);
      }
      sum.join();
      const float(&c)[kSums] = sum.c[0];
      const float dot = QUADPAIR || quad < 2 ? c[0] : c[2], next = QUADPAIR ? c[2] : quad < 2 ? c[1] : c[3 % kSums];
      if (C::kList) {
        keep(parts, 1, first, places, dot, next);
      } else if (C::kRanges > 1) {
        if (begin + i < runs) keep(parts + begin + i, C::kKept, first, slots, dot, next);
      } else if (i < runs) {
        one = i ? one + dot : dot, two = i ? two + next : next;
      }
    }
    if (C::kRanges == 1) keep(parts, 1, first, slots, to_float(to_half(one)), to_float(to_half(two)));
  }
  sync_task<kW2, C::kThreads>();

  if (C::kRanges > 1) {  // each slot's dot product, rounded
#pragma unroll 1
    for (int i = threadIdx.x; i < slots * 8; i += C::kThreads) {
      float(*const slot)[8] = parts + (i >> 3) * C::kKept;
      float dot = slot[0][i & 7];
#pragma unroll
      for (int r = 1; r < C::kRuns; r++)
        if (r < runs) dot += slot[r][i & 7];
      slot[0][i & 7] = to_float(to_half(dot));
    }
    sync_task<kW2, C::kThreads>();
  }

  for (int i = threadIdx.x; i < served * 8; i += C::kThreads) {
    const int first = (i >> 3) * TOP_K;
    float sum = 0.0f;
#pragma unroll 10
    for (int j = 0; j < TOP_K; j++) {
      const int s = first + j;
      if ((u32)chosen[s] < (u32)experts) sum = fmaf(factor[s], parts[s * C::kKept][i & 7], sum);
    }
    out[(u32)((i >> 3) * HIDDEN + octet * 8 + (i & 7))] = to_half(sum);
  }
}
