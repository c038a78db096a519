// The three ways in which a warp goes through its runs: of one unit, longer ones, and of any length (sizes that
// are arguments). `arrive` is called once by every warp, behind its first loads of weights.
#pragma once

#if SPECIALISED
// Runs of one unit: everything about a run is known in advance, and several are on their way at once.
template <int TOKENS, bool CROWDED, class Arrive>
__device__ __forceinline__ void unit_runs(const W2Call& call, W2Shared<TOKENS, CROWDED>& shared, Arrive arrive) {
  using C = W2Cut<TOKENS, CROWDED>;
  const int warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int slots = call.slots;
  constexpr int units = C::kUnits, runs = C::kRuns;
  // the places of a step: slots from `first` on and their runs from `begin` on, or list items
  const int first = C::kList ? warp * kStepSlots : warp / C::kRanges * kStepSlots;
  const int begin = C::kList ? 0 : warp % C::kRanges * C::kWarpRuns;
  const int places = C::kList ? slots * runs : slots;
  Matrix matrix[kSets];
  Matrix::Place place[kSets];
  bool there[kSets];
  int run[kSets];
#pragma unroll
  for (int s = 0; s < kSets; s++) {
    const int at = first + 4 * s + quad, slot = C::kList ? at / runs : at;
    const int expert = call.expert(slot, at < places);
    run[s] = C::kList ? at % runs : 0;
    there[s] = (u32)expert < (u32)call.experts;
    matrix[s] = call.matrix(expert, units);
    place[s] = matrix[s].at(call.octet, 0, row);
  }

  // A rolled loop holds the loads of a run and those ahead; unrolled, the compiler holds more.
  constexpr bool kRolled = CROWDED && C::kAhead < C::kWarpRuns;
  constexpr int kHeld = kRolled ? C::kAhead + 1 : C::kWarpRuns;
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
  const u16* activations = call.intermediate + (C::kList ? mine * 32 : mine * INNER + begin * 32);
  asm volatile("" : "+l"(activations));  // one address, not one for each load
  const u8* const row_of = shared.staged + (serves ? mine : 0) * C::kRowBytes + begin * 64;
  auto multiply = [&](Sums& sum, int i, int unit) {
    uint4 operand[4];
#pragma unroll
    for (int w = 0; w < 4; w++)
      operand[w] = C::kStaged
                       ? read_shared(row_of + ((unit - begin) * 4 + w) * 16, serves && (C::kWhole || unit < units))
                       : read_activations(activations + (unit - begin) * 32 + w * 8,
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

#pragma unroll
  for (int i = 0; i < C::kAhead; i++) request(i, begin + i);
  arrive();

  float one = 0.0f, two = 0.0f;
#pragma unroll(kRolled ? 1 : C::kWarpRuns)
  for (int i = 0; i < C::kWarpRuns; i++) {
    Sums sum;
    if (kRolled) {
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
    float dot, next;
    own_sums(sum, dot, next);
    if (C::kList) {
      keep(shared.parts, 1, first, places, dot, next);
    } else if (C::kRanges > 1) {
      if (begin + i < runs) keep(shared.parts + begin + i, C::kKept, first, slots, dot, next);
    } else {
      one = i ? one + dot : dot, two = i ? two + next : next;
    }
  }
  if (C::kRanges == 1 && !C::kList)
    keep(shared.parts, 1, first, slots, to_float(to_activation(one)), to_float(to_activation(two)));
}

// Longer runs: one stream of units through all of a warp's runs, with kHeld units on their way.
template <int TOKENS, bool CROWDED, class Arrive>
__device__ __forceinline__ void long_runs(const W2Call& call, W2Shared<TOKENS, CROWDED>& shared, Arrive arrive) {
  using C = W2Cut<TOKENS, CROWDED>;
  constexpr int kShift = GROUP >> 6, kEach = C::kPiece < 1 << kShift ? C::kPiece : 1 << kShift;
  constexpr int kHeld = C::kHeld, kPieces = C::kRunUnits / C::kPiece;
  const int warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int first = C::kList ? warp * kStepSlots : warp / C::kRanges * kStepSlots;
  const int begin = C::kList ? 0 : warp % C::kRanges * C::kWarpRuns;
  const int places = C::kList ? call.slots * C::kRuns : call.slots;
  Places<kHeld, kEach, C::kEarly, C::kWhole> of;
  of.units = C::kUnits;
#pragma unroll
  for (int s = 0; s < kSets; s++) {
    const int at = first + 4 * s + quad, slot = C::kList ? at / C::kRuns : at;
    const int expert = call.expert(slot, at < places);
    of.aim(s, call.matrix(expert, C::kUnits), call.octet, (C::kList ? at % C::kRuns : begin) * C::kRunUnits,
           (u32)expert < (u32)call.experts);
  }
  const int mine = first + (QUADPAIR ? quad : row);
  of.serves = (QUADPAIR ? row == 0 : quad == (row & 3)) && mine < places;
  of.own = (C::kList ? mine % C::kRuns : begin) * C::kRunUnits;
  of.activations = call.intermediate + (C::kList ? mine / C::kRuns : mine) * INNER + of.own * 32;
  asm volatile("" : "+l"(of.activations));  // one address, not one for each load

#pragma unroll
  for (int h = 0; h < kHeld; h++) of.request(h, h);
  arrive();

  float one = 0.0f, two = 0.0f;
#pragma unroll 1
  for (int i = 0; i < C::kWarpRuns; i++) {
    Sums sum;
#pragma unroll 1
    for (int piece = 0; piece < kPieces; piece++) {
      const bool last = i + 1 == C::kWarpRuns && piece + 1 == kPieces;
#pragma unroll
      for (int t = 0; t < C::kPiece; t++) {
        of.multiply(sum, t % kHeld, t);
        const bool inside = t + kHeld < C::kPiece;
        if (inside || C::kWarpRuns * kPieces > 1) of.request(t % kHeld, t + kHeld, inside || !last);
      }
      of.advance(C::kPiece);
    }
    float dot, next;
    own_sums(sum, dot, next);
    if (C::kList) {
      keep(shared.parts, 1, first, places, dot, next);
    } else if (C::kRanges > 1) {
      if (begin + i < C::kRuns) keep(shared.parts + begin + i, C::kKept, first, call.slots, dot, next);
    } else {
      one = i ? one + dot : dot, two = i ? two + next : next;
    }
  }
  if (C::kRanges == 1 && !C::kList)
    keep(shared.parts, 1, first, call.slots, to_float(to_activation(one)), to_float(to_activation(two)));
}
#else
// Any sizes. One token: a list of all slots' runs, several times over where there are not enough warps. Four: a
// stream through the runs of some slots. Returns the number of a slot's runs.
template <int TOKENS, bool CROWDED, class Arrive>
__device__ __forceinline__ int any_runs(const W2Call& call, W2Shared<TOKENS, CROWDED>& shared, Arrive arrive) {
  using C = W2Cut<TOKENS, CROWDED>;
  constexpr bool kList = TOKENS == 1;
  const int top_k = call.top_k, warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int units = call.inner / 32, length = run_units_of(units, top_k), runs = divide_up(units, length);
  const int places = kList ? call.slots * runs : call.slots, groups = divide_up(places, kStepSlots);
  const int ranges = kList || groups > C::kWarps / 2 ? 1 : min(C::kWarps / groups, runs);
  const int each = kList ? 1 : divide_up(runs, ranges);
  bool arrived = false;
#pragma unroll 1
  for (int task = warp; task < groups * ranges || !arrived; task += C::kWarps) {
    const int first = task / ranges * kStepSlots, begin = task % ranges * each;
    const int count = min(each, runs - begin);  // runs of this task; maybe none
    Places<2, 1, C::kEarly, false> of;
    of.units = units;
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      const int at = first + 4 * s + quad, slot = kList ? at / runs : at;
      const int expert = call.expert(slot, at < places);
      of.aim(s, call.matrix(expert, units), call.octet, (kList ? at % runs : begin) * length,
             (u32)expert < (u32)call.experts);
    }
    const int mine = first + (QUADPAIR ? quad : row);
    of.serves = (QUADPAIR ? row == 0 : quad == (row & 3)) && mine < places;
    of.own = (kList ? mine % runs : begin) * length;
    of.activations = call.intermediate + (kList ? mine / runs : mine) * call.inner + of.own * 32;
    asm volatile("" : "+l"(of.activations));
    int left = count * length;  // units; the next of a run may belong to the next run
    of.request(0, 0, left > 0), of.request(1, 1, left > 1);
    if (!arrived) arrive();
    arrived = true;

    Sums sum;
    int run = begin, more = length;
    auto finish = [&]() {  // behind a unit: is a run at its end?
      if (--more) return;
      float dot, next;
      own_sums(sum, dot, next);
      if (kList)
        keep(shared.parts, 1, first, places, dot, next);
      else
        keep(shared.parts + run, runs, first, places, dot, next);
      sum.clear();
      more = length, run++;
    };
#pragma unroll 1
    for (; left > 0; left -= 2) {
      of.multiply(sum, 0, 0);
      of.request(0, 2, left > 2);
      finish();
      if (left > 1) {
        of.multiply(sum, 1, 1);
        of.request(1, 3, left > 3);
        finish();
      }
      of.advance(2);
    }
  }
  return runs;
}
#endif
