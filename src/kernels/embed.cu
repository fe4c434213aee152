// x = rows of an embedding table or of a vocabulary shard; ids outside of it give zeros, so that a sum over the ranks gives the row. One block per
// row. x may have a wider type (X) than the table (T).
#include "scalar.cuh"

template <typename X, typename T, int N>
__device__ __forceinline__ void embed(
    const int* __restrict__ token_ids,  // [T]
    const T* __restrict__ table,        // [rows, D]
    X* __restrict__ x,                  // [T, D]
    long long rows,
    long long dim,
    long long first_row
) {
    wait_for_inputs();
    const long long row = token_ids[blockIdx.x] - first_row;
    const bool is_own = row >= 0 && row < rows;
    const auto* from = reinterpret_cast<const Pack<T, N>*>(table + (is_own ? row * dim : 0));
    auto* to = reinterpret_cast<Pack<X, N>*>(x + blockIdx.x * dim);
    for (long long i = threadIdx.x; i < dim / N; i += blockDim.x) {
        const auto values = is_own ? from[i] : Pack<T, N>{};
        Pack<X, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j) narrow(widen(values.at[j]), out.at[j]);
        to[i] = out;
    }
}

#define EMBED(NAME, X, T, N)                                                                                         \
    extern "C" __global__ void __launch_bounds__(512) NAME(                                                         \
        const int* token_ids, const T* table, X* x, long long rows, long long dim, long long first_row) {           \
        embed<X, T, N>(token_ids, table, x, rows, dim, first_row);                                                  \
    }

EMBED(embed_f32_x1, float, float, 1)
EMBED(embed_f32_x4, float, float, 4)
EMBED(embed_bf16_x1, bf16, bf16, 1)
EMBED(embed_bf16_x8, bf16, bf16, 8)
EMBED(embed_f32_bf16_x1, float, bf16, 1)
EMBED(embed_f32_bf16_x8, float, bf16, 8)
