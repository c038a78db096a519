// W2 and the weighted sum: intermediate (M, k, I) -> out (M, H), for up to 8 tokens.
#pragma once
#include "w2.cuh"
#include "w2stream.cuh"

#define KERNEL(name, most, crowded)                                                                                \
  extern "C" __global__ void BOUNDS((W2Cut<most, crowded>::kThreads), (W2Cut<most, crowded>::kBlocks))                 \
      name(const u16* intermediate, const int* ids, const float* weights, const void* w2_words,                    \
           const void* w2_metadata, const void* w2_scales, const void* w2_zeros, u16* out, int tokens, int top_k,  \
           int hidden, int inner, int experts, int group) {                                                        \
    w2<most, crowded>(intermediate, ids, weights, w2_words, GROUPS(w2_metadata, w2_scales), w2_zeros, out, tokens, \
                      top_k, hidden, inner, experts, group, blockIdx.x, blockIdx.y, Previous{});                   \
  }

KERNEL(w2_1, 1, false)  // a block for each token
KERNEL(w2_4, 4, false)
KERNEL(w2_8, 4, true)  // two blocks of four tokens

// The same for layers with much to read, a block for each token and some octets: grid.x says among how many blocks
// the octets are shared.
#if QUADPAIR  // not launched there but by tests; the loop around w2_1's body takes a few registers more
#define MANY_BOUNDS __launch_bounds__((W2Cut<1, false>::kThreads))
#else
#define MANY_BOUNDS BOUNDS((W2Cut<1, false>::kThreads), W2StreamCut::kBlocks)
#endif
extern "C" __global__ void MANY_BOUNDS
    w2_many(const u16* intermediate, const int* ids, const float* weights, const void* w2_words,
            const void* w2_metadata, const void* w2_scales, const void* w2_zeros, u16* out, int tokens, int top_k,
            int hidden, int inner, int experts, int group) {
  w2_stream(intermediate, ids, weights, w2_words, GROUPS(w2_metadata, w2_scales), w2_zeros, out, tokens, top_k, hidden,
            inner, experts, group, blockIdx.y);
}
