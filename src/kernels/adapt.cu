// An adapter beside a product of few rows: low = x A^T, out += low B^T (arXiv 2106.09685), in bf16 with sums in float32 on tensor
// cores. T rows, K columns of x, N of out, k of low.
//
// Both are tiny and wait for memory and launches alone. K is split over a cluster of blocks, which add their sums up through
// one another's shared memory in a fixed order; what a kernel reads that is older than the kernel before it (A; B and out) is
// under way while that one ends. Chunks, splits and the order within them depend on K alone, so a row's bits do not depend on
// the rows beside it.
#include "cluster.cuh"
#include "mma.cuh"
#include "scalar.cuh"

constexpr int THREADS = 128;
constexpr int CHUNK = 64;  // columns of a stage: 8 pieces of 16 bytes a row
constexpr int SPLITS = 8;  // blocks of a cluster, each with an equal part of the chunks

// Rows of a matrix from one on. Those that are not there are zeros, as are columns behind the last.
struct Rows {
    const bf16* at;
    long long stride;
    int first, end;
};

// Where a piece of a row stands in a stage, so that eight rows' pieces of one column lie in different banks.
__device__ __forceinline__ bf16* piece_of(bf16* stage, int row, int piece) {
    return stage + row * CHUNK + (piece ^ (row & 7)) * 8;
}

// Of 32 columns the one whose row of w is the `row`th in a stage: a thread's outputs in four tiles of 8 are then neighbours.
__device__ __forceinline__ int spread(int row) { return (row & ~31) + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2; }

// N rows' columns column .. + CHUNK to a stage, in the background.
template <int N, bool SPREAD>
__device__ __forceinline__ void load_rows(bf16* stage, const Rows& from, int column, int columns) {
    const int piece = threadIdx.x % 8;
    const bool is_in = column + 8 * piece < columns;
#pragma unroll
    for (int row = threadIdx.x / 8; row < N; row += THREADS / 8) {
        const int source = from.first + (SPREAD ? spread(row) : row);
        const bool is_there = is_in && source < from.end;
        const bf16* at = is_there ? from.at + source * from.stride + column + 8 * piece : from.at;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(piece_of(stage, row, piece))),
                     "l"(at), "r"(is_there ? 16 : 0)
                     : "memory");
    }
}

template <int N>
__device__ __forceinline__ void load_matrices(unsigned (&to)[N], const bf16* row) {
    if constexpr (N == 4)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(row)));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1])
                     : "r"(shared_address(row)));
}

// One block's [M, N] of x w^T: a warp has 16 rows, and beside others in its row of warps TILES times 8 columns. A lane's sums
// are of rows lane / 4 and + 8, columns 8 t + lane % 4 * 2 and + 1.
template <int M, int N, int STAGES, bool SPREAD>
struct Product {
    static constexpr int ACROSS = THREADS / 32 / (M / 16);
    static constexpr int TILES = N / ACROSS / 8;
    static constexpr int STAGE = (M + N) * CHUNK;
    float sum[TILES][4];

    __device__ __forceinline__ static int row() { return threadIdx.x / 32 / ACROSS * 16 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ static int column() { return threadIdx.x / 32 % ACROSS * TILES * 8; }

    // Chunks begin .. end of the columns. Weights come before the kernel before has ended, x after.
    __device__ __forceinline__ Product(bf16* stages, const Rows& x, const Rows& w, int columns, int begin, int end) : sum{} {
#pragma unroll
        for (int s = 0; s < STAGES; ++s)
            if (begin + s < end) load_rows<N, SPREAD>(stages + s * STAGE + M * CHUNK, w, (begin + s) * CHUNK, columns);
        wait_for_inputs();
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            if (begin + s < end) load_rows<M, false>(stages + s * STAGE, x, (begin + s) * CHUNK, columns);
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        bf16* stage = stages;
        for (int chunk = begin; chunk < end; ++chunk) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            __syncthreads();
            multiply_stage(stage);
            const int next = chunk + STAGES;
            if (next < end) {
                __syncthreads();
                load_rows<N, SPREAD>(stage + M * CHUNK, w, next * CHUNK, columns);
                load_rows<M, false>(stage, x, next * CHUNK, columns);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            stage = stage == stages + (STAGES - 1) * STAGE ? stages : stage + STAGE;
        }
    }

    __device__ __forceinline__ void multiply_stage(bf16* stage) {
        constexpr int PAIR = TILES % 2 ? 1 : 2;  // tiles whose columns come at once
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 / ACROSS * 16;
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) {
            unsigned a[4], b[2 * PAIR];
            load_matrices(a, piece_of(stage, first + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int t = 0; t < TILES; t += PAIR) {
                const int row = column() + 8 * t + lane % 8 + (PAIR == 2 ? lane / 16 * 8 : 0);
                load_matrices(b, piece_of(stage + M * CHUNK, row, 2 * k + lane / 8 % 2));
#pragma unroll
                for (int p = 0; p < PAIR; ++p)
                    multiply(sum[t + p], a[0], a[1], a[2], a[3], b[2 * p], b[2 * p + 1]);
            }
        }
    }
};

// What stands at `at` in the shared memory of a block of the cluster.
__device__ __forceinline__ float2 load_peer(const float* at, int rank) {
    float2 out;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(out.x), "=f"(out.y)
                 : "r"(peer_address(shared_address(at), rank))
                 : "memory");
    return out;
}

// low = x A^T. A cluster has M rows and N columns.
template <int M, int N>
__device__ __forceinline__ void adapt_down(
    const bf16* __restrict__ x,  // [T, K]
    const bf16* __restrict__ a,  // [k, K] of a row stride
    bf16* __restrict__ low,      // [T, k]
    int rows,
    int columns,  // K
    int inner,    // k
    long long stride
) {
    using Sums = Product<M, N, 4, false>;
    __shared__ alignas(128) bf16 stages[4 * Sums::STAGE];
    static_assert(M * N * 2 <= 4 * Sums::STAGE, "the sums go where the stages were");
    const int rank = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS, across = (inner + N - 1) / N;
    const int first = tile / across * M, column = tile % across * N;
    const int chunks = (columns + CHUNK - 1) / CHUNK;
    const Sums product(stages, {x, columns, first, rows}, {a, stride, column, inner}, columns, rank * chunks / SPLITS,
                       (rank + 1) * chunks / SPLITS);
    __syncthreads();
    float* sums = reinterpret_cast<float*>(stages);  // [M, N]
#pragma unroll
    for (int t = 0; t < Sums::TILES; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (Sums::row() + 8 * half) * N + Sums::column() + 8 * t + threadIdx.x % 4 * 2;
            *reinterpret_cast<float2*>(sums + at) = {product.sum[t][2 * half], product.sum[t][2 * half + 1]};
        }
    sync_cluster();
    const int pair = rank * (M * N / 2 / SPLITS) + threadIdx.x;
    if (threadIdx.x < M * N / 2 / SPLITS) {
        float2 parts[SPLITS], sum{};
#pragma unroll
        for (int r = 0; r < SPLITS; ++r) parts[r] = load_peer(sums + 2 * pair, r);
#pragma unroll
        for (int r = 0; r < SPLITS; ++r) sum.x += parts[r].x, sum.y += parts[r].y;
        const int row = first + 2 * pair / N, at = column + 2 * pair % N;
        Pack<bf16, 2> out;
        narrow(sum.x, out.at[0]), narrow(sum.y, out.at[1]);
        if (row < rows && at < inner) store(low + static_cast<long long>(row) * inner + at, out);
    }
    sync_cluster();  // nobody's memory goes while another reads it
}

// out += low B^T, rounded once. The kernel before is `adapt_down`: out and B are older than it.
template <int M, int N>
__device__ __forceinline__ void adapt_up(
    const bf16* __restrict__ low,  // [T, k]
    const bf16* __restrict__ b,    // [N, k]
    bf16* out,                     // [T, N]
    int rows,
    int columns,  // N
    int inner     // k
) {
    using Sums = Product<M, N, 3, true>;
    __shared__ alignas(128) bf16 stages[3 * Sums::STAGE];
    constexpr int GROUPS = Sums::TILES / 4;  // of 32 columns, 8 of them a lane's
    const int across = (columns + N - 1) / N, first = blockIdx.x / across * M, column = blockIdx.x % across * N;
    const auto place = [&](int group, int half) {  // of a lane's 8 columns of a row; null behind the last
        const int row = first + Sums::row() + 8 * half;
        const int at = column + Sums::column() + 32 * group + threadIdx.x % 4 * 8;
        return row < rows && at < columns ? out + static_cast<long long>(row) * columns + at : nullptr;
    };
    Pack<bf16, 8> kept[GROUPS][2];
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i)
        if (const bf16* at = place(i / 2, i % 2)) kept[i / 2][i % 2] = load<bf16, 8>(at);
    const Sums product(stages, {low, inner, first, rows}, {b, inner, column, columns}, inner, 0,
                       (inner + CHUNK - 1) / CHUNK);
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i) {
        auto& sum = kept[i / 2][i % 2];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            narrow(widen(sum.at[j]) + product.sum[i / 2 * 4 + j / 2][i % 2 * 2 + j % 2], sum.at[j]);
        if (bf16* at = place(i / 2, i % 2)) store(at, sum);
    }
}

// Clusters begin with sm_90: before it these kernels do nothing, and the host takes cuBLASLt's products.
#if __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(SPLITS, 1, 1)
#define IN_CLUSTERS(...) __VA_ARGS__
#else
#define CLUSTER
#define IN_CLUSTERS(...)
#endif
#define ADAPT_DOWN(M)                                                                                                \
    extern "C" __global__ void CLUSTER __launch_bounds__(THREADS) adapt_down_##M(                                   \
        const bf16* x, const bf16* a, bf16* low, long long rows, long long columns, long long inner, long long stride) { \
        IN_CLUSTERS(adapt_down<M, 32>(x, a, low, rows, columns, inner, stride);)                                    \
    }
#define ADAPT_UP(M)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) adapt_up_##M(                                             \
        const bf16* low, const bf16* b, bf16* out, long long rows, long long columns, long long inner) {            \
        IN_CLUSTERS(adapt_up<M, 64>(low, b, out, rows, columns, inner);)                                            \
    }

ADAPT_DOWN(16)
ADAPT_DOWN(32)
ADAPT_DOWN(64)
ADAPT_UP(32)
ADAPT_UP(64)
