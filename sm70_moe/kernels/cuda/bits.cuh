// Words, pairs of halves and memory, as PTX.
//
// No CUDA header is included: a build compiles these sources a few hundred times, and the headers
// would take most of that time.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

// Weights and their metadata are read once: no place in L1, which holds the activations. Not the
// read-only path (.nc), though nothing writes them: across it the compiler moves loads to their use,
// whatever barrier stands between, and a launch must have all of its bytes in flight.
//
// Every load has a condition, as a predicate and not as a branch, which would part loads that belong
// together. Where it is false, nothing is read and the value is 0.
__device__ __forceinline__ uint4 read_codes(const void* p, bool there = true) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{ .reg .pred go; setp.ne.u32 go, %5, 0; @go ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"((u32)there)
      : "memory");
  return v;
}

__device__ __forceinline__ u32 read_word(const void* p, bool there = true) {
  u32 v = 0;
  asm volatile("{ .reg .pred go; setp.ne.u32 go, %2, 0; @go ld.global.u32 %0, [%1]; }"
               : "+r"(v)
               : "l"(p), "r"((u32)there)
               : "memory");
  return v;
}

__device__ __forceinline__ u32 read_half(const void* p, bool there = true) {
  u16 v = 0;
  asm volatile("{ .reg .pred go; setp.ne.u32 go, %2, 0; @go ld.global.u16 %0, [%1]; }"
               : "+h"(v)
               : "l"(p), "r"((u32)there)
               : "memory");
  return v;
}

__device__ __forceinline__ u32 read_byte(const void* p, bool there = true) {
  u32 v = 0;
  asm volatile("{ .reg .pred go; setp.ne.u32 go, %2, 0; @go ld.global.u8 %0, [%1]; }"
               : "+r"(v)
               : "l"(p), "r"((u32)there)
               : "memory");
  return v;
}

// Activations are read by several blocks of a multiprocessor: they stay in L1. L1 takes such a load eight
// lanes at a time, so lanes whose column nobody reads stay out.
__device__ __forceinline__ uint4 read_activations(const void* p, bool there) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{ .reg .pred go; setp.ne.u32 go, %5, 0; @go ld.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"((u32)there)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 read_shared(const void* p, bool there) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{ .reg .pred go; setp.ne.u32 go, %5, 0; @go ld.shared.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "r"((u32)__cvta_generic_to_shared(p)), "r"((u32)there)
               : "memory");
  return v;
}

// Shifts by 32 and more, and by negative numbers, give 0.
__device__ __forceinline__ u32 shift_left(u32 word, int by) {
  u32 d;
  asm("shl.b32 %0, %1, %2;" : "=r"(d) : "r"(word), "r"(by));
  return d;
}

__device__ __forceinline__ u32 shift_right(u32 word, int by) {
  u32 d;
  asm("shr.u32 %0, %1, %2;" : "=r"(d) : "r"(word), "r"(by));
  return d;
}

// FP16 pairs. Subnormals are kept: there is no .ftz.
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// -a * b; the sign costs no instruction of its own.
__device__ __forceinline__ u32 negated_mul2(u32 a, u32 b) {
  u32 d;
  asm("{ .reg .b32 n; neg.f16x2 n, %1; mul.rn.f16x2 %0, n, %2; }" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 spread(u32 word, u32 selector) { return __byte_perm(word, 0, selector); }

// Activations, in and between kernels: FP16, or BF16 in sources that say so. `mul_activation` rounds once: FP32 holds
// a product of two BF16 numbers.
#ifdef MOE_BFLOAT16
__device__ __forceinline__ u16 to_activation(float value) {
  u16 b;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(value));
  return b;
}

__device__ __forceinline__ float to_float(u16 number) { return __uint_as_float((u32)number << 16); }

__device__ __forceinline__ u16 mul_activation(u16 a, u16 b) { return to_activation(to_float(a) * to_float(b)); }
#else
__device__ __forceinline__ u16 to_activation(float value) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(value));
  return h;
}

__device__ __forceinline__ float to_float(u16 half) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(half));
  return f;
}

__device__ __forceinline__ u16 mul_activation(u16 a, u16 b) {
  u16 d;
  asm("mul.rn.f16 %0, %1, %2;" : "=h"(d) : "h"(a), "h"(b));
  return d;
}
#endif

// Dependent launch (sm_90 and later). Without the launch attribute both do nothing; a cooperative grid has neither.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900 && !defined MOE_ONE_LAUNCH
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
