// W2 and the weighted sum: intermediate (M, k, I) -> out (M, H), for up to 8 tokens.
#include "w2kernels.cuh"
