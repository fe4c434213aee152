// out = x w^T + bias of 65 to 256 rows in e4m3 with a scale for each row, on Hopper's tensor cores: TMA and wgmma, sums in float32.
//
// Weights are the left factor, so that one instruction multiplies 64 features and all rows. A cluster has a tile of features and
// all rows. Its blocks have a part of K each and read one another's sums from shared memory, in the order of K. In a block one warp
// copies and two warpgroups multiply, each half of the features. Weights are on their way before the work before this ends: the kernel
// before must not write them, nor their scales or the bias.
#include "cluster.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "scalar.cuh"

constexpr int FEATURES = 128;   // of a tile
constexpr int CONSUMERS = 256;  // threads that multiply
constexpr int STAGES_BYTES = 224 * 1024;

struct Output {
    bf16* at;
    const bf16* bias;  // [N] or null
    long long leading;
    int rows, features;
    const float *x_scales, *w_scales;  // [R], [N]
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

MULTIPLY(128, 64, 64, 65, 66)
MULTIPLY(256, 128, 128, 129, 130)

template <int ROWS_>
struct Shape {
    static constexpr int ROWS = ROWS_;
    static constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = FEATURES * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int STAGES = STAGES_BYTES / STAGE_BYTES, SUMS = ROWS / 2;  // of a thread
    static_assert(CONSUMERS * SUMS * 4 <= STAGES * STAGE_BYTES, "sums take the place of the stages");
};

// What a block has: a tile, from its first feature on, and steps begin .. end over K.
struct Part {
    int rank, parts, tile, begin, end;
    __device__ __forceinline__ explicit Part(int steps)
        : rank(static_cast<int>(cluster_rank())), parts(static_cast<int>(cluster_size())),
          tile(static_cast<int>(blockIdx.x) / parts * FEATURES), begin(rank * steps / parts), end((rank + 1) * steps / parts) {}
};

// Copies a part's steps; one thread.
template <typename S>
__device__ __forceinline__ void produce(
    const TensorMap& x_map, const TensorMap& w_map, unsigned stages, unsigned full, unsigned empty, const Part& part
) {
    unsigned long long once, often;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
    const auto copy_w = [&](int step, int stage) {
        expect(full + 8 * stage, S::STAGE_BYTES);
        copy(stages + stage * S::STAGE_BYTES + S::X_BYTES, &w_map, step * E4m3::STEP, part.tile, full + 8 * stage, once);
    };
    const auto copy_x = [&](int step, int stage) {
        copy(stages + stage * S::STAGE_BYTES, &x_map, step * E4m3::STEP, 0, full + 8 * stage, often);
    };
    const int early = min(part.end - part.begin, S::STAGES);
    for (int stage = 0; stage < early; ++stage) copy_w(part.begin + stage, stage);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int stage = 0; stage < early; ++stage) copy_x(part.begin + stage, stage);
    int stage = 0, parity = 0;
    for (int step = part.begin + early; step < part.end; ++step) {
        wait(empty + 8 * stage, parity);
        copy_w(step, stage);
        copy_x(step, stage);
        if (++stage == S::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// A warpgroup's sums over the part's steps, of 64 features and all rows.
template <typename S>
__device__ __forceinline__ void consume(
    float (&d)[S::SUMS], unsigned stages, unsigned full, unsigned empty, const Part& part
) {
    const int group = static_cast<int>(threadIdx.x) / GROUP, thread = threadIdx.x % GROUP, steps = part.end - part.begin;
    int stage = 0, parity = 0, before = 0;
    for (int step = 0; step < steps; ++step) {
        wait(full + 8 * stage, parity);
        const unsigned x = stages + stage * S::STAGE_BYTES, w = x + S::X_BYTES + group * 64 * ROW_BYTES;
        const unsigned long long a = descriptor(w), b = descriptor(x);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < ROW_BYTES / 32; ++k) multiply(E4m3{}, d, a + 2 * k, b + 2 * k, step > 0 || k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_products<1>();
        if (step > 0 && thread == 0) arrive(empty + 8 * before);
        before = stage;
        if (++stage == S::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    wait_products<0>();
}

// What a thread's two features, eight apart, are scaled by and what is added to them. Not of the work before: it is read early.
struct Features {
    int first;  // of the warp's sixteen
    float scales[2], bias[2] = {};
    __device__ __forceinline__ Features(const Output& out, int first) : first(first) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int feature = min(first + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i, out.features - 1);
            scales[i] = out.w_scales[feature];
            if (out.bias) bias[i] = widen(out.bias[feature]);
        }
    }
};

// Sums of two neighbours of eight rows: of a feature (x and y), and of the eighth after it (z and w).
__device__ __forceinline__ void emit(float4 v, const Output& out, const float* row_scales, int row, const Features& of) {
    const int lane = threadIdx.x % 32;
    const float2 of_rows = *reinterpret_cast<const float2*>(row_scales + row + lane % 4 * 2);
    v.x = v.x * of_rows.x * of.scales[0] + of.bias[0], v.y = v.y * of_rows.y * of.scales[0] + of.bias[0];
    v.z = v.z * of_rows.x * of.scales[1] + of.bias[1], v.w = v.w * of_rows.y * of.scales[1] + of.bias[1];
    const unsigned left = transpose(pack(v.x, v.y)), right = transpose(pack(v.z, v.w));
    const int feature = of.first + lane % 4 * 2;
    row += lane / 4;
    unsigned* to = reinterpret_cast<unsigned*>(out.at + row * out.leading + feature);
    if (row < out.rows && feature < out.features) to[0] = left;
    if (row < out.rows && feature + 8 < out.features) to[4] = right;
}

// Adds the parts' sums up, of the block's share of the rows.
template <typename S, int PARTS>
__device__ __forceinline__ void reduce(
    const Output& out, const float* row_scales, unsigned sums, const Part& part, const Features& features
) {
    const int eights = (out.rows + 7) / 8;
#pragma unroll 4
    for (int eight = part.rank * eights / PARTS; eight < (part.rank + 1) * eights / PARTS; ++eight) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < PARTS; ++other) {
            const float4 more = load_shared(sums + eight * CONSUMERS * 16, other);
            v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
        }
        emit(v, out, row_scales, 8 * eight, features);
    }
}

template <typename S>
__device__ __forceinline__ void wide_product(const TensorMap& x_map, const TensorMap& w_map, const Output& out, int steps) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * S::STAGES];
    __shared__ alignas(8) float row_scales[S::ROWS];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = shared_address(barriers), empty = full + 8 * S::STAGES;
    const Part part(steps);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < S::STAGES; ++stage) {
            init(full + 8 * stage, 1);
            init(empty + 8 * stage, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce<S>(x_map, w_map, stages, full, empty, part);
        __syncwarp();
        sync_cluster();
    } else {
        const Features features(out, part.tile + static_cast<int>(threadIdx.x) / 32 * 16);
        wait_for_inputs();
        if (threadIdx.x < S::ROWS) row_scales[threadIdx.x] = threadIdx.x < out.rows ? out.x_scales[threadIdx.x] : 0.0f;
        float d[S::SUMS];
        consume<S>(d, stages, full, empty, part);
        asm volatile("bar.sync 1, 256;" ::: "memory");  // nobody reads the stages any more: sums take their place
        const unsigned sums = stages + threadIdx.x * 16;
#pragma unroll
        for (int eight = 0; eight < S::ROWS / 8; ++eight)
            if (8 * eight < out.rows)
                store_shared(
                    sums + eight * CONSUMERS * 16, make_float4(d[4 * eight], d[4 * eight + 1], d[4 * eight + 2], d[4 * eight + 3])
                );
        sync_cluster();
        switch (part.parts) {
            case 1: reduce<S, 1>(out, row_scales, sums, part, features); break;
            case 2: reduce<S, 2>(out, row_scales, sums, part, features); break;
            case 3: reduce<S, 3>(out, row_scales, sums, part, features); break;
            default: reduce<S, 4>(out, row_scales, sums, part, features);
        }
    }
    sync_cluster();  // others read the sums here
}

#else  // another chip: not asked for there

template <int>
struct Shape {};
template <typename S>
__device__ __forceinline__ void wide_product(const TensorMap&, const TensorMap&, const Output&, int) {}

#endif

#define WIDE_PRODUCT(ROWS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) wide_product_fp8_##ROWS(                       \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, const bf16* bias,     \
        long long leading, long long rows, long long features, long long steps, const float* x_scales,             \
        const float* w_scales                                                                                      \
    ) {                                                                                                            \
        const Output output = {                                                                                    \
            out, bias, leading, static_cast<int>(rows), static_cast<int>(features), x_scales, w_scales             \
        };                                                                                                         \
        wide_product<Shape<ROWS>>(x, w, output, static_cast<int>(steps));                                          \
    }

WIDE_PRODUCT(128)
WIDE_PRODUCT(256)
