// W13, SwiGLU: x (M, H) -> intermediate (M, k, I), for up to 8 tokens.
#include "w13kernels.cuh"
