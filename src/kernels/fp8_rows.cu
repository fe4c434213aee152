// Quantizes a bf16 matrix to e4m3 or, multiplied by Hadamard matrices, to int8, with one scale per row, in one pass: a block has a row in its
// registers.
#include "rounded_rows.cuh"

constexpr int MOST = 4;       // packs of a row per thread
constexpr int MOST_LONG = 8;  // for longer rows

template <int MOST>
__device__ __forceinline__ void round_row(
    const bf16* __restrict__ x,  // [R, K], rows `stride` elements apart
    const RoundedRows& to,       // [R, K]
    long long columns,
    long long stride,
    long long early  // 1: lets the next kernel start early
) {
    if (early) let_next_begin();
    wait_for_inputs();
    const int packs = static_cast<int>(columns / 8);
    const auto* from = reinterpret_cast<const Pack<bf16, 8>*>(x + blockIdx.x * stride);
    Pack<bf16, 8> row[MOST];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < packs) row[k] = from[i];
    }
    write_row(row, packs, to.from(blockIdx.x, columns), E4m3Form(0));
}

#define FP8_ROWS(NAME, MOST)                                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                                            \
        const bf16* x, unsigned char* values, float* scales, long long columns, long long stride, long long early       \
    ) {                                                                                                                 \
        round_row<MOST>(x, {values, scales}, columns, stride, early);                                                   \
    }

FP8_ROWS(fp8_rows, MOST)
FP8_ROWS(fp8_rows_long, MOST_LONG)

// int8: a thread has every L-th pack of a Hadamard block, so that the transform's last steps need no exchange with other lanes; L lanes have the block.
extern "C" __global__ void __launch_bounds__(1024) int8_rows(
    const bf16* x, unsigned char* values, float* scales, long long columns, long long stride, long long early,
    long long block  // columns of a Hadamard matrix
) {
    if (early) let_next_begin();
    wait_for_inputs();
    const int packs = static_cast<int>(columns / 8), of_block = max(static_cast<int>(block) / 8, 1);
    const int lanes = max(of_block / MOST, 1), lane = threadIdx.x % lanes;
    const int first = threadIdx.x / lanes * (MOST * lanes) + lane;  // of the thread's packs
    const auto* from = reinterpret_cast<const Pack<bf16, 8>*>(x + blockIdx.x * stride);
    float row[MOST][8];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        Pack<bf16, 8> pack = {};
        if (first + k * lanes < packs) pack = from[first + k * lanes];
#pragma unroll
        for (int j = 0; j < 8; ++j) row[k][j] = widen(pack.at[j]);
    }
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < MOST; ++k) hadamard(row[k], min(static_cast<int>(block), 8 * lanes), ~0u);
#pragma unroll
    for (int step = 1; step < MOST; step *= 2) {
        if (step * lanes >= of_block) break;
#pragma unroll
        for (int k = 0; k < MOST; ++k)
            if (!(k & step)) hadamard_pair(row[k], row[k + step]);
    }
#pragma unroll
    for (int k = 0; k < MOST; ++k) bits = most_bits(row[k], bits);
    const auto scale = int8_scale(block_max_bits(bits), static_cast<int>(block));
    if (threadIdx.x == 0) scales[blockIdx.x] = scale.scale;
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = first + k * lanes;
        if (i < packs) scale.write(row[k], values + blockIdx.x * columns + 8 * i);
    }
}
