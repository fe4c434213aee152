// Products in which every row has the weight of its expert, for rows that route.cu has sorted into tiles.
//
// A block takes items, 64 or 128 features of one tile over all of K, one after the other, and weights of the next item are on their way
// while it ends: a grid of blocks that all run at once reads weights at the memory's speed, whatever the tiles are, and the host knows of
// none. Weights are the left factor, so that a tile of few rows costs few products. A sum goes over K in one order, whatever
// the tile and whoever is beside it.
//
// gate_up: act = silu(gate) * up of a token's row, in sorted order; features g0 u0 g1 u1 ..
// down: a sorted row of act, written to the place of its choice.
// low_tokens, low_rows: the inner products of adapters, of a token's row or of a sorted one, in sorted order.
// gate_up_adapted, down_adapted: gate_up and down, whose sums go on over the row's inner products and the adapters' other matrix.
// gate_up_clamped, down_biased: gate_up and down with biases, gate_up with the clamped SwiGLU.
#include "async.cuh"
#include "clamped.cuh"
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
    // Of adapters: the inner products of sorted rows [rows, inner], and the matrix [E, features, inner] that they are multiplied with.
    const void* low;
    const void* b;
    long long b_expert, b_row;
    int inner;
    // Where inner products are made of several adapters: whose each feature is, and whose each token's are; or null.
    const int* owners;
    const int* adapters;
    // Of experts with biases: those of all features [E, features] with bias_expert.
    const void* bias;
    long long bias_expert;
};

enum Form { GATE_UP, DOWN, LOW_TOKENS, LOW_ROWS };

// Whether a product reads sorted rows, and not those of tokens.
__device__ constexpr bool reads_sorted(Form form) { return form == DOWN || form == LOW_ROWS; }

// Whether a sorted row has no part in an inner product, which is another adapter's.
__device__ __forceinline__ bool is_others(const Product& of, int sorted, int feature) {
    return of.owners && of.owners[feature] != of.adapters[of.order[sorted] / of.choices];
}

// WM x WN warps, each with MT x NT products of 16 features and 8 rows; STEPS steps are copied at once into one of DEPTH stages.
template <int WM, int WN, int MT, int NT, int SUB, int DEPTH, Form FORM_, bool ADAPTED = false, bool BIASED = false>
struct Shape {
    static constexpr int FEATURES = WM * MT * 16, ROWS = WN * NT * 8, THREADS = WM * WN * 32, STAGES = DEPTH, STEPS = SUB;
    static constexpr int W_BYTES = FEATURES * ROW_BYTES, STEP_BYTES = W_BYTES + ROWS * ROW_BYTES, STAGE_BYTES = STEPS * STEP_BYTES;
    static constexpr int LINES = THREADS / 8;  // rows that all threads copy at once, 16 bytes each
    static constexpr int OWN_FEATURES = FEATURES / LINES, OWN_ROWS = ROWS / LINES;
    static constexpr int GROUPS = WN, M = MT, N = NT;
    static constexpr Form FORM = FORM_;
    static constexpr bool IS_ADAPTED = ADAPTED, IS_BIASED = BIASED;
    static_assert(FEATURES % LINES == 0 && ROWS % LINES == 0 && NT % 2 == 0, "");
};

// Steps that are copied at once, of so many columns.
template <typename S>
__device__ __forceinline__ int steps_of(int columns) {
    return (columns + S::STEPS * STEP - 1) / (S::STEPS * STEP);
}

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
    const bf16 *b, *low;  // of adapters

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
            const int row = reads_sorted(S::FORM) ? sorted : of.order[sorted] / of.choices;
            x[i] = static_cast<const bf16*>(of.x) + row * of.x_stride + chunk;
        }
        if (S::IS_ADAPTED) {
            b = static_cast<const bf16*>(of.b) + tile.expert * of.b_expert + (feature + line) * of.b_row + chunk;
            low = static_cast<const bf16*>(of.low) + static_cast<long long>(tile.first + line) * of.inner + chunk;
        }
    }

    // Queues the next step's copies into a stage, if there is a step.
    __device__ __forceinline__ void next(int stage, int items, int columns, int steps) {
        if (item < items) {
            if (step == 0) open(columns);
            const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;
            const int own_steps = steps_of<S>(of.k);
            const bool is_low = S::IS_ADAPTED && step >= own_steps;
            const bf16* from = is_low ? b : w;
            const long long between = is_low ? of.b_row : of.w_row;
#pragma unroll
            for (int part = 0; part < S::STEPS; ++part) {
                const int k = ((is_low ? step - own_steps : step) * S::STEPS + part) * STEP;
                const bool has = k + chunk * 8 < (is_low ? of.inner : of.k);
                const unsigned to = stages + stage * S::STAGE_BYTES + part * S::STEP_BYTES + line * ROW_BYTES;
#pragma unroll
                for (int i = 0; i < S::OWN_FEATURES; ++i) {
                    const int row = line + i * S::LINES, at = i * S::LINES * ROW_BYTES + ((chunk ^ (row / 2 % 8)) * 16);
                    const bool is_there = has && i * S::LINES < own_features;
                    copy_16_once(to + at, is_there ? from + i * S::LINES * between + k : from, is_there ? 16 : 0, policy);
                }
#pragma unroll
                for (int i = 0; i < S::OWN_ROWS; ++i) {
                    const int row = line + i * S::LINES, at = S::W_BYTES + i * S::LINES * ROW_BYTES + ((chunk ^ (row % 8)) * 16);
                    const bool is_there = has && i * S::LINES < own_rows;
                    const bf16* own = is_low ? low + i * S::LINES * of.inner : x[i];
                    copy_16(to + at, is_there ? own + k : x[i], is_there ? 16 : 0);
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
            const int to = S::FORM == DOWN ? of.order[tile.first + at] : tile.first + at;
            bf16* out = static_cast<bf16*>(of.out) + to * of.out_stride;
#pragma unroll
            for (int i = 0; i < S::M; ++i) {
                const int pair = first / 2 + (warp / S::GROUPS * S::M + i) * 8 + lane / 4;
                if (2 * pair >= of.features) continue;
                float even = sums[i][j][odd], other = sums[i][j][2 + odd];
                if constexpr (S::IS_BIASED) {
                    const bf16* bias = static_cast<const bf16*>(of.bias) + tile.expert * of.bias_expert + 2 * pair;
                    even += widen(bias[0]), other += widen(bias[1]);
                }
                if (S::FORM == GATE_UP) {
                    narrow(S::IS_BIASED ? clamped_swiglu(even, other) : silu_mul(even, other), out[pair]);
                } else if (S::FORM == DOWN) {
                    *reinterpret_cast<unsigned*>(out + 2 * pair) = pack(even, other);
                } else {
                    const bool drops[2] = {is_others(of, tile.first + at, 2 * pair), is_others(of, tile.first + at, 2 * pair + 1)};
                    *reinterpret_cast<unsigned*>(out + 2 * pair) = pack(drops[0] ? 0.0f : even, drops[1] ? 0.0f : other);
                }
            }
        }
    }
}

template <typename S>
__device__ __forceinline__ void product(const Product& of) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 127) / 128 * 128;
    const int columns = (of.features + S::FEATURES - 1) / S::FEATURES, own_steps = steps_of<S>(of.k);
    const int steps = own_steps + (S::IS_ADAPTED ? steps_of<S>(of.inner) : 0);
    // Weights that this block will most likely read, or another one soon: of experts that all have one tile.
    if (static_cast<int>(blockIdx.x) / columns < of.sure) {
        const int first = blockIdx.x % columns * S::FEATURES, lines = min(own_steps, S::STAGES) * S::STEPS;
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

// sums += x times two rows, of this lane's columns.
__device__ __forceinline__ void multiply_pair(float (&sums)[2], const float* x, const float* even, const float* odd, int columns) {
    for (int k = threadIdx.x % 32; k < columns; k += 32) {
        sums[0] += x[k] * even[k];
        sums[1] += x[k] * odd[k];
    }
}

// float32: two features and a row at a time, by a warp.
template <Form FORM, bool ADAPTED = false, bool BIASED = false>
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
            const bool has_odd = feature + 1 < of.features;
            const int choice = of.order[sorted], row = reads_sorted(FORM) ? sorted : choice / of.choices;
            const float* even = static_cast<const float*>(of.w) + tile.expert * of.w_expert + feature * of.w_row;
            float sums[2] = {};
            multiply_pair(sums, static_cast<const float*>(of.x) + row * of.x_stride, even, has_odd ? even + of.w_row : even, of.k);
            if (ADAPTED) {
                const float* b = static_cast<const float*>(of.b) + tile.expert * of.b_expert + feature * of.b_row;
                const float* low = static_cast<const float*>(of.low) + static_cast<long long>(sorted) * of.inner;
                multiply_pair(sums, low, b, has_odd ? b + of.b_row : b, of.inner);
            }
            for (int step = 16; step > 0; step /= 2) {
                sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], step);
                sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], step);
            }
            if (lane != 0) continue;
            if constexpr (BIASED) {
                const float* bias = static_cast<const float*>(of.bias) + tile.expert * of.bias_expert + feature;
                sums[0] += bias[0];
                if (has_odd) sums[1] += bias[1];
            }
            float* out = static_cast<float*>(of.out) + (FORM == DOWN ? choice : sorted) * of.out_stride;
            if (FORM == GATE_UP) {
                out[feature / 2] = BIASED ? clamped_swiglu(sums[0], sums[1]) : sums[0] / (1.0f + expf(-sums[0])) * sums[1];
            } else {
                const bool is_low = FORM != DOWN;
                out[feature] = is_low && is_others(of, sorted, feature) ? 0.0f : sums[0];
                if (has_odd) out[feature + 1] = is_low && is_others(of, sorted, feature + 1) ? 0.0f : sums[1];
            }
        }
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

#define ADAPTER(NAME, THREADS, PER_PROCESSOR, CALL)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(                                        \
        const void* x, const void* w, void* out, const int* order, const Tile* tiles, long long x_stride,              \
        long long w_expert, long long w_row, long long out_stride, long long k, long long features,                    \
        long long choices, long long sure, const void* low, const void* b, long long b_expert, long long b_row,        \
        long long inner, const int* owners, const int* adapters                                                       \
    ) {                                                                                                               \
        const Product of = {x, w, out, order, tiles, x_stride, w_expert, w_row, out_stride, static_cast<int>(k),       \
                            static_cast<int>(features), static_cast<int>(choices), static_cast<int>(sure), low, b,     \
                            b_expert, b_row, static_cast<int>(inner), owners, adapters};                               \
        CALL(of);                                                                                                     \
    }

#define BIASED_PRODUCT(NAME, THREADS, PER_PROCESSOR, CALL)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(                                        \
        const void* x, const void* w, void* out, const int* order, const Tile* tiles, long long x_stride,              \
        long long w_expert, long long w_row, long long out_stride, long long k, long long features,                    \
        long long choices, long long sure, const void* bias, long long bias_expert                                    \
    ) {                                                                                                               \
        const Product of = {x, w, out, order, tiles, x_stride, w_expert, w_row, out_stride, static_cast<int>(k),       \
                            static_cast<int>(features), static_cast<int>(choices), static_cast<int>(sure), nullptr,    \
                            nullptr, 0, 0, 0, nullptr, nullptr, bias, bias_expert};                                    \
        CALL(of);                                                                                                     \
    }

#define PRODUCTS(NAME, THREADS, PER_PROCESSOR, ...)                                                              \
    PRODUCT(experts_gate_up_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, GATE_UP>>))              \
    PRODUCT(experts_down_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, DOWN>>))                    \
    ADAPTER(experts_gate_up_adapted_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, GATE_UP, true>>)) \
    ADAPTER(experts_down_adapted_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, DOWN, true>>))      \
    BIASED_PRODUCT(experts_gate_up_clamped_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, GATE_UP, false, true>>)) \
    BIASED_PRODUCT(experts_down_biased_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, DOWN, false, true>>)) \
    ADAPTER(experts_low_tokens_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, LOW_TOKENS>>))        \
    ADAPTER(experts_low_rows_##NAME, THREADS, PER_PROCESSOR, (product<Shape<__VA_ARGS__, LOW_ROWS>>))

PRODUCTS(few, 128, 3, 4, 1, 1, 4, 2, 3)
PRODUCTS(some, 128, 2, 4, 1, 2, 4, 1, 5)
PRODUCTS(many, 256, 1, 4, 2, 2, 8, 2, 3)
PRODUCTS(small, 128, 3, 4, 1, 1, 8, 1, 4)
PRODUCT(experts_gate_up_f32, 128, 4, product_f32<GATE_UP>)
PRODUCT(experts_down_f32, 128, 4, product_f32<DOWN>)
ADAPTER(experts_gate_up_adapted_f32, 128, 4, (product_f32<GATE_UP, true>))
ADAPTER(experts_down_adapted_f32, 128, 4, (product_f32<DOWN, true>))
BIASED_PRODUCT(experts_gate_up_clamped_f32, 128, 4, (product_f32<GATE_UP, false, true>))
BIASED_PRODUCT(experts_down_biased_f32, 128, 4, (product_f32<DOWN, false, true>))
ADAPTER(experts_low_tokens_f32, 128, 4, product_f32<LOW_TOKENS>)
ADAPTER(experts_low_rows_f32, 128, 4, product_f32<LOW_ROWS>)
