// The router's logits: GEMMs of 16 tokens by a cluster, or before sm_90 by eight blocks, each over a part of the columns. See route.cu.
#pragma once
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

// A block's rows as another kernel has written them.
struct Given {
    const bf16* __restrict__ x;  // [T, D]

    __device__ __forceinline__ void begin(const Router&, int, int) { wait_for_inputs(); }
    __device__ __forceinline__ void put(unsigned char* tile, const Router& to, int first_row, int from, int end) const {
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * COLUMNS / 8; i += THREADS) {
            const int row = i / (COLUMNS / 8), k = i % (COLUMNS / 8) * 8;
            uint4 chunk = make_uint4(0, 0, 0, 0);
            if (first_row + row < to.rows && from + k < end)
                chunk = *reinterpret_cast<const uint4*>(x + static_cast<long long>(first_row + row) * to.dim + from + k);
            *reinterpret_cast<uint4*>(tile + row * X_PITCH + k * 2) = chunk;
        }
    }
};

// Computes sums of a block's tokens with all experts over its columns. `rows` waits for the preceding kernel, and puts up to COLUMNS columns in a tile.
template <int J, typename Rows>
__device__ __forceinline__ void multiply_part(
    const Router& to, Room<J>& room, Rows& rows, const bf16* __restrict__ w, int first_row, int part
) {
    constexpr int TILES = J * 4 / WARPS;  // of 8 experts, per warp
    static_assert(TILES % 2 == 0, "");
    __shared__ alignas(16) unsigned char rows_of_x[ROWS * X_PITCH];  // the tile
    const int warp = threadIdx.x / 32, quad = threadIdx.x % 4, line = threadIdx.x % 32 / 4;
    const int begin = part * to.width(), end = min(to.dim, begin + to.width());
    uint4 b[STEPS][2];
    load_weights(b, to, w, warp, begin, end);
    rows.begin(to, first_row, part);
    float sums[TILES][4] = {};
    for (int from = begin; from < end; from += COLUMNS) {
        __syncthreads();
        rows.put(rows_of_x, to, first_row, from, end);
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

#if __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(PARTS)
#else
#define CLUSTER
#endif

// Parameters after the rows.
#define PARAMETERS(T)                                                                                                 \
    const T *w, const short *recorded, const int *slots, float *logits, int *experts, float *weights,     \
        short *record, int *order, Tile *tiles, int *counters, long long stride, long long rows, long long dim,       \
        long long experts_of_all, long long choices, long long first_expert, long long own_experts,                   \
        long long rows_of_tile, long long normalised
#define ROUTER                                                                                                   \
    const Router to = {recorded, slots, logits, experts, weights, record, order, tiles, counters, stride,        \
                       static_cast<int>(rows), static_cast<int>(dim), static_cast<int>(experts_of_all),          \
                       static_cast<int>(choices), static_cast<int>(first_expert), static_cast<int>(own_experts), \
                       static_cast<int>(rows_of_tile), normalised != 0}
#define KERNEL extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 2)
