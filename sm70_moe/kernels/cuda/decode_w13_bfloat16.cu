// W13, SwiGLU: x (M, H) -> intermediate (M, k, I); BF16 in and out, for up to 8 tokens.
#define MOE_BFLOAT16
#include "w13kernels.cuh"
