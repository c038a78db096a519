// W13, SwiGLU: x (M, H) -> intermediate (M, k, I), for up to 8 tokens.
#pragma once
#include "w13.cuh"
#include "w13stream.cuh"

#define KERNEL(name, most)                                                                              \
  extern "C" __global__ void BOUNDS(W13Cut<most>::kThreads, W13Cut<most>::kBlocks)          \
      name(const u16* x, const int* ids, const void* w13_words, const void* w13_metadata,                       \
           const void* w13_scales, const void* w13_zeros, u16* intermediate, int tokens, int top_k, int hidden, \
           int inner, int experts, int group) {                                                                 \
    w13<most>(x, ids, w13_words, GROUPS(w13_metadata, w13_scales), w13_zeros, intermediate, tokens,     \
                      top_k, hidden, inner, experts, group, blockIdx.x, blockIdx.y);                   \
  }

KERNEL(w13_1, 1)
KERNEL(w13_2, 2)
KERNEL(w13_8, 8)  // blocks of four tokens

// The same for layers with many columns: grid.x says among how many blocks the octets are shared.
#define STREAM(name, most)                                                                                       \
  extern "C" __global__ void BOUNDS(W13Cut<most>::kThreads, W13StreamCut<most>::kBlocks)                          \
      name(const u16* x, const int* ids, const void* w13_words, const void* w13_metadata, const void* w13_scales, \
           const void* w13_zeros, u16* intermediate, int tokens, int top_k, int hidden, int inner, int experts,   \
           int group) {                                                                                           \
    w13_stream<most>(x, ids, w13_words, GROUPS(w13_metadata, w13_scales), w13_zeros, intermediate, tokens, top_k, \
                     hidden, inner, experts, group, blockIdx.y);                                                  \
  }

STREAM(w13_many_1, 1)
STREAM(w13_many_8, 8)
