// out = x w^T + bias, or silu(gate) * up of its columns g0 u0 g1 u1 .., of few rows and a large w, on Hopper's tensor cores: TMA
// and wgmma, sums in float32.
//
// A cluster has a tile of features and all rows. Its blocks have a part of K each and read one another's sums from shared memory,
// in the order of K. In a block one warp copies and two warpgroups multiply, each half of the features. Weights are on their way
// before the work before this ends: the kernel before must not write them. Factors are bf16, or e4m3 with a scale for each row.
#include "cluster.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "scalar.cuh"

constexpr int ROWS = 64;            // of x
constexpr int CONSUMERS = 256;      // threads that multiply
constexpr int STAGES_BYTES = 225 * 1024;

struct Output {
    void* at;
    const bf16* bias;  // [N] or null
    long long leading;
    int rows, features;
    const float *x_scales, *w_scales;  // [R], [N]; of e4m3
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename Kind_, int FEATURES_>
struct Shape {
    using Kind = Kind_;
    static constexpr int FEATURES = FEATURES_, N = FEATURES / 2;
    static constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = FEATURES * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int STAGES = STAGES_BYTES / STAGE_BYTES;
    static constexpr int PITCH = FEATURES + 8;  // of sums in shared memory: no two of a warp's writes share a bank
    static_assert(ROWS * PITCH * 4 <= STAGES * STAGE_BYTES, "sums take the place of the stages");
};

MULTIPLY(32, 16, 16, 17, 18)
MULTIPLY(40, 20, 20, 21, 22)
MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(144, 72, 72, 73, 74)

__device__ __forceinline__ void store_shared(unsigned at, float low, float high) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(low), "f"(high) : "memory");
}

// Eight neighbours of a row as they were summed, to their values.
template <typename Kind>
__device__ __forceinline__ void rescale(float (&v)[8], const Output& out, int row, int feature) {
    if constexpr (Kind::IS_SCALED) {
        const float of_row = out.x_scales[row];
        const auto of_features = load<float, 8>(out.w_scales + feature);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * of_row * of_features.at[i];
    }
}

// Eight neighbours of a row.
struct Plain {  // out [R, N]
    __device__ __forceinline__ static void emit(const float (&v)[8], const Output& out, int row, int feature) {
        float bias[8] = {};
        if (out.bias) {
            const auto added = load<bf16, 8>(out.bias + feature);
#pragma unroll
            for (int i = 0; i < 8; ++i) bias[i] = widen(added.at[i]);
        }
        *reinterpret_cast<uint4*>(static_cast<bf16*>(out.at) + row * out.leading + feature) =
            make_uint4(pack(v[0] + bias[0], v[1] + bias[1]), pack(v[2] + bias[2], v[3] + bias[3]),
                       pack(v[4] + bias[4], v[5] + bias[5]), pack(v[6] + bias[6], v[7] + bias[7]));
    }
};

struct SwiGlu {  // out [R, N / 2]
    __device__ __forceinline__ static void emit(const float (&v)[8], const Output& out, int row, int feature) {
        *reinterpret_cast<uint2*>(static_cast<bf16*>(out.at) + row * out.leading + feature / 2) =
            make_uint2(pack(silu_mul(v[0], v[1]), silu_mul(v[2], v[3])), pack(silu_mul(v[4], v[5]), silu_mul(v[6], v[7])));
    }
};

// Copies a part's steps; one thread.
template <typename S>
__device__ __forceinline__ void produce(
    const TensorMap& x_map, const TensorMap& w_map, unsigned stages, unsigned full, unsigned empty, int tile, int begin, int end
) {
    unsigned long long once, often;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
    const auto copy_w = [&](int step, int stage) {
        const unsigned to = stages + stage * S::STAGE_BYTES + S::X_BYTES, barrier = full + 8 * stage;
        expect(barrier, S::STAGE_BYTES);
        copy(to, &w_map, step * S::Kind::STEP, tile, barrier, once);
        copy(to + S::W_BYTES / 2, &w_map, step * S::Kind::STEP, tile + S::N, barrier, once);
    };
    const auto copy_x = [&](int step, int stage) {
        copy(stages + stage * S::STAGE_BYTES, &x_map, step * S::Kind::STEP, 0, full + 8 * stage, often);
    };
    const int early = min(end - begin, S::STAGES);
    for (int stage = 0; stage < early; ++stage) copy_w(begin + stage, stage);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int stage = 0; stage < early; ++stage) copy_x(begin + stage, stage);
    int stage = 0, parity = 0;
    for (int step = begin + early; step < end; ++step) {
        wait(empty + 8 * stage, parity);
        copy_w(step, stage);
        copy_x(step, stage);
        if (++stage == S::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// A warpgroup's sums over the part's steps.
template <typename S>
__device__ __forceinline__ void consume(
    float (&d)[S::N / 2], unsigned stages, unsigned full, unsigned empty, int group, int steps
) {
#pragma unroll
    for (int i = 0; i < S::N / 2; ++i) d[i] = 0.0f;
    int stage = 0, parity = 0, before = 0;
    for (int step = 0; step < steps; ++step) {
        wait(full + 8 * stage, parity);
        const unsigned base = stages + stage * S::STAGE_BYTES;
        const unsigned long long a = descriptor(base), b = descriptor(base + S::X_BYTES + group * S::N * ROW_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < ROW_BYTES / 32; ++k) multiply(typename S::Kind{}, d, a + 2 * k, b + 2 * k, 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_products<1>();
        if (step > 0 && threadIdx.x % GROUP == 0) arrive(empty + 8 * before);
        before = stage;
        if (++stage == S::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    wait_products<0>();
}

template <typename Form, typename S>
__device__ __forceinline__ void product(const TensorMap& x_map, const TensorMap& w_map, const Output& out, int steps) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * S::STAGES];
    const unsigned stages = (shared_address(memory) + 1023) / 1024 * 1024;
    const unsigned full = shared_address(barriers), empty = full + 8 * S::STAGES;
    const int rank = static_cast<int>(cluster_rank()), parts = static_cast<int>(cluster_size());
    const int tile = static_cast<int>(blockIdx.x) / parts * S::FEATURES;
    const int begin = rank * steps / parts, end = (rank + 1) * steps / parts;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < S::STAGES; ++stage) {
            init(full + 8 * stage, 1);
            init(empty + 8 * stage, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce<S>(x_map, w_map, stages, full, empty, tile, begin, end);
        __syncwarp();
        sync_cluster();
    } else {
        wait_for_inputs();
        const int group = static_cast<int>(threadIdx.x) / GROUP, thread = threadIdx.x % GROUP;
        float d[S::N / 2];
        consume<S>(d, stages, full, empty, group, end - begin);
        asm volatile("bar.sync 1, 256;" ::: "memory");  // nobody reads the stages any more: sums take their place
#pragma unroll
        for (int i = 0; i < S::N / 2; i += 2) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            const int column = group * S::N + thread % 4 * 2 + i / 4 * 8;
            if (row < out.rows) store_shared(stages + (row * S::PITCH + column) * 4, d[i], d[i + 1]);
        }
        sync_cluster();
        constexpr int UNITS = S::FEATURES / 8;  // of a row
        const int units = out.rows * UNITS;
        for (int unit = rank * units / parts + threadIdx.x; unit < (rank + 1) * units / parts; unit += CONSUMERS) {
            const int row = unit / UNITS, column = unit % UNITS * 8;
            if (tile + column >= out.features) continue;
            const unsigned at = stages + (row * S::PITCH + column) * 4;
            float v[8] = {};
#pragma unroll 4
            for (int part = 0; part < parts; ++part) {
                const float4 low = load_shared(at, part), high = load_shared(at + 16, part);
                v[0] += low.x, v[1] += low.y, v[2] += low.z, v[3] += low.w;
                v[4] += high.x, v[5] += high.y, v[6] += high.z, v[7] += high.w;
            }
            rescale<typename S::Kind>(v, out, row, tile + column);
            Form::emit(v, out, row, tile + column);
        }
    }
    sync_cluster();  // others read the sums here
}

#else  // another chip: not asked for there

template <typename, int>
struct Shape {};
struct Plain {};
struct SwiGlu {};
template <typename Form, typename S>
__device__ __forceinline__ void product(const TensorMap&, const TensorMap&, const Output&, int) {}

#endif

#define PRODUCT(NAME, FORM, FEATURES)                                                                             \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME##_##FEATURES(                            \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, void* out, const bf16* bias,    \
        long long leading, long long rows, long long features, long long steps                                    \
    ) {                                                                                                           \
        const Output output = {out, bias, leading, static_cast<int>(rows), static_cast<int>(features)};           \
        product<FORM, Shape<Bf16, FEATURES>>(x, w, output, static_cast<int>(steps));                              \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) NAME##_fp8_##FEATURES(                        \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, void* out, const bf16* bias,    \
        long long leading, long long rows, long long features, long long steps, const float* x_scales,            \
        const float* w_scales                                                                                     \
    ) {                                                                                                           \
        const Output output = {                                                                                   \
            out, bias, leading, static_cast<int>(rows), static_cast<int>(features), x_scales, w_scales            \
        };                                                                                                        \
        product<FORM, Shape<E4m3, FEATURES>>(x, w, output, static_cast<int>(steps));                              \
    }

PRODUCT(product, Plain, 64)
PRODUCT(product_silu_mul, SwiGlu, 64)
PRODUCT(product, Plain, 80)
PRODUCT(product_silu_mul, SwiGlu, 80)
PRODUCT(product, Plain, 128)
PRODUCT(product_silu_mul, SwiGlu, 128)
PRODUCT(product, Plain, 288)
PRODUCT(product_silu_mul, SwiGlu, 288)
