// x += delta, rounded to the type of x; then y = x / sqrt(mean(x^2) + eps) * (centre + weight) (arXiv 1910.07467). One block per row, which stays in
// registers between the two passes. x may have a wider type (X) than the other tensors (T). With FP8, y is also quantized to e4m3, and y itself is
// only written if requested.
#include "fp8.cuh"
#include "scalar.cuh"

template <typename X, typename T, int N, bool FP8 = false>
__device__ __forceinline__ void add_rms_norm(
    X* __restrict__ x,             // [T, D]
    const T* __restrict__ delta,   // [T, D] or null
    const T* __restrict__ weight,  // [D]
    T* __restrict__ y,             // [T, D], with FP8 or null
    long long dim,
    float eps,
    float centre,  // 1 if weights are centred around 0, else 0
    Fp8Row rounded = {}  // of the first row
) {
    constexpr int MOST = N == 1 ? 4 : 2;  // packs of a row per thread
    const int packs = static_cast<int>(dim / N);
    const auto factors_of = [&](int i) { return reinterpret_cast<const Pack<T, N>*>(weight)[i]; };
    Pack<T, N> early[FP8 ? MOST : 1];  // with FP8: no kernel of a step writes weights, so they are loaded early
    if constexpr (FP8) {
        let_next_begin();
#pragma unroll
        for (int k = 0; k < MOST; ++k)
            if (threadIdx.x + k * blockDim.x < packs) early[k] = factors_of(threadIdx.x + k * blockDim.x);
    }
    wait_for_inputs();
    auto* row = reinterpret_cast<Pack<X, N>*>(x + blockIdx.x * dim);
    const auto* added = reinterpret_cast<const Pack<T, N>*>(delta + blockIdx.x * dim);
    Pack<X, N> kept[MOST];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= packs) break;
        kept[k] = row[i];
        if (delta) {
            const auto more = added[i];
            float sums[N];
#pragma unroll
            for (int j = 0; j < N; ++j) sums[j] = widen(kept[k].at[j]) + widen(more.at[j]);
            narrow(sums, kept[k]);
            row[i] = kept[k];
        }
#pragma unroll
        for (int j = 0; j < N; ++j) squares += widen(kept[k].at[j]) * widen(kept[k].at[j]);
    }
    const float scale = rsqrtf(block_sum_at_once(squares) / static_cast<float>(dim) + eps);
    Pack<T, N> normed[FP8 ? MOST : 1];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= packs) break;
        const auto factors = FP8 ? early[FP8 ? k : 0] : factors_of(i);
        float values[N];
#pragma unroll
        for (int j = 0; j < N; ++j) values[j] = widen(kept[k].at[j]) * scale * (centre + widen(factors.at[j]));
        Pack<T, N> out;
        narrow(values, out);
        if constexpr (FP8) normed[k] = out;
        if (!FP8 || y) reinterpret_cast<Pack<T, N>*>(y + blockIdx.x * dim)[i] = out;
    }
    if constexpr (FP8) write_fp8(normed, packs, {rounded.values + blockIdx.x * dim, rounded.scale + blockIdx.x});
}

#define ADD_RMS_NORM(NAME, X, T, N)                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                                        \
        X* x, const T* delta, const T* weight, T* y, long long dim, float eps, float centre) {                      \
        add_rms_norm<X, T, N>(x, delta, weight, y, dim, eps, centre);                                               \
    }

ADD_RMS_NORM(add_rms_norm_f32_x1, float, float, 1)
ADD_RMS_NORM(add_rms_norm_f32_x4, float, float, 4)
ADD_RMS_NORM(add_rms_norm_bf16_x1, bf16, bf16, 1)
ADD_RMS_NORM(add_rms_norm_bf16_x8, bf16, bf16, 8)
ADD_RMS_NORM(add_rms_norm_f32_bf16_x1, float, bf16, 1)
ADD_RMS_NORM(add_rms_norm_f32_bf16_x8, float, bf16, 8)

#define ADD_RMS_NORM_FP8(NAME, X)                                                                                     \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                                         \
        X* x, const bf16* delta, const bf16* weight, bf16* y, unsigned char* values, float* scales, long long dim,    \
        float eps, float centre                                                                                       \
    ) {                                                                                                               \
        add_rms_norm<X, bf16, 8, true>(x, delta, weight, y, dim, eps, centre, {values, scales});                      \
    }

ADD_RMS_NORM_FP8(add_rms_norm_fp8_bf16_x8, bf16)
ADD_RMS_NORM_FP8(add_rms_norm_fp8_f32_bf16_x8, float)
