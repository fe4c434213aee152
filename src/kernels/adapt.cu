// Adds a LoRA adapter to a GEMM's output: low = x A^T, out += low B^T (arXiv 2106.09685), in bf16 with float32 sums on tensor cores. T rows, K
// columns of x, N of out, k of low.
//
// Both GEMMs are tiny and bound by memory and launch latency, so operands go directly to registers: the order of columns within a multiplication is
// free as long as both operands agree, so a lane loads 16 bytes of a row of each. K is split over the warps of a cluster of blocks, which add their
// sums in a fixed order. Operands that are older than the preceding kernel (A; B and out) are loaded while that kernel ends.
//
// The split of K and the order of sums depend only on K, and every element is summed separately. So a row's bits depend neither on other rows nor on
// a kernel's tile; decode steps and training agree.
#include "clamped.cuh"
#include "cluster.cuh"
#include "mma.cuh"

constexpr int SPLITS = 8;      // blocks per cluster
constexpr int DOWN_WARPS = 8;  // per block, each with a part of K
constexpr int DOWN_THREADS = 32 * DOWN_WARPS;
constexpr int PARTS = SPLITS * DOWN_WARPS;
constexpr int DEPTH = 32;  // columns per step of `adapt_down`, 8 per lane
constexpr int UP_WARPS = 4;
constexpr int UP_THREADS = 32 * UP_WARPS;
constexpr int UP_COLUMNS = 32;  // per warp, 8 per lane
constexpr int UP_DEPTH = 16;    // columns of low per step of `adapt_up`, 4 per lane

// Reads from the shared memory of another block of the cluster, at the same place as `at`.
__device__ __forceinline__ float2 load_peer(const float2* at, int rank) {
    float2 out;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(out.x), "=f"(out.y)
                 : "r"(peer_address(shared_address(at), rank))
                 : "memory");
    return out;
}

__device__ __forceinline__ void add(float2& sum, float2 next) { sum.x += next.x, sum.y += next.y; }

// Loads a lane's 16 bytes of a step for each of its rows, which start at `rows`. Zeros after the last of `columns`.
template <int N>
__device__ __forceinline__ void load_step(uint4 (&to)[N], const bf16* const (&rows)[N], int step, int columns) {
    const bool is_in = step * DEPTH + threadIdx.x % 4 * 8 < columns;
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = is_in ? __ldcg(reinterpret_cast<const uint4*>(rows[i] + step * DEPTH)) : uint4{0, 0, 0, 0};
}

// low = x A^T. A cluster computes M rows and N columns; a warp loads AHEAD steps before they are used. A lane has the rows lane / 4 + 8 i of both
// operands, and the columns 8 (lane % 4) .. + 8 of a step. Rows beyond the end are replaced by others, whose sums are never read.
template <int M, int N, int AHEAD>
__device__ __forceinline__ void adapt_down(
    const bf16* __restrict__ x,  // [T, K]
    const bf16* __restrict__ a,  // [k, K] of a row stride
    bf16* __restrict__ low,      // [T, k]
    int rows,
    int columns,  // K
    int inner,    // k
    long long stride
) {
    __shared__ float2 sums[DOWN_WARPS][M * N / 2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = lane % 4 * 8;
    const int rank = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS, across = (inner + N - 1) / N;
    const int first = tile / across * M, column = tile % across * N;
    const int steps = (columns + DEPTH - 1) / DEPTH, part = rank * DOWN_WARPS + warp;
    const int begin = part * steps / PARTS, end = (part + 1) * steps / PARTS;
    const bf16 *x_rows[M / 8], *a_rows[N / 8];
#pragma unroll
    for (int i = 0; i < M / 8; ++i) x_rows[i] = x + static_cast<long long>(min(first + lane / 4 + 8 * i, rows - 1)) * columns + own;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) a_rows[i] = a + min(column + lane / 4 + 8 * i, inner - 1) * stride + own;
    uint4 x_ahead[AHEAD][M / 8], a_ahead[AHEAD][N / 8];
#pragma unroll
    for (int s = 0; s < AHEAD; ++s)
        if (begin + s < end) load_step(a_ahead[s], a_rows, begin + s, columns);
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s)
        if (begin + s < end) load_step(x_ahead[s], x_rows, begin + s, columns);
    float sum[M / 16][N / 8][4] = {};
    for (int base = begin; base < end; base += AHEAD) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            if (base + s >= end) continue;
#pragma unroll
            for (int i = 0; i < M / 16; ++i) {
                const uint4 top = x_ahead[s][2 * i], bottom = x_ahead[s][2 * i + 1];
#pragma unroll
                for (int j = 0; j < N / 8; ++j) multiply(sum[i][j], top.x, bottom.x, top.y, bottom.y, a_ahead[s][j].x, a_ahead[s][j].y);
#pragma unroll
                for (int j = 0; j < N / 8; ++j) multiply(sum[i][j], top.z, bottom.z, top.w, bottom.w, a_ahead[s][j].z, a_ahead[s][j].w);
            }
            const int next = base + s + AHEAD;
            if (next < end) load_step(a_ahead[s], a_rows, next, columns), load_step(x_ahead[s], x_rows, next, columns);
        }
    }
#pragma unroll
    for (int i = 0; i < M / 8; ++i)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            sums[warp][(lane / 4 + 8 * i) * (N / 2) + 4 * j + lane % 4] = {sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]};
    __syncthreads();
    for (int pair = threadIdx.x; pair < M * N / 2; pair += DOWN_THREADS) {
        float2 all = sums[0][pair];
#pragma unroll
        for (int w = 1; w < DOWN_WARPS; ++w) add(all, sums[w][pair]);
        sums[0][pair] = all;
    }
    sync_cluster();
    constexpr int SHARE = M * N / 2 / SPLITS;
    static_assert(SHARE <= DOWN_THREADS, "a pair each");
    const int pair = rank * SHARE + threadIdx.x;
    if (threadIdx.x < SHARE) {
        float2 of_ranks[SPLITS];
#pragma unroll
        for (int r = 0; r < SPLITS; ++r) of_ranks[r] = load_peer(&sums[0][pair], r);
        float2 all = of_ranks[0];
#pragma unroll
        for (int r = 1; r < SPLITS; ++r) add(all, of_ranks[r]);
        const int row = first + pair / (N / 2), at = column + pair % (N / 2) * 2;
        Pack<bf16, 2> out;
        narrow(all.x, all.y, out.at[0], out.at[1]);
        if (row < rows && at < inner) store(low + static_cast<long long>(row) * inner + at, out);
    }
    sync_cluster();  // no block may end while another reads its memory
}

// low B^T for a warp's M rows and UP_COLUMNS columns, loading STEPS steps at once, and the existing values of `out`. A lane's sums are of the rows
// lane / 4 + 8 i and of 8 consecutive columns. The preceding kernel is `adapt_down`: out and B are older than it.
template <int M, int STEPS>
struct Raised {
    Pack<bf16, 8> out[M / 8];
    float sum[M / 16][4][4];
    int first, column, rows, columns;

    __device__ __forceinline__ Raised(
        const bf16* __restrict__ low,  // [T, k]
        const bf16* __restrict__ b,    // [N, k]
        const bf16* from,              // [T, N]
        int rows,
        int columns,  // N
        int inner,    // k
        int stacked   // number of warps per block along the rows; a divisor of UP_WARPS
    ) : sum{}, rows(rows), columns(columns) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, beside = UP_WARPS / stacked;
        const int across = (columns + beside * UP_COLUMNS - 1) / (beside * UP_COLUMNS);
        const int left = (blockIdx.x % across * beside + warp % beside) * UP_COLUMNS;
        first = (blockIdx.x / across * stacked + warp / beside) * M + lane / 4, column = left + lane % 4 * 8;
        const auto load_four = [&](const bf16* from, int row, int step) {
            const int at = step * UP_DEPTH + lane % 4 * 4;
            return at < inner ? *reinterpret_cast<const uint2*>(from + static_cast<unsigned>(row * inner + at)) : uint2{0, 0};
        };
        uint2 weights[STEPS][4];
        const auto load_weights = [&](int base) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
#pragma unroll
                for (int t = 0; t < 4; ++t)  // so that a lane's outputs in the four tiles are consecutive
                    weights[s][t] = load_four(b, min(left + lane / 8 * 8 + t * 2 + lane / 4 % 2, columns - 1), base + s);
        };
        load_weights(0);
#pragma unroll
        for (int i = 0; i < M / 8; ++i)
            if (is_there(i)) out[i] = load<bf16, 8>(from + place(i));
        wait_for_inputs();
        const int steps = (inner + UP_DEPTH - 1) / UP_DEPTH;
#pragma unroll 1
        for (int base = 0; base < steps; base += STEPS) {
            if (base > 0) load_weights(base);
#pragma unroll
            for (int i = 0; i < M / 16; ++i) {
                uint2 top[STEPS], bottom[STEPS];
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    top[s] = load_four(low, min(first + 16 * i, rows - 1), base + s);
                    bottom[s] = load_four(low, min(first + 16 * i + 8, rows - 1), base + s);
                }
#pragma unroll
                for (int s = 0; s < STEPS; ++s)
#pragma unroll
                    for (int t = 0; t < 4; ++t)
                        multiply(sum[i][t], top[s].x, bottom[s].x, top[s].y, bottom[s].y, weights[s][t].x, weights[s][t].y);
            }
        }
#pragma unroll
        for (int i = 0; i < M / 8; ++i)
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const float (&two)[4] = sum[i / 2][t];
                narrow(widen(out[i].at[2 * t]) + two[i % 2 * 2], widen(out[i].at[2 * t + 1]) + two[i % 2 * 2 + 1], out[i].at[2 * t],
                       out[i].at[2 * t + 1]);
            }
    }

    __device__ __forceinline__ bool is_there(int i) const { return first + 8 * i < rows && column < columns; }
    __device__ __forceinline__ long long place(int i) const { return static_cast<long long>(first + 8 * i) * columns + column; }
};

// out += low B^T, rounded once.
template <int M, int STEPS>
__device__ __forceinline__ void adapt_up(const bf16* low, const bf16* b, bf16* out /* [T, N] */, int rows, int columns, int inner, int stacked) {
    const Raised<M, STEPS> raised(low, b, out, rows, columns, inner, stacked);
#pragma unroll
    for (int i = 0; i < M / 8; ++i)
        if (raised.is_there(i)) store(out + raised.place(i), raised.out[i]);
}

// act = silu(gate) up of out + low B^T with columns g0 u0 g1 u1 .., rounded before and after, as swiglu.cu computes it.
template <int M, int STEPS>
__device__ __forceinline__ void adapt_silu_mul(
    const bf16* low, const bf16* b, const bf16* out /* [T, N] */, bf16* __restrict__ act /* [T, N / 2] */, int rows, int columns, int inner,
    int stacked
) {
    const Raised<M, STEPS> raised(low, b, out, rows, columns, inner, stacked);
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
        Pack<bf16, 4> four;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float gate = widen(raised.out[i].at[2 * j]), up = widen(raised.out[i].at[2 * j + 1]);
            narrow(gate * sigmoid(gate) * up, four.at[j]);
        }
        if (raised.is_there(i)) store(act + raised.place(i) / 2, four);
    }
}

// Clusters need sm_90: on older GPUs these kernels do nothing, and the host uses cuBLASLt instead.
#if __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#define IN_CLUSTERS(...) __VA_ARGS__
#else
#define CLUSTER
#define IN_CLUSTERS(...)
#endif
#define ADAPT_DOWN(M, N, AHEAD)                                                                                      \
    extern "C" __global__ void CLUSTER __launch_bounds__(DOWN_THREADS, 2) adapt_down_##M##x##N(                      \
        const bf16* x, const bf16* a, bf16* low, long long rows, long long columns, long long inner, long long stride) { \
        IN_CLUSTERS(adapt_down<M, N, AHEAD>(x, a, low, rows, columns, inner, stride);)                              \
    }
#define ADAPT_UP(M, STEPS, BLOCKS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(UP_THREADS, BLOCKS) adapt_up_##M##x##STEPS(                                 \
        const bf16* low, const bf16* b, bf16* out, long long rows, long long columns, long long inner,              \
        long long stacked) {                                                                                        \
        IN_CLUSTERS(adapt_up<M, STEPS>(low, b, out, rows, columns, inner, stacked);)                                \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(UP_THREADS, BLOCKS) adapt_silu_mul_##M##x##STEPS(                           \
        const bf16* low, const bf16* b, const bf16* out, bf16* act, long long rows, long long columns, long long inner, \
        long long stacked) {                                                                                        \
        IN_CLUSTERS(adapt_silu_mul<M, STEPS>(low, b, out, act, rows, columns, inner, stacked);)                     \
    }

ADAPT_DOWN(16, 16, 4)
ADAPT_DOWN(16, 32, 3)
ADAPT_DOWN(16, 48, 2)
ADAPT_DOWN(32, 16, 3)
ADAPT_DOWN(32, 32, 2)
ADAPT_DOWN(32, 48, 1)
ADAPT_UP(16, 1, 4)
ADAPT_UP(16, 2, 4)
ADAPT_UP(16, 4, 4)
ADAPT_UP(32, 1, 4)
ADAPT_UP(32, 2, 4)
ADAPT_UP(32, 4, 3)
