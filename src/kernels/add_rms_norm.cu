// x += delta, rounded to the type of x; then y = x / sqrt(mean(x^2) + eps) * (centre + weight) (arXiv 1910.07467). One block per row, which stays in
// registers between the two passes. x may have a wider type (X) than the other tensors (T). With a form of quantized rows, y is also quantized, and y
// itself is only written if requested.
#include "rounded_rows.cuh"

// The form of rows that are not quantized.
struct NotRounded {
    static constexpr bool IS_ROUNDED = false;
};

template <typename X, typename T, int N, typename Form = NotRounded>
__device__ __forceinline__ void add_rms_norm(
    X* __restrict__ x,             // [T, D]
    const T* __restrict__ delta,   // [T, D] or null
    const T* __restrict__ weight,  // [D]
    T* __restrict__ y,             // [T, D]; if it is quantized, or null
    long long dim,
    float eps,
    float centre,  // 1 if weights are centred around 0, else 0
    RoundedRows rounded = {},
    const Form& form = {}
) {
    constexpr bool IS_ROUNDED = Form::IS_ROUNDED;
    constexpr int MOST = N == 1 ? 4 : 2;  // packs of a row per thread
    const int packs = static_cast<int>(dim / N);
    const auto factors_of = [&](int i) { return reinterpret_cast<const Pack<T, N>*>(weight)[i]; };
    Pack<T, N> early[IS_ROUNDED ? MOST : 1];  // quantizing: no kernel of a step writes weights, so they are loaded early
    if constexpr (IS_ROUNDED) {
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
    Pack<T, N> normed[IS_ROUNDED ? MOST : 1];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= packs) break;
        const auto factors = IS_ROUNDED ? early[IS_ROUNDED ? k : 0] : factors_of(i);
        float values[N];
#pragma unroll
        for (int j = 0; j < N; ++j) values[j] = widen(kept[k].at[j]) * scale * (centre + widen(factors.at[j]));
        Pack<T, N> out;
        narrow(values, out);
        if constexpr (IS_ROUNDED) normed[k] = out;
        if (!IS_ROUNDED || y) reinterpret_cast<Pack<T, N>*>(y + blockIdx.x * dim)[i] = out;
    }
    if constexpr (IS_ROUNDED) write_row(normed, packs, rounded.from(blockIdx.x, dim), form);
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

// `block`: columns of a Hadamard matrix, for int8.
#define ADD_RMS_NORM_ROUNDED(NAME, X, FORM)                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                                         \
        X* x, const bf16* delta, const bf16* weight, bf16* y, unsigned char* values, float* scales, long long dim,    \
        float eps, float centre, long long block                                                                      \
    ) {                                                                                                               \
        add_rms_norm<X, bf16, 8>(x, delta, weight, y, dim, eps, centre, {values, scales}, FORM(block));               \
    }

ADD_RMS_NORM_ROUNDED(add_rms_norm_fp8_bf16_x8, bf16, E4m3Form)
ADD_RMS_NORM_ROUNDED(add_rms_norm_fp8_f32_bf16_x8, float, E4m3Form)
ADD_RMS_NORM_ROUNDED(add_rms_norm_int8_bf16_x8, bf16, Int8Form)
ADD_RMS_NORM_ROUNDED(add_rms_norm_int8_f32_bf16_x8, float, Int8Form)
