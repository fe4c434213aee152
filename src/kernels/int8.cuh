// Rows in int8 with one scale each, such that the largest absolute value of a row becomes 127; and the Hadamard transform that spreads columns which
// are larger than the others, before rows are rounded.
#pragma once
#include "scalar.cuh"

// A row's scale, and the number by which its values are multiplied before they are rounded.
struct WholeScale {
    float scale, factor;

    __device__ __forceinline__ explicit WholeScale(float peak) {
        scale = __fdiv_rn(peak, 127.0f);
        factor = peak > 0.0f ? fminf(__fdiv_rn(127.0f, peak), 3.4028235e38f) : 0.0f;
    }

    // Rounds to nearest, ties to even: the code is the lowest byte of the result.
    __device__ __forceinline__ unsigned of(float value) const { return __float_as_uint(__fadd_rn(__fmul_rn(value, factor), 12582912.0f)); }
    __device__ __forceinline__ unsigned of(bf16 value) const { return of(widen(value)); }

    template <typename T>
    __device__ __forceinline__ void write(const T (&from)[8], unsigned char* to) const {
        const auto four = [&](int i) {
            const unsigned low = __byte_perm(of(from[i]), of(from[i + 1]), 0x0040), high = __byte_perm(of(from[i + 2]), of(from[i + 3]), 0x0040);
            return __byte_perm(low, high, 0x5410);
        };
        *reinterpret_cast<uint2*>(to) = make_uint2(four(0), four(4));
    }
    template <typename T, int N>
    __device__ __forceinline__ void write(const Pack<T, N>& from, unsigned char* to) const {
        if constexpr (N == 8) write(from.at, to);
        else *to = static_cast<unsigned char>(of(from.at[0]));
    }
};

// A step of a Hadamard transform: sums and differences.
template <int N>
__device__ __forceinline__ void hadamard_pair(float (&low)[N], float (&high)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float sum = low[j] + high[j];
        high[j] = low[j] - high[j], low[j] = sum;
    }
}

// Multiplies blocks of `block` columns by a Hadamard matrix of ones and minus ones. A lane has N consecutive columns of a row, its neighbours have
// the next ones. All lanes of `members` together.
template <int N>
__device__ __forceinline__ void hadamard(float (&x)[N], int block, unsigned members) {
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (!(j & step)) {
                const float low = x[j], high = x[j + step];
                x[j] = low + high, x[j + step] = low - high;
            }
    for (int step = 1; step < block / N; step *= 2) {
        const float sign = threadIdx.x & step ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = __fmaf_rn(x[j], sign, __shfl_xor_sync(members, x[j], step));
    }
}

// The larger of `bits` and of absolute values, as bits: they have the order of the values, with NaN above all.
__device__ __forceinline__ unsigned most_bits(const float (&values)[8], unsigned bits) {
#pragma unroll
    for (int j = 0; j < 8; ++j) bits = max(bits, __float_as_uint(values[j]) & 0x7fffffffu);
    return bits;
}

// The scale of a row that was multiplied by Hadamard matrices of ones and minus ones. These would have to be divided by the root of their size: the
// scale is, instead of the values.
__device__ __forceinline__ WholeScale int8_scale(unsigned bits, int block) {
    WholeScale made(__uint_as_float(bits));
    made.scale = __fmul_rn(made.scale, __frsqrt_rn(static_cast<float>(block)));
    return made;
}
