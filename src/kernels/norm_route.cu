// The norm before a router and the router in one launch: x += delta, rounded to the type of x; y = x / sqrt(mean(x^2) + eps) * (centre + weight), quantized
// to e4m3, and itself only if requested; then route.cu for y. The same bits as add_rms_norm.cu and route.cu. For rows of 2,048 columns, from sm_90 on.
//
// A cluster has whole rows: its blocks exchange sums of squares before the norm, and largest values together with the sums of logits.
#include "fp8.cuh"
#include "rounded_rows.cuh"
#include "route_logits.cuh"

#if __CUDA_ARCH__ >= 900

constexpr int OWN = ROWS / WARPS;  // rows per warp, of which a lane has eight columns

// A block's rows, which begin as x and delta. Sums have the order of add_rms_norm.cu, in which a warp has COLUMNS columns, too.
template <typename X>
struct Normed {
    X* x;                // [T, D]
    const bf16* delta;   // [T, D]
    const bf16* weight;  // [D]
    bf16* y;             // [T, D] or null
    RoundedRows rounded;
    float eps, centre;
    unsigned* most;  // of the block's rows: the largest value of its columns, in shared memory
    Pack<bf16, 8> row[OWN];

    __device__ __forceinline__ static int local(int i) { return threadIdx.x / 32 * OWN + i; }
    __device__ __forceinline__ static long long place(const Router& to, int row, int part) {
        return static_cast<long long>(row) * to.dim + part * COLUMNS + threadIdx.x % 32 * 8;
    }

    __device__ __forceinline__ void begin(const Router& to, int first_row, int part) {
        __shared__ float squares[ROWS];
        const int lane = threadIdx.x % 32;
        let_next_begin();
        const auto factors = load<bf16, 8>(weight + part * COLUMNS + lane * 8);
        wait_for_inputs();
        Pack<X, 8> kept[OWN];
        Pack<bf16, 8> more[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int at = first_row + local(i);
            kept[i] = {}, more[i] = {};
            if (at < to.rows) kept[i] = load<X, 8>(x + place(to, at, part)), more[i] = load<bf16, 8>(delta + place(to, at, part));
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int at = first_row + local(i);
            float sums[8], own = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[j] = widen(kept[i].at[j]) + widen(more[i].at[j]);
            narrow(sums, kept[i]);
            if (at < to.rows) store(x + place(to, at, part), kept[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) own += widen(kept[i].at[j]) * widen(kept[i].at[j]);
            own = warp_sum(own);
            if (lane == 0) squares[local(i)] = own;
        }
        sync_cluster();
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int at = first_row + local(i);
            const float own = lane < PARTS ? load_one(shared_address(&squares[local(i)]), lane) : 0.0f;
            float sum = 0.0f, values[8];
#pragma unroll
            for (int other = 0; other < PARTS; ++other) sum += __shfl_sync(ALL, own, other);
            const float scale = rsqrtf(sum / static_cast<float>(to.dim) + eps);
#pragma unroll
            for (int j = 0; j < 8; ++j) values[j] = widen(kept[i].at[j]) * scale * (centre + widen(factors.at[j]));
            narrow(values, row[i]);
            if (y && at < to.rows) store(y + place(to, at, part), row[i]);
            const unsigned bits = __reduce_max_sync(ALL, most_bits(row[i], 0));
            if (lane == 0) most[local(i)] = bits;
        }
    }

    __device__ __forceinline__ void put(unsigned char* tile, const Router&, int, int, int) const {
#pragma unroll
        for (int i = 0; i < OWN; ++i) *reinterpret_cast<Pack<bf16, 8>*>(tile + local(i) * X_PITCH + threadIdx.x % 32 * 16) = row[i];
    }

    // The largest values of a warp's rows, once all blocks of the cluster have theirs.
    __device__ __forceinline__ void gather_most(unsigned (&bits)[OWN]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float own = lane < PARTS ? load_one(shared_address(&most[local(i)]), lane) : 0.0f;
            bits[i] = __reduce_max_sync(ALL, __float_as_uint(own));
        }
    }

    __device__ __forceinline__ void round(const Router& to, const unsigned (&bits)[OWN], int first_row, int part) const {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int at = first_row + local(i);
            if (at >= to.rows) continue;
            const RowScale scale(bits[i]);
            scale.write(row[i], rounded.values + place(to, at, part));
            if (part == 0 && threadIdx.x % 32 == 0) rounded.scales[at] = scale.scale;
        }
    }
};

template <typename X, int J>
__device__ __forceinline__ void norm_route(const Router& to, Normed<X> rows, const bf16* w) {
    constexpr int EACH = ROWS / PARTS;  // tokens per block
    __shared__ Room<J> room;
    __shared__ unsigned most[ROWS];
    rows.most = most;
    const int cluster = blockIdx.x / PARTS, part = blockIdx.x % PARTS, warp = threadIdx.x / 32;
    multiply_part<J>(to, room, rows, w, cluster * ROWS, part);
    sync_cluster();
    const Scoring<bf16> scoring = {};
    const int row = cluster * ROWS + part * EACH + warp;
    const bool has = warp < EACH && row < to.rows;
    float p[J];
    unsigned bits[OWN];
    if (has) gather<J, SOFTMAX>(p, to, scoring, room, row);
    rows.gather_most(bits);
    arrive_cluster();
    if (has) choose<J, SOFTMAX>(to, scoring, p, row);
    rows.round(to, bits, cluster * ROWS, part);
    wait_cluster();  // this block's sums are no longer read
    if (part == 0 && cluster == to.clusters() - 1) sort<J>(to, room);
}

#else  // other GPUs: never launched there

template <typename X>
struct Normed {
    X* x;
    const bf16 *delta, *weight;
    bf16* y;
    RoundedRows rounded;
    float eps, centre;
};
template <typename X, int J>
__device__ __forceinline__ void norm_route(const Router&, const Normed<X>&, const bf16*) {}

#endif

#define NORM_ROUTE(NAME, X, J)                                                                                         \
    KERNEL NAME(                                                                                                       \
        X* x, const bf16* delta, const bf16* weight, bf16* y, unsigned char* values, float* scales, float eps,         \
        float centre, PARAMETERS(bf16)                                                                                 \
    ) {                                                                                                                \
        ROUTER;                                                                                                        \
        norm_route<X, J>(to, Normed<X>{x, delta, weight, y, {values, scales}, eps, centre}, w);                \
    }

NORM_ROUTE(norm_route_fp8_bf16_128, bf16, 4)
NORM_ROUTE(norm_route_fp8_bf16_512, bf16, 16)
NORM_ROUTE(norm_route_fp8_f32_bf16_128, float, 4)
NORM_ROUTE(norm_route_fp8_f32_bf16_512, float, 16)
