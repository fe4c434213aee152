// Products in which every row has the weight of its expert, for rows that route.cu has sorted into tiles.
//
// A block takes items, 64 or 128 features of one tile over all of K, one after the other, and weights of the next item are on their way
// while it ends: a grid of blocks that all run at once reads weights at the memory's speed, whatever the tiles are, and the host knows of
// none. Weights are the left factor, so that a tile of few rows costs few products. A sum goes over K in one order, whatever
// the tile and whoever is beside it.
//
// gate_up: act = silu(gate) * up of a token's row, in sorted order; features g0 u0 g1 u1 ..
// down: a sorted row of act, written to the place of its choice.
// combine: the weighted sum of a token's choices, in their order.
// gather: that sum in float32, of rows that lie elsewhere; for training.
#include "async.cuh"
#include "cluster.cuh"
#include "mma.cuh"
#include "scalar.cuh"
#include "tiles.cuh"

constexpr int STEP = 64;         // columns of a stage: rows of 128 bytes
constexpr int ROW_BYTES = 2 * STEP;

struct Product {
    const void* x;      // [rows, K] with x_stride
    const void* w;      // [E, features, K] with w_expert, w_row
    void* out;          // [rows, features or half of them]
    const int* order;   // choices in sorted order
    const Tile* tiles;  // their number, then all of them
    long long x_stride, w_expert, w_row, out_stride;
    int k, features, choices, sure;  // sure: experts of which nearly all are hit; 0: one cannot know
};

// WM x WN warps, each with MT x NT products of 16 features and 8 rows; STEPS steps are copied at once into one of DEPTH stages.
template <int WM, int WN, int MT, int NT, int SUB, int DEPTH, bool DOWN>
struct Shape {
    static constexpr int FEATURES = WM * MT * 16, ROWS = WN * NT * 8, THREADS = WM * WN * 32, STAGES = DEPTH, STEPS = SUB;
    static constexpr int W_BYTES = FEATURES * ROW_BYTES, STEP_BYTES = W_BYTES + ROWS * ROW_BYTES, STAGE_BYTES = STEPS * STEP_BYTES;
    static constexpr int LINES = THREADS / 8;  // rows that all threads copy at once, 16 bytes each
    static constexpr int OWN_FEATURES = FEATURES / LINES, OWN_ROWS = ROWS / LINES;
    static constexpr int GROUPS = WN, M = MT, N = NT;
    static constexpr bool IS_DOWN = DOWN;
    static_assert(FEATURES % LINES == 0 && ROWS % LINES == 0 && NT % 2 == 0, "");
};

// What a thread copies of the item that is read now.
template <typename S>
struct Reader {
    const Product& of;
    unsigned stages;
    unsigned long long policy;
    int item, step;
    int own_features, own_rows;  // how many rows of the stage, from its line on, exist
    const bf16* w;
    const bf16* x[S::OWN_ROWS];

    __device__ __forceinline__ Reader(const Product& of, unsigned stages)
        : of(of), stages(stages), policy(read_once()), item(blockIdx.x), step(0) {}

    __device__ __forceinline__ void open(int columns) {
        const Tile tile = of.tiles[1 + item / columns];
        const int line = threadIdx.x / 8, chunk = threadIdx.x % 8 * 8, feature = item % columns * S::FEATURES;
        own_features = of.features - feature - line;
        own_rows = tile.count - line;
        w = static_cast<const bf16*>(of.w) + tile.expert * of.w_expert + (feature + line) * of.w_row + chunk;
#pragma unroll
        for (int i = 0; i < S::OWN_ROWS; ++i) {
            const int sorted = tile.first + min(line + i * S::LINES, tile.count - 1);
            const int row = S::IS_DOWN ? sorted : of.order[sorted] / of.choices;
            x[i] = static_cast<const bf16*>(of.x) + row * of.x_stride + chunk;
        }
    }

    // Queues the next step's copies into a stage, if there is a step.
    __device__ __forceinline__ void next(int stage, int items, int columns, int steps) {
        if (item < items) {
            if (step == 0) open(columns);
            const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;
#pragma unroll
            for (int part = 0; part < S::STEPS; ++part) {
                const int k = (step * S::STEPS + part) * STEP;
                const bool has = k + chunk * 8 < of.k;
                const unsigned to = stages + stage * S::STAGE_BYTES + part * S::STEP_BYTES + line * ROW_BYTES;
#pragma unroll
                for (int i = 0; i < S::OWN_FEATURES; ++i) {
                    const int row = line + i * S::LINES, at = i * S::LINES * ROW_BYTES + ((chunk ^ (row / 2 % 8)) * 16);
                    const bool is_there = has && i * S::LINES < own_features;
                    copy_16_once(to + at, is_there ? w + i * S::LINES * of.w_row + k : w, is_there ? 16 : 0, policy);
                }
#pragma unroll
                for (int i = 0; i < S::OWN_ROWS; ++i) {
                    const int row = line + i * S::LINES, at = S::W_BYTES + i * S::LINES * ROW_BYTES + ((chunk ^ (row % 8)) * 16);
                    const bool is_there = has && i * S::LINES < own_rows;
                    copy_16(to + at, is_there ? x[i] + k : x[i], is_there ? 16 : 0);
                }
            }
            if (++step == steps) step = 0, item += gridDim.x;
        }
        commit_copies();
    }
};

// sums += a step's weights times its rows, of which `count` from this warp's first on exist. Of 16 features the even ones are rows 0 .. 7
// of a product and the odd ones rows 8 .. 15, so that a thread has both of a pair.
template <typename S>
__device__ __forceinline__ void multiply_step(float (&sums)[S::M][S::N][4], unsigned at, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane % 8, matrix = lane / 8;
    const int feature = warp / S::GROUPS * S::M * 16, row = warp % S::GROUPS * S::N * 8;
    const unsigned w_at = at + (feature + 2 * line + matrix % 2) * ROW_BYTES;
    const unsigned x_at = at + S::W_BYTES + (row + matrix / 2 * 8 + line) * ROW_BYTES;
#pragma unroll
    for (int k = 0; k < STEP / 16; ++k) {
        unsigned a[S::M][4];
#pragma unroll
        for (int i = 0; i < S::M; ++i) load_matrices(a[i], w_at + i * 16 * ROW_BYTES + (((2 * k + matrix / 2) ^ line) * 16));
#pragma unroll
        for (int j = 0; j < S::N; j += 2) {
            if (j * 8 >= count) break;
            unsigned b[4];
            load_matrices(b, x_at + j * 8 * ROW_BYTES + (((2 * k + matrix % 2) ^ line) * 16));
#pragma unroll
            for (int i = 0; i < S::M; ++i) {
                multiply(sums[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                multiply(sums[i][j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

template <typename S>
__device__ __forceinline__ void write_sums(const float (&sums)[S::M][S::N][4], const Product& of, const Tile& tile, int first) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp % S::GROUPS * S::N * 8 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < S::N; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int at = row + j * 8 + odd;
            if (at >= tile.count) continue;
            const int to = S::IS_DOWN ? of.order[tile.first + at] : tile.first + at;
            bf16* out = static_cast<bf16*>(of.out) + to * of.out_stride;
#pragma unroll
            for (int i = 0; i < S::M; ++i) {
                const int pair = first / 2 + (warp / S::GROUPS * S::M + i) * 8 + lane / 4;
                if (2 * pair >= of.features) continue;
                const float even = sums[i][j][odd], other = sums[i][j][2 + odd];
                if (S::IS_DOWN) {
                    *reinterpret_cast<unsigned*>(out + 2 * pair) = pack(even, other);
                } else {
                    narrow(silu_mul(even, other), out[pair]);
                }
            }
        }
    }
}

template <typename S>
__device__ __forceinline__ void product(const Product& of) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 127) / 128 * 128;
    const int columns = (of.features + S::FEATURES - 1) / S::FEATURES, steps = (of.k + S::STEPS * STEP - 1) / (S::STEPS * STEP);
    // Weights that this block will most likely read, or another one soon: of experts that all have one tile.
    if (static_cast<int>(blockIdx.x) / columns < of.sure) {
        const int first = blockIdx.x % columns * S::FEATURES, lines = min(steps, S::STAGES) * S::STEPS;
        const bf16* w = static_cast<const bf16*>(of.w) + blockIdx.x / columns * of.w_expert + first * of.w_row;
        for (int i = threadIdx.x; i < min(S::FEATURES, of.features - first) * lines; i += S::THREADS)
            prefetch(w + i / lines * of.w_row + min(i % lines * STEP, of.k - 1));
    }
    wait_for_inputs();
    const int items = of.tiles[0].expert * columns;
    Reader<S> reader(of, stages);
    for (int stage = 0; stage < S::STAGES - 1; ++stage) reader.next(stage, items, columns, steps);
    int stage = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = of.tiles[1 + item / columns];
        const int count = tile.count - static_cast<int>(threadIdx.x) / 32 % S::GROUPS * S::N * 8;
        float sums[S::M][S::N][4] = {};
        for (int step = 0; step < steps; ++step) {
            wait_copies<S::STAGES - 2>();
            __syncthreads();
            reader.next(stage == 0 ? S::STAGES - 1 : stage - 1, items, columns, steps);
#pragma unroll
            for (int part = 0; part < S::STEPS; ++part)
                multiply_step<S>(sums, stages + stage * S::STAGE_BYTES + part * S::STEP_BYTES, count);
            if (++stage == S::STAGES) stage = 0;
        }
        write_sums<S>(sums, of, tile, item % columns * S::FEATURES);
    }
    wait_copies<0>();
}

// float32: two features and a row at a time, by a warp.
template <bool DOWN>
__device__ __forceinline__ void product_f32(const Product& of) {
    constexpr int FEATURES = 64, WARPS = 4;
    wait_for_inputs();
    const int columns = (of.features + FEATURES - 1) / FEATURES, items = of.tiles[0].expert * columns;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = of.tiles[1 + item / columns];
        for (int i = warp; i < FEATURES / 2 * tile.count; i += WARPS) {
            const int feature = item % columns * FEATURES + i % (FEATURES / 2) * 2, sorted = tile.first + i / (FEATURES / 2);
            if (feature >= of.features) continue;
            const int choice = of.order[sorted], row = DOWN ? sorted : choice / of.choices;
            const float* x = static_cast<const float*>(of.x) + row * of.x_stride;
            const float* even = static_cast<const float*>(of.w) + tile.expert * of.w_expert + feature * of.w_row;
            const float* odd = even + of.w_row;
            float sums[2] = {};
            for (int k = lane; k < of.k; k += 32) {
                sums[0] += x[k] * even[k];
                sums[1] += x[k] * odd[k];
            }
            for (int step = 16; step > 0; step /= 2) {
                sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], step);
                sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], step);
            }
            if (lane != 0) continue;
            float* out = static_cast<float*>(of.out) + (DOWN ? choice : sorted) * of.out_stride;
            if (DOWN) {
                out[feature] = sums[0];
                out[feature + 1] = sums[1];
            } else {
                out[feature / 2] = sums[0] / (1.0f + expf(-sums[0])) * sums[1];
            }
        }
    }
}

// y = the sum of a token's rows, each times its weight, rounded once; of other ranks' experts there are none.
template <typename T, int N>
__device__ __forceinline__ void combine(
    const T* __restrict__ rows, const int* __restrict__ experts, const float* __restrict__ weights, T* __restrict__ y, long long dim,
    int choices, int first_expert, int own_experts
) {
    wait_for_inputs();
    const long long first = blockIdx.x * static_cast<long long>(choices);
    for (int i = threadIdx.x; i < dim / N; i += blockDim.x) {
        float sums[N] = {};
#pragma unroll 8
        for (int choice = 0; choice < choices; ++choice) {
            const int expert = experts[first + choice] - first_expert;
            if (expert < 0 || expert >= own_experts) continue;
            const float weight = weights[first + choice];
            const auto row = load<T, N>(rows + (first + choice) * dim + i * N);
#pragma unroll
            for (int j = 0; j < N; ++j) sums[j] += widen(row.at[j]) * weight;
        }
        Pack<T, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j) narrow(sums[j], out.at[j]);
        store(y + blockIdx.x * dim + i * N, out);
    }
}

// y = the sum of the rows that a token's choices have, in their order, each times its weight if there are any.
template <typename T, int N>
__device__ __forceinline__ void gather(
    const T* __restrict__ rows, const long long* __restrict__ places, const float* __restrict__ weights, float* __restrict__ y,
    long long dim, int choices
) {
    wait_for_inputs();
    const long long first = blockIdx.x * static_cast<long long>(choices);
    for (int i = threadIdx.x; i < dim / N; i += blockDim.x) {
        float sums[N] = {};
#pragma unroll 8
        for (int choice = 0; choice < choices; ++choice) {
            const float weight = weights ? weights[first + choice] : 1.0f;
            const auto row = load<T, N>(rows + places[first + choice] * dim + i * N);
#pragma unroll
            for (int j = 0; j < N; ++j) sums[j] = __fadd_rn(sums[j], __fmul_rn(widen(row.at[j]), weight));
        }
        Pack<float, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j) out.at[j] = sums[j];
        store(y + blockIdx.x * dim + i * N, out);
    }
}

#define PRODUCT(NAME, THREADS, PER_PROCESSOR, CALL)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(                                       \
        const void* x, const void* w, void* out, const int* order, const Tile* tiles, long long x_stride,             \
        long long w_expert, long long w_row, long long out_stride, long long k, long long features,                   \
        long long choices, long long sure                                                                            \
    ) {                                                                                                              \
        const Product of = {x, w, out, order, tiles, x_stride, w_expert, w_row, out_stride, static_cast<int>(k),      \
                            static_cast<int>(features), static_cast<int>(choices), static_cast<int>(sure)};           \
        CALL(of);                                                                                                    \
    }

#define PRODUCTS(NAME, THREADS, PER_PROCESSOR, ...)                                                            \
    PRODUCT(experts_gate_up_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, false>>))              \
    PRODUCT(experts_down_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, true>>))

PRODUCTS(few, 128, 3, 4, 1, 1, 4, 2, 3)
PRODUCTS(some, 128, 2, 4, 1, 2, 4, 1, 5)
PRODUCTS(many, 256, 1, 4, 2, 2, 8, 2, 3)
PRODUCTS(small, 128, 3, 4, 1, 1, 8, 1, 4)
PRODUCT(experts_gate_up_f32, 128, 4, product_f32<false>)
PRODUCT(experts_down_f32, 128, 4, product_f32<true>)

#define COMBINE(NAME, T, N)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                          \
        const T* rows, const int* experts, const float* weights, T* y, long long dim, long long choices,             \
        long long first_expert, long long own_experts                                                                \
    ) {                                                                                                              \
        combine<T, N>(rows, experts, weights, y, dim, static_cast<int>(choices), static_cast<int>(first_expert),     \
                      static_cast<int>(own_experts));                                                                \
    }

COMBINE(experts_combine_f32_x1, float, 1)
COMBINE(experts_combine_f32_x4, float, 4)
COMBINE(experts_combine_bf16_x1, bf16, 1)
COMBINE(experts_combine_bf16_x8, bf16, 8)

#define GATHER(NAME, T, N)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                      \
        const T* rows, const long long* places, const float* weights, float* y, long long dim, long long choices \
    ) {                                                                                                          \
        gather<T, N>(rows, places, weights, y, dim, static_cast<int>(choices));                                  \
    }

GATHER(experts_gather_f32_x1, float, 1)
GATHER(experts_gather_f32_x4, float, 4)
GATHER(experts_gather_bf16_x1, bf16, 1)
GATHER(experts_gather_bf16_x8, bf16, 8)
