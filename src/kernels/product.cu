// out = x w^T + bias, or silu(gate) * up of its columns g0 u0 g1 u1 .., for few rows and a large w, on Hopper's tensor cores: TMA and wgmma, float32
// sums.
//
// A cluster has a tile of features and all rows. Its blocks have a part of K each and read one another's sums from shared memory, in the order of K.
// In a block one warp copies and two warpgroups multiply, each half of the features. Weights are loaded before the preceding kernel ends, so it must
// not write them. Operands are bf16, or e4m3 or int8 with one scale per row.
#include "product.cuh"

constexpr int ROWS = 64;            // of x
constexpr int CONSUMERS = 256;      // threads that multiply
constexpr int STAGES_BYTES = 225 * 1024;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Kind_, int FEATURES_>
struct Shape {
    using Kind = Kind_;
    static constexpr int FEATURES = FEATURES_, N = FEATURES / 2;
    static constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = FEATURES * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int STAGES = STAGES_BYTES / STAGE_BYTES;
    static constexpr int PITCH = FEATURES + 8;  // pitch of sums in shared memory, such that a warp's writes use different banks
    static_assert(ROWS * PITCH * 4 <= STAGES * STAGE_BYTES, "sums take the place of the stages");
};

MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(40, 20, 20, 21, 22)
MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(144, 72, 72, 73, 74)
MULTIPLY_INT8(32, 16, 16, 17, 18)
MULTIPLY_INT8(48, 24, 24, 25, 26)
MULTIPLY_INT8(64, 32, 32, 33, 34)
MULTIPLY_INT8(144, 72, 72, 73, 74)

__device__ __forceinline__ void store_shared(unsigned at, float low, float high) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(low), "f"(high) : "memory");
}

// Copies the steps of a part; one thread.
template <typename S>
__device__ __forceinline__ void produce(
    const TensorMap& x_map, const TensorMap& w_map, unsigned stages, unsigned full, unsigned empty, const TilePart& part
) {
    const unsigned long long once = copied_once(), often = copied_often();
    const auto copy_w = [&](int step, int stage) {
        const unsigned to = stages + stage * S::STAGE_BYTES + S::X_BYTES, barrier = full + 8 * stage;
        expect(barrier, S::STAGE_BYTES);
        copy(to, &w_map, step * S::Kind::STEP, part.tile, barrier, once);
        copy(to + S::W_BYTES / 2, &w_map, step * S::Kind::STEP, part.tile + S::N, barrier, once);
    };
    const auto copy_x = [&](int step, int stage) {
        copy(stages + stage * S::STAGE_BYTES, &x_map, step * S::Kind::STEP, 0, full + 8 * stage, often);
    };
    fill(part.begin, part.end, S::STAGES, empty, copy_w, copy_x);
}

// A warpgroup's sums over the part's steps.
template <typename S>
__device__ __forceinline__ void consume(
    typename S::Kind::Sum (&d)[S::N / 2], unsigned stages, unsigned full, unsigned empty, int group, int steps
) {
#pragma unroll
    for (int i = 0; i < S::N / 2; ++i) d[i] = 0;
    over_steps<S::STAGES>(full, empty, steps, threadIdx.x % GROUP == 0, [&](int, int stage) {
        const unsigned base = stages + stage * S::STAGE_BYTES;
        const unsigned long long a = descriptor(base), b = descriptor(base + S::X_BYTES + group * S::N * ROW_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < ROW_BYTES / 32; ++k) multiply(typename S::Kind{}, d, a + 2 * k, b + 2 * k, 1);
    });
}

template <typename Form, typename S>
__device__ __forceinline__ void product(const TensorMap& x_map, const TensorMap& w_map, const Output& out, int steps) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * S::STAGES];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = shared_address(barriers), empty = full + 8 * S::STAGES;
    const TilePart part(S::FEATURES, steps);
    if (threadIdx.x == 0) init_stages<S::STAGES>(full, empty, 2);
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce<S>(x_map, w_map, stages, full, empty, part);
        __syncwarp();
        sync_cluster();
    } else {
        wait_for_inputs();
        const int group = static_cast<int>(threadIdx.x) / GROUP, thread = threadIdx.x % GROUP;
        typename S::Kind::Sum d[S::N / 2];
        consume<S>(d, stages, full, empty, group, part.end - part.begin);
        asm volatile("bar.sync 1, 256;" ::: "memory");  // the stages are no longer read: sums take their place
#pragma unroll
        for (int i = 0; i < S::N / 2; i += 2) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            const int column = group * S::N + thread % 4 * 2 + i / 4 * 8;
            if (row < out.rows) store_shared(stages + (row * S::PITCH + column) * 4, S::Kind::bits(d[i]), S::Kind::bits(d[i + 1]));
        }
        sync_cluster();
        add_parts<Form, typename S::Kind, S::FEATURES, S::PITCH, CONSUMERS>(out, stages, part.tile, part.rank, part.parts);
    }
    sync_cluster();  // other blocks read the sums here
}

#else  // other GPUs: never launched there

template <typename, int>
struct Shape {};
template <typename Form, typename S>
__device__ __forceinline__ void product(const TensorMap&, const TensorMap&, const Output&, int) {}

#endif

#define PRODUCT(NAME, FORM, FEATURES)                                                                             \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME##_##FEATURES(                            \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, const bf16* bias,    \
        long long leading, long long rows, long long features, long long steps                                    \
    ) {                                                                                                           \
        const Output output = {out, bias, leading, static_cast<int>(rows), static_cast<int>(features)};           \
        product<FORM, Shape<Bf16, FEATURES>>(x, w, output, static_cast<int>(steps));                              \
    }
#define SCALED_PRODUCT(NAME, FORM, KIND, FEATURES)                                                                \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME##_##FEATURES(                            \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, const bf16* bias,    \
        long long leading, long long rows, long long features, long long steps, const float* x_scales,            \
        const float* w_scales                                                                                     \
    ) {                                                                                                           \
        const Output output = {                                                                                   \
            out, bias, leading, static_cast<int>(rows), static_cast<int>(features), x_scales, w_scales            \
        };                                                                                                        \
        product<FORM, Shape<KIND, FEATURES>>(x, w, output, static_cast<int>(steps));                              \
    }
#define FLOAT_PRODUCTS(FEATURES)                                       \
    PRODUCT(product, Plain, FEATURES)                                  \
    PRODUCT(product_silu_mul, SwiGlu, FEATURES)                        \
    SCALED_PRODUCT(product_fp8, Plain, E4m3, FEATURES)                 \
    SCALED_PRODUCT(product_silu_mul_fp8, SwiGlu, E4m3, FEATURES)
#define INT8_PRODUCTS(FEATURES)                                        \
    SCALED_PRODUCT(product_int8, Plain, Int8, FEATURES)                \
    SCALED_PRODUCT(product_silu_mul_int8, SwiGlu, Int8, FEATURES)

FLOAT_PRODUCTS(64)
FLOAT_PRODUCTS(80)
FLOAT_PRODUCTS(128)
FLOAT_PRODUCTS(288)
INT8_PRODUCTS(64)  // no wgmma of int8 has 40 columns, half of 80 features
INT8_PRODUCTS(96)
INT8_PRODUCTS(128)
INT8_PRODUCTS(288)
