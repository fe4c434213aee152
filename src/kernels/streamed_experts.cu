// e4m3 GEMMs with few rows per expert, for rows that route.cu has sorted into tiles of up to 32, on Hopper: gate and up with SwiGLU of a token's row,
// in sorted order; down of a sorted row, which is quantized here, to the position of its choice. Computes the same bits as experts.cu.
//
// As many blocks as run at once divide all features of all tiles evenly, in order, so that most of a block's work belongs to one expert. It keeps
// that expert's rows in shared memory and streams weights past them: one warp copies stages of up to 128 features and 128 columns, and two warpgroups
// multiply 64 features each. A block's most likely first weights are copied before the preceding kernel has ended, on the assumption that every
// expert has one tile, and dropped if that is wrong.
//
// Weights are read before the preceding kernel has ended; it must not write them, and must itself have waited for any kernel that does.
#include "async.cuh"
#include "fp8.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "tiles.cuh"

constexpr int GROUPS = 2;      // warpgroups
constexpr int FEATURES = 64;   // per warpgroup
constexpr int ROWS = 32;       // per tile
constexpr int CONSUMERS = 128 * GROUPS;
constexpr int UNIT_BYTES = FEATURES * ROW_BYTES, STAGE_BYTES = GROUPS * UNIT_BYTES, STEP_BYTES = ROWS * ROW_BYTES;
constexpr int MOST_STAGES = 10;
constexpr int MOST_PACKS = 8;  // of a row of down, per lane

struct Product {
    const void* x;         // [T, K] e4m3; for down [T k, K] bf16
    const float* x_scales; // [T]; for down null
    const float* w_scales; // [E, features]
    bf16* out;             // [T k, features / 2]; for down [T k, features]
    const int* order;      // choices in sorted order
    const Tile* tiles;     // the number of tiles, then the tiles
    int k, features, choices, sure, stages;  // sure: experts that most likely have one tile each; 0: unknown
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

MULTIPLY(32, 16, 16, 17, 18)

// The rest of a block's share of the units of 64 features in all tiles; it takes up to two units of one tile at once.
struct Share {
    int unit, end, per_tile;
    __device__ __forceinline__ Share(const Product& of, int tiles) : per_tile((of.features + FEATURES - 1) / FEATURES) {
        const long long all = static_cast<long long>(tiles) * per_tile;
        unit = static_cast<int>(blockIdx.x * all / gridDim.x), end = static_cast<int>((blockIdx.x + 1) * all / gridDim.x);
    }
    __device__ __forceinline__ bool has() const { return unit < end; }
    __device__ __forceinline__ int tile() const { return unit / per_tile; }
    __device__ __forceinline__ int column() const { return unit % per_tile; }
    __device__ __forceinline__ int width() const { return min(GROUPS, min(end - unit, per_tile - column())); }
    __device__ __forceinline__ void next() { unit += width(); }
};

// The stages, and which of them is next.
struct Pipe {
    unsigned stages, full, empty;
    int count, stage = 0, parity = 0;

    __device__ __forceinline__ unsigned at() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ void next() {
        if (++stage == count) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ int steps_of(const Product& of) { return (of.k + ROW_BYTES - 1) / ROW_BYTES; }

// The number of first steps of a share, up to `most`.
__device__ __forceinline__ int first_steps(const Product& of, Share share, int most) {
    int number = 0;
    for (const int steps = steps_of(of); share.has() && number < most; share.next()) number += steps;
    return min(number, most);
}

// Copies a share's steps `from` .. `to`. One thread.
template <typename ExpertOf>
__device__ __forceinline__ void feed(
    const TensorMap& w, const Product& of, Pipe& pipe, Share share, int from, int to, const ExpertOf& expert_of
) {
    const unsigned long long once = copied_once();
    const int steps = steps_of(of);
    int number = 0;
    for (; share.has(); share.next()) {
        if (number + steps <= from) {
            number += steps;
            continue;
        }
        const int width = share.width(), first = (expert_of(share.tile()) * of.features + share.column() * FEATURES) / 16;
        for (int step = 0; step < steps; ++step, ++number) {
            if (number < from) continue;
            if (number == to) return;
            const unsigned barrier = pipe.full + 8 * pipe.stage;
            wait(pipe.empty + 8 * pipe.stage, pipe.parity ^ 1);
            expect(barrier, width * UNIT_BYTES);
            for (int unit = 0; unit < width; ++unit)
                copy_pairs(pipe.at() + unit * UNIT_BYTES, &w, step * ROW_BYTES, first + unit * FEATURES / 16, barrier, once);
            pipe.next();
        }
    }
}

// Whether the first `early` steps of a share were guessed right, given the actual tiles.
__device__ __forceinline__ bool were_right(const Product& of, Share guess, int early) {
    if (early == 0) return true;
    bool right = of.tiles[0].expert == of.sure;
    for (int steps = steps_of(of); early > 0; early -= steps, guess.next())
        right = right && of.tiles[1 + guess.tile()].expert == guess.tile();
    return right;
}

// Copies a tile's rows and their scales to shared memory, by the threads that multiply.
template <bool DOWN>
__device__ __forceinline__ void take_rows(const Product& of, const Tile& tile, unsigned x, float* scales, int steps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int r = warp; r < ROWS; r += CONSUMERS / 32) {
        const bool has = r < tile.count;
        const int sorted = tile.first + min(r, tile.count - 1);
        const unsigned to = x + r * ROW_BYTES;
        if constexpr (DOWN) {
            const auto* all = static_cast<const bf16*>(of.x) + static_cast<long long>(sorted) * of.k;
            const auto* from = reinterpret_cast<const Pack<bf16, 8>*>(all);
            Pack<bf16, 8> row[MOST_PACKS];
            unsigned bits = 0;
#pragma unroll
            for (int p = 0; p < MOST_PACKS; ++p) {
                const int i = p * 32 + lane;
                row[p] = Pack<bf16, 8>{};
                if (has && i < of.k / 8) row[p] = from[i], bits = most_bits(row[p], bits);
            }
            const RowScale scale(__reduce_max_sync(0xffffffffu, bits));
            if (lane == 0) scales[r] = scale.scale;
#pragma unroll
            for (int p = 0; p < MOST_PACKS; ++p) {
                const int i = p * 32 + lane;
                if (i >= steps * 16) continue;
                const auto pair = [&](int j) { return e4m3_pair(scale.of(row[p].at[j]), scale.of(row[p].at[j + 1])); };
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + i / 16 * STEP_BYTES + ((i % 16 / 2) ^ (r % 8)) * 16 + i % 2 * 8),
                             "r"(pair(0) | pair(2) << 16), "r"(pair(4) | pair(6) << 16)
                             : "memory");
            }
        } else {
            const int row = of.order[sorted] / of.choices;
            const auto* from = static_cast<const unsigned char*>(of.x) + static_cast<long long>(row) * of.k;
            for (int i = lane; i < steps * 8; i += 32) {
                const bool is_there = has && i * 16 < of.k;
                copy_16(to + i / 8 * STEP_BYTES + ((i % 8) ^ (r % 8)) * 16, is_there ? from + i * 16 : from, is_there ? 16 : 0);
            }
            if (lane == 0) scales[r] = of.x_scales[row];
        }
    }
    if constexpr (!DOWN) {
        commit_copies();
        wait_copies<0>();
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Writes a warpgroup's scaled sums of 64 features and all rows; features are in pairs, in the order of `copy_pairs`.
template <bool DOWN>
__device__ __forceinline__ void write(
    const float (&d)[16], const Product& of, const Tile& tile, const float* scales, int feature, const float2& of_pair
) {
    const int lane = threadIdx.x % 32;
    if (feature >= of.features) return;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int at = lane % 4 * 2 + j * 8 + odd;
            if (at >= tile.count) continue;
            const float low = d[j * 4 + odd] * scales[at] * of_pair.x, high = d[j * 4 + 2 + odd] * scales[at] * of_pair.y;
            if constexpr (DOWN) {
                const long long row = of.order[tile.first + at];
                *reinterpret_cast<unsigned*>(of.out + row * of.features + feature) = pack(low, high);
            } else {
                narrow(silu_mul(low, high), of.out[static_cast<long long>(tile.first + at) * (of.features / 2) + feature / 2]);
            }
        }
    }
}

template <bool DOWN>
__device__ __forceinline__ void consume(const Product& of, Pipe pipe, Share share, unsigned x, float* scales) {
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % 32, own = threadIdx.x % GROUP / 32 * 16 + lane / 4 * 2;
    const bool gives = threadIdx.x % GROUP == 0;
    const int steps = steps_of(of);
    int current = -1;
    Tile tile = {};
    for (; share.has(); share.next()) {
        if (share.tile() != current) {
            current = share.tile(), tile = of.tiles[1 + current];
            sync_consumers();  // the previous rows are no longer read
            take_rows<DOWN>(of, tile, x, scales, steps);
            sync_consumers();
        }
        const int feature = (share.column() + group) * FEATURES + own;
        const long long pair = static_cast<long long>(tile.expert) * of.features + min(feature, of.features - 2);
        const float2 of_pair = *reinterpret_cast<const float2*>(of.w_scales + pair);
        float d[16] = {};  // a warpgroup without features computes with arbitrary data
        int before = 0;
        for (int step = 0; step < steps; ++step, pipe.next()) {
            wait(pipe.full + 8 * pipe.stage, pipe.parity);
            const unsigned long long a = descriptor(pipe.at() + group * UNIT_BYTES), b = descriptor(x + step * STEP_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < ROW_BYTES / 32; ++k) multiply(E4m3{}, d, a + 2 * k, b + 2 * k, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            wait_products<1>();
            if (step > 0 && gives) arrive(pipe.empty + 8 * before);
            before = pipe.stage;
        }
        wait_products<0>();
        if (gives) arrive(pipe.empty + 8 * before);
        if (group < share.width()) write<DOWN>(d, of, tile, scales, feature, of_pair);
    }
}

template <bool DOWN>
__device__ __forceinline__ void product(const TensorMap& w, const Product& of) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * MOST_STAGES];
    __shared__ float scales[ROWS];
    const unsigned x = (shared_address(memory) + 1023) / 1024 * 1024;
    Pipe pipe;
    pipe.stages = x + steps_of(of) * STEP_BYTES, pipe.count = of.stages;
    pipe.full = shared_address(barriers), pipe.empty = pipe.full + 8 * MOST_STAGES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < of.stages; ++stage) init(pipe.full + 8 * stage, 1), init(pipe.empty + 8 * stage, GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const Share guess(of, of.sure);
    const int early = first_steps(of, guess, of.stages);
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        feed(w, of, pipe, guess, 0, early, [](int tile) { return tile; });
        wait_for_inputs();
        const auto expert_of = [&](int tile) { return of.tiles[1 + tile].expert; };
        feed(w, of, pipe, Share(of, of.tiles[0].expert), were_right(of, guess, early) ? early : 0, INT_MAX, expert_of);
    } else {
        wait_for_inputs();
        if (!were_right(of, guess, early)) {
            for (int step = 0; step < early; ++step, pipe.next()) {
                wait(pipe.full + 8 * pipe.stage, pipe.parity);
                if (threadIdx.x % GROUP == 0) arrive(pipe.empty + 8 * pipe.stage);
            }
        }
        consume<DOWN>(of, pipe, Share(of, of.tiles[0].expert), x, scales);
    }
}

#else  // other GPUs: never launched there

template <bool>
__device__ __forceinline__ void product(const TensorMap&, const Product&) {}

#endif

#define PRODUCT(NAME, DOWN)                                                                                          \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME(                                            \
        const __grid_constant__ TensorMap boxes, const void* x, const float* x_scales, const float* w_scales,        \
        bf16* out, const int* order, const Tile* tiles, long long k, long long features, long long choices,          \
        long long sure, long long stages                                                                             \
    ) {                                                                                                              \
        product<DOWN>(boxes, {x, x_scales, w_scales, out, order, tiles, static_cast<int>(k),                         \
                              static_cast<int>(features), static_cast<int>(choices), static_cast<int>(sure),         \
                              static_cast<int>(stages)});                                                            \
    }

PRODUCT(streamed_experts_gate_up, false)
PRODUCT(streamed_experts_down, true)
