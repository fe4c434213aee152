// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) over rows of D (arXiv 1910.07467), and its backward.
// One block a row, or a run of rows in the backward; a row's second reading comes out of the cache.
#include "scalar.cuh"

template <typename T>
__device__ __forceinline__ void forward(
    const T* __restrict__ x,       // [R, D]
    const T* __restrict__ weight,  // [D]
    T* __restrict__ y,             // [R, D]
    float* __restrict__ rstd,      // [R]
    long long dim,
    float eps
) {
    const T* row = x + blockIdx.x * dim;
    float squares = 0.0f;
    for (long long i = threadIdx.x; i < dim; i += blockDim.x) {
        const float value = widen(row[i]);
        squares += value * value;
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
    for (long long i = threadIdx.x; i < dim; i += blockDim.x)
        narrow(widen(row[i]) * scale * widen(weight[i]), y[blockIdx.x * dim + i]);
}

// dx = rstd * (dy * w) - x * rstd^3 * mean(dy * w * x); each block sums dy * x * rstd of its rows into its own partial sum.
template <typename T>
__device__ __forceinline__ void backward(
    const T* __restrict__ dy,       // [R, D]
    const T* __restrict__ x,        // [R, D]
    const T* __restrict__ weight,   // [D]
    const float* __restrict__ rstd, // [R]
    T* __restrict__ dx,             // [R, D]
    float* __restrict__ partial,    // [blocks, D]
    long long rows,
    long long dim
) {
    extern __shared__ float sums[];  // [D]; column i belongs to thread i % blockDim.x
    for (long long i = threadIdx.x; i < dim; i += blockDim.x) sums[i] = 0.0f;
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *dy_row = dy + r * dim, *x_row = x + r * dim;
        const float scale = rstd[r];
        float projection = 0.0f;
        for (long long i = threadIdx.x; i < dim; i += blockDim.x) {
            const float product = widen(dy_row[i]) * widen(x_row[i]);
            projection += product * widen(weight[i]);
            sums[i] += product * scale;
        }
        const float coefficient = -scale * scale * scale * block_sum(projection) / static_cast<float>(dim);
        for (long long i = threadIdx.x; i < dim; i += blockDim.x)
            narrow(widen(dy_row[i]) * widen(weight[i]) * scale + widen(x_row[i]) * coefficient, dx[r * dim + i]);
    }
    for (long long i = threadIdx.x; i < dim; i += blockDim.x) partial[blockIdx.x * dim + i] = sums[i];
}

#define RMS_NORM(SUFFIX, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(512) rms_norm_forward_##SUFFIX(                                    \
        const T* x, const T* weight, T* y, float* rstd, long long dim, float eps) {                                 \
        forward(x, weight, y, rstd, dim, eps);                                                                      \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(512) rms_norm_backward_##SUFFIX(                                   \
        const T* dy, const T* x, const T* weight, const float* rstd, T* dx, float* partial, long long rows,         \
        long long dim) {                                                                                            \
        backward(dy, x, weight, rstd, dx, partial, rows, dim);                                                      \
    }

RMS_NORM(f32, float)
RMS_NORM(bf16, bf16)
