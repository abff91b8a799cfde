// Functions that all kernels share: pairs of bf16 values, and the instructions of instructions.cuh. Only these files are included, no
// headers of CUDA, so that the runtime compiler (nvrtc) needs no others.
#pragma once

using uint32_t = unsigned int;
using bf16 = unsigned short;  // bits of a bfloat16

#define INFINITE __int_as_float(0x7f800000)

#include "instructions.cuh"

__device__ __forceinline__ float2 widen(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
__device__ __forceinline__ uint32_t normalise(uint32_t x, float rstd, uint32_t w) {  // bf16(x * rstd), then times w, rounded again
    const float2 v = widen(x);
    return times(narrow(v.x * rstd, v.y * rstd), w);
}
