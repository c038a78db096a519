// W13, SwiGLU: x (M, H) -> intermediate (M, k, I), for up to 8 tokens.
//
// One block owns one octet of interleaved gate and up columns of one expert, over all of K.
// Its warps share K out among them; everything that a thread reads of the weights is requested
// before the first tensor-core step, so a launch has all of its bytes in flight.
//
// Grouped without a plan: block (., slot) reads all ids, serves its expert for every token that chose
// it (four of them; a second block serves the rest), and leaves if another one does. Tokens are the
// columns of the tensor-core step.
//
// The bits of a result depend on K's grouping into partial sums only: "parts" of kQuads steps of four
// units, added in order. It is the same in all kernels of a build, so a token has the same result
// alone and in any batch.
#pragma once
#include "banks.cuh"
#include "geometry.cuh"
#include "swiglu.cuh"
#include "tensor.cuh"

#if SPECIALISED
constexpr int kMostUnits = HIDDEN / 32;
#else
constexpr int kMostUnits = 512;  // H up to 16,384: what the sums of a block take in shared memory
#endif

// Steps of four units in a part. Volta: more loads for each warp, as its step takes one octet only.
constexpr int kQuads = QUADPAIR ? 4 : 2;
constexpr int kPartUnits = 4 * kQuads;
constexpr int kMostParts = divide_up(kMostUnits, kPartUnits);

// Choices that were measured on an H200, also by name for further measurements.
// Warps that a multiprocessor should hold: what registers are kept low for. On sm_90 such that nothing is
// spilled: two spilled registers cost more than a block less.
#ifndef MOE_W13_RESIDENT
#define MOE_W13_RESIDENT                              \
  (!SPECIALISED                      ? 32             \
   : __CUDA_ARCH__ != 900            ? 24             \
   : MOST == 1 && MOE_METADATA == 4  ? 35             \
   : MOST == 2 && MOE_METADATA == 3  ? 30             \
                                     : 40)
#endif
// Operands that are loaded before the first is used, 1 to 4 * kQuads.
#ifndef MOE_W13_EARLY
#define MOE_W13_EARLY                                 \
  (QUADPAIR                          ? SPECIALISED + 1 \
   : MOST == 1 && MOE_METADATA == 4  ? 4              \
   : __CUDA_ARCH__ != 900            ? 2              \
   : MOST == 2 && MOE_METADATA != 3  ? 8              \
                                     : 2)
#endif

// Whether the next kernel may start when weights have been asked for, or only behind the barrier that follows.
#ifndef MOE_W13_START_EARLY
#define MOE_W13_START_EARLY (MOE_METADATA == 3 && MOST == 2 || MOE_METADATA == 2 && MOST == 1)
#endif

// How a block is cut in a kernel for up to MOST tokens. Each owns one octet of columns.
// - m16n8k16: two parts in a warp. Rows 8 to 15 are the next part, and each token has two columns.
// - the quad-pair step: one part in a warp.
template <int MOST>
struct W13Cut {
  static constexpr int kServed = MOST < 4 ? MOST : 4;  // tokens of a block
  static constexpr int kWarpParts = QUADPAIR ? 1 : 2;
  static constexpr int kWarpUnits = kWarpParts * kPartUnits;
#if SPECIALISED
  static constexpr int kNeeded = divide_up(kMostUnits, kWarpUnits);
  static constexpr int kWarps = kNeeded < 16 ? kNeeded : 16;
  static constexpr bool kWhole = kWarps * kWarpUnits == kMostUnits;  // one round, nothing past the end
#else
  static constexpr int kWarps = 16;  // at most: launched are as many as the sizes need (steps.py)
  static constexpr bool kWhole = false;
#endif
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = MOE_W13_RESIDENT / kWarps < 1 ? 1 : MOE_W13_RESIDENT / kWarps;
  __device__ __forceinline__ static int warps() { return SPECIALISED ? kWarps : blockDim.x >> 5; }
  static constexpr int kEarly = MOE_W13_EARLY;
  // token (of those that the block serves) and part of a column of the tensor-core step
  __device__ static int token(int column) { return QUADPAIR ? column : column >> 1; }
  __device__ static int half(int column) { return QUADPAIR ? 0 : column & 1; }
};

#if SPECIALISED
constexpr int kTopK = TOP_K;
#else
constexpr int kTopK = 16;  // at most, as the manifest says
#endif
constexpr bool kOneScans = __CUDA_ARCH__ >= 900 && !QUADPAIR;

// Whom a block serves: tokens, and for each the bits of its slots with the block's expert.
struct Served {
  u32 slots[4];
  int token[4];
  bool any;
};

// All ids of a call, in a warp's registers: lane l has those of slots l, l + 32, ... Requested together, and
// without waiting for the block's own.
template <int MOST>
struct Ids {
  static constexpr int kWords = divide_up(MOST * kTopK, 32);
  int id[kWords];

  __device__ __forceinline__ Ids(const int* ids, int slots) {
#pragma unroll
    for (int w = 0; w < kWords; w++) id[w] = (int)read_word(ids + place(w), place(w) < slots);
  }

  __device__ __forceinline__ static int place(int w) { return 32 * w + lane_id(); }

  // Does no slot before this one have the expert?
  __device__ __forceinline__ bool first(int expert, int slot) const {
    bool seen = false;
#pragma unroll
    for (int w = 0; w < kWords; w++) seen |= place(w) < slot && id[w] == expert;
    return !__any_sync(~0u, seen);
  }
};

// The tokens that chose `expert` are served four at a time; the block of the first slot of the first of
// four does it, all others of these have nothing to do. One warp finds out for the block: it is seventy
// instructions.
template <int MOST>
__device__ __forceinline__ void scan(Served& served, const Ids<MOST>& ids, int expert, int slot, int slots, int top_k) {
  constexpr int kServed = W13Cut<MOST>::kServed;
  const int lane = lane_id(), token = slot / TOP_K;
  u32 mine = 0;  // lane t: slots of token t
#pragma unroll
  for (int w = 0; w < Ids<MOST>::kWords; w++) {
    const u32 same = __ballot_sync(~0u, Ids<MOST>::place(w) < slots && ids.id[w] == expert);
    const int ahead = lane * TOP_K - 32 * w;
    mine |= shift_right(same, ahead) | shift_left(same, -ahead);
  }
  mine &= ~shift_left(~0u, TOP_K);
  const u32 active = __ballot_sync(~0u, mine);
  const int first = __popc(active & ~shift_left(~0u, token));
  u32 from = active & shift_left(~0u, token);  // lane j: the j-th of these tokens is served in place j
#pragma unroll
  for (int j = 1; j < kServed; j++)
    if (lane >= j) from &= from - 1;
  const int source = __ffs(from) - 1;
  const u32 found = __shfl_sync(~0u, mine, source & 31);
  if (lane < kServed) served.slots[lane] = from ? found : 0, served.token[lane] = source;
  if (lane == token) served.any = first % kServed == 0 && __ffs(mine) - 1 == slot - token * TOP_K;
}

// Stores a lane's sums of part `first` (and the next) for all tokens.
template <int TOKENS>
__device__ __forceinline__ void keep_part(float (*sums)[8][TOKENS], int first, int parts, bool whole, float (&c)[kSums]) {
  const int row = lane_row();
#if QUADPAIR
  if (TOKENS == 1) {
    sum_quads_first(c);
    if (!(threadIdx.x & 14) && (whole || first < parts)) {
      sums[first][row & 5][0] = c[0];
      sums[first][row & 5 | 2][0] = c[2];
    }
  } else {
    sum_quads(c);
    float* const place = &sums[first][summed_row()][summed_column() % TOKENS];
    if (summed_column() < TOKENS && (whole || first < parts)) place[0] = c[0], place[1] = c[1];
  }
#else
  // columns 2 quad and the next: rows 0 to 7 with the first part, rows 8 to 15 with the second
  const int quad = lane_quad();
  if (quad < TOKENS) {
    if (whole || first < parts) sums[first][row][quad] = c[0];
    if (whole || first + 1 < parts) sums[first + 1][row][quad] = c[3];
  }
#endif
}

template <int MOST>
__device__ __forceinline__ void w13(const u16* x, const int* ids, const void* words, const void* groups,
                                    const void* zeros, u16* intermediate, int tokens, int top_k, int hidden, int inner,
                                    int experts, int group, int octet, int slot) {
  using C = W13Cut<MOST>;
  constexpr int TOKENS = C::kServed;
  __shared__ float sums[kMostParts][8][TOKENS];
  __shared__ Served served;
  const int warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int units = HIDDEN / 32, parts = (units + kPartUnits - 1) / kPartUnits;
#ifndef MOE_ONE_LAUNCH
  // Ids, activations, and whatever still reads the intermediate: all of it belongs to the kernels in front.
  // Also, let_next_start stands behind it everywhere: W2 reads ids before it waits itself.
  wait_for_previous();
#endif
  const Ids<MOST> all(ids, MOST > 1 ? tokens * TOP_K : 0);
  const int expert = ids[slot];

  // Activations of this lane's column, a word's worth each: kEarly of them before they are needed.
  uint4 operand[4 * kQuads];
  int unit = (warp * C::kWarpParts + C::half(row)) * kPartUnits + quad;
  const u16* activations = x + unit * 32;
  bool serves = C::token(row) == 0;  // does anybody read this lane's column?
  auto load = [&](int i) {
    const u16* const from = activations + i / 4 * 128 + i % 4 * 8;
    operand[i] = read_activations(from, serves && (C::kWhole || unit + i / 4 * 4 < units));
  };
  if (TOKENS == 1 && C::kWhole) {
#pragma unroll
    for (int i = 0; i < C::kEarly; i++) load(i);
  }

  if ((u32)expert >= (u32)experts) {
    if (threadIdx.x < 4) intermediate[slot * INNER + octet * 4 + threadIdx.x] = 0;
    return;
  }
  // A block whose slot is the first with its expert has work, whoever else chose it: it asks for weights
  // before it looks further.
  // (Before sm_90 all blocks look first, and all warps do: a vote under a condition that the compiler
  // cannot follow becomes a call there.)
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
  for (int round = 0; round < parts; round += C::warps() * C::kWarpParts) {
    const int first = round + warp * C::kWarpParts;
    uint4 codes[kQuads][kSets];
    Matrix::Raw raw[kQuads][kSets];
    const Matrix::Place place = matrix.at(octet, first * kPartUnits + quad, row);
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
#pragma unroll
      for (int s = 0; s < kSets; s++) {
        const int ahead = s * kPartUnits + 4 * j;
        const bool there = C::kWhole || first * kPartUnits + quad + ahead < units;
        codes[j][s] = matrix.codes_at(place, ahead, there);
        raw[j][s] = matrix.raw_at(place, ahead, there);
      }
    }
    if (MOE_W13_START_EARLY) let_next_start();

    if (C::kEarly < 4 * kQuads) {
      // Brings this warp's activations into L1, a sector a lane, while the weights are on their way, so that
      // operands can be loaded where they are used. `warm` is 0: `tokens` is below 256, which the compiler
      // does not know.
      const int sector = min(first * kPartUnits * 2 + lane_id(), HIDDEN / 16 - 1);
      const u32 warm = read_word(x + slot / TOP_K * HIDDEN + sector * 16) & (u32)(tokens >> 8);
      activations += warm;
    }
    if (TOKENS > 1 && !known && warp == 0) scan(served, all, expert, slot, tokens * TOP_K, top_k);
    sync_task<kW13, C::kThreads>();  // keeps the loads in front
    if (TOKENS > 1 && round == 0) {
      serves = C::token(row) < TOKENS && served.slots[C::token(row) % TOKENS];
      if (serves) activations += served.token[C::token(row)] * HIDDEN;
    }
    if (!MOE_W13_START_EARLY) let_next_start();
    known = true;
    asm volatile("" : "+l"(activations));  // one address, not one for each load
    if (TOKENS > 1 || !C::kWhole) {
#pragma unroll
      for (int i = 0; i < C::kEarly; i++) load(i);
    }

    Sums sum;
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
      Scale scale[kSets];
#pragma unroll
      for (int s = 0; s < kSets; s++) scale[s] = raw[j][s].scale(row);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const int i = 4 * j + w;
        if (i + C::kEarly < 4 * kQuads) load(i + C::kEarly);
        u32 weights[kSets][4];
#pragma unroll
        for (int s = 0; s < kSets; s++) decode(word_of(codes[j][s], w), scale[s], weights[s]);
        sum.add(weights, operand[i]);
      }
    }
    sum.join();
    keep_part(sums, first, parts, C::kWhole, sum.c[0]);
    if (!C::kWhole) {
      unit += C::warps() * C::kWarpParts * kPartUnits;
      activations += C::warps() * C::kWarpParts * kPartUnits * 32;
    }
  }
  sync_task<kW13, C::kThreads>();

  // one thread a column of the intermediate and token
  if (threadIdx.x >= 4 * TOKENS) return;
  const int token = threadIdx.x % TOKENS, column = threadIdx.x / TOKENS;
  float gate = 0.0f, up = 0.0f;
#pragma unroll(SPECIALISED ? kMostParts : 4)
  for (int p = 0; p < parts; p++) gate += sums[p][2 * column][token], up += sums[p][2 * column + 1][token];
  const u16 value = swiglu(gate, up);
  u16* const result = intermediate + (u32)octet * 4 + column;
  if (TOKENS == 1) {
    result[(u32)slot * INNER] = value;
  } else {
    for (u32 slots = served.slots[token]; slots; slots &= slots - 1)
      result[(served.token[token] * TOP_K + __ffs(slots) - 1) * INNER] = value;
  }
}
