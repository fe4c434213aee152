// y = silu(gate) * up of x w^T with columns g0 u0 g1 u1 .., for up to 512 rows per launch, on Hopper's tensor cores: TMA and wgmma, float32 or
// int32 sums. Operands are bf16, or e4m3 or int8 with one scale per row.
//
// Weights are the left operand, so that one instruction multiplies 64 features and 256 rows, and three warpgroups have a tile of 192 features. Blocks
// work in pairs. With up to 256 rows a pair has three tiles: one for each block, with rows of which each block copies half for both; and half of K
// each of the third, whose sums they exchange. With more rows each block has 256 rows and all of the pair's tiles, with weights of which each copies
// half for both. There is no copying warp, as registers would not suffice: the first thread copies between multiplications. Weights are loaded before
// the preceding kernel ends, so it must not write them.
#include "cluster.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "scalar.cuh"

constexpr int ROWS = 256;      // per block
constexpr int FEATURES = 192;  // per tile
constexpr int THREADS = 384;
constexpr int STAGES = 4;
constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = FEATURES * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;

struct Output {
    bf16* at;
    long long leading;
    int rows, features;                // of x and of w
    const float *x_scales, *w_scales;  // [R], [2 F]; for e4m3 and int8
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

MULTIPLY(256, 128, 128, 129, 130)
MULTIPLY_INT8(256, 128, 128, 129, 130)

// Copies, for a matrix in groups of sixteen rows, their eight gates before their eight ups, to both blocks.
__device__ __forceinline__ void copy_pairs_to_both(
    unsigned to, const TensorMap* map, int k, int sixteen, unsigned barrier, unsigned long long policy
) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4}], [%5], %6, %7;" ::"r"(to),
        "l"(map), "r"(k), "r"(0), "r"(sixteen), "r"(barrier), "h"(static_cast<short>(3)), "l"(policy)
        : "memory");
}

// A block's steps over K: those of each of its whole tiles, then its half of the tile that the pair shares.
template <bool TALL>
struct Steps {
    int all, rank, begin, end;  // for a whole tile; for the shared one
    __device__ __forceinline__ explicit Steps(int all)
        : all(all), rank(static_cast<int>(cluster_rank())), begin(rank * all / 2), end((rank + 1) * all / 2) {}
    static constexpr int WHOLE = TALL ? 3 : 1;
    __device__ __forceinline__ int count() const { return TALL ? 3 * all : all + end - begin; }
    __device__ __forceinline__ int tile(int round) const {
        return static_cast<int>(blockIdx.x) / 2 * 3 + (TALL ? round : round < WHOLE ? rank : 2);
    }
    __device__ __forceinline__ int row() const { return TALL ? rank * ROWS : 0; }
};

// Used by the first thread only: fills stages, in order.
template <typename Kind, bool TALL>
struct Copier {
    const TensorMap &x_map, &w_map;
    const Steps<TALL>& steps;
    unsigned stages, full, empty;
    int filled = 0, round = 0, step = 0;

    __device__ __forceinline__ void copy_w(int stage) const {
        const unsigned long long once = copied_once();
        const unsigned to = stages + stage * STAGE_BYTES + X_BYTES, barrier = full + 8 * stage;
        const int sixteen = steps.tile(round) * (FEATURES / 16);
        expect(barrier, STAGE_BYTES);
        if (TALL)
            copy_pairs_to_both(
                to + steps.rank * (W_BYTES / 2), &w_map, step * Kind::STEP, sixteen + steps.rank * (FEATURES / 32), barrier, once
            );
        else
            copy_pairs(to, &w_map, step * Kind::STEP, sixteen, barrier, once);
    }

    __device__ __forceinline__ void copy_x(int stage) const {
        const unsigned long long often = copied_often();
        const unsigned to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
        if (!TALL && round < Steps<TALL>::WHOLE) {
            const int half = steps.rank;
            copy_to(to + half * (X_BYTES / 2), &x_map, step * Kind::STEP, half * (ROWS / 2), barrier, 3, often);
        } else {
            for (int half = 0; half < 2; ++half)
                copy(to + half * (X_BYTES / 2), &x_map, step * Kind::STEP, steps.row() + half * (ROWS / 2), barrier, often);
        }
    }

    __device__ __forceinline__ void advance() {
        ++filled;
        if (++step == steps.all) ++round, step = round < Steps<TALL>::WHOLE ? 0 : steps.begin;
    }

    // Refills a stage after the pair's warpgroups have released it.
    __device__ __forceinline__ void refill(int stage) {
        if (filled == steps.count()) return;
        wait(empty + 8 * stage, filled / STAGES - 1 & 1);
        copy_w(stage);
        copy_x(stage);
        advance();
    }
};

// A warpgroup's sums over `count` steps, for 64 features and all rows.
template <typename Kind, bool TALL>
__device__ __forceinline__ void multiply_steps(typename Kind::Sum (&d)[128], Copier<Kind, TALL>& copier, int count, int& taken) {
    const auto release = [&](int stage) {
        const int thread = threadIdx.x % GROUP;
        if (thread < 2) arrive_at(copier.empty + 8 * stage, thread);
        __syncwarp();
        if (threadIdx.x == 0) copier.refill(stage);
        __syncwarp();
    };
    for (int step = 0; step < count; ++step, ++taken) {
        const int stage = taken % STAGES;
        wait(copier.full + 8 * stage, taken / STAGES & 1);
        const unsigned x = copier.stages + stage * STAGE_BYTES, w = x + X_BYTES + threadIdx.x / GROUP * 64 * ROW_BYTES;
        const unsigned long long a = descriptor(w), b = descriptor(x);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < ROW_BYTES / 32; ++k) multiply(Kind{}, d, a + 2 * k, b + 2 * k, step > 0 || k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_products<1>();
        if (step > 0) release((taken - 1) % STAGES);
    }
    wait_products<0>();
    release((taken - 1) % STAGES);
}

// A warp's eight gates and their ups and, for e4m3 and int8, the scales of those that a thread has.
struct Features {
    int first;
    float2 scales;
    __device__ __forceinline__ Features(const Output& out, int first) : first(first) {
        const int gate = min(first, out.features - 16) + static_cast<int>(threadIdx.x) % 32 / 4 * 2;
        if (out.w_scales) scales = *reinterpret_cast<const float2*>(out.w_scales + gate);
    }
};

// Writes results from the sums of a gate (x and y) and its up (z and w), for two consecutive rows of eight.
template <typename Kind>
__device__ __forceinline__ void emit(float4 v, const Output& out, const float* row_scales, int row, const Features& of) {
    const int lane = threadIdx.x % 32, feature = of.first;
    if constexpr (Kind::IS_SCALED) {
        const float2 of_rows = *reinterpret_cast<const float2*>(row_scales + row % ROWS + lane % 4 * 2);
        v.x = Kind::scaled(v.x, of_rows.x, of.scales.x), v.y = Kind::scaled(v.y, of_rows.y, of.scales.x);
        v.z = Kind::scaled(v.z, of_rows.x, of.scales.y), v.w = Kind::scaled(v.w, of_rows.y, of.scales.y);
    }
    const unsigned y = transpose(pack(silu_mul(v.x, v.z), silu_mul(v.y, v.w)));
    row += lane / 4;
    if (row < out.rows && feature < out.features)
        *reinterpret_cast<unsigned*>(out.at + row * out.leading + feature / 2 + lane % 4 * 2) = y;
}

template <typename Kind, bool TALL>
__device__ __forceinline__ void gate_up(const TensorMap& x_map, const TensorMap& w_map, const Output& out, int all) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
    __shared__ alignas(8) float row_scales[ROWS];  // for e4m3 and int8
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = shared_address(barriers), empty = full + 8 * STAGES;
    const Steps<TALL> steps(all);
    Copier<Kind, TALL> copier = {x_map, w_map, steps, stages, full, empty};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(full + 8 * stage, 1);
            init(empty + 8 * stage, 2 * THREADS / GROUP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    sync_cluster();
    const int early = min(steps.count(), STAGES);
    if (threadIdx.x == 0)
        for (auto first = copier; first.filled < early; first.advance()) first.copy_w(first.filled);
    __syncwarp();
    wait_for_inputs();
    if (threadIdx.x == 0)
        for (; copier.filled < early; copier.advance()) copier.copy_x(copier.filled);
    if (Kind::IS_SCALED && threadIdx.x < ROWS) {
        const int row = steps.row() + static_cast<int>(threadIdx.x);
        row_scales[threadIdx.x] = row < out.rows ? out.x_scales[row] : 0.0f;
    }
    __syncthreads();

    typename Kind::Sum d[128];
    int taken = 0;
    const int own = static_cast<int>(threadIdx.x) / 32 * 16;  // the warp's first feature in a tile
    for (int round = 0; round < Steps<TALL>::WHOLE; ++round) {
        multiply_steps(d, copier, steps.all, taken);
        const Features features(out, steps.tile(round) * FEATURES + own);
#pragma unroll
        for (int eight = 0; eight < 32; ++eight)
            emit<Kind>(sums_of<Kind>(d, eight), out, row_scales, steps.row() + 8 * eight, features);
    }
    if (!TALL) {  // each block finishes half of the rows: it passes on its sums of the others, in the memory of the stages
        multiply_steps(d, copier, steps.end - steps.begin, taken);
        const bool first = steps.rank == 0;
        const auto place = [&](int eight) { return stages + (eight * THREADS + threadIdx.x) * 16; };
        __syncthreads();
#pragma unroll
        for (int eight = 0; eight < 16; ++eight) {
            const float4 low = sums_of<Kind>(d, eight), high = sums_of<Kind>(d, 16 + eight);
            store_shared(place(eight), first ? high : low);
        }
        sync_cluster();
        const Features features(out, steps.tile(1) * FEATURES + own);
#pragma unroll
        for (int eight = 0; eight < 16; ++eight) {
            const float4 low = sums_of<Kind>(d, eight), high = sums_of<Kind>(d, 16 + eight), given = load_shared(place(eight), steps.rank ^ 1);
            float4 v = first ? low : high;
            add_sums<Kind>(v, given);
            emit<Kind>(v, out, row_scales, (first ? 0 : ROWS / 2) + 8 * eight, features);
        }
    }
    sync_cluster();  // the other block reads sums here, and arrives at barriers
}

#else  // other GPUs: never launched there

template <typename, bool>
__device__ __forceinline__ void gate_up(const TensorMap&, const TensorMap&, const Output&, int) {}

#endif

#define GATE_UP(ROWS, TALL)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_up_##ROWS(                                      \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* y, long long leading,     \
        long long rows, long long features, long long steps                                                       \
    ) {                                                                                                           \
        const Output output = {y, leading, static_cast<int>(rows), static_cast<int>(features)};                   \
        gate_up<Bf16, TALL>(x, w, output, static_cast<int>(steps));                                               \
    }
#define SCALED_GATE_UP(NAME, KIND, TALL)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(                                                \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* y, long long leading,     \
        long long rows, long long features, long long steps, const float* x_scales, const float* w_scales         \
    ) {                                                                                                           \
        const Output output = {                                                                                   \
            y, leading, static_cast<int>(rows), static_cast<int>(features), x_scales, w_scales                    \
        };                                                                                                        \
        gate_up<KIND, TALL>(x, w, output, static_cast<int>(steps));                                               \
    }

GATE_UP(256, false)
GATE_UP(512, true)
SCALED_GATE_UP(gate_up_fp8_256, E4m3, false)
SCALED_GATE_UP(gate_up_fp8_512, E4m3, true)
SCALED_GATE_UP(gate_up_int8_256, Int8, false)
SCALED_GATE_UP(gate_up_int8_512, Int8, true)
