// out = x w^T + bias, or silu(gate) * up of its columns g0 u0 g1 u1 .., for 65 to 256 rows in e4m3 with one scale per row, on Hopper's tensor cores:
// TMA and wgmma, float32 sums.
//
// Weights are the left operand, so that one instruction multiplies 64 features and all rows of a tile. A cluster has a tile. Its blocks have a part
// of K each and read one another's sums from shared memory, in the order of K; if K is not split, sums are written from registers. In a block one
// warp copies and G warpgroups multiply, each 64 features. Weights are loaded before the preceding kernel ends: it must not write them, nor their
// scales or the bias.
#include "product.cuh"

constexpr int MOST_STAGES = 32;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

MULTIPLY(64, 32, 32, 33, 34)
MULTIPLY(128, 64, 64, 65, 66)
MULTIPLY(256, 128, 128, 129, 130)

template <int G, int R, bool SWIGLU_>
struct Shape {
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
        if (S::SWIGLU) copy_pairs(to, &w_map, step * E4m3::STEP, part.tile / 16, full + 8 * stage, once);
        else copy(to, &w_map, step * E4m3::STEP, part.tile, full + 8 * stage, once);
    };
    const auto copy_x = [&](int step, int stage) {
        copy(stages + stage * S::STAGE_BYTES, &x_map, step * E4m3::STEP, part.row, full + 8 * stage, often);
    };
    fill(part.begin, part.end, count, empty, copy_w, copy_x);
}

// A warpgroup's sums over the part's steps, for 64 features and the tile's rows.
template <typename S>
__device__ __forceinline__ void consume(
    float (&d)[S::SUMS], unsigned stages, unsigned full, unsigned empty, const Part& part, int count
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
        if (++stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
    wait_products<0>();
}

// Scales and biases of a thread's two features: eight apart, or with SwiGLU a gate and its up. They are read early, so the preceding kernel must not
// write them.
template <bool SWIGLU>
struct Features {
    int first;  // of the warp's sixteen
    float scales[2], bias[2] = {};
    __device__ __forceinline__ Features(const Output& out, int first) : first(first) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int feature = SWIGLU ? min(first, out.features - 16) + lane / 4 * 2 + i : min(first + lane / 4 + 8 * i, out.features - 1);
            scales[i] = out.w_scales[feature];
            if (!SWIGLU && out.bias) bias[i] = widen(out.bias[feature]);
        }
    }
};

// Writes results from sums of two consecutive rows of eight, from row `local` of the tile on: for a thread's first feature (x and y) and for its
// second (z and w).
template <bool SWIGLU>
__device__ __forceinline__ void emit(
    float4 v, const Output& out, const float* row_scales, int tile_row, int local, const Features<SWIGLU>& of
) {
    const int lane = threadIdx.x % 32;
    const float2 of_rows = *reinterpret_cast<const float2*>(row_scales + local + lane % 4 * 2);
    v.x = v.x * of_rows.x * of.scales[0] + of.bias[0], v.y = v.y * of_rows.y * of.scales[0] + of.bias[0];
    v.z = v.z * of_rows.x * of.scales[1] + of.bias[1], v.w = v.w * of_rows.y * of.scales[1] + of.bias[1];
    const int row = tile_row + local + lane / 4;
    if (SWIGLU) {
        const unsigned y = transpose(pack(silu_mul(v.x, v.z), silu_mul(v.y, v.w)));
        if (row < out.rows && of.first < out.features)
            *reinterpret_cast<unsigned*>(out.at + row * out.leading + of.first / 2 + lane % 4 * 2) = y;
        return;
    }
    const unsigned left = transpose(pack(v.x, v.y)), right = transpose(pack(v.z, v.w));
    const int feature = of.first + lane % 4 * 2;
    unsigned* to = reinterpret_cast<unsigned*>(out.at + row * out.leading + feature);
    if (row < out.rows && feature < out.features) to[0] = left;
    if (row < out.rows && feature + 8 < out.features) to[4] = right;
}

// A thread's sums for eight rows.
template <int SUMS>
__device__ __forceinline__ float4 sums_of(const float (&d)[SUMS], int eight) {
    return make_float4(d[4 * eight], d[4 * eight + 1], d[4 * eight + 2], d[4 * eight + 3]);
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
            const float4 more = load_shared(sums + eight * S::CONSUMERS * 16, other);
            v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
        }
        emit<S::SWIGLU>(v, out, row_scales, part.row, 8 * eight, features);
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
        float d[S::SUMS];
        consume<S>(d, stages, full, empty, part, count);
        asm volatile("bar.sync 1, %0;" ::"n"(S::CONSUMERS) : "memory");  // the stages are no longer read: sums take their place
        if (part.parts == 1) {
#pragma unroll
            for (int eight = 0; eight < S::ROWS / 8; ++eight)
                if (part.row + 8 * eight < out.rows)
                    emit<S::SWIGLU>(sums_of(d, eight), out, row_scales, part.row, 8 * eight, features);
        } else {
            const unsigned sums = stages + threadIdx.x * 16;
#pragma unroll
            for (int eight = 0; eight < S::ROWS / 8; ++eight)
                if (part.row + 8 * eight < out.rows)
                    store_shared(sums + eight * S::CONSUMERS * 16, sums_of(d, eight));
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

template <int, int, bool>
struct Shape {};
template <typename S>
__device__ __forceinline__ void wide_product(const TensorMap&, const TensorMap&, const Output&, int, int, int) {}

#endif

#define WIDE_PRODUCT(NAME, SWIGLU, G, ROWS)                                                                       \
    extern "C" __global__ void __launch_bounds__(G * GROUP + 32, 1) NAME##_##G##_##ROWS(                          \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, const bf16* bias,     \
        long long leading, long long rows, long long features, long long steps, const float* x_scales,             \
        const float* w_scales, long long stages, long long row_tiles                                               \
    ) {                                                                                                            \
        const Output output = {                                                                                    \
            out, bias, leading, static_cast<int>(rows), static_cast<int>(features), x_scales, w_scales             \
        };                                                                                                         \
        wide_product<Shape<G, ROWS, SWIGLU>>(                                                                      \
            x, w, output, static_cast<int>(steps), static_cast<int>(stages), static_cast<int>(row_tiles)           \
        );                                                                                                         \
    }

WIDE_PRODUCT(wide_product_fp8, false, 1, 64)
WIDE_PRODUCT(wide_product_fp8, false, 2, 64)
WIDE_PRODUCT(wide_product_fp8, false, 2, 128)
WIDE_PRODUCT(wide_product_fp8, false, 3, 128)
WIDE_PRODUCT(wide_product_fp8, false, 2, 256)
WIDE_PRODUCT(wide_product_silu_mul_fp8, true, 2, 128)
WIDE_PRODUCT(wide_product_silu_mul_fp8, true, 3, 128)
