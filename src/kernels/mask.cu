// Masks for rows: inner products with other rows' adapters, and token ids that a row's output structure forbids.
#include "scalar.cuh"

constexpr int THREADS = 256;

template <typename T>
__device__ __forceinline__ void mask_low(
    T* __restrict__ low,               // [T, k] inner products of all adapters
    const int* __restrict__ owners,    // [k] the adapter of each column
    const int* __restrict__ adapters,  // [T] the adapter of each row, -1: none
    long long rows, long long columns
) {
    wait_for_inputs();
    const long long at = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (at < rows * columns && owners[at % columns] != adapters[at / columns]) narrow(0.0f, low[at]);
}

#define MASK_LOW(name, T)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                            \
        T* __restrict__ low, const int* __restrict__ owners, const int* __restrict__ adapters, long long rows,             \
        long long columns                                                                                                  \
    ) {                                                                                                                    \
        mask_low(low, owners, adapters, rows, columns);                                                                    \
    }

MASK_LOW(mask_low_f32, float)
MASK_LOW(mask_low_bf16, bf16)

// A block has one part of one row.
extern "C" __global__ void __launch_bounds__(THREADS) mask_logits(
    float* __restrict__ logits,          // [S, V of this rank], `stride` from row to row
    const int* __restrict__ places,      // [S] a row's mask, -1: all ids are allowed
    const unsigned* __restrict__ masks,  // [masks, words] bits by id
    long long vocab, long long stride, long long first_id, long long words, long long parts
) {
    wait_for_inputs();
    const long long s = blockIdx.x / parts, part = blockIdx.x % parts;
    const int place = places[s];
    if (place < 0) return;
    const unsigned* mask = masks + place * words;
    for (long long column = part * THREADS + threadIdx.x; column < vocab; column += parts * THREADS) {
        const long long id = first_id + column;
        if (!(mask[id / 32] >> id % 32 & 1)) logits[s * stride + column] = -INFINITY;
    }
}
