// Sum of squares of a flat range in float64, for gradient norms. Each block writes a partial sum; the grid does not depend on the GPU, so that the
// sums have the same bits everywhere.
#include "scalar.cuh"

constexpr int THREADS = 512;

template <typename T>
__device__ __forceinline__ void sum_of_squares(
    const T* __restrict__ x,       // [n]
    double* __restrict__ partial,  // [blocks]
    long long n
) {
    constexpr int UNROLL = 8;  // loads in flight per thread
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    double sum = 0.0;
    for (long long start = first; start < n; start += UNROLL * stride) {
        float x_[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const long long i = start + k * stride;
            x_[k] = i < n ? widen(x[i]) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) sum += static_cast<double>(x_[k]) * static_cast<double>(x_[k]);
    }
    __shared__ double warps[32];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) sum += warps[warp];
    partial[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares_f32(const float* x, double* partial, long long n) {
    sum_of_squares(x, partial, n);
}
extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares_bf16(const bf16* x, double* partial, long long n) {
    sum_of_squares(x, partial, n);
}
