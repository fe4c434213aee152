// Rows in e4m3 with one scale each, such that the largest absolute value of a row becomes 448, the largest of e4m3. GPUs before sm_89 do not have
// this type; launches there are refused.
#pragma once
#include "scalar.cuh"

// Destination of a quantized row.
struct Fp8Row {
    unsigned char* values;  // [K]
    float* scale;
};

#if __CUDA_ARCH__ >= 890

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
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
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

// Quantizes a row in shared memory; `bits` is the largest value that this thread has written there.
__device__ __forceinline__ void write_fp8(const Pack<bf16, 8>* row, int packs, unsigned bits, const Fp8Row& to) {
    const RowScale scale(block_max_bits(bits));  // by then the whole row is there
    if (threadIdx.x == 0) *to.scale = scale.scale;
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += blockDim.x) scale.write(row[i], to.values + 8 * i);
}

// Quantizes a row of which each thread has the packs at threadIdx.x + k * blockDim.x.
template <int MOST>
__device__ __forceinline__ void write_fp8(const Pack<bf16, 8> (&row)[MOST], int packs, const Fp8Row& to) {
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < MOST; ++k)
        if (threadIdx.x + k * blockDim.x < packs) bits = most_bits(row[k], bits);
    const RowScale scale(block_max_bits(bits));
    if (threadIdx.x == 0) *to.scale = scale.scale;
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < packs) scale.write(row[k], to.values + 8 * i);
    }
}

#else

template <int MOST>
__device__ __forceinline__ void write_fp8(const Pack<bf16, 8> (&)[MOST], int, const Fp8Row&) {}
__device__ __forceinline__ unsigned most_bits(const Pack<bf16, 8>&, unsigned bits) { return bits; }
__device__ __forceinline__ void write_fp8(const Pack<bf16, 8>*, int, unsigned, const Fp8Row&) {}

#endif
