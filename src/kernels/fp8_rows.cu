// Quantizes a bf16 matrix to e4m3 with one scale per row, in one pass: a block has a row in its registers.
#include "fp8.cuh"

constexpr int MOST = 4;       // packs of a row per thread
constexpr int MOST_LONG = 8;  // for longer rows

template <int MOST>
__device__ __forceinline__ void round_row(
    const bf16* __restrict__ x,          // [R, K], rows `stride` elements apart
    unsigned char* __restrict__ values,  // [R, K]
    float* __restrict__ scales,          // [R]
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
    write_fp8(row, packs, {values + blockIdx.x * columns, scales + blockIdx.x});
}

extern "C" __global__ void __launch_bounds__(1024) fp8_rows(
    const bf16* x, unsigned char* values, float* scales, long long columns, long long stride, long long early
) {
    round_row<MOST>(x, values, scales, columns, stride, early);
}
extern "C" __global__ void __launch_bounds__(1024) fp8_rows_long(
    const bf16* x, unsigned char* values, float* scales, long long columns, long long stride, long long early
) {
    round_row<MOST_LONG>(x, values, scales, columns, stride, early);
}
