// W2 and the weighted sum: intermediate (M, k, I) -> out (M, H); BF16 in and out, for up to 8 tokens.
#define MOE_BFLOAT16
#include "w2kernels.cuh"
