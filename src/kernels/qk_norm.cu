// RMSNorm of a token's queries over all heads together, and of its keys, in two steps: sums of squares, which the ranks of a tensor-parallel group
// add in between, and the multiplication in place. One block per token; sums have a fixed order.
#include "scalar.cuh"

// Strides in elements; query heads are [Hkv, columns], key heads [Hkv, hd].
struct Layout {
    long long q_row, q_group, k_row, k_group;
    int kv_heads, q_columns, k_columns;
};

template <typename T>
__device__ __forceinline__ float squares_of(const T* row, long long group_stride, int groups, int columns) {
    float squares = 0.0f;
    for (int i = threadIdx.x; i < groups * columns; i += blockDim.x) {
        const float value = widen(row[i / columns * group_stride + i % columns]);
        squares += value * value;
    }
    return block_sum(squares);
}

template <typename T>
__device__ __forceinline__ void scale_all(T* row, const T* weight, long long group_stride, int groups, int columns, float scale) {
    for (int i = threadIdx.x; i < groups * columns; i += blockDim.x) {
        T& value = row[i / columns * group_stride + i % columns];
        narrow(widen(value) * scale * widen(weight[i]), value);
    }
}

template <typename T>
__device__ __forceinline__ void qk_squares(const T* q, const T* k, Layout stride, float* sums, bool counts_k) {
    wait_for_inputs();
    const long long token = blockIdx.x;
    const float of_q = squares_of(q + token * stride.q_row, stride.q_group, stride.kv_heads, stride.q_columns);
    const float of_k = squares_of(k + token * stride.k_row, stride.k_group, stride.kv_heads, stride.k_columns);
    if (threadIdx.x > 0) return;
    sums[2 * token] = of_q;
    sums[2 * token + 1] = counts_k ? of_k : 0.0f;
}

template <typename T>
__device__ __forceinline__ void qk_scale(T* q, T* k, const T* q_norm, const T* k_norm, Layout stride, const float* sums,
                                         float q_width, float k_width, float eps) {
    wait_for_inputs();
    const long long token = blockIdx.x;
    const float of_q = rsqrtf(sums[2 * token] / q_width + eps), of_k = rsqrtf(sums[2 * token + 1] / k_width + eps);
    scale_all(q + token * stride.q_row, q_norm, stride.q_group, stride.kv_heads, stride.q_columns, of_q);
    scale_all(k + token * stride.k_row, k_norm, stride.k_group, stride.kv_heads, stride.k_columns, of_k);
}

// Converts the host's arguments, which are `long long`.
__device__ __forceinline__ Layout layout(long long q_row, long long q_group, long long k_row, long long k_group, long long kv_heads,
                                         long long q_columns, long long k_columns) {
    return {q_row, q_group, k_row, k_group, static_cast<int>(kv_heads), static_cast<int>(q_columns), static_cast<int>(k_columns)};
}

#define QK_NORM(KIND, T)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) qk_squares_##KIND(                                                       \
        const T* q, const T* k, long long q_row, long long q_group, long long k_row, long long k_group, long long kv_heads,    \
        long long q_columns, long long k_columns, float* sums, long long counts_k) {                                           \
        qk_squares(q, k, layout(q_row, q_group, k_row, k_group, kv_heads, q_columns, k_columns), sums, counts_k != 0);         \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) qk_scale_##KIND(                                                         \
        T* q, T* k, const T* q_norm, const T* k_norm, long long q_row, long long q_group, long long k_row,                     \
        long long k_group, long long kv_heads, long long q_columns, long long k_columns, const float* sums, float q_width,     \
        float k_width, float eps) {                                                                                            \
        qk_scale(q, k, q_norm, k_norm, layout(q_row, q_group, k_row, k_group, kv_heads, q_columns, k_columns), sums, q_width,  \
                 k_width, eps);                                                                                                \
    }

QK_NORM(f32, float)
QK_NORM(bf16, bf16)
