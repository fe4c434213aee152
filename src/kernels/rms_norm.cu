// y = x * rstd * (centre + weight) with rstd = 1 / sqrt(mean(x^2) + eps) over rows of D (arXiv 1910.07467), and its backward. One block per row, or
// per several rows in the backward. Wide: N consecutive elements per thread, kept in registers. Narrow: any D; a row's second reading comes from the
// cache. x may have a wider type (X) than the other tensors (T).
#include "rounded_rows.cuh"

template <typename X, typename T, int N>
__device__ __forceinline__ void forward_wide(
    const X* __restrict__ x,       // [R, D]
    const T* __restrict__ weight,  // [D]
    T* __restrict__ y,             // [R, D]
    float* __restrict__ rstd,      // [R]
    int dim,
    float eps,
    float centre
) {
    const int column = threadIdx.x * N;
    const long long at = blockIdx.x * static_cast<long long>(dim) + column;
    Pack<X, N> row;
    float squares = 0.0f;
    if (column < dim) {
        row = load<X, N>(x + at);
#pragma unroll
        for (int k = 0; k < N; ++k) squares += widen(row.at[k]) * widen(row.at[k]);
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
    if (column >= dim) return;
    const auto weights = load<T, N>(weight + column);
    Pack<T, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) narrow(widen(row.at[k]) * scale * (centre + widen(weights.at[k])), out.at[k]);
    store(y + at, out);
}

template <typename X, typename T>
__device__ __forceinline__ void forward_narrow(const X* x, const T* weight, T* y, float* rstd, int dim, float eps, float centre) {
    const long long start = blockIdx.x * static_cast<long long>(dim);
    float squares = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) squares += widen(x[start + i]) * widen(x[start + i]);
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        narrow(widen(x[start + i]) * scale * (centre + widen(weight[i])), y[start + i]);
}

constexpr int MOST = 4;  // packs of a row per thread in the quantizing forward: with fewer warps a row waits less at barriers

// y rounded to bf16 and then quantized; y itself is only written if requested. Sums have the order of the wide forward, in which every pack
// has a thread: within the pack, over 32 packs, and over these groups in order.
template <typename X, typename Form>
__device__ __forceinline__ void forward_rounded(
    const X* __restrict__ x,          // [R, D]
    const bf16* __restrict__ weight,  // [D]
    bf16* __restrict__ y,             // [R, D] or null
    int dim,
    float eps,
    float centre,
    const RoundedRows& rounded,
    const Form& form
) {
    __shared__ float of_warps[32 * MOST];
    wait_for_inputs();
    const long long first = blockIdx.x * static_cast<long long>(dim);
    const int packs = dim / 8;
    Pack<X, 8> row[MOST];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < packs) row[k] = load<X, 8>(x + first + 8 * i);
    }
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        float squares = 0.0f;
        if (i < packs) {
#pragma unroll
            for (int j = 0; j < 8; ++j) squares += widen(row[k].at[j]) * widen(row[k].at[j]);
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) of_warps[i / 32] = squares;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < (packs + 31) / 32; ++warp) sum += of_warps[warp];
    const float scale = rsqrtf(sum / static_cast<float>(dim) + eps);
    Pack<bf16, 8> normed[MOST];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= packs) break;
        const auto weights = load<bf16, 8>(weight + 8 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            narrow(widen(row[k].at[j]) * scale * (centre + widen(weights.at[j])), normed[k].at[j]);
        if (y) store(y + first + 8 * i, normed[k]);
    }
    write_row(normed, packs, rounded.from(blockIdx.x, dim), form);
}

// dx = residual + rstd * (dy * w) - x * rstd^3 * mean(dy * w * x), where w includes the centre; each block sums dy * x * rstd of its rows into its
// own partial sum. The next row is loaded while this one's sum is computed.
template <typename X, typename T, int N>
__device__ __forceinline__ void backward_wide(
    const T* __restrict__ dy,        // [R, D]
    const X* __restrict__ x,         // [R, D]
    const T* __restrict__ weight,    // [D]
    const float* __restrict__ rstd,  // [R]
    const T* __restrict__ residual,  // [R, D] or null
    T* __restrict__ dx,              // [R, D]
    float* __restrict__ partial,     // [blocks, D]
    long long rows,
    int dim,
    float centre
) {
    const int column = threadIdx.x * N;
    const bool is_active = column < dim;
    float weights[N] = {}, sums[N] = {};
    Pack<T, N> dy_row = {}, residual_row = {}, next_dy = {}, next_residual = {};
    Pack<X, N> x_row = {}, next_x = {};
    if (is_active) {
        const auto packed = load<T, N>(weight + column);
#pragma unroll
        for (int k = 0; k < N; ++k) weights[k] = centre + widen(packed.at[k]);
    }
    const auto fetch = [&](long long r) {
        if (!is_active || r >= rows) return;
        const long long at = r * dim + column;
        next_dy = load<T, N>(dy + at), next_x = load<X, N>(x + at);
        if (residual) next_residual = load<T, N>(residual + at);
    };
    fetch(blockIdx.x);
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        dy_row = next_dy, x_row = next_x, residual_row = next_residual;
        fetch(r + gridDim.x);
        const float scale = rstd[r];
        float projection = 0.0f;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float product = widen(dy_row.at[k]) * widen(x_row.at[k]);
            projection += product * weights[k];
            sums[k] += product * scale;
        }
        const float coefficient = -scale * scale * scale * block_sum(projection) / static_cast<float>(dim);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float own = widen(dy_row.at[k]) * weights[k] * scale + widen(x_row.at[k]) * coefficient;
            narrow(own + widen(residual_row.at[k]), dy_row.at[k]);
        }
        if (is_active) store(dx + r * dim + column, dy_row);
    }
    if (!is_active) return;
#pragma unroll
    for (int k = 0; k < N; ++k) partial[blockIdx.x * static_cast<long long>(dim) + column + k] = sums[k];
}

template <typename X, typename T>
__device__ __forceinline__ void backward_narrow(
    const T* dy, const X* x, const T* weight, const float* rstd, const T* residual, T* dx, float* partial, long long rows,
    int dim, float centre
) {
    extern __shared__ float sums[];  // [D]; column i belongs to thread i % blockDim.x
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sums[i] = 0.0f;
    for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
        const T* dy_row = dy + r * dim;
        const X* x_row = x + r * dim;
        const float scale = rstd[r];
        float projection = 0.0f;
        for (int i = threadIdx.x; i < dim; i += blockDim.x) {
            const float product = widen(dy_row[i]) * widen(x_row[i]);
            projection += product * (centre + widen(weight[i]));
            sums[i] += product * scale;
        }
        const float coefficient = -scale * scale * scale * block_sum(projection) / static_cast<float>(dim);
        for (int i = threadIdx.x; i < dim; i += blockDim.x) {
            const float own = widen(dy_row[i]) * (centre + widen(weight[i])) * scale + widen(x_row[i]) * coefficient;
            narrow(residual ? own + widen(residual[r * dim + i]) : own, dx[r * dim + i]);
        }
    }
    for (int i = threadIdx.x; i < dim; i += blockDim.x) partial[blockIdx.x * static_cast<long long>(dim) + i] = sums[i];
}

#define RMS_NORM(SUFFIX, X, T, FORWARD, BACKWARD)                                                                    \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_forward_##SUFFIX(                                   \
        const X* x, const T* weight, T* y, float* rstd, long long dim, float eps, float centre) {                   \
        FORWARD(x, weight, y, rstd, static_cast<int>(dim), eps, centre);                                            \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024) rms_norm_backward_##SUFFIX(                                  \
        const T* dy, const X* x, const T* weight, const float* rstd, const T* residual, T* dx, float* partial,      \
        long long rows, long long dim, float centre) {                                                              \
        BACKWARD(dy, x, weight, rstd, residual, dx, partial, rows, static_cast<int>(dim), centre);                  \
    }

#define RMS_NORMS(SUFFIX, X, T, N)                                                                                   \
    RMS_NORM(SUFFIX##_x1, X, T, (forward_narrow<X, T>), (backward_narrow<X, T>))                                    \
    RMS_NORM(SUFFIX##_x##N, X, T, (forward_wide<X, T, N>), (backward_wide<X, T, N>))

RMS_NORMS(f32, float, float, 4)
RMS_NORMS(bf16, bf16, bf16, 8)
RMS_NORMS(f32_bf16, float, bf16, 8)

// `block`: columns of a Hadamard matrix, for int8.
#define RMS_NORM_ROUNDED(NAME, X, FORM)                                                                              \
    extern "C" __global__ void __launch_bounds__(512) NAME(                                                         \
        const X* x, const bf16* weight, bf16* y, unsigned char* values, float* scales, long long dim, float eps,     \
        float centre, long long block                                                                               \
    ) {                                                                                                             \
        forward_rounded<X>(x, weight, y, static_cast<int>(dim), eps, centre, {values, scales}, FORM(block));        \
    }

RMS_NORM_ROUNDED(rms_norm_forward_fp8_bf16, bf16, E4m3Form)
RMS_NORM_ROUNDED(rms_norm_forward_fp8_f32_bf16, float, E4m3Form)
