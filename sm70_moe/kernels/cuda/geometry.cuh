// Sizes: numbers in a version for one geometry, arguments of the kernel in the other.
#pragma once

#ifdef MOE_HIDDEN
#define SPECIALISED 1
#define HIDDEN MOE_HIDDEN
#define INNER MOE_INTERMEDIATE
#define TOP_K MOE_TOP_K
#define GROUP MOE_GROUP
#else
#define SPECIALISED 0
#define HIDDEN hidden
#define INNER inner
#define TOP_K top_k
#define GROUP group
#endif

__device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
