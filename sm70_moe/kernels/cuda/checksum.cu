// Proves that the loader and the device do what they should: XOR over the words of each chosen expert,
// each expert once, 16 bytes a load, all loads in front.
//
// Grid (chunks of an expert, slots). A block whose id is invalid, or stands in an earlier slot too, has
// nothing to read. `out` gets one word a block: XOR over them is XOR over the expert's words.
#include <stdint.h>

constexpr int THREADS = 160, LOADS = 5;

extern "C" __global__ __launch_bounds__(THREADS) void checksum(
    const int* ids, const uint4* bank, uint32_t* out, int words, int experts)
{
    __shared__ uint32_t partial[THREADS / 32];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");  // no effect unless launched that way
#endif
    int slot = blockIdx.y, expert = ids[slot];
    bool reads = expert >= 0 && expert < experts;
    for (int before = 0; before < slot; ++before) reads = reads && ids[before] != expert;

    uint4 word[LOADS];
    const uint4* from = bank + static_cast<int64_t>(expert) * words;
    int first = blockIdx.x * (THREADS * LOADS) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        int place = first + i * THREADS;
        word[i] = make_uint4(0, 0, 0, 0);
        if (reads && place < words)
            asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(word[i].x), "=r"(word[i].y), "=r"(word[i].z), "=r"(word[i].w)
                         : "l"(from + place) : "memory");
    }
    __syncthreads();  // keeps the loads in front of the arithmetic

    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) all ^= word[i].x ^ word[i].y ^ word[i].z ^ word[i].w;
#pragma unroll
    for (int lane = 16; lane; lane /= 2) all ^= __shfl_xor_sync(0xFFFFFFFF, all, lane);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = all;
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");  // ends after the kernel in front
#endif
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < THREADS / 32; ++warp) all ^= partial[warp];
        out[slot * gridDim.x + blockIdx.x] = all;
    }
}
