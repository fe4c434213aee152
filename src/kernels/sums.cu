// Sums in a fixed order, which atomics would not have: rows by index, and the columns of partial sums.
#include "scalar.cuh"

// to[index[i]] += sum of from[order[i]] over each run of equal indices: one block per run, its rows in order.
template <typename From, typename To, int N>
__device__ __forceinline__ void add_rows(
    const From* __restrict__ from,         // [R, D]
    const long long* __restrict__ index,   // [R], ascending
    const long long* __restrict__ order,   // [R], the row of `from` for each index
    To* __restrict__ to,                   // [.., D]
    long long rows,
    long long dim
) {
    constexpr int UNROLL = 4;  // rows in flight
    const long long first = blockIdx.x, own = index[first];
    if (first > 0 && index[first - 1] == own) return;
    for (long long column = threadIdx.x * N; column < dim; column += blockDim.x * N) {
        float sums[N] = {};
        for (long long at = first; at < rows && index[at] == own; at += UNROLL) {
            Pack<From, N> part[UNROLL];
            bool is_own[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                is_own[u] = at + u < rows && index[at + u] == own;
                if (is_own[u]) part[u] = load<From, N>(from + order[at + u] * dim + column);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (!is_own[u]) break;
#pragma unroll
                for (int k = 0; k < N; ++k) sums[k] += widen(part[u].at[k]);
            }
        }
        auto total = load<To, N>(to + own * dim + column);
#pragma unroll
        for (int k = 0; k < N; ++k) narrow(widen(total.at[k]) + sums[k], total.at[k]);
        store(to + own * dim + column, total);
    }
}

// to[d] += sum over rows of from[., d]: 32 columns per block, in 8 groups of rows each.
template <typename To>
__device__ __forceinline__ void add_columns(
    const float* __restrict__ from,  // [R, D]
    To* __restrict__ to,             // [D]
    long long rows,
    long long dim
) {
    constexpr int RUNS = 8, COLUMNS = 32;
    __shared__ float runs[RUNS][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, run = threadIdx.x / COLUMNS;
    const long long column = blockIdx.x * static_cast<long long>(COLUMNS) + lane;
    float sum = 0.0f;
    if (column < dim) {
#pragma unroll 8
        for (long long r = run; r < rows; r += RUNS) sum += from[r * dim + column];
    }
    runs[run][lane] = sum;
    __syncthreads();
    if (run > 0 || column >= dim) return;
    float total = widen(to[column]);
    for (int r = 0; r < RUNS; ++r) total += runs[r][lane];
    narrow(total, to[column]);
}

#define ADD_ROWS(SUFFIX, FROM, TO, N)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) add_rows_##SUFFIX(                                            \
        const FROM* from, const long long* index, const long long* order, TO* to, long long rows, long long dim) {  \
        add_rows<FROM, TO, N>(from, index, order, to, rows, dim);                                                   \
    }
#define ADD_COLUMNS(SUFFIX, TO)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) add_columns_##SUFFIX(                                         \
        const float* from, TO* to, long long rows, long long dim) {                                                 \
        add_columns(from, to, rows, dim);                                                                           \
    }

ADD_ROWS(f32_f32_x1, float, float, 1)
ADD_ROWS(f32_f32_x4, float, float, 4)
ADD_ROWS(f32_bf16_x1, float, bf16, 1)
ADD_ROWS(f32_bf16_x4, float, bf16, 4)
ADD_ROWS(bf16_f32_x1, bf16, float, 1)
ADD_ROWS(bf16_f32_x4, bf16, float, 4)
ADD_ROWS(bf16_bf16_x1, bf16, bf16, 1)
ADD_ROWS(bf16_bf16_x4, bf16, bf16, 4)
ADD_COLUMNS(f32, float)
ADD_COLUMNS(bf16, bf16)
