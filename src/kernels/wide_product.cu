// out = x w^T + bias, or silu(gate) * up of its columns g0 u0 g1 u1 .., in e4m3 or int8 with one scale per row, on Hopper's tensor cores: TMA and
// wgmma, float32 or int32 sums. For 65 to 256 rows, and for any number in int8.
//
// Weights are the left operand, so that one instruction multiplies 64 features and all rows of a tile. A cluster has a tile. Its blocks have a part
// of K each and read one another's sums from shared memory, in the order of K; if K is not split, sums are written from registers. In a block one
// warp copies and G warpgroups multiply, each 64 features. Weights are loaded before the preceding kernel ends: it must not write them, nor their
// scales or the bias.
#include "tile_output.cuh"

constexpr int MOST_STAGES = 32;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(128, 64, 64, 65, 66)
MULTIPLY(256, 128, 128, 129, 130)
MULTIPLY_INT8(64, 32, 32, 33, 34)
MULTIPLY_INT8(128, 64, 64, 65, 66)
MULTIPLY_INT8(256, 128, 128, 129, 130)

template <typename Kind_, int G, int R, bool SWIGLU_>
struct Shape {
    using Kind = Kind_;
    static constexpr int ROWS = R, GROUPS = G, FEATURES = 64 * G, CONSUMERS = 128 * G;
    static constexpr bool SWIGLU = SWIGLU_;
    static constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = FEATURES * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int SUMS = ROWS / 2;  // per thread
};

// A block's work: a tile, from its first feature and row on, and the steps begin .. end over K. Tiles with the same features are neighbours.
struct Part {
    int rank, parts, tile, row, begin, end;
    __device__ __forceinline__ Part(int features, int rows, int row_tiles, int steps)
        : rank(static_cast<int>(cluster_rank())), parts(static_cast<int>(cluster_size())),
          tile(static_cast<int>(blockIdx.x) / parts / row_tiles * features),
          row(static_cast<int>(blockIdx.x) / parts % row_tiles * rows), begin(rank * steps / parts), end((rank + 1) * steps / parts) {}
};

// Copies a part's steps through `count` stages; one thread.
template <typename S>
__device__ __forceinline__ void produce(
    const TensorMap& x_map, const TensorMap& w_map, unsigned stages, unsigned full, unsigned empty, const Part& part, int count
) {
    const unsigned long long once = copied_once(), often = copied_often();
    const auto copy_w = [&](int step, int stage) {
        expect(full + 8 * stage, S::STAGE_BYTES);
        const unsigned to = stages + stage * S::STAGE_BYTES + S::X_BYTES;
        if (S::SWIGLU) copy_pairs(to, &w_map, step * S::Kind::STEP, part.tile / 16, full + 8 * stage, once);
        else copy(to, &w_map, step * S::Kind::STEP, part.tile, full + 8 * stage, once);
    };
    const auto copy_x = [&](int step, int stage) {
        copy(stages + stage * S::STAGE_BYTES, &x_map, step * S::Kind::STEP, part.row, full + 8 * stage, often);
    };
    fill(part.begin, part.end, count, empty, copy_w, copy_x);
}

// A warpgroup's sums over the part's steps, for 64 features and the tile's rows.
template <typename S>
__device__ __forceinline__ void consume(
    typename S::Kind::Sum (&d)[S::SUMS], unsigned stages, unsigned full, unsigned empty, const Part& part, int count
) {
    const int group = static_cast<int>(threadIdx.x) / GROUP, thread = threadIdx.x % GROUP, steps = part.end - part.begin;
    int stage = 0, parity = 0, before = 0;
    for (int step = 0; step < steps; ++step) {
        wait(full + 8 * stage, parity);
        const unsigned x = stages + stage * S::STAGE_BYTES, w = x + S::X_BYTES + group * 64 * ROW_BYTES;
        const unsigned long long a = descriptor(w), b = descriptor(x);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < ROW_BYTES / 32; ++k) multiply(typename S::Kind{}, d, a + 2 * k, b + 2 * k, step > 0 || k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_products<1>();
        if (step > 0 && thread == 0) arrive(empty + 8 * before);
        before = stage;
        if (++stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
    wait_products<0>();
}

// The scales of a thread's two rows of the eight from `local` on.
__device__ __forceinline__ float2 scales_of(const float* row_scales, int local) {
    return *reinterpret_cast<const float2*>(row_scales + local + threadIdx.x % 4 * 2);
}

// Adds the parts' sums, for the block's share of the rows.
template <typename S, int PARTS>
__device__ __forceinline__ void reduce(
    const Output& out, const float* row_scales, unsigned sums, const Part& part, const Features<S::SWIGLU>& features
) {
    const int eights = (min(out.rows - part.row, S::ROWS) + 7) / 8;
#pragma unroll 4
    for (int eight = part.rank * eights / PARTS; eight < (part.rank + 1) * eights / PARTS; ++eight) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < PARTS; ++other) {
            add_sums<typename S::Kind>(v, load_shared(sums + eight * S::CONSUMERS * 16, other));
        }
        emit<typename S::Kind>(v, out, scales_of(row_scales, 8 * eight), part.row + 8 * eight, features);
    }
}

template <typename S>
__device__ __forceinline__ void wide_product(
    const TensorMap& x_map, const TensorMap& w_map, const Output& out, int steps, int count, int row_tiles
) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * MOST_STAGES];
    __shared__ alignas(8) float row_scales[S::ROWS];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = shared_address(barriers), empty = full + 8 * count;
    const Part part(S::FEATURES, S::ROWS, row_tiles, steps);
    if (threadIdx.x == S::CONSUMERS) {
        for (int stage = 0; stage < count; ++stage) {
            init(full + 8 * stage, 1);
            init(empty + 8 * stage, S::GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= S::CONSUMERS) {
        if (threadIdx.x == S::CONSUMERS) produce<S>(x_map, w_map, stages, full, empty, part, count);
        __syncwarp();
        if (part.parts > 1) sync_cluster();
    } else {
        const Features<S::SWIGLU> features(out, part.tile + static_cast<int>(threadIdx.x) / 32 * 16);
        wait_for_inputs();
        for (int i = threadIdx.x; i < S::ROWS; i += S::CONSUMERS)
            row_scales[i] = part.row + i < out.rows ? out.x_scales[part.row + i] : 0.0f;
        typename S::Kind::Sum d[S::SUMS];
        consume<S>(d, stages, full, empty, part, count);
        asm volatile("bar.sync 1, %0;" ::"n"(S::CONSUMERS) : "memory");  // the stages are no longer read: sums take their place
        if (part.parts == 1) {
#pragma unroll
            for (int eight = 0; eight < S::ROWS / 8; ++eight)
                if (part.row + 8 * eight < out.rows)
                    emit<typename S::Kind>(
                        sums_of<typename S::Kind>(d, eight), out, scales_of(row_scales, 8 * eight), part.row + 8 * eight, features
                    );
        } else {
            const unsigned sums = stages + threadIdx.x * 16;
#pragma unroll
            for (int eight = 0; eight < S::ROWS / 8; ++eight)
                if (part.row + 8 * eight < out.rows)
                    store_shared(sums + eight * S::CONSUMERS * 16, sums_of<typename S::Kind>(d, eight));
            sync_cluster();
            switch (part.parts) {
                case 2: reduce<S, 2>(out, row_scales, sums, part, features); break;
                case 3: reduce<S, 3>(out, row_scales, sums, part, features); break;
                default: reduce<S, 4>(out, row_scales, sums, part, features);
            }
        }
    }
    if (part.parts > 1) sync_cluster();  // other blocks read the sums here
}

#else  // other GPUs: never launched there

template <typename, int, int, bool>
struct Shape {};
template <typename S>
__device__ __forceinline__ void wide_product(const TensorMap&, const TensorMap&, const Output&, int, int, int) {}

#endif

#define WIDE_PRODUCT(NAME, KIND, SWIGLU, G, ROWS)                                                                     \
    extern "C" __global__ void __launch_bounds__(G * GROUP + 32, 1) NAME##_##G##_##ROWS(                          \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, const bf16* bias,     \
        long long leading, long long rows, long long features, long long steps, const float* x_scales,             \
        const float* w_scales, long long stages, long long row_tiles                                               \
    ) {                                                                                                            \
        const Output output = {                                                                                    \
            out, bias, leading, static_cast<int>(rows), static_cast<int>(features), x_scales, w_scales             \
        };                                                                                                         \
        wide_product<Shape<KIND, G, ROWS, SWIGLU>>(                                                                      \
            x, w, output, static_cast<int>(steps), static_cast<int>(stages), static_cast<int>(row_tiles)           \
        );                                                                                                         \
    }

#define WIDE_PRODUCTS(SUFFIX, KIND)                                 \
    WIDE_PRODUCT(wide_product_##SUFFIX, KIND, false, 1, 64)           \
    WIDE_PRODUCT(wide_product_##SUFFIX, KIND, false, 2, 64)           \
    WIDE_PRODUCT(wide_product_##SUFFIX, KIND, false, 2, 128)          \
    WIDE_PRODUCT(wide_product_##SUFFIX, KIND, false, 3, 128)          \
    WIDE_PRODUCT(wide_product_##SUFFIX, KIND, false, 2, 256)          \
    WIDE_PRODUCT(wide_product_silu_mul_##SUFFIX, KIND, true, 2, 128)  \
    WIDE_PRODUCT(wide_product_silu_mul_##SUFFIX, KIND, true, 3, 128)  \
    WIDE_PRODUCT(wide_product_silu_mul_##SUFFIX, KIND, true, 2, 256)

WIDE_PRODUCTS(fp8, E4m3)
WIDE_PRODUCTS(int8, Int8)
