// What the tests of the cubin reader count: tensor-core steps, wide loads, spills, barriers, calls.
#include <stdint.h>

// four steps of m8n8k4: native up to sm_75, a call to a routine of the compiler's on later ones
extern "C" __global__ void volta(const uint32_t* a, const uint32_t* b, float* c)
{
    float d[8] = {};
    int lane = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
                     "{%0,%1,%2,%3,%4,%5,%6,%7};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                     : "r"(a[i * 64 + lane]), "r"(a[i * 64 + lane + 32]), "r"(b[i * 64 + lane]),
                       "r"(b[i * 64 + lane + 32]));
    for (int i = 0; i < 8; ++i) c[lane * 8 + i] = d[i];
}

// ten 16-byte loads, one barrier, 2 KB of shared memory
extern "C" __global__ __launch_bounds__(128) void loads(const uint4* bank, const int* ids, uint4* out, int words)
{
    __shared__ uint4 all[128];
    uint4 sum = make_uint4(0, 0, 0, 0);
    const uint4* from = bank + static_cast<int64_t>(ids[blockIdx.y]) * words;
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        uint4 word = from[threadIdx.x + 128 * i];
        sum.x ^= word.x, sum.y ^= word.y, sum.z ^= word.z, sum.w ^= word.w;
    }
    all[threadIdx.x] = sum;
    __syncthreads();
    out[threadIdx.x] = all[127 - threadIdx.x];
}

// an array that is indexed at run time lives in local memory: 256 bytes of stack
extern "C" __global__ void spills(const int* places, const uint32_t* from, uint32_t* out, int count)
{
    uint32_t held[64];
    for (int i = 0; i < 64; ++i) held[i] = from[i];
    for (int i = 0; i < count; ++i) held[places[i] & 63] ^= held[places[i] * 7 & 63];
    uint32_t sum = 0;
    for (int i = 0; i < 64; ++i) sum = sum * 31 + held[i];
    out[threadIdx.x] = sum;
}

#if MOE_LATE
// a wide load behind a tensor-core step
extern "C" __global__ void late(const uint32_t* a, const uint4* bank, float* c)
{
    float d[8] = {};
    int lane = threadIdx.x;
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%8,%9},"
                 "{%0,%1,%2,%3,%4,%5,%6,%7};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(a[lane]), "r"(a[lane + 32]));
    uint4 word = bank[static_cast<int>(d[0]) & 15];
    c[lane] = d[1] + d[7] + word.x + word.y + word.z + word.w;
}
#endif
