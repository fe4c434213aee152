// Which experts a step's tokens go to, and which rows every expert has, in one launch: logits of the router in float32, their softmax,
// the k highest probabilities, and all choices sorted by expert.
//
// T tokens, E experts, k of them a token, D hidden. A block multiplies 16 tokens by a part of D. The last block of these tokens adds the
// parts up in their order and chooses; the last block of all sorts. Neither order depends on which block is last, nor on how many
// tokens there are.
#include "mma.cuh"
#include "scalar.cuh"
#include "tiles.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 16;   // tokens of a block
constexpr int PART = 256;  // columns of a block
constexpr unsigned ALL = 0xffffffffu;

struct Router {
    const short* recorded;  // of row t from t * stride on, -1: none; or null
    const int* slots;       // [T], -1: padding, which has no experts; or null
    float* logits;          // [parts, T, E]
    int* experts;           // [T, k], -1: none
    float* weights;         // [T, k]
    short* record;          // of row t from t * stride on; or null
    int* order;             // [T k], choices (t * k + rank) sorted by expert
    Tile* tiles;            // the number of tiles as the first one's expert, then all of them
    int* counters;          // [1 + T / 16], 0 before and after
    long long stride;
    int rows, dim, experts_of_all, choices, first_expert, own_experts, rows_of_tile;
    bool normalised;
};

// Sums of a block's tokens with all experts over its columns.
template <int J>
__device__ __forceinline__ void multiply_part(
    const Router& to, const bf16* __restrict__ x, const bf16* __restrict__ w, int first_row, int part
) {
    constexpr int TILES = J * 4 / WARPS > 0 ? J * 4 / WARPS : 1;  // of 8 experts, a warp's
    const int warp = threadIdx.x / 32, quad = threadIdx.x % 4, line = threadIdx.x % 32 / 4;
    const int low = first_row + line, high = low + 8;
    float sums[TILES][4] = {};
    const auto chunk = [&](const bf16* at, int row, int rows, int k) {
        return row < rows ? *reinterpret_cast<const uint4*>(at + static_cast<long long>(row) * to.dim + k) : make_uint4(0, 0, 0, 0);
    };
    const int end = min(to.dim, (part + 1) * PART);
#pragma unroll 4
    for (int from = part * PART; from < end; from += 32) {
        const int k = from + quad * 8;  // a lane's columns, in the same order in both factors
        const bool has = k < end;
        const uint4 a0 = chunk(x, low, has ? to.rows : 0, k), a1 = chunk(x, high, has ? to.rows : 0, k);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const uint4 b = chunk(w, (warp + i * WARPS) * 8 + line, has ? to.experts_of_all : 0, k);
            multiply(sums[i], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
            multiply(sums[i], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = j < 2 ? low : high, expert = (warp + i * WARPS) * 8 + quad * 2 + j % 2;
            if (row < to.rows && expert < to.experts_of_all)
                to.logits[(static_cast<long long>(part) * to.rows + row) * to.experts_of_all + expert] = sums[i][j];
        }
    }
}

template <int J>
__device__ __forceinline__ void multiply_part(
    const Router& to, const float* __restrict__ x, const float* __restrict__ w, int first_row, int part
) {
    const int end = min(to.dim, (part + 1) * PART);
    for (int i = threadIdx.x; i < ROWS * to.experts_of_all; i += THREADS) {
        const int row = first_row + i / to.experts_of_all, expert = i % to.experts_of_all;
        if (row >= to.rows) continue;
        float sum = 0.0f;
        for (int k = part * PART; k < end; ++k)
            sum += x[static_cast<long long>(row) * to.dim + k] * w[static_cast<long long>(expert) * to.dim + k];
        to.logits[(static_cast<long long>(part) * to.rows + row) * to.experts_of_all + expert] = sum;
    }
}

// One token's experts and their weights, by a warp. Lane l has the experts l, l + 32, ..; then choice l.
template <int J>
__device__ __forceinline__ void choose(const Router& to, int row, int parts) {
    constexpr int AT_ONCE = J > 4 ? 2 : 8;  // parts that are read at once
    const int lane = threadIdx.x % 32;
    float p[J];
    float highest = -INFINITY;
#pragma unroll
    for (int j = 0; j < J; ++j) {
        const int expert = j * 32 + lane;
        p[j] = expert < to.experts_of_all ? 0.0f : -INFINITY;
    }
    for (int from = 0; from < parts; from += AT_ONCE) {
        float more[AT_ONCE][J];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int j = 0; j < J; ++j) {
                const int expert = j * 32 + lane;
                const long long at = (static_cast<long long>(from + i) * to.rows + row) * to.experts_of_all + expert;
                more[i][j] = from + i < parts && expert < to.experts_of_all ? __ldcg(to.logits + at) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int j = 0; j < J; ++j) p[j] += more[i][j];
        }
    }
#pragma unroll
    for (int j = 0; j < J; ++j) highest = fmaxf(highest, p[j]);
    highest = warp_max(highest);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < J; ++j) {
        p[j] = expf(p[j] - highest);
        sum += p[j];
    }
    sum = warp_sum(sum);
    unsigned keys[J];  // in the order of probabilities; 0: not to be chosen
#pragma unroll
    for (int j = 0; j < J; ++j) {
        p[j] = p[j] / sum;
        keys[j] = j * 32 + lane < to.experts_of_all ? min(__float_as_uint(p[j]), 0xfffffffeu) + 1 : 0;
    }
    int expert = -1;
    const short* recorded = to.recorded ? to.recorded + row * to.stride : nullptr;
    const bool is_padding = to.slots && to.slots[row] < 0;
    if (!is_padding && recorded && recorded[0] >= 0) {
        if (lane < to.choices) expert = recorded[lane];
    } else if (!is_padding) {
        for (int choice = 0; choice < to.choices; ++choice) {
            unsigned best = 0;
            int at = INT_MAX;
#pragma unroll
            for (int j = 0; j < J; ++j) {
                if (keys[j] > best) best = keys[j], at = j * 32 + lane;
            }
            const unsigned top = __reduce_max_sync(ALL, best);
            const int chosen = __reduce_min_sync(ALL, best == top ? at : INT_MAX);  // of equal ones the first
#pragma unroll
            for (int j = 0; j < J; ++j) {
                if (chosen == j * 32 + lane) keys[j] = 0;
            }
            if (lane == choice) expert = chosen;
        }
    }
    float weight = 0.0f;
    for (int choice = 0; choice < to.choices; ++choice) {
        const int chosen = __shfl_sync(ALL, expert, choice);
        float own = 0.0f;
#pragma unroll
        for (int j = 0; j < J; ++j) {
            if (chosen / 32 == j) own = p[j];
        }
        const float given = __shfl_sync(ALL, own, chosen & 31);
        if (lane == choice && chosen >= 0) weight = given;
    }
    const float of_chosen = warp_sum(weight);
    if (to.normalised && expert >= 0) weight /= of_chosen;
    if (lane < to.choices) {
        to.experts[row * to.choices + lane] = expert;
        to.weights[row * to.choices + lane] = weight;
        if (to.record) to.record[row * to.stride + lane] = static_cast<short>(expert);
    }
}

// Choices by expert, those of one expert in their own order, and tiles of them; by a block.
template <int J>
__device__ __forceinline__ void sort(const Router& to) {
    constexpr int AT_ONCE = 8;             // of a thread's choices
    __shared__ int counts[WARPS][J * 32];  // of a warp's share of the choices; then where these go
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all = to.rows * to.choices, share = (all + THREADS - 1) / THREADS * 32;
    const int begin = min(all, warp * share), end = min(all, begin + share);
    int own[AT_ONCE];  // this rank's experts of some of the warp's choices, -1: none
    const auto read = [&](int from) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int choice = from + i * 32 + lane;
            own[i] = choice < end ? __ldcg(to.experts + choice) - to.first_expert : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) own[i] = own[i] < to.own_experts ? max(own[i], -1) : -1;
    };
    for (int i = lane; i < J * 32; i += 32) counts[warp][i] = 0;
    __syncwarp();
    for (int from = begin; from < end; from += AT_ONCE * 32) {
        read(from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (own[i] >= 0) atomicAdd(&counts[warp][own[i]], 1);
        }
    }
    __syncthreads();
    if (warp == 0) {
        int rows_before = 0, tiles_before = 0;
        for (int base = 0; base < to.own_experts; base += 32) {
            const int expert = base + lane;
            int rows = 0;
            for (int i = 0; i < WARPS; ++i) rows += expert < to.own_experts ? counts[i][expert] : 0;
            const int tiles = (rows + to.rows_of_tile - 1) / to.rows_of_tile;
            int rows_here = rows, tiles_here = tiles;  // with those of the lanes before
            for (int step = 1; step < 32; step *= 2) {
                const int more_rows = __shfl_up_sync(ALL, rows_here, step), more_tiles = __shfl_up_sync(ALL, tiles_here, step);
                if (lane >= step) rows_here += more_rows, tiles_here += more_tiles;
            }
            const int first = rows_before + rows_here - rows;
            if (expert < to.own_experts) {
                int at = first;
                for (int i = 0; i < WARPS; ++i) {
                    const int count = counts[i][expert];
                    counts[i][expert] = at;
                    at += count;
                }
            }
            for (int i = 0; i < tiles; ++i) {
                const int done = i * to.rows_of_tile;
                to.tiles[1 + tiles_before + tiles_here - tiles + i] = {expert, first + done, min(rows - done, to.rows_of_tile), 0};
            }
            rows_before += __shfl_sync(ALL, rows_here, 31);
            tiles_before += __shfl_sync(ALL, tiles_here, 31);
        }
        if (lane == 0) to.tiles[0] = {tiles_before, 0, 0, 0};
    }
    __syncthreads();
    for (int from = begin; from < end; from += AT_ONCE * 32) {
        if (end - begin > AT_ONCE * 32) read(from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int expert = own[i];
            const unsigned same = __match_any_sync(ALL, expert);
            const int rank = __popc(same & ((1u << lane) - 1));
            const int at = expert >= 0 ? counts[warp][expert] + rank : 0;
            __syncwarp();
            if (expert >= 0) {
                to.order[at] = from + i * 32 + lane;
                if (rank == 0) counts[warp][expert] = at + __popc(same);
            }
            __syncwarp();
        }
    }
}

// Whether this block is the last of `all` that come to the counter, which then is 0 again. What the others wrote before, it may read.
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

template <typename T, int J>
__device__ __forceinline__ void route(const Router& to, const T* x, const T* w) {
    wait_for_inputs();
    const int parts = (to.dim + PART - 1) / PART, tile = blockIdx.x / parts, part = blockIdx.x % parts;
    multiply_part<J>(to, x, w, tile * ROWS, part);
    if (!is_last(to.counters + 1 + tile, parts)) return;
    for (int row = tile * ROWS + threadIdx.x / 32; row < min(to.rows, (tile + 1) * ROWS); row += WARPS) choose<J>(to, row, parts);
    if (is_last(to.counters, (to.rows + ROWS - 1) / ROWS)) sort<J>(to);
}

#define ROUTE(NAME, T, J)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(                                                   \
        const T* x, const T* w, const short* recorded, const int* slots, float* logits, int* experts, float* weights, \
        short* record, int* order, Tile* tiles, int* counters, long long stride, long long rows, long long dim,       \
        long long experts_of_all, long long choices, long long first_expert, long long own_experts,                   \
        long long rows_of_tile, long long normalised                                                                 \
    ) {                                                                                                              \
        const Router to = {recorded, slots, logits, experts, weights, record, order, tiles, counters, stride,        \
                           static_cast<int>(rows), static_cast<int>(dim), static_cast<int>(experts_of_all),          \
                           static_cast<int>(choices), static_cast<int>(first_expert), static_cast<int>(own_experts), \
                           static_cast<int>(rows_of_tile), normalised != 0};                                         \
        route<T, J>(to, x, w);                                                                                       \
    }

ROUTE(route_bf16_128, bf16, 4)
ROUTE(route_bf16_512, bf16, 16)
ROUTE(route_f32_128, float, 4)
ROUTE(route_f32_512, float, 16)
