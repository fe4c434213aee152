// Routes a step's tokens to experts and sorts the rows by expert, in one launch: logits of the router in float32, their softmax, the k highest
// probabilities, and all choices sorted by expert. Logits may have biases, and sigmoids may replace the softmax.
//
// T tokens, E experts, k of them per token, D hidden. Eight blocks multiply 16 tokens by a part of D each. They add the parts in order and choose for
// two tokens each. From sm_90 on they are a cluster, whose blocks read one another's sums; before, the last of them does it for all. One block of all
// sorts, as soon as every choice has arrived in its mailbox. No order depends on which block is first, nor on the number of tokens.
//
// The router's weights are read before the preceding kernel has ended; it must not write them, and must itself have waited for any kernel that does.
#include "cluster.cuh"
#include "mma.cuh"
#include "route.cuh"

// Stores the sum of a token of this block with an expert, over this block's columns.
template <int J>
__device__ __forceinline__ void note_sum(const Router& to, Room<J>& room, int part, int token, int expert, float sum) {
#if __CUDA_ARCH__ >= 900
    room.sums[token * Room<J>::PITCH + expert] = sum;
#else
    const int row = blockIdx.x / PARTS * ROWS + token;
    if (row < to.rows && expert < to.experts_of_all)
        to.logits[(static_cast<long long>(part) * to.rows + row) * to.experts_of_all + expert] = sum;
#endif
}

// Loads a warp's weights of two times 8 experts and up to COLUMNS columns; a lane's columns are those of `multiply_part`.
__device__ __forceinline__ void load_weights(uint4 (&b)[STEPS][2], const Router& to, const bf16* w, int first, int from, int end) {
    const int line = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int expert = (first + i * WARPS) * 8 + line, k = from + step * 32 + quad * 8;
            b[step][i] = make_uint4(0, 0, 0, 0);
            if (expert < to.experts_of_all && k < end)
                b[step][i] = *reinterpret_cast<const uint4*>(w + static_cast<long long>(expert) * to.dim + k);
        }
    }
}

// Computes sums of a block's tokens with all experts over its columns.
template <int J>
__device__ __forceinline__ void multiply_part(
    const Router& to, Room<J>& room, const bf16* __restrict__ x, const bf16* __restrict__ w, int first_row, int part
) {
    constexpr int TILES = J * 4 / WARPS;  // of 8 experts, per warp
    static_assert(TILES % 2 == 0, "");
    __shared__ alignas(16) unsigned char rows_of_x[ROWS * X_PITCH];
    const int warp = threadIdx.x / 32, quad = threadIdx.x % 4, line = threadIdx.x % 32 / 4;
    const int begin = part * to.width(), end = min(to.dim, begin + to.width());
    uint4 b[STEPS][2];
    load_weights(b, to, w, warp, begin, end);
    wait_for_inputs();
    float sums[TILES][4] = {};
    for (int from = begin; from < end; from += COLUMNS) {
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * COLUMNS / 8; i += THREADS) {
            const int row = i / (COLUMNS / 8), k = i % (COLUMNS / 8) * 8;
            uint4 chunk = make_uint4(0, 0, 0, 0);
            if (first_row + row < to.rows && from + k < end)
                chunk = *reinterpret_cast<const uint4*>(x + static_cast<long long>(first_row + row) * to.dim + from + k);
            *reinterpret_cast<uint4*>(rows_of_x + row * X_PITCH + k * 2) = chunk;
        }
        __syncthreads();
#pragma unroll
        for (int pair = 0; pair < TILES; pair += 2) {
            if (pair > 0 || from > begin) load_weights(b, to, w, warp + pair * WARPS, from, end);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const unsigned char* at = rows_of_x + line * X_PITCH + (step * 32 + quad * 8) * 2;  // the same columns in both operands
                const uint4 a0 = *reinterpret_cast<const uint4*>(at), a1 = *reinterpret_cast<const uint4*>(at + 8 * X_PITCH);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint4 own = b[step][i];
                    multiply(sums[pair + i], a0.x, a1.x, a0.y, a1.y, own.x, own.y);
                    multiply(sums[pair + i], a0.z, a1.z, a0.w, a1.w, own.z, own.w);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            note_sum<J>(to, room, part, line + j / 2 * 8, (warp + i * WARPS) * 8 + quad * 2 + j % 2, sums[i][j]);
    }
}

template <int J>
__device__ __forceinline__ void multiply_part(
    const Router& to, Room<J>& room, const float* __restrict__ x, const float* __restrict__ w, int first_row, int part
) {
    wait_for_inputs();
    const int begin = part * to.width(), end = min(to.dim, begin + to.width());
    for (int i = threadIdx.x; i < ROWS * to.experts_of_all; i += THREADS) {
        const int token = i / to.experts_of_all, expert = i % to.experts_of_all;
        if (first_row + token >= to.rows) continue;
        float sum = 0.0f;
        for (int k = begin; k < end; ++k)
            sum += x[static_cast<long long>(first_row + token) * to.dim + k] * w[static_cast<long long>(expert) * to.dim + k];
        note_sum<J>(to, room, part, token, expert, sum);
    }
}

// Adds up a token's logits: the sums of all parts, in order, and the biases. Lane l has the experts l, l + 32, ..
template <int J, Scores S, typename T>
__device__ __forceinline__ void gather(float (&p)[J], const Router& to, const Scoring<T>& scoring, const Room<J>& room, int row) {
    constexpr int AT_ONCE = J > 4 ? 2 : PARTS;  // parts that are read at once
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < J; ++j) p[j] = j * 32 + lane < to.experts_of_all ? 0.0f : -INFINITY;
    for (int from = 0; from < PARTS; from += AT_ONCE) {
        float more[AT_ONCE][J];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int j = 0; j < J; ++j) {
                const int expert = j * 32 + lane;
                more[i][j] = 0.0f;
                if (expert >= to.experts_of_all) continue;
#if __CUDA_ARCH__ >= 900
                more[i][j] = load_one(shared_address(&room.sums[row % ROWS * Room<J>::PITCH + expert]), from + i);
#else
                more[i][j] = __ldcg(to.logits + (static_cast<long long>(from + i) * to.rows + row) * to.experts_of_all + expert);
#endif
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int j = 0; j < J; ++j) p[j] += more[i][j];
        }
    }
    if constexpr (S == BIASED) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
            if (j * 32 + lane < to.experts_of_all) p[j] += widen(scoring.numbers[j * 32 + lane]);
        }
    }
}

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
    multiply_part<J>(to, room, x, w, cluster * ROWS, part);
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

#if __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(PARTS)
#else
#define CLUSTER
#endif

#define PARAMETERS(T)                                                                                                 \
    const T *x, const T *w, const short *recorded, const int *slots, float *logits, int *experts, float *weights,     \
        short *record, int *order, Tile *tiles, int *counters, long long stride, long long rows, long long dim,       \
        long long experts_of_all, long long choices, long long first_expert, long long own_experts,                   \
        long long rows_of_tile, long long normalised
#define ROUTER                                                                                                   \
    const Router to = {recorded, slots, logits, experts, weights, record, order, tiles, counters, stride,        \
                       static_cast<int>(rows), static_cast<int>(dim), static_cast<int>(experts_of_all),          \
                       static_cast<int>(choices), static_cast<int>(first_expert), static_cast<int>(own_experts), \
                       static_cast<int>(rows_of_tile), normalised != 0}
#define KERNEL extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 2)

#define ROUTE(NAME, T, J)                                   \
    KERNEL NAME(PARAMETERS(T)) {                            \
        ROUTER;                                             \
        route<T, J, SOFTMAX>(to, Scoring<T>{}, x, w);       \
    }
#define ROUTE_BIASED(NAME, T, J)                                            \
    KERNEL NAME(PARAMETERS(T), const T* numbers) {                          \
        ROUTER;                                                             \
        route<T, J, BIASED>(to, Scoring<T>{numbers, 1, 1, 1.0f}, x, w);     \
    }
#define ROUTE_SIGMOID(NAME, T, J)                                                                                      \
    KERNEL NAME(PARAMETERS(T), const T* numbers, long long num_groups, long long groups_per_token, float scale) {      \
        ROUTER;                                                                                                       \
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
