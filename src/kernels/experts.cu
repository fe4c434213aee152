// GEMMs in which every row uses the weight of its expert, for rows that route.cu has sorted into tiles. Operands are bf16, float32, or on Hopper e4m3
// with one scale per row.
//
// A block processes items (64 or 128 features of one tile, over all of K) one after the other, and prefetches weights of the next item while one
// ends. So a grid in which all blocks run at once reads weights at memory speed, whatever the tiles are, and the host does not need to know them.
// Weights are the left operand, so that a tile with few rows needs few instructions. Sums go over K in one order, whatever the tile and the other
// rows. In bf16 warps multiply, in e4m3 warpgroups do (wgmma), over the same tiles in shared memory.
//
// gate_up: act = silu(gate) * up of a token's row, in sorted order; features g0 u0 g1 u1 .. down: a sorted row of act, written to the position of its
// choice. low_tokens, low_rows: the inner products of adapters with a token's row or with a sorted row, in sorted order; those of narrow adapters are
// computed by experts_narrow.cu. gate_up_adapted, down_adapted: gate_up and down, whose sums continue over the row's inner products and the adapters'
// other matrix. gate_up_clamped, down_biased: gate_up and down with biases, gate_up with the clamped SwiGLU.
#include "async.cuh"
#include "clamped.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "scalar.cuh"
#include "tiles.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(128, 64, 64, 65, 66)
#endif

struct Product {
    const void* x;      // [rows, K] with x_stride
    const void* w;      // [E, features, K] with w_expert, w_row
    void* out;          // [rows, features or half of them]
    const int* order;   // choices in sorted order
    const Tile* tiles;  // the number of tiles, then the tiles
    long long x_stride, w_expert, w_row, out_stride;
    int k, features, choices, sure;  // sure: experts of which nearly all are used; 0: unknown
    // For adapters: the inner products of sorted rows [rows, inner], and the matrix [E, features, inner] that they are multiplied with.
    const void* low;
    const void* b;
    long long b_expert, b_row;
    int inner;
    // For inner products with several stacked adapters: the adapter of each feature and of each token; or null.
    const int* owners;
    const int* adapters;
    const float *x_scales, *w_scales;  // for e4m3: of the rows of x, and [E, features]
    // For experts with biases: all biases [E, features], with the stride bias_expert.
    const void* bias;
    long long bias_expert;
};

enum Form { GATE_UP, DOWN, LOW_TOKENS, LOW_ROWS };

// Whether a GEMM reads sorted rows, and not tokens' rows.
__device__ constexpr bool reads_sorted(Form form) { return form == DOWN || form == LOW_ROWS; }

// Whether an inner product belongs to another adapter than the sorted row's.
__device__ __forceinline__ bool is_others(const Product& of, int sorted, int feature) {
    return of.owners && of.owners[feature] != of.adapters[of.order[sorted] / of.choices];
}

// WM x WN warps, each with MT x NT multiplications of 16 features and 8 rows; STEPS rows of 128 bytes are copied at once into one of DEPTH stages.
template <typename KIND, int WM, int WN, int MT, int NT, int SUB, int DEPTH, Form FORM_, bool ADAPTED = false, bool BIASED = false>
struct Shape {
    using Kind = KIND;
    static constexpr int FEATURES = WM * MT * 16, ROWS = WN * NT * 8, THREADS = WM * WN * 32, STAGES = DEPTH, STEPS = SUB;
    static constexpr int W_BYTES = FEATURES * ROW_BYTES, STEP_BYTES = W_BYTES + ROWS * ROW_BYTES, STAGE_BYTES = STEPS * STEP_BYTES;
    static constexpr int LINES = THREADS / 8;  // rows that all threads copy at once, 16 bytes each
    static constexpr int OWN_FEATURES = FEATURES / LINES, OWN_ROWS = ROWS / LINES;
    static constexpr int GROUPS = WN, M = MT, N = NT;
    static constexpr int ELEMENT_BYTES = ROW_BYTES / Kind::STEP;
    // Stages that are read while another is copied: a warpgroup's multiplications of a short stage continue while its threads do.
    static constexpr int READ = Kind::IS_SCALED && STEPS == 1 ? 1 : 0, AHEAD = STAGES - 1 - READ;
    static constexpr int ALIGNMENT = Kind::IS_SCALED ? 1024 : 128;  // of stages, as multiplications require
    static constexpr Form FORM = FORM_;
    static constexpr bool IS_ADAPTED = ADAPTED, IS_BIASED = BIASED;
    static_assert(FEATURES % LINES == 0 && ROWS % LINES == 0 && LINES % 16 == 0 && NT % 2 == 0, "");
    static_assert(!Kind::IS_SCALED || (WM % 4 == 0 && WN == 1 && STEP_BYTES % ALIGNMENT == 0), "warpgroups have all rows");
};

// Steps that are copied at once, for rows of `bytes` bytes.
template <typename S>
__device__ __forceinline__ int steps_of(int bytes) {
    return (bytes + S::STEPS * ROW_BYTES - 1) / (S::STEPS * ROW_BYTES);
}

template <typename S>
__device__ __forceinline__ int own_steps(const Product& of) {
    return steps_of<S>(of.k * S::ELEMENT_BYTES);
}

constexpr int NARROW = 16;  // most inner products of adapters that do not pass through shared memory

// Steps over the inner products and the adapters' other matrix.
template <typename S>
__device__ __forceinline__ int adapter_steps(const Product& of) {
    return S::IS_ADAPTED && of.inner > NARROW ? steps_of<S>(of.inner * 2) : 0;
}

// The position of a feature in shared memory: of 16 the even ones come first, as rows 0 .. 7 of a multiplication, so that a thread has the sums of
// both features of a pair.
__device__ __forceinline__ int place(int feature) { return feature / 16 * 16 + feature % 2 * 8 + feature % 16 / 2; }

// The first of 16 features that a warp multiplies, and the first row.
template <typename S>
__device__ __forceinline__ int own_feature(int i) {
    const int warp = threadIdx.x / 32;
    return S::Kind::IS_SCALED ? (warp / 4 * S::M + i) * 64 + warp % 4 * 16 : (warp / S::GROUPS * S::M + i) * 16;
}
template <typename S>
__device__ __forceinline__ int own_row() {
    return static_cast<int>(threadIdx.x) / 32 % S::GROUPS * S::N * 8;
}

// What a thread copies of the item that is being read. Distances are in bytes.
template <typename S>
struct Reader {
    using Bytes = const unsigned char*;
    const Product& of;
    unsigned stages;
    unsigned long long policy;
    int item, step;
    int own_features, own_rows;  // number of existing rows of the stage, from the thread's line on
    Bytes w, x[S::OWN_ROWS];
    Bytes b, low;  // for adapters, in bf16

    __device__ __forceinline__ Reader(const Product& of, unsigned stages)
        : of(of), stages(stages), policy(read_once()), item(blockIdx.x), step(0) {}

    __device__ __forceinline__ void open(int columns) {
        const Tile tile = of.tiles[1 + item / columns];
        const int line = threadIdx.x / 8, chunk = threadIdx.x % 8 * 16, feature = item % columns * S::FEATURES;
        own_features = of.features - feature - line;
        own_rows = tile.count - line;
        w = static_cast<Bytes>(of.w) + (tile.expert * of.w_expert + (feature + line) * of.w_row) * S::ELEMENT_BYTES + chunk;
#pragma unroll
        for (int i = 0; i < S::OWN_ROWS; ++i) {
            const int sorted = tile.first + min(line + i * S::LINES, tile.count - 1);
            const int row = reads_sorted(S::FORM) ? sorted : of.order[sorted] / of.choices;
            x[i] = static_cast<Bytes>(of.x) + row * of.x_stride * S::ELEMENT_BYTES + chunk;
        }
        if (S::IS_ADAPTED) {
            b = static_cast<Bytes>(of.b) + (tile.expert * of.b_expert + (feature + line) * of.b_row) * 2 + chunk;
            low = static_cast<Bytes>(of.low) + static_cast<long long>(tile.first + line) * of.inner * 2 + chunk;
        }
    }

    // Queues the next step's copies into a stage, if there is a step.
    __device__ __forceinline__ void next(int stage, int items, int columns, int steps) {
        if (item < items) {
            if (step == 0) open(columns);
            const int line = threadIdx.x / 8, chunk = threadIdx.x % 8, feature = place(line);
            const bool is_low = S::IS_ADAPTED && step >= own_steps<S>(of);
            const Bytes from = is_low ? b : w;
            const long long between = is_low ? of.b_row * 2 : of.w_row * S::ELEMENT_BYTES;
#pragma unroll
            for (int part = 0; part < S::STEPS; ++part) {
                const int k = ((is_low ? step - own_steps<S>(of) : step) * S::STEPS + part) * ROW_BYTES;
                const bool has = k + chunk * 16 < (is_low ? of.inner * 2 : of.k * S::ELEMENT_BYTES);
                const unsigned to = stages + stage * S::STAGE_BYTES + part * S::STEP_BYTES;
                const unsigned w_to = to + feature * ROW_BYTES + ((chunk ^ (feature % 8)) * 16);
                const unsigned x_to = to + S::W_BYTES + line * ROW_BYTES + ((chunk ^ (line % 8)) * 16);
#pragma unroll
                for (int i = 0; i < S::OWN_FEATURES; ++i) {
                    const bool is_there = has && i * S::LINES < own_features;
                    const Bytes own = is_there ? from + i * S::LINES * between + k : from;
                    copy_16_once(w_to + i * S::LINES * ROW_BYTES, own, is_there ? 16 : 0, policy);
                }
#pragma unroll
                for (int i = 0; i < S::OWN_ROWS; ++i) {
                    const bool is_there = has && i * S::LINES < own_rows;
                    const Bytes own = is_low ? low + i * S::LINES * of.inner * 2 : x[i];
                    copy_16(x_to + i * S::LINES * ROW_BYTES, is_there ? own + k : x[i], is_there ? 16 : 0);
                }
            }
            if (++step == steps) step = 0, item += gridDim.x;
        }
        commit_copies();
    }
};

// sums += a step's weights times its rows in bf16; `count` rows exist from this warp's first on.
template <typename S>
__device__ __forceinline__ void multiply_step(float (&sums)[S::M][S::N][4], unsigned at, int count) {
    const int lane = threadIdx.x % 32, line = lane % 8, matrix = lane / 8;
    const unsigned w_at = at + (matrix % 2 * 8 + line) * ROW_BYTES;
    const unsigned x_at = at + S::W_BYTES + (own_row<S>() + matrix / 2 * 8 + line) * ROW_BYTES;
#pragma unroll
    for (int k = 0; k < ROW_BYTES / 32; ++k) {
        unsigned a[S::M][4];
#pragma unroll
        for (int i = 0; i < S::M; ++i)
            load_matrices(a[i], w_at + own_feature<S>(i) * ROW_BYTES + (((2 * k + matrix / 2) ^ line) * 16));
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Queues sums += a stage's weights times its rows in e4m3, and waits until at most READ stages are still being read.
template <typename S>
__device__ __forceinline__ void queue_stage(float (&sums)[S::M][S::N][4], unsigned at) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int part = 0; part < S::STEPS; ++part) {
        const unsigned w = at + part * S::STEP_BYTES + threadIdx.x / GROUP * S::M * 64 * ROW_BYTES;
        const unsigned long long b = descriptor(at + part * S::STEP_BYTES + S::W_BYTES);
#pragma unroll
        for (int i = 0; i < S::M; ++i) {
            const unsigned long long a = descriptor(w + i * 64 * ROW_BYTES);
#pragma unroll
            for (int k = 0; k < ROW_BYTES / 32; ++k)
                multiply(E4m3{}, reinterpret_cast<float (&)[4 * S::N]>(sums[i]), a + 2 * k, b + 2 * k, 1);
        }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    wait_products<S::READ>();
}

// Makes data that threads have copied to shared memory visible to wgmma after the next barrier.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else  // other GPUs: never launched there

template <typename S>
__device__ __forceinline__ void queue_stage(float (&)[S::M][S::N][4], unsigned) {}
template <int>
__device__ __forceinline__ void wait_products() {}
__device__ __forceinline__ void show_copies() {}

#endif

// Multiplies sums of quantized rows by the scales of both rows.
template <typename S>
__device__ __forceinline__ void scale_sums(float (&sums)[S::M][S::N][4], const Product& of, const Tile& tile, int first) {
    const int lane = threadIdx.x % 32;
    float2 of_pair[S::M];
#pragma unroll
    for (int i = 0; i < S::M; ++i) {
        const int feature = min(first + own_feature<S>(i) + lane / 4 * 2, of.features - 2);
        of_pair[i] = *reinterpret_cast<const float2*>(of.w_scales + static_cast<long long>(tile.expert) * of.features + feature);
    }
#pragma unroll
    for (int j = 0; j < S::N; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int sorted = tile.first + min(lane % 4 * 2 + j * 8 + odd, tile.count - 1);
            const float of_row = of.x_scales[reads_sorted(S::FORM) ? sorted : of.order[sorted] / of.choices];
#pragma unroll
            for (int i = 0; i < S::M; ++i) {
                sums[i][j][odd] = sums[i][j][odd] * of_row * of_pair[i].x;
                sums[i][j][2 + odd] = sums[i][j][2 + odd] * of_row * of_pair[i].y;
            }
        }
    }
}

__device__ __forceinline__ uint2 load_8(const void* from) {
    uint2 out;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
    return out;
}

// A lane's operands of sums += b low^T for narrow adapters, loaded directly to registers when an item begins. The order of columns within a
// multiplication is free as long as both operands agree: a lane has four consecutive ones.
template <typename S>
struct NarrowAdapter {
    uint2 b[S::M][2], low[S::N];

    __device__ __forceinline__ void load(const Product& of, const Tile& tile, int first) {
        const int lane = threadIdx.x % 32, at = lane % 4 * 4;
        const bool is_there = at < of.inner;
#pragma unroll
        for (int i = 0; i < S::M; ++i) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int feature = min(first + own_feature<S>(i) + lane / 4 * 2 + odd, of.features - 1);
                const bf16* from = static_cast<const bf16*>(of.b) + tile.expert * of.b_expert + feature * of.b_row + at;
                b[i][odd] = is_there ? load_8(from) : uint2{0, 0};
            }
        }
#pragma unroll
        for (int j = 0; j < S::N; ++j) {
            const long long row = tile.first + min(own_row<S>() + j * 8 + lane / 4, tile.count - 1);
            low[j] = is_there ? load_8(static_cast<const bf16*>(of.low) + row * of.inner + at) : uint2{0, 0};
        }
    }

    __device__ __forceinline__ void add_to(float (&sums)[S::M][S::N][4]) const {
#pragma unroll
        for (int i = 0; i < S::M; ++i)
#pragma unroll
            for (int j = 0; j < S::N; ++j) multiply(sums[i][j], b[i][0].x, b[i][1].x, b[i][0].y, b[i][1].y, low[j].x, low[j].y);
    }
};

template <typename S>
__device__ __forceinline__ void write_sums(const float (&sums)[S::M][S::N][4], const Product& of, const Tile& tile, int first) {
    const int lane = threadIdx.x % 32, row = own_row<S>() + lane % 4 * 2;
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
                const int pair = (first + own_feature<S>(i)) / 2 + lane / 4;
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
    constexpr bool IS_SCALED = S::Kind::IS_SCALED;
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + S::ALIGNMENT - 1) / S::ALIGNMENT * S::ALIGNMENT;
    const int columns = (of.features + S::FEATURES - 1) / S::FEATURES, of_weights = own_steps<S>(of);
    const int steps = of_weights + adapter_steps<S>(of);
    const bool is_narrow = S::IS_ADAPTED && of.inner <= NARROW;
    // Prefetches weights that this block will most likely read, or another one soon: of experts that all have one tile.
    if (static_cast<int>(blockIdx.x) / columns < of.sure) {
        const int first = blockIdx.x % columns * S::FEATURES, lines = min(of_weights, S::STAGES) * S::STEPS;
        const unsigned char* w = static_cast<const unsigned char*>(of.w);
        w += (blockIdx.x / columns * of.w_expert + first * of.w_row) * S::ELEMENT_BYTES;
        for (int i = threadIdx.x; i < min(S::FEATURES, of.features - first) * lines; i += S::THREADS)
            prefetch(w + i / lines * of.w_row * S::ELEMENT_BYTES + min(i % lines * ROW_BYTES, of.k * S::ELEMENT_BYTES - 1));
    }
    wait_for_inputs();
    const int items = of.tiles[0].expert * columns;
    Reader<S> reader(of, stages);
    // This is 0, but ptxas treats it as different in each thread. For a copy with a cache hint to a partly uniform shared address, ptxas would
    // otherwise emit an instruction with an odd descriptor, which is illegal.
    int stage;
    asm volatile("mov.u32 %0, %%tid.y;" : "=r"(stage));
    for (int ahead = stage; ahead < S::AHEAD; ++ahead) reader.next(ahead, items, columns, steps);
    // Waits for a stage, and queues copies into the one that is no longer read.
    const auto take = [&] {
        wait_copies<S::AHEAD - 1>();
        if constexpr (IS_SCALED) show_copies();
        __syncthreads();
        reader.next(stage + S::AHEAD < S::STAGES ? stage + S::AHEAD : stage + S::AHEAD - S::STAGES, items, columns, steps);
        const unsigned at = stages + stage * S::STAGE_BYTES;
        if (++stage == S::STAGES) stage = 0;
        return at;
    };
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = of.tiles[1 + item / columns];
        const int count = tile.count - own_row<S>(), first = item % columns * S::FEATURES;
        float sums[S::M][S::N][4] = {};
        NarrowAdapter<S> adapter;
        if (is_narrow) adapter.load(of, tile, first);
        int step = 0;
        if constexpr (IS_SCALED) {
            for (; step < of_weights; ++step) queue_stage<S>(sums, take());
            wait_products<0>();
            scale_sums<S>(sums, of, tile, first);
        }
        if constexpr (!IS_SCALED || S::IS_ADAPTED) {
            for (; step < steps; ++step) {
                const unsigned at = take();
#pragma unroll
                for (int part = 0; part < S::STEPS; ++part) multiply_step<S>(sums, at + part * S::STEP_BYTES, count);
            }
        }
        if (is_narrow) adapter.add_to(sums);
        write_sums<S>(sums, of, tile, first);
    }
    wait_copies<0>();
}

// sums += x times two rows, over this lane's columns.
__device__ __forceinline__ void multiply_pair(float (&sums)[2], const float* x, const float* even, const float* odd, int columns) {
    for (int k = threadIdx.x % 32; k < columns; k += 32) {
        sums[0] += x[k] * even[k];
        sums[1] += x[k] * odd[k];
    }
}

// float32: two features and one row at a time, per warp.
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

#define PARAMETERS                                                                                                \
    const void *x, const void *w, void *out, const int *order, const Tile *tiles, long long x_stride,              \
        long long w_expert, long long w_row, long long out_stride, long long k, long long features,               \
        long long choices, long long sure
#define OF                                                                                                        \
    x, w, out, order, tiles, x_stride, w_expert, w_row, out_stride, static_cast<int>(k),                           \
        static_cast<int>(features), static_cast<int>(choices), static_cast<int>(sure)
#define OF_ADAPTERS                                                                                                \
    const void *low, const void *b, long long b_expert, long long b_row, long long inner, const int *owners,       \
        const int *adapters
#define ADAPTERS low, b, b_expert, b_row, static_cast<int>(inner), owners, adapters

#define PRODUCT(NAME, THREADS, PER_PROCESSOR, CALL)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(PARAMETERS) {                       \
        const Product of = {OF};                                                                                  \
        CALL(of);                                                                                                 \
    }

#define ADAPTER(NAME, THREADS, PER_PROCESSOR, CALL)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(PARAMETERS, OF_ADAPTERS) {          \
        const Product of = {OF, ADAPTERS};                                                                        \
        CALL(of);                                                                                                 \
    }

#define SCALED(NAME, THREADS, PER_PROCESSOR, CALL)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(                                    \
        PARAMETERS, OF_ADAPTERS, const float* x_scales, const float* w_scales                                      \
    ) {                                                                                                           \
        const Product of = {OF, ADAPTERS, x_scales, w_scales};                                                    \
        CALL(of);                                                                                                 \
    }

#define BIASED_PRODUCT(NAME, THREADS, PER_PROCESSOR, CALL)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(                                    \
        PARAMETERS, const void* bias, long long bias_expert                                                        \
    ) {                                                                                                           \
        const Product of = {OF, nullptr, nullptr, 0, 0, 0, nullptr, nullptr, nullptr, nullptr, bias, bias_expert}; \
        CALL(of);                                                                                                 \
    }

#define PRODUCTS(NAME, THREADS, PER_PROCESSOR, ...)                                                                     \
    PRODUCT(experts_gate_up_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, GATE_UP>>))               \
    PRODUCT(experts_down_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, DOWN>>))                     \
    ADAPTER(experts_gate_up_adapted_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, GATE_UP, true>>)) \
    ADAPTER(experts_down_adapted_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, DOWN, true>>))       \
    BIASED_PRODUCT(                                                                                                      \
        experts_gate_up_clamped_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, GATE_UP, false, true>>) \
    )                                                                                                                    \
    BIASED_PRODUCT(experts_down_biased_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, DOWN, false, true>>)) \
    ADAPTER(experts_low_tokens_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, LOW_TOKENS>>))         \
    ADAPTER(experts_low_rows_##NAME, THREADS, PER_PROCESSOR, (product<Shape<Bf16, __VA_ARGS__, LOW_ROWS>>))

#define SCALED_PRODUCTS(NAME, THREADS, PER_PROCESSOR, ...)                                                                 \
    SCALED(experts_gate_up_fp8_##NAME, THREADS, PER_PROCESSOR, (product<Shape<E4m3, __VA_ARGS__, GATE_UP>>))               \
    SCALED(experts_down_fp8_##NAME, THREADS, PER_PROCESSOR, (product<Shape<E4m3, __VA_ARGS__, DOWN>>))                     \
    SCALED(experts_gate_up_adapted_fp8_##NAME, THREADS, PER_PROCESSOR, (product<Shape<E4m3, __VA_ARGS__, GATE_UP, true>>)) \
    SCALED(experts_down_adapted_fp8_##NAME, THREADS, PER_PROCESSOR, (product<Shape<E4m3, __VA_ARGS__, DOWN, true>>))

PRODUCTS(few, 128, 3, 4, 1, 1, 4, 2, 3)
PRODUCTS(some, 128, 2, 4, 1, 2, 4, 1, 5)
PRODUCTS(more, 128, 2, 4, 1, 2, 8, 1, 4)
PRODUCTS(many, 256, 1, 4, 2, 2, 8, 2, 3)
PRODUCTS(small, 128, 3, 4, 1, 1, 8, 1, 4)
SCALED_PRODUCTS(few, 128, 3, 4, 1, 1, 4, 2, 3)
SCALED_PRODUCTS(some, 128, 2, 4, 1, 2, 4, 1, 5)
SCALED_PRODUCTS(more, 128, 2, 4, 1, 2, 8, 1, 4)
SCALED_PRODUCTS(many, 256, 1, 8, 1, 2, 16, 1, 4)
PRODUCT(experts_gate_up_f32, 128, 4, product_f32<GATE_UP>)
PRODUCT(experts_down_f32, 128, 4, product_f32<DOWN>)
ADAPTER(experts_gate_up_adapted_f32, 128, 4, (product_f32<GATE_UP, true>))
ADAPTER(experts_down_adapted_f32, 128, 4, (product_f32<DOWN, true>))
BIASED_PRODUCT(experts_gate_up_clamped_f32, 128, 4, (product_f32<GATE_UP, false, true>))
BIASED_PRODUCT(experts_down_biased_f32, 128, 4, (product_f32<DOWN, false, true>))
ADAPTER(experts_low_tokens_f32, 128, 4, product_f32<LOW_TOKENS>)
ADAPTER(experts_low_rows_f32, 128, 4, product_f32<LOW_ROWS>)
