// W2 and the weighted sum: intermediate (M, k, I) -> out (M, H), for up to 8 tokens.
//
// One block owns one octet of output columns, for all slots of some tokens, so that it can add the
// slots in the router's order: no atomics and no scratch memory.
//
// A warp takes eight slots and some of their runs (w2cut.cuh). In a tensor-core step slots 0 to 3 are
// rows 0 to 7, slots 4 to 7 rows 8 to 15, and slot r has column r to itself: lane (row, quad) gives
// activations only where its quad is the slot's place. (The quad-pair step takes four slots.) A slot's runs
// are added in order, so its bits do not depend on the slots beside it: a token has the same result alone and
// in any batch. (A slot's weights meet zeros in the columns of three others, so decoded weights must be finite.)
//
// Two slots with one expert read its weights twice, the second time from L1 or L2.
#pragma once
#include "banks.cuh"
#include "w2cut.cuh"

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

// The places of a warp's steps, and what each lane asks of them: a unit after the other, from the first one on.
//
// `HELD` units are on their way or in use; `EACH`: metadata are asked for with every so many units; `EARLY`:
// operands of a unit that are loaded before the first is used.
template <int HELD, int EACH, int EARLY, bool WHOLE>
struct Places {
  Matrix matrix[kSets];
  Matrix::Place place[kSets];
  bool there[kSets];
  int from[kSets];  // the next unit of the run
  uint4 codes[HELD][kSets];
  Matrix::Raw raw[HELD][kSets];
  const u16* activations;  // of this lane's column of a step: one slot, in one quad only
  bool serves;
  int own;  // the next unit of that one
  int units;

#if SPECIALISED
  static constexpr int kShift = GROUP >> 6;
  static constexpr bool kAligned = EACH == 1 << kShift;  // metadata are found by adding, too
#else
  static constexpr bool kAligned = false;
#endif

  // Place `s` has these runs of an expert.
  __device__ __forceinline__ void aim(int s, const Matrix& of, int octet, int unit, bool valid) {
    const int row = lane_row();
    matrix[s] = of, there[s] = valid, from[s] = unit;
    place[s] = of.at(octet, kAligned ? unit : 0, row);
    if (!kAligned) place[s].codes += unit * Matrix::Place::kUnit;
  }

  // Loads of the unit `ahead` of the next one into the place `held`.
  __device__ __forceinline__ void request(int held, int ahead, bool more = true) {
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      const bool needed = more && there[s] && (WHOLE || from[s] + ahead < units);
      codes[held][s] = matrix[s].codes_at(place[s], ahead, needed);
      if (ahead % EACH == 0)
        raw[held][s] = matrix[s].raw_at(place[s], kAligned ? ahead : from[s] + ahead, needed);
      else
        raw[held][s] = raw[(held + HELD - 1) % HELD][s];
    }
  }

  __device__ __forceinline__ void multiply(Sums& sum, int held, int ahead) {
    const int row = lane_row();
    uint4 operand[4];
    auto load = [&](int w) {
      operand[w] = read_activations(activations + ahead * 32 + w * 8, serves && (WHOLE || own + ahead < units));
    };
#pragma unroll
    for (int w = 0; w < EARLY; w++) load(w);
    Scale scale[kSets];
#pragma unroll
    for (int s = 0; s < kSets; s++) scale[s] = raw[held][s].scale(row);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      if (w + EARLY < 4) load(w + EARLY);
      u32 decoded[kSets][4];
#pragma unroll
      for (int s = 0; s < kSets; s++) decode(word_of(codes[held][s], w), scale[s], decoded[s]);
      sum.add(decoded, operand[w]);
    }
  }

  __device__ __forceinline__ void advance(int by) {
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      from[s] += by;
      place[s].codes += by * Matrix::Place::kUnit;
      if (kAligned) matrix[s].advance(place[s], by);
    }
    activations += by * 32, own += by;
  }
};

// The two sums that a lane has of a step's: of slots (or items) 2 quad and the next.
__device__ __forceinline__ void own_sums(Sums& sum, float& dot, float& next) {
  sum.join();
  const float(&c)[kSums] = sum.c[0];
  const int quad = lane_quad();
  dot = QUADPAIR || quad < 2 ? c[0] : c[2], next = QUADPAIR ? c[2] : quad < 2 ? c[1] : c[3 % kSums];
}

template <int TOKENS, bool CROWDED>
struct W2Shared {
  using C = W2Cut<TOKENS, CROWDED>;
  float parts[C::kParts][8];
  float factor[C::kSlots];
  int chosen[C::kSlots];
  __align__(16) u8 staged[C::kStagedBytes];
};

// What all kinds of runs need to know.
struct W2Call {
  const u16* intermediate;
  const int* ids;
  const void *words, *groups, *zeros;
  int slots, top_k, hidden, inner, experts, group, octet;

  __device__ __forceinline__ Matrix matrix(int expert, int units) const {
    return Matrix::of(words, groups, zeros, expert, units, HIDDEN, GROUP);
  }
  // Expert of a slot; none where there is no such slot.
  __device__ __forceinline__ int expert(int slot, bool there) const { return there ? ids[slot] : -1; }
};

#include "w2runs.cuh"

template <int TOKENS, bool CROWDED, class Ready>
__device__ __forceinline__ void w2(const u16* intermediate, const int* ids, const float* weights, const void* words,
                                   const void* groups, const void* zeros, u16* out, int tokens, int top_k, int hidden,
                                   int inner, int experts, int group, int octet, int part, Ready ready) {
  using C = W2Cut<TOKENS, CROWDED>;
  __shared__ W2Shared<TOKENS, CROWDED> shared;
  const int token = part * TOKENS;  // the first of this block's tokens
  const int served = TOKENS == 1 ? 1 : min(tokens - token, TOKENS), slots = served * TOP_K;
  intermediate += (u64)token * TOP_K * INNER, out += (u64)token * HIDDEN;
  ids += token * TOP_K, weights += token * TOP_K;
  const W2Call call = {intermediate, ids, words, groups, zeros, slots, top_k, hidden, inner, experts, group, octet};

  // behind the first loads of weights
  auto arrive = [&]() {
#pragma unroll 1
    for (int i = threadIdx.x; i < slots; i += C::kThreads) shared.chosen[i] = ids[i], shared.factor[i] = weights[i];
    ready();  // the activations are there
    if (C::kStaged) {
      const int chunks = INNER / 8;
#pragma unroll 1
      for (int n = threadIdx.x; n < slots * chunks; n += C::kThreads) {
        u8* const to = shared.staged + n / chunks * C::kRowBytes + n % chunks * 16;
        *(uint4*)to = read_activations(intermediate + n * 8, true);
      }
    }
    sync_task<kW2, C::kThreads>();  // keeps the loads in front
  };
#if SPECIALISED
  constexpr int runs = C::kRuns, kept = C::kKept;
  if constexpr (C::kUnitRuns)
    unit_runs<TOKENS, CROWDED>(call, shared, arrive);
  else
    long_runs<TOKENS, CROWDED>(call, shared, arrive);
#else
  const int runs = any_runs<TOKENS, CROWDED>(call, shared, arrive), kept = runs;
#endif
  sync_task<kW2, C::kThreads>();

  float(*const parts)[8] = shared.parts;
  if (kept > 1 || !SPECIALISED) {  // each slot's dot product, rounded
#pragma unroll 1
    for (int i = threadIdx.x; i < slots * 8; i += C::kThreads) {
      float(*const slot)[8] = parts + (i >> 3) * kept;
      float dot = slot[0][i & 7];
#pragma unroll(SPECIALISED && C::kRuns <= 16 ? C::kRuns : 8)
      for (int r = 1; r < runs; r++) dot += slot[r][i & 7];
      slot[0][i & 7] = to_float(to_activation(dot));
    }
    sync_task<kW2, C::kThreads>();
  }

  for (int i = threadIdx.x; i < served * 8; i += C::kThreads) {
    const int first = (i >> 3) * TOP_K;
    float sum = 0.0f;
#pragma unroll 10
    for (int j = 0; j < TOP_K; j++) {
      const int s = first + j;
      if ((u32)shared.chosen[s] < (u32)experts) sum = fmaf(shared.factor[s], parts[s * kept][i & 7], sum);
    }
    out[(u32)((i >> 3) * HIDDEN + octet * 8 + (i & 7))] = to_activation(sum);
  }
}
