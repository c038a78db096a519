// SwiGLU with the rounding points of CONTRACT 8.3 and 8.4.
#pragma once
#include "bits.cuh"

// silu in FP32 of the rounded gate, to within 4 units of 2^-24. The quotient is refined instead of
// divided: a division is a call. Beyond 80 the result is no FP16 number but 0 anyway, and far below every bound
// for BF16, whose gates may be so large that the quotient would not be; minus infinity gives NaN, as -inf / inf does.
__device__ __forceinline__ float silu(float gate) {
  const float below = 1.0f + expf(fminf(-gate, 80.0f));
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(below));
  const float near = gate * inverse;
  const float better = fmaf(fmaf(-below, near, gate), inverse, near);
#ifdef MOE_BFLOAT16
  if (gate < -80.0f) return gate * 0.0f;
#endif
  return gate > 65504.0f ? gate : better;
}

// Rounded dot products -> the activation.
__device__ __forceinline__ u16 swiglu_rounded(u16 gate, u16 up) {
  return mul_activation(to_activation(silu(to_float(gate))), up);
}

// FP32 dot products -> the activation.
__device__ __forceinline__ u16 swiglu(float gate, float up) {
  return swiglu_rounded(to_activation(gate), to_activation(up));
}
