// W13, SwiGLU: x (M, H) -> intermediate (M, k, I), for up to 8 tokens.
//
// One block owns one or two octets of interleaved gate and up columns of one expert, over all of K.
// Its warps share K out among them; everything that a thread reads of the weights is requested
// before the first tensor-core step, so a launch has all of its bytes in flight.
//
// Grouped without a plan: block (., slot) reads all ids, serves its expert for every token that chose
// it, and leaves if an earlier slot has the same id. Tokens are the columns of the tensor-core step.
//
// The bits of a result depend on K's grouping into partial sums only: "parts" of kQuads steps of four
// units, added in order. It is the same in all kernels of a build, so a token has the same result
// alone and in any batch.
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
#ifndef MOE_W13_QUADS
#define MOE_W13_QUADS (QUADPAIR ? 4 : 2)
#endif
constexpr int kQuads = MOE_W13_QUADS;
constexpr int kPartUnits = 4 * kQuads;
constexpr int kMostParts = divide_up(kMostUnits, kPartUnits);

#ifndef MOE_W13_BLOCKS
#define MOE_W13_BLOCKS (kHalves ? 4 : 3)
#endif

#ifndef MOE_SKIP
#define MOE_SKIP 0  // experiments: 1 leaves out the product, 2 the last sum
#endif
#ifndef MOE_W13_EARLY
#define MOE_W13_EARLY (QUADPAIR || TOKENS > 4 ? 2 : 4 * kQuads)
#endif

// How a block of up to TOKENS tokens is cut.
// - one octet, two parts in a warp: rows 8 to 15 are the next part, and each token has two columns;
// - two octets, one part in a warp (more than four tokens);
// - the quad-pair step: one octet, one part in a warp.
template <int TOKENS>
struct Cut {
  static constexpr bool kHalves = !QUADPAIR && TOKENS <= 4;
  static constexpr int kOctets = QUADPAIR || kHalves ? 1 : 2;
  static constexpr int kWarpParts = kHalves ? 2 : 1;
  static constexpr int kWarpUnits = kWarpParts * kPartUnits;
  static constexpr int kColumns = TOKENS == 1 ? 1 : kHalves ? 4 : 8;  // tokens that sums are kept for
  static constexpr int kRows = 8 * kOctets;
#if SPECIALISED
  static constexpr int kMostWarps = kQuads == 1 ? 20 : 16;
  static constexpr int kNeeded = divide_up(kMostUnits, kWarpUnits);
  static constexpr int kWarps = kNeeded < kMostWarps ? kNeeded : kMostWarps;
  static constexpr bool kWhole = kWarps * kWarpUnits == kMostUnits;  // one round, nothing past the end
#else
  static constexpr int kWarps = 8;
  static constexpr bool kWhole = false;
#endif
  static constexpr int kThreads = 32 * kWarps;
  // Blocks a multiprocessor should hold at least: what the compiler is told to keep registers low for.
  static constexpr int kBlocks = MOE_W13_BLOCKS;
  static constexpr int kEarly = MOE_W13_EARLY;  // operands that are loaded before the first is used
  // token and part (0 or 1) of a column of the tensor-core step
  __device__ static int token(int column) { return kHalves ? column >> 1 : column; }
  __device__ static int half(int column) { return kHalves ? column & 1 : 0; }
};

// Finds the slots of every token that chose this block's expert, as bits; false if an earlier slot has
// the same id, whose block serves this one too. One warp does it for the block: it is sixty instructions.
template <int TOKENS>
__device__ __forceinline__ bool scan(const int* ids, int expert, int slot, int slots, int top_k, u32* chosen) {
  constexpr int kWords = SPECIALISED ? divide_up(TOKENS * TOP_K, 32) : TOKENS;  // k up to 31
  const int lane = lane_id();
  u32 mine = 0, earlier = 0;  // lane t: slots of token t
#pragma unroll
  for (int w = 0; w < kWords; w++) {
    const int i = 32 * w + lane;
    const u32 same = __ballot_sync(~0u, (i < slots ? ids[i] : -1) == expert);
    const int ahead = lane * TOP_K - 32 * w;
    mine |= shift_right(same, ahead) | shift_left(same, -ahead);
    earlier |= same & ~shift_left(~0u, max(slot - 32 * w, 0));
  }
  if (lane < Cut<TOKENS>::kColumns) chosen[lane] = mine & ~shift_left(~0u, TOP_K);
  return !earlier;
}

template <int TOKENS>
__device__ __forceinline__ void w13(const u16* x, const int* ids, const void* words, const void* groups,
                                    const void* zeros, u16* intermediate, int tokens, int top_k, int hidden, int inner,
                                    int experts, int group) {
  using C = Cut<TOKENS>;
  __shared__ float sums[kMostParts][C::kRows][C::kColumns];
  __shared__ u32 chosen[C::kColumns];
  __shared__ bool leader;
  const int warp = threadIdx.x >> 5, row = lane_row(), quad = lane_quad();
  const int tile = blockIdx.x, slot = blockIdx.y;
  const int units = HIDDEN / 32, parts = (units + kPartUnits - 1) / kPartUnits;
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
    if (threadIdx.x < C::kRows / 2) intermediate[slot * INNER + tile * (C::kRows / 2) + threadIdx.x] = 0;
    return;
  }
  if (TOKENS > 1) {
    // (Volta: by all warps, since a vote under a condition that the compiler cannot follow becomes a call.)
    if (QUADPAIR || warp == 0) leader = scan<TOKENS>(ids, expert, slot, tokens * TOP_K, top_k, chosen);
    __syncthreads();
    if (!leader) return;
    serves = C::token(row) < C::kColumns && chosen[C::token(row)];
    activations += C::token(row) * HIDDEN;
  }

  const Matrix matrix = Matrix::of(words, groups, zeros, expert, units, 2 * INNER, GROUP);
  for (int round = 0; round < parts; round += C::kWarps * C::kWarpParts) {
    const int first = round + warp * C::kWarpParts;
    // one octet: a set is a part; two octets: a set is an octet
    uint4 codes[kQuads][kSets];
    Matrix::Raw raw[kQuads][kSets];
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      const int octet = C::kOctets * tile + (C::kOctets == 2 ? s : 0), part = first + (C::kHalves ? s : 0);
      const Matrix::Place place = matrix.at(octet, part * kPartUnits + quad, row);
#pragma unroll
      for (int j = 0; j < kQuads; j++) {
        const bool there = C::kWhole || part * kPartUnits + quad + 4 * j < units;
        codes[j][s] = matrix.codes_at(place, 4 * j, there);
        raw[j][s] = matrix.raw_at(place, 4 * j, there);
      }
    }
    let_next_start();

    if (C::kEarly < 4 * kQuads) {
      // Brings this warp's activations into L1, a sector a lane, while the weights are on their way, so that
      // operands can be loaded where they are used. `warm` is 0: `tokens` is below 256, which the compiler
      // does not know.
      const int sector = min(first * kPartUnits * 2 + lane_id(), HIDDEN / 16 - 1);
      const u32 warm = read_word(x + slot / TOP_K * HIDDEN + sector * 16) & (u32)(tokens >> 8);
      activations += warm;
    }
    asm volatile("" : "+l"(activations));  // one address, not one for each load
    __syncthreads();                       // keeps the loads in front
    if (TOKENS > 1 || !C::kWhole) {
#pragma unroll
      for (int i = 0; i < C::kEarly; i++) load(i);
    }

    Sums sum;
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
      if (MOE_SKIP == 1) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
          const uint4 x4 = operand[(4 * j + w) % C::kEarly];
#pragma unroll
          for (int s = 0; s < kSets; s++)
            sum.c[0][w] += __uint_as_float(word_of(codes[j][s], w) ^ x4.x ^ x4.y ^ x4.z ^ x4.w ^ raw[j][s].first);
        }
        continue;
      }
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
    if (!C::kWhole) {
      unit += C::kWarps * C::kWarpParts * kPartUnits;
      activations += C::kWarps * C::kWarpParts * kPartUnits * 32;
    }
    sum.join();
    float(&c)[kSums] = sum.c[0];

#if QUADPAIR
    if (TOKENS == 1) {
      sum_quads_first(c);
      if (!(threadIdx.x & 14) && (C::kWhole || first < parts)) {
        sums[first][row & 5][0] = c[0];
        sums[first][row & 5 | 2][0] = c[2];
      }
    } else {
      sum_quads(c);
      float* const place = &sums[first][summed_row()][summed_column() % C::kColumns];
      if (C::kWhole || first < parts) place[0] = c[0], place[1] = c[1];
    }
#else
    if (C::kHalves) {
      // columns 2 quad and the next: rows 0 to 7 with the first part, rows 8 to 15 with the second
      if (quad < C::kColumns) {
        if (C::kWhole || first < parts) sums[first][row][quad] = c[0];
        if (C::kWhole || first + 1 < parts) sums[first + 1][row][quad] = c[3];
      }
    } else if (C::kWhole || first < parts) {
      float* const upper = &sums[first][row][2 * quad % C::kColumns];
      float* const lower = &sums[first][(row + 8) % C::kRows][2 * quad % C::kColumns];
      upper[0] = c[0], upper[1] = c[1], lower[0] = c[2], lower[1] = c[3];
    }
#endif
  }
  __syncthreads();

  // one thread a column of the intermediate and token
  if (threadIdx.x >= C::kRows / 2 * C::kColumns) return;
  const int token = threadIdx.x % C::kColumns, column = threadIdx.x / C::kColumns;
  float gate = 0.0f, up = 0.0f;
#pragma unroll(SPECIALISED ? kMostParts : 4)
  for (int p = 0; p < parts; p++) gate += sums[p][2 * column][token], up += sums[p][2 * column + 1][token];
  const u16 value = swiglu(gate, up);
  u16* const result = intermediate + blockIdx.x * (C::kRows / 2) + column;
  if (TOKENS == 1) {
    result[blockIdx.y * INNER] = value;
  } else {
    for (u32 slots = chosen[token]; slots; slots &= slots - 1)
      result[(token * TOP_K + __ffs(slots) - 1) * INNER] = value;
  }
}

#define KERNEL(name, most)                                                                                     \
  extern "C" __global__ void BOUNDS(Cut<most>::kThreads, Cut<most>::kBlocks)                                            \
      name(const u16* x, const int* ids, const void* w13_words, const void* w13_metadata, const void* w13_scales, const void* w13_zeros, \
           u16* intermediate, int tokens, int top_k, int hidden, int inner, int experts, int group) {          \
    w13<most>(x, ids, w13_words, GROUPS(w13_metadata, w13_scales), w13_zeros, intermediate, tokens, top_k, hidden, inner, experts,   \
              group);                                                                                          \
  }

KERNEL(w13_1, 1)
KERNEL(w13_4, 4)
KERNEL(w13_8, 8)
