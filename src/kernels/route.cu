// Routes a step's tokens to experts and sorts the rows by expert, in one launch: logits of the router in float32, their softmax, the k highest
// probabilities, and all choices sorted by expert. Logits may have biases, and sigmoids may replace the softmax.
//
// T tokens, E experts, k of them per token, D hidden. Eight blocks multiply 16 tokens by a part of D each. They add the parts in order and choose for
// two tokens each. From sm_90 on they are a cluster, whose blocks read one another's sums; before, the last of them does it for all. One block of all
// sorts, as soon as every choice has arrived in its mailbox. No order depends on which block is first, nor on the number of tokens.
//
// The router's weights are read before the preceding kernel has ended; it must not write them, and must itself have waited for any kernel that does.
#include "route_logits.cuh"

#if __CUDA_ARCH__ < 900
// Whether this block is the last of `all` that reach the counter, which is then reset to 0. It may read what the others wrote before.
__device__ __forceinline__ bool is_last(int* counter, int all) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == all - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}
#endif

template <typename T, int J, Scores S>
__device__ __forceinline__ void route(const Router& to, const Scoring<T>& scoring, const T* x, const T* w) {
    __shared__ Room<J> room;
    const int cluster = blockIdx.x / PARTS, part = blockIdx.x % PARTS, warp = threadIdx.x / 32;
    if constexpr (sizeof(T) == 2) {
        Given rows = {x};
        multiply_part<J>(to, room, rows, w, cluster * ROWS, part);
    } else {
        multiply_part<J>(to, room, x, w, cluster * ROWS, part);
    }
    float p[J];
#if __CUDA_ARCH__ >= 900
    constexpr int EACH = ROWS / PARTS;  // tokens per block
    sync_cluster();
    const int row = cluster * ROWS + part * EACH + warp;
    const bool has = warp < EACH && row < to.rows;
    if (has) gather<J, S>(p, to, scoring, room, row);
    arrive_cluster();
    if (has) choose<J, S>(to, scoring, p, row);
    wait_cluster();  // this block's sums are no longer read
    if (part != 0) return;
#else
    if (!is_last(to.counters + cluster, PARTS)) return;
    for (int row = cluster * ROWS + warp; row < min(to.rows, (cluster + 1) * ROWS); row += WARPS) {
        gather<J, S>(p, to, scoring, room, row);
        choose<J, S>(to, scoring, p, row);
    }
#endif
    if (cluster == to.clusters() - 1) sort<J>(to, room);
}

#define ROUTE(NAME, T, J)                             \
    KERNEL NAME(const T* x, PARAMETERS(T)) {          \
        ROUTER;                                       \
        route<T, J, SOFTMAX>(to, Scoring<T>{}, x, w); \
    }
#define ROUTE_BIASED(NAME, T, J)                                        \
    KERNEL NAME(const T* x, PARAMETERS(T), const T* numbers) {          \
        ROUTER;                                                         \
        route<T, J, BIASED>(to, Scoring<T>{numbers, 1, 1, 1.0f}, x, w); \
    }
#define ROUTE_SIGMOID(NAME, T, J)                                                                                      \
    KERNEL NAME(                                                                                                       \
        const T* x, PARAMETERS(T), const T* numbers, long long num_groups, long long groups_per_token, float scale     \
    ) {                                                                                                                \
        ROUTER;                                                                                                        \
        const Scoring<T> scoring = {numbers, static_cast<int>(num_groups), static_cast<int>(groups_per_token), scale}; \
        route<T, J, SIGMOID>(to, scoring, x, w);                                                                       \
    }
#define ROUTE_ALL(NAME, T, J)             \
    ROUTE(route_##NAME, T, J)             \
    ROUTE_BIASED(route_biased_##NAME, T, J) \
    ROUTE_SIGMOID(route_sigmoid_##NAME, T, J)

ROUTE_ALL(bf16_128, bf16, 4)
ROUTE_ALL(bf16_512, bf16, 16)
ROUTE_ALL(f32_128, float, 4)
ROUTE_ALL(f32_512, float, 16)
