// Finds the ids that precede a draw, for the repetition penalty. Token ids are kept in a paged history, at the slots of their keys and values, so it
// is shared, copied and recomputed like these.
#include "scalar.cuh"

constexpr int THREADS = 512;

extern "C" __global__ void __launch_bounds__(THREADS) note_tokens(
    const int* __restrict__ token_ids,  // [T]
    const int* __restrict__ slots,      // [T], block * block_size + offset; -1: padding
    int* __restrict__ history,          // [slots]
    long long count
) {
    wait_for_inputs();
    const long long t = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (t < count && slots[t] >= 0) history[slots[t]] = token_ids[t];
}

// A block has one draw.
extern "C" __global__ void __launch_bounds__(THREADS) mark_seen(
    const int* __restrict__ history,       // [slots]
    const int* __restrict__ block_tables,  // [S, max_blocks]
    const int* __restrict__ lens,          // [S] tokens so far
    unsigned* __restrict__ seen,           // [S, words] bits by id
    long long max_blocks, long long block_size, long long words
) {
    wait_for_inputs();
    const long long s = blockIdx.x;
    unsigned* bits = seen + s * words;
    for (long long word = threadIdx.x; word < words; word += THREADS) bits[word] = 0;
    __syncthreads();
    for (int position = threadIdx.x; position < lens[s]; position += THREADS) {
        const long long block = block_tables[s * max_blocks + position / block_size];
        const int id = history[block * block_size + position % block_size];
        atomicOr(&bits[id / 32], 1u << id % 32);
    }
}
