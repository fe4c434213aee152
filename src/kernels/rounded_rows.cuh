// How kernels quantize the rows that they compute: each row to e4m3, or multiplied by Hadamard matrices to int8, with one scale.
#pragma once
#include "fp8.cuh"
#include "int8.cuh"

// Destination of quantized rows of `columns`, from the first row on.
struct RoundedRows {
    unsigned char* values;  // [R, K]
    float* scales;          // [R]
    __device__ __forceinline__ RoundedRows from(long long row, long long columns) const {
        return {values + row * columns, scales + row};
    }
};

// Forms of quantized rows. `Kept`: eight values of a row as they wait until the row's largest is known.
struct E4m3Form {
    static constexpr bool IS_ROUNDED = true;
    using Kept = Pack<bf16, 8>;
    using Scale = RowScale;
    __device__ __forceinline__ explicit E4m3Form(long long) {}

    __device__ __forceinline__ Kept keep(const Pack<bf16, 8>& values, bool) const { return values; }
    __device__ __forceinline__ static unsigned most(const Kept& values, unsigned bits) { return most_bits(values, bits); }
    __device__ __forceinline__ static Scale scale(unsigned bits) { return Scale(bits); }
    // Number of packs that threads have to visit.
    __device__ __forceinline__ static int visits(int packs) { return packs; }
};

struct Int8Form {
    static constexpr bool IS_ROUNDED = true;
    using Kept = Pack<float, 8>;
    using Scale = WholeScale;
    int block;  // columns of a Hadamard matrix, a power of two from 8 to 256
    __device__ __forceinline__ explicit Int8Form(long long block) : block(static_cast<int>(block)) {}

    // All lanes of a warp together, with neighbouring packs; those beyond the row have zeros.
    __device__ __forceinline__ Kept keep(const Pack<bf16, 8>& values, bool is_in) const {
        Kept kept;
#pragma unroll
        for (int j = 0; j < 8; ++j) kept.at[j] = is_in ? widen(values.at[j]) : 0.0f;
        hadamard(kept.at, block, ~0u);
        return kept;
    }
    __device__ __forceinline__ static unsigned most(const Kept& values, unsigned bits) { return most_bits(values.at, bits); }
    __device__ __forceinline__ Scale scale(unsigned bits) const { return int8_scale(bits, block); }
    __device__ __forceinline__ static int visits(int packs) { return (packs + 31) / 32 * 32; }
};

// Quantizes a row in shared memory; `bits` is the largest value that this thread has written there.
template <typename Form>
__device__ __forceinline__ void write_row(
    const typename Form::Kept* row, int packs, unsigned bits, const RoundedRows& to, const Form& form
) {
    const auto scale = form.scale(block_max_bits(bits));  // by then the whole row is there
    if (threadIdx.x == 0) *to.scales = scale.scale;
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += blockDim.x) scale.write(row[i], to.values + 8 * i);
}

// Quantizes a row of which each thread has the packs at threadIdx.x + k * blockDim.x.
template <typename Form, int MOST>
__device__ __forceinline__ void write_row(
    const Pack<bf16, 8> (&row)[MOST], int packs, const RoundedRows& to, const Form& form
) {
    typename Form::Kept kept[MOST];
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const bool is_in = threadIdx.x + k * blockDim.x < packs;
        kept[k] = form.keep(row[k], is_in);
        if (is_in) bits = Form::most(kept[k], bits);
    }
    const auto scale = form.scale(block_max_bits(bits));
    if (threadIdx.x == 0) *to.scales = scale.scale;
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < packs) scale.write(kept[k], to.values + 8 * i);
    }
}
