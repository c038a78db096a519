// How W2's work is cut: into runs of units, and runs over a block's warps.
//
// A "run" is a piece of a dot product that the tensor cores add up; a slot's runs are added in order. How long
// runs are follows from the layer's sizes alone, so that a token has the same bits in every kernel.
#pragma once
#include "geometry.cuh"
#include "tensor.cuh"

constexpr int kStepSlots = 4 * kSets;  // places of a step
constexpr int kMostParts2 = 1344;      // sums of a block: 42 KB

// Units of a run: 1, 2, 4 or a multiple of 4. Short ones, since a token alone has all of its runs in flight at
// once; but not so many that 16 warps could not take those of few slots in one go (128 places), or that the
// sums of four tokens would take more than 40 KB.
__device__ constexpr int run_units_of(int units, int top_k) {
  const int usual = units <= 8 ? 1 : units < 16 ? 2 : 4;
  const int few = top_k < 8 ? divide_up(units * top_k, 128) : 1, fit = divide_up(units * 4 * top_k, 1280);
  const int least = few > fit ? few : fit;
  return usual >= least ? usual : divide_up(least, 4) * 4;
}

// Choices that were measured on an H200, also by name for further measurements.
#ifndef MOE_W2_WARPS  // of a block at most, unless it has more groups of slots; with runs of one unit
#define MOE_W2_WARPS (QUADPAIR ? (TOKENS == 4 ? 16 : 10) : TOKENS == 4 ? 5 : 16)
#endif
#ifndef MOE_W2_LONG  // units that a warp takes one after the other; with longer runs and four tokens
#define MOE_W2_LONG (CROWDED ? 16 : 12)
#endif
#ifndef MOE_W2_AHEAD  // runs of one unit whose loads come before the first product
#define MOE_W2_AHEAD (QUADPAIR ? 8 : CROWDED ? 1 : 2)
#endif
#ifndef MOE_W2_HELD  // units whose loads are on their way, of longer runs
#define MOE_W2_HELD (CROWDED || (QUADPAIR && TOKENS == 4) ? 2 : 4)
#endif
#ifndef MOE_W2_EARLY  // operands of a unit that are loaded before the first is used, of longer runs
#define MOE_W2_EARLY (SPECIALISED && TOKENS == 1 && !QUADPAIR ? 4 : 2)
#endif
#ifndef MOE_W2_STAGED  // activations through shared memory; it lost on an H200, but leaves Volta its registers
#define MOE_W2_STAGED QUADPAIR
#endif
#ifndef MOE_W2_RESIDENT  // warps that a multiprocessor should hold: what registers are kept low for
#define MOE_W2_RESIDENT                                                                         \
  (!SPECIALISED   ? 16                                                                          \
   : kPiece > 1   ? (TOKENS == 1 && kPiece == 2 ? 28 : kPiece == 2 ? 24 : 20)                   \
   : TOKENS == 1  ? 39                                                                          \
   : CROWDED      ? 25                                                                          \
   : kRuns <= 5 && MOE_METADATA == 4 && __CUDA_ARCH__ < 1200 ? 20                               \
                                                             : 15)
#endif

// CROWDED: there are more blocks than multiprocessors hold, so that many resident warps are worth more than
// loads far ahead.
//
// A warp takes kStepSlots slots and some of their runs. Few slots would leave places of a step empty: then the
// places take a list of all slots' runs, in order.
template <int TOKENS, bool CROWDED>
struct W2Cut {
#if SPECIALISED
  static constexpr int kUnits = INNER / 32, kRunUnits = run_units_of(kUnits, TOP_K);
  static constexpr int kRuns = divide_up(kUnits, kRunUnits);
  static constexpr int kSlots = TOKENS * TOP_K, kGroups = divide_up(kSlots, kStepSlots);
  static constexpr int kPiece = kRunUnits < 4 ? kRunUnits : 4;  // units of a run without a loop
  static constexpr bool kUnitRuns = kRunUnits == 1;
  static constexpr int kListWarps = divide_up(kSlots * kRuns, kStepSlots);
  static constexpr bool kList =
      kListWarps <= 16 && (QUADPAIR ? kSlots < 4 : TOKENS == 1 || kSlots < 8);
  static constexpr int kLong = divide_up(kUnits, MOE_W2_LONG);
  static constexpr int kRoom = kUnitRuns ? MOE_W2_WARPS / kGroups
                               : QUADPAIR || TOKENS == 1 || 16 / kGroups < kLong ? 16 / kGroups
                                                                                 : kLong;
  static constexpr int kMost = kRoom < 1 ? 1 : kRoom < kRuns ? kRoom : kRuns;
  static constexpr int kWarpRuns = kList ? 1 : divide_up(kRuns, kMost);
  static constexpr int kRanges = kList ? kRuns : divide_up(kRuns, kWarpRuns);
  static constexpr int kWarps = kList ? kListWarps : kGroups * kRanges;
  static constexpr int kAhead = MOE_W2_AHEAD < kWarpRuns ? MOE_W2_AHEAD : kWarpRuns;
  static constexpr int kHeld = MOE_W2_HELD < kPiece ? MOE_W2_HELD : kPiece;
  // no warp has fewer than kWarpRuns runs, no run fewer than kRunUnits units
  static constexpr bool kWhole = kUnits % kRunUnits == 0 && kRuns % kRanges == 0;
  static constexpr int kKept = kRanges == 1 ? 1 : kRuns;  // sums of a slot that are added up at the end
  static constexpr int kParts = kSlots * kKept;
#else
  static constexpr int kWarps = 8, kPiece = 1, kRuns = 1, kHeld = 2;
  static constexpr int kSlots = TOKENS * 16;  // k up to 16: what ids take in shared memory
  static constexpr int kParts = TOKENS == 1 ? kMostParts2 / 4 : kMostParts2;
  static constexpr bool kUnitRuns = false, kWhole = false;
  static constexpr int kWarpRuns = 1;
#endif
  static constexpr int kThreads = 32 * kWarps, kEarly = MOE_W2_EARLY;
  // Where a warp has several runs of one unit, the activations go to shared memory first: from L2 each run would
  // wait for its own. Rows are padded so that eight of them meet in no bank.
  static constexpr bool kStaged = kUnitRuns && kWarpRuns > 1 && MOE_W2_STAGED;
#if SPECIALISED
  static constexpr int kRowBytes = INNER * 2 + 16;
#else
  static constexpr int kRowBytes = 16;
#endif
  static constexpr int kStagedBytes = kStaged ? kSlots * kRowBytes : 16;
  static constexpr int kBlocks = MOE_W2_RESIDENT / kWarps < 1 ? 1 : MOE_W2_RESIDENT / kWarps;
};
