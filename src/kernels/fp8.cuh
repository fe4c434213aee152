// Rows in e4m3 with one scale each, by which the largest absolute value of a row becomes 448, the largest of e4m3. Chips before sm_89
// have no such type: they are refused before a launch.
#pragma once
#include "scalar.cuh"

// Where a row goes.
struct Fp8Row {
    unsigned char* values;  // [K]
    float* scale;
};

#if __CUDA_ARCH__ >= 890

// The largest over the block, the same in every thread. Blocks of whole warps.
__device__ __forceinline__ unsigned block_max_bits(unsigned value) {
    __shared__ unsigned warps[32];
    value = __reduce_max_sync(0xffffffffu, value);
    __syncthreads();  // readers of an earlier maximum are done
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    return __reduce_max_sync(0xffffffffu, threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0);
}

// Two neighbours, to nearest, ties to even, no larger than 448.
__device__ __forceinline__ unsigned e4m3_pair(float low, float high) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// A row's scale, and what its values are multiplied by before they are rounded.
struct RowScale {
    float scale, factor;

    // `bits` are those of the largest absolute value in bf16: they are in the order of the values, NaN above all.
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

// The larger of `bits` and those of the absolute values of a pack.
__device__ __forceinline__ unsigned most_bits(const Pack<bf16, 8>& from, unsigned bits) {
    const uint4 words = *reinterpret_cast<const uint4*>(&from);
    const unsigned low = __vmaxu2(words.x & 0x7fff7fffu, words.y & 0x7fff7fffu);
    const unsigned high = __vmaxu2(words.z & 0x7fff7fffu, words.w & 0x7fff7fffu);
    const unsigned both = __vmaxu2(low, high);
    return max(bits, max(both & 0xffffu, both >> 16));
}

// Writes a row that is in shared memory; `bits` are those of the largest value that the thread has put there.
__device__ __forceinline__ void write_fp8(const Pack<bf16, 8>* row, int packs, unsigned bits, const Fp8Row& to) {
    const RowScale scale(block_max_bits(bits));  // all of the row is there by then
    if (threadIdx.x == 0) *to.scale = scale.scale;
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += blockDim.x) scale.write(row[i], to.values + 8 * i);
}

// Writes the row of which each thread has the packs at threadIdx.x + k * blockDim.x.
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
