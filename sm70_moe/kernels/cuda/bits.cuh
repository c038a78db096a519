// Words, pairs of halves and memory, as PTX.
//
// No CUDA header is included: a build compiles these sources a few hundred times, and the headers
// would take most of that time.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

// Weights and their metadata are read once and never written while a kernel runs: the read-only
// path, and no place in L1, which holds the activations. "volatile" keeps their order.
__device__ __forceinline__ uint4 read_codes(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ u32 read_word(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 read_half(const void* p) {
  u16 v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 read_byte(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// Activations may come from the kernel before, which can still be running when this one starts:
// not the read-only path.
__device__ __forceinline__ uint4 read_activations(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
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

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 spread(u32 word, u32 selector) { return __byte_perm(word, 0, selector); }

__device__ __forceinline__ u16 to_half(float value) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(value));
  return h;
}

__device__ __forceinline__ float to_float(u16 half) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(half));
  return f;
}

__device__ __forceinline__ u16 mul_half(u16 a, u16 b) {
  u16 d;
  asm("mul.rn.f16 %0, %1, %2;" : "=h"(d) : "h"(a), "h"(b));
  return d;
}

// Dependent launch (sm_90 and later). Without the launch attribute both do nothing.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
