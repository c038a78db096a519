// Instructions of the batch kernels: copies to shared memory that nobody waits for (ASYNC), and the tensor-core
// steps. A file of its own, so that tests can replace it.
#pragma once
#include "bits.cuh"

#if ASYNC
__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy_4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>  // waits for all groups of copies but the last LATER
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
#else
__device__ __forceinline__ void copy_16(void* to, const void* from) { *(uint4*)to = read_activations(from, true); }
__device__ __forceinline__ void end_copies() {}
template <int LATER>
__device__ __forceinline__ void wait_for_copies() {}
#endif

__device__ __forceinline__ void step_884(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void step_16816(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3,
                                           u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
