// out = x w^T in float32 with a fixed order of sums: the reference that exact GEMMs are compared with.
//
// bf16: one warpgroup multiplies 64 rows of x and 64 of w; each instruction adds sixteen values of K to the sums, from first to last. This is the
// order of a GEMM without split K, and does not depend on tiles. It is for trials, and slow. float32: every element is a chain of fused multiply-adds
// over K. Also the sum of two parts of K, of which exact GEMMs with a long K consist.
#include "hopper.cuh"
#include "scalar.cuh"

constexpr int TILE = 64;      // rows of x and of w per block
constexpr int THREADS = 128;  // of bf16
constexpr int SIDE = 16;      // threads along each side of a tile in float32
constexpr int DEPTH = 16;     // values of K at once in float32
constexpr int SUM_THREADS = 256;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

MULTIPLY(64, 32, 32, 33, 34)

// Copies rows first .. first + 64 of a matrix, 64 values of K, to shared memory, swizzled as by TMA; zeros beyond the matrix.
__device__ __forceinline__ void stage(
    unsigned char* to, const bf16* __restrict__ from, long long leading, long long first, long long rows, long long k,
    long long end
) {
    const bool is_aligned = leading % 8 == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0;
    for (int i = threadIdx.x; i < TILE * 8; i += THREADS) {
        const int row = i / 8, eight = i % 8;
        const long long at = k + eight * 8;
        const bf16* own = from + (first + row) * leading + at;
        Pack<bf16, 8> values = {};
        if (first + row < rows && is_aligned && at + 8 <= end) {
            values = load<bf16, 8>(own);
        } else if (first + row < rows) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (at + j < end) values.at[j] = own[j];
        }
        *reinterpret_cast<Pack<bf16, 8>*>(to + row * ROW_BYTES + (eight ^ row % 8) * 16) = values;
    }
}

__device__ __forceinline__ void product(
    const bf16* x, const bf16* w, float* out, long long x_leading, long long w_leading, long long rows, long long features,
    long long k
) {
    __shared__ alignas(1024) unsigned char stages[2][TILE * ROW_BYTES];
    const long long row_tiles = (rows + TILE - 1) / TILE;
    const long long row = blockIdx.x % row_tiles * TILE, feature = blockIdx.x / row_tiles * TILE;
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
    for (long long step = 0; step < k; step += Bf16::STEP) {
        stage(stages[0], x, x_leading, row, rows, step, k);
        stage(stages[1], w, w_leading, feature, features, step, k);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        const unsigned long long a = descriptor(shared_address(stages[0])), b = descriptor(shared_address(stages[1]));
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < ROW_BYTES / 32; ++i) multiply(Bf16{}, d, a + 2 * i, b + 2 * i, 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_products<0>();
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const long long at = row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        const long long column = feature + threadIdx.x % 4 * 2 + i / 4 * 8 + i % 2;
        if (at < rows && column < features) out[at * features + column] = d[i];
    }
}

#else  // other GPUs: never launched there

__device__ __forceinline__ void product(
    const bf16*, const bf16*, float*, long long, long long, long long, long long, long long
) {}

#endif

// x [R, K], w [N, K], out [R, N], contiguous.
extern "C" __global__ void __launch_bounds__(THREADS) exact_product_bf16(
    const bf16* x, const bf16* w, float* out, long long x_leading, long long w_leading, long long rows, long long features,
    long long k
) {
    product(x, w, out, x_leading, w_leading, rows, features, k);
}

// out = x w^T + bias, or adds that to out; a thread has rows and features at distances of SIDE.
extern "C" __global__ void __launch_bounds__(SIDE * SIDE) exact_product_f32(
    const float* __restrict__ x,     // [R, K]
    const float* __restrict__ w,     // [N, K]
    const float* __restrict__ bias,  // [N] or null
    float* __restrict__ out,         // [R, N]
    long long x_leading, long long w_leading, long long out_leading, long long rows, long long features, long long k,
    long long adds
) {
    constexpr int EACH = TILE / SIDE;
    __shared__ float xs[DEPTH][TILE + 1], ws[DEPTH][TILE + 1];
    const long long row_tiles = (rows + TILE - 1) / TILE;
    const long long row = blockIdx.x % row_tiles * TILE, feature = blockIdx.x / row_tiles * TILE;
    const int own_row = threadIdx.x / SIDE, own_feature = threadIdx.x % SIDE;
    float sums[EACH][EACH] = {};
    for (long long step = 0; step < k; step += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += SIDE * SIDE) {
            const int at = i / DEPTH, deep = i % DEPTH;
            const bool is_inside = step + deep < k;
            xs[deep][at] = is_inside && row + at < rows ? x[(row + at) * x_leading + step + deep] : 0.0f;
            ws[deep][at] = is_inside && feature + at < features ? w[(feature + at) * w_leading + step + deep] : 0.0f;
        }
        __syncthreads();
        const int depth = static_cast<int>(min(static_cast<long long>(DEPTH), k - step));
        for (int deep = 0; deep < depth; ++deep) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
#pragma unroll
                for (int j = 0; j < EACH; ++j)
                    sums[i][j] = fmaf(xs[deep][own_row + i * SIDE], ws[deep][own_feature + j * SIDE], sums[i][j]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const long long at = row + own_row + i * SIDE, column = feature + own_feature + j * SIDE;
            if (at >= rows || column >= features) continue;
            float& to = out[at * out_leading + column];
            const float sum = bias ? __fadd_rn(sums[i][j], bias[column]) : sums[i][j];
            to = adds ? __fadd_rn(to, sum) : sum;
        }
    }
}

// out = first + second + bias, rounded once; eight columns per thread.
template <typename T>
__device__ __forceinline__ void sum_parts(
    const float* __restrict__ parts, const T* __restrict__ bias, T* __restrict__ out, long long rows, long long features, long long leading
) {
    wait_for_inputs();
    const long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= rows * features) return;
    const long long row = at / features, column = at % features;
    const Pack<float, 8> first = load<float, 8>(parts + at), second = load<float, 8>(parts + rows * features + at);
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sums[i] = __fadd_rn(first.at[i], second.at[i]);
        if (bias) sums[i] = __fadd_rn(sums[i], widen(bias[column + i]));
    }
    Pack<T, 8> values;
    narrow(sums, values);
    store(out + row * leading + column, values);
}

#define EXACT_SUM(NAME, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(SUM_THREADS) NAME(                                                 \
        const float* parts, /* [2, R, N] */                                                                         \
        const T* bias,      /* [N] or null */                                                                       \
        T* out,             /* [R, N] of a row stride */                                                            \
        long long rows, long long features, long long leading) {                                                    \
        sum_parts<T>(parts, bias, out, rows, features, leading);                                                    \
    }

EXACT_SUM(exact_sum_bf16, bf16)
EXACT_SUM(exact_sum_f32, float)
