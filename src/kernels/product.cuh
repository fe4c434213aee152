// Shared by the Hopper GEMMs with few rows: how results are written, and how a cluster's blocks add the sums of their parts of K.
#pragma once
#include "cluster.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "scalar.cuh"

struct Output {
    bf16* at;
    const bf16* bias;  // [N] or null; never with SwiGLU
    long long leading;
    int rows, features;
    const float *x_scales, *w_scales;  // [R], [N]; for e4m3 and int8
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A block's work: a tile, from its first feature on, and the steps begin .. end over K.
struct TilePart {
    int rank, parts, tile, begin, end;
    __device__ __forceinline__ TilePart(int features, int steps)
        : rank(static_cast<int>(cluster_rank())), parts(static_cast<int>(cluster_size())),
          tile(static_cast<int>(blockIdx.x) / parts * features), begin(rank * steps / parts), end((rank + 1) * steps / parts) {}
};

// Initializes barriers of stages that one thread fills and `readers` groups empty; one thread.
template <int STAGES>
__device__ __forceinline__ void init_stages(unsigned full, unsigned empty, int readers) {
    for (int stage = 0; stage < STAGES; ++stage) {
        init(full + 8 * stage, 1);
        init(empty + 8 * stage, readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Multiplies stage after stage as they are filled. The thread that `releases` frees a stage once the next step's multiplication is queued.
template <int STAGES, class Multiply>
__device__ __forceinline__ void over_steps(unsigned full, unsigned empty, int steps, bool releases, const Multiply& multiply) {
    int stage = 0, parity = 0, before = 0;
    for (int step = 0; step < steps; ++step) {
        wait(full + 8 * stage, parity);
        multiply(step, stage);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_products<1>();
        if (step > 0 && releases) arrive(empty + 8 * before);
        before = stage;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    wait_products<0>();
}

// Scales eight consecutive sums of a row.
template <typename Kind>
__device__ __forceinline__ void rescale(float (&v)[8], const Output& out, int row, int feature) {
    if constexpr (Kind::IS_SCALED) {
        const float of_row = out.x_scales[row];
        const auto of_features = load<float, 8>(out.w_scales + feature);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = Kind::scaled(v[i], of_row, of_features.at[i]);
    }
}

// Writers of eight consecutive elements of a row.
struct Plain {  // out [R, N]
    __device__ __forceinline__ static void emit(const float (&v)[8], const Output& out, int row, int feature) {
        float bias[8] = {};
        if (out.bias) {
            const auto added = load<bf16, 8>(out.bias + feature);
#pragma unroll
            for (int i = 0; i < 8; ++i) bias[i] = widen(added.at[i]);
        }
        *reinterpret_cast<uint4*>(out.at + row * out.leading + feature) =
            make_uint4(pack(v[0] + bias[0], v[1] + bias[1]), pack(v[2] + bias[2], v[3] + bias[3]),
                       pack(v[4] + bias[4], v[5] + bias[5]), pack(v[6] + bias[6], v[7] + bias[7]));
    }
};

struct SwiGlu {  // out [R, N / 2]
    __device__ __forceinline__ static void emit(const float (&v)[8], const Output& out, int row, int feature) {
        *reinterpret_cast<uint2*>(out.at + row * out.leading + feature / 2) =
            make_uint2(pack(silu_mul(v[0], v[1]), silu_mul(v[2], v[3])), pack(silu_mul(v[4], v[5]), silu_mul(v[6], v[7])));
    }
};

// Adds the parts' sums [R, FEATURES] of a tile, which are at `sums` in every block's shared memory with `PITCH` numbers per row, and writes this
// block's share of the results.
template <typename Form, typename Kind, int FEATURES, int PITCH, int THREADS>
__device__ __forceinline__ void add_parts(const Output& out, unsigned sums, int tile, int rank, int parts) {
    constexpr int EIGHTS = FEATURES / 8;  // per row
    const int eights = out.rows * EIGHTS, end = (rank + 1) * eights / parts;
    for (int eight = rank * eights / parts + threadIdx.x; eight < end; eight += THREADS) {
        const int row = eight / EIGHTS, column = eight % EIGHTS * 8, feature = tile + column;
        if (feature >= out.features) continue;
        const unsigned at = sums + (row * PITCH + column) * 4;
        float v[8] = {};
#pragma unroll 4
        for (int other = 0; other < parts; ++other) {
            const float4 low = load_shared(at, other), high = load_shared(at + 16, other);
            const float more[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = Kind::add(v[i], more[i]);
        }
        rescale<Kind>(v, out, row, feature);
        Form::emit(v, out, row, feature);
    }
}

#else  // other GPUs: never launched there

struct Plain {};
struct SwiGlu {};

#endif
