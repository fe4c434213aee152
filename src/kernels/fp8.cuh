// Rows in e4m3 with one scale each, such that the largest absolute value of a row becomes 448, the largest of e4m3. GPUs before sm_89 do not have
// this type; launches there are refused.
#pragma once
#include "scalar.cuh"

// Maximum over the block, equal in every thread. Blocks must consist of whole warps.
__device__ __forceinline__ unsigned block_max_bits(unsigned value) {
    __shared__ unsigned warps[32];
    value = __reduce_max_sync(0xffffffffu, value);
    __syncthreads();  // an earlier maximum has been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    return __reduce_max_sync(0xffffffffu, threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0);
}

// Converts two consecutive values, to nearest, ties to even, at most 448.
__device__ __forceinline__ unsigned e4m3_pair(float low, float high) {
    unsigned short both = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// A row's scale, and the number by which its values are multiplied before they are rounded.
struct RowScale {
    float scale, factor;

    // `bits` is the largest absolute value as bf16 bits: these have the order of the values, with NaN above all.
    __device__ __forceinline__ explicit RowScale(unsigned bits) {
        const float peak = __uint_as_float(bits << 16);
        scale = __fdiv_rn(peak, 448.0f);
        factor = peak > 0.0f ? fminf(__fdiv_rn(448.0f, peak), 3.4028235e38f) : 0.0f;
    }

    __device__ __forceinline__ float of(bf16 value) const { return __fmul_rn(widen(value), factor); }

    __device__ __forceinline__ void write(const Pack<bf16, 8>& from, unsigned char* to) const {
        const auto pair = [&](int i) { return e4m3_pair(of(from.at[i]), of(from.at[i + 1])); };
        *reinterpret_cast<uint2*>(to) = make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
    }

    __device__ __forceinline__ void write(const Pack<bf16, 1>& from, unsigned char* to) const {
        *to = static_cast<unsigned char>(e4m3_pair(of(from.at[0]), 0.0f));
    }
};

// The larger of `bits` and the absolute values of a pack, as bits.
__device__ __forceinline__ unsigned most_bits(const Pack<bf16, 8>& from, unsigned bits) {
    const uint4 words = *reinterpret_cast<const uint4*>(&from);
    const unsigned low = __vmaxu2(words.x & 0x7fff7fffu, words.y & 0x7fff7fffu);
    const unsigned high = __vmaxu2(words.z & 0x7fff7fffu, words.w & 0x7fff7fffu);
    const unsigned both = __vmaxu2(low, high);
    return max(bits, max(both & 0xffffu, both >> 16));
}
