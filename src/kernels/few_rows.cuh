// out = x w^T + bias, or silu(gate) * up of its columns g0 u0 g1 u1 .., for up to 64 rows in bf16, or in e4m3 or int8 with one scale per row, on Hopper's
// tensor cores: TMA and wgmma, float32 or int32 sums.
//
// Weights are the left operand, so that an instruction multiplies 64 features with 8, 16, 32 or 64 rows, and most shared memory is for weights in
// flight. A cluster has a tile of features. Its blocks have a part of K each and read one another's sums from shared memory, in the order of K. In a
// block one warp copies and a warpgroup multiplies. Each block occupies a multiprocessor, so blocks of the next GEMM start where these end, while the
// small kernels between them are already scheduled: all let the next kernel be scheduled before they wait. So weights, their scales and the bias must
// have been written before a kernel that has itself waited for its inputs.
#pragma once
#include "product.cuh"

constexpr int UNIT = 64;  // features per instruction and per box
constexpr int STAGES_BYTES = 208 * 1024;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

MULTIPLY(8, 4, 4, 5, 6)
MULTIPLY(16, 8, 8, 9, 10)
MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY_INT8(8, 4, 4, 5, 6)
MULTIPLY_INT8(16, 8, 8, 9, 10)
MULTIPLY_INT8(32, 16, 16, 17, 18)
MULTIPLY_INT8(64, 32, 32, 33, 34)

template <typename Kind_, int ROWS_, int FEATURES_>
struct Shape {
    using Kind = Kind_;
    static constexpr int ROWS = ROWS_, FEATURES = FEATURES_, UNITS = FEATURES / UNIT;
    static constexpr int SUMS = ROWS / 2;  // of a thread in a unit
    static constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = FEATURES * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int STAGES = STAGES_BYTES / STAGE_BYTES;
    static constexpr int PITCH = FEATURES + 4;  // pitch of sums in shared memory, such that a warp's writes use different banks
    static_assert(ROWS * PITCH * 4 <= STAGES * STAGE_BYTES, "sums take the place of the stages");
};

// Copies the steps of a part; one thread.
template <typename S>
__device__ __forceinline__ void produce(
    const TensorMap& x_map, const TensorMap& w_map, unsigned stages, unsigned full, unsigned empty, const TilePart& part
) {
    const unsigned long long once = copied_once(), often = copied_often();
    const auto copy_w = [&](int step, int stage) {
        const unsigned to = stages + stage * S::STAGE_BYTES + S::X_BYTES, barrier = full + 8 * stage;
        expect(barrier, S::STAGE_BYTES);
#pragma unroll
        for (int unit = 0; unit < S::UNITS; ++unit)
            copy(to + unit * UNIT * ROW_BYTES, &w_map, step * S::Kind::STEP, part.tile + unit * UNIT, barrier, once);
    };
    const auto copy_x = [&](int step, int stage) {
        copy(stages + stage * S::STAGE_BYTES, &x_map, step * S::Kind::STEP, 0, full + 8 * stage, often);
    };
    fill(part.begin, part.end, S::STAGES, empty, copy_w, copy_x);
}

// The warpgroup's sums over the part's steps.
template <typename S>
__device__ __forceinline__ void consume(
    typename S::Kind::Sum (&d)[S::UNITS][S::SUMS], unsigned stages, unsigned full, unsigned empty, int steps
) {
    over_steps<S::STAGES>(full, empty, steps, threadIdx.x == 0, [&](int step, int stage) {
        const unsigned x = stages + stage * S::STAGE_BYTES, w = x + S::X_BYTES;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int unit = 0; unit < S::UNITS; ++unit) {
            const unsigned long long a = descriptor(w + unit * UNIT * ROW_BYTES), b = descriptor(x);
#pragma unroll
            for (int k = 0; k < ROW_BYTES / 32; ++k) multiply(typename S::Kind{}, d[unit], a + 2 * k, b + 2 * k, step > 0 || k > 0);
        }
    });
}

template <typename Form, typename S>
__device__ __forceinline__ void product(const TensorMap& x_map, const TensorMap& w_map, const Output& out, int steps) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * S::STAGES];
    let_next_begin();
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = shared_address(barriers), empty = full + 8 * S::STAGES;
    const TilePart part(S::FEATURES, steps);
    if (threadIdx.x == GROUP) init_stages<S::STAGES>(full, empty, 1);
    __syncthreads();
    if (threadIdx.x >= GROUP) {
        if (threadIdx.x == GROUP) produce<S>(x_map, w_map, stages, full, empty, part);
        __syncwarp();
        sync_cluster();
    } else {
        wait_for_inputs();
        typename S::Kind::Sum d[S::UNITS][S::SUMS];
        consume<S>(d, stages, full, empty, part.end - part.begin);
        asm volatile("bar.sync 1, %0;" ::"n"(GROUP) : "memory");  // the stages are no longer read: sums take their place
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
        for (int unit = 0; unit < S::UNITS; ++unit)
#pragma unroll
            for (int i = 0; i < S::SUMS; ++i) {
                const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = unit * UNIT + warp * 16 + lane / 4 + i / 2 % 2 * 8;
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(stages + (row * S::PITCH + column) * 4), "f"(S::Kind::bits(d[unit][i])) : "memory");
            }
        sync_cluster();
        add_parts<Form, typename S::Kind, S::FEATURES, S::PITCH, GROUP>(out, stages, part.tile, part.rank, part.parts);
    }
    sync_cluster();  // other blocks read the sums here
}

#else  // other GPUs: never launched there

template <typename, int, int>
struct Shape {};
template <typename Form, typename S>
__device__ __forceinline__ void product(const TensorMap&, const TensorMap&, const Output&, int) {}

#endif

#define PRODUCT(NAME, FORM, KIND, ROWS, FEATURES)                                                                 \
    extern "C" __global__ void __launch_bounds__(GROUP + 32, 1) NAME##_##ROWS##_##FEATURES(                       \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, const bf16* bias,    \
        long long leading, long long rows, long long features, long long steps, const float* x_scales,            \
        const float* w_scales                                                                                     \
    ) {                                                                                                           \
        const Output output = {                                                                                   \
            out, bias, leading, static_cast<int>(rows), static_cast<int>(features), x_scales, w_scales            \
        };                                                                                                        \
        product<FORM, Shape<KIND, ROWS, FEATURES>>(x, w, output, static_cast<int>(steps));                        \
    }

#define PRODUCTS_OF_ROWS(NAME, FORM, KIND, ROWS) \
    PRODUCT(NAME, FORM, KIND, ROWS, 64)          \
    PRODUCT(NAME, FORM, KIND, ROWS, 128)         \
    PRODUCT(NAME, FORM, KIND, ROWS, 192)         \
    PRODUCT(NAME, FORM, KIND, ROWS, 256)         \
    PRODUCT(NAME, FORM, KIND, ROWS, 320)

#define PRODUCTS(NAME, FORM, KIND)           \
    PRODUCTS_OF_ROWS(NAME, FORM, KIND, 8)    \
    PRODUCTS_OF_ROWS(NAME, FORM, KIND, 16)   \
    PRODUCTS_OF_ROWS(NAME, FORM, KIND, 32)   \
    PRODUCTS_OF_ROWS(NAME, FORM, KIND, 64)
