// Kernels for the draft head: they compute the inputs of its block, and store hidden states and draft tokens for later rows.
#include "scalar.cuh"

// Computes out = [norm(embedded), norm(hidden)] for each row, with one block for each half of a row. A hidden state is a row of `kept` or of `own`.
template <typename X, typename T, int N>
__device__ __forceinline__ void draft_input(
    const X* __restrict__ embedded,  // [R, D]
    const T* __restrict__ kept,      // [.., D], used if `before` is an index of its rows
    const T* __restrict__ own,       // [.., D], used if `before` is the complement of an index of its rows
    const int* __restrict__ before,  // [R]
    const T* __restrict__ of_embedded,  // [D], weights of the norm of embeddings
    const T* __restrict__ of_hidden,    // [D], weights of the norm of hidden states
    T* __restrict__ out,             // [R, 2 D]
    long long dim, float eps,
    float centre                     // 1 if the norm's weights are centred around 0, else 0
) {
    wait_for_inputs();
    const long long row = blockIdx.x / 2;
    const int half = blockIdx.x % 2, place = before[row];
    const int packs = static_cast<int>(dim / N);
    const auto* hidden = reinterpret_cast<const Pack<T, N>*>(place < 0 ? own + ~place * dim : kept + place * dim);
    const auto* embedding = reinterpret_cast<const Pack<X, N>*>(embedded + row * dim);
    const auto* weight = reinterpret_cast<const Pack<T, N>*>(half ? of_hidden : of_embedded);
    auto* to = reinterpret_cast<Pack<T, N>*>(out + (2 * row + half) * dim);
    const auto values_of = [&](int i, float(&values)[N]) {
        if (half) {
            const Pack<T, N> pack = hidden[i];
#pragma unroll
            for (int j = 0; j < N; ++j) values[j] = widen(pack.at[j]);
        } else {
            const Pack<X, N> pack = embedding[i];
#pragma unroll
            for (int j = 0; j < N; ++j) values[j] = widen(pack.at[j]);
        }
    };
    float squares = 0.0f;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        float values[N];
        values_of(i, values);
#pragma unroll
        for (int j = 0; j < N; ++j) squares = fmaf(values[j], values[j], squares);
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        float values[N];
        values_of(i, values);
        const Pack<T, N> factors = weight[i];
#pragma unroll
        for (int j = 0; j < N; ++j) values[j] *= scale * (centre + widen(factors.at[j]));
        Pack<T, N> pack;
        narrow(values, pack);
        to[i] = pack;
    }
}

// Sets to[places[row]] = rows[row]; rows with a negative place are skipped. Each row has one block.
template <typename T, int N>
__device__ __forceinline__ void keep_rows(const T* __restrict__ rows, const int* __restrict__ places, T* __restrict__ to, long long dim) {
    wait_for_inputs();
    const long long row = blockIdx.x, place = places[row];
    if (place < 0) return;
    const auto* from = reinterpret_cast<const Pack<T, N>*>(rows + row * dim);
    auto* own = reinterpret_cast<Pack<T, N>*>(to + place * dim);
    for (long long i = threadIdx.x; i < dim / N; i += blockDim.x) own[i] = from[i];
}

// Sets to[places[row]] = ids[row], or 0 if the id is negative because nothing could be sampled: a draft token may be wrong, but must be a token.
extern "C" __global__ void __launch_bounds__(256) keep_drafts(
    const int* __restrict__ ids,     // [R]
    const int* __restrict__ places,  // [R], negative: the row is skipped
    int* __restrict__ to,
    long long count
) {
    wait_for_inputs();
    const long long row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < count && places[row] >= 0) to[places[row]] = max(ids[row], 0);
}

#define DRAFT_INPUT(NAME, X, T, N)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512) draft_input_##NAME(                                               \
        const X* embedded, const T* kept, const T* own, const int* before, const T* of_embedded, const T* of_hidden,    \
        T* out, long long dim, float eps, float centre) {                                                               \
        draft_input<X, T, N>(embedded, kept, own, before, of_embedded, of_hidden, out, dim, eps, centre);               \
    }
#define KEEP_ROWS(NAME, T, N)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512) keep_rows_##NAME(const T* rows, const int* places, T* to,         \
                                                                       long long dim) {                                 \
        keep_rows<T, N>(rows, places, to, dim);                                                                         \
    }

DRAFT_INPUT(f32_x1, float, float, 1)
DRAFT_INPUT(f32_x4, float, float, 4)
DRAFT_INPUT(bf16_x1, bf16, bf16, 1)
DRAFT_INPUT(bf16_x8, bf16, bf16, 8)
DRAFT_INPUT(f32_bf16_x1, float, bf16, 1)
DRAFT_INPUT(f32_bf16_x8, float, bf16, 8)
KEEP_ROWS(f32_x1, float, 1)
KEEP_ROWS(f32_x4, float, 4)
KEEP_ROWS(bf16_x1, bf16, 1)
KEEP_ROWS(bf16_x8, bf16, 8)
