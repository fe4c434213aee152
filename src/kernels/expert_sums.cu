// Sums over a token's experts.
//
// combine: the weighted sum of a token's choices, in order, plus the shared expert's row if there is one. gather: that sum in float32, for rows at
// given places; for training.
#include "scalar.cuh"

// The shared expert: its output, its input and its gate; or nulls.
template <typename T>
struct SharedExpert {
    const T* rows;  // [T, D]
    const T* x;     // [T, D]
    const T* gate;  // [D]; or null, where it has none
};

// y = the weighted sum of a token's rows, plus the shared expert's row times the sigmoid of its gate if it has one, rounded once; choices of other
// ranks' experts are skipped.
template <typename T, int N>
__device__ __forceinline__ void combine(
    const T* __restrict__ rows, const int* __restrict__ experts, const float* __restrict__ weights, T* __restrict__ y, long long dim,
    int choices, int first_expert, int own_experts, const SharedExpert<T>& shared
) {
    wait_for_inputs();
    const long long first = blockIdx.x * static_cast<long long>(choices);
    float share = 1.0f;
    if (shared.gate) {
        share = 0.0f;
        for (int i = threadIdx.x; i < dim; i += blockDim.x) share += widen(shared.x[blockIdx.x * dim + i]) * widen(shared.gate[i]);
        share = 1.0f / (1.0f + expf(-block_sum(share)));
    }
    for (int i = threadIdx.x; i < dim / N; i += blockDim.x) {
        float sums[N] = {};
#pragma unroll 8
        for (int choice = 0; choice < choices; ++choice) {
            const int expert = experts[first + choice] - first_expert;
            if (expert < 0 || expert >= own_experts) continue;
            const float weight = weights[first + choice];
            const auto row = load<T, N>(rows + (first + choice) * dim + i * N);
#pragma unroll
            for (int j = 0; j < N; ++j) sums[j] += widen(row.at[j]) * weight;
        }
        if (shared.rows) {
            const auto row = load<T, N>(shared.rows + blockIdx.x * dim + i * N);
#pragma unroll
            for (int j = 0; j < N; ++j) sums[j] += widen(row.at[j]) * share;
        }
        Pack<T, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j) narrow(sums[j], out.at[j]);
        store(y + blockIdx.x * dim + i * N, out);
    }
}

// y = the sum of the rows of a token's choices, in order, each multiplied by its weight if there are weights.
template <typename T, int N>
__device__ __forceinline__ void gather(
    const T* __restrict__ rows, const long long* __restrict__ places, const float* __restrict__ weights, float* __restrict__ y,
    long long dim, int choices
) {
    wait_for_inputs();
    const long long first = blockIdx.x * static_cast<long long>(choices);
    for (int i = threadIdx.x; i < dim / N; i += blockDim.x) {
        float sums[N] = {};
#pragma unroll 8
        for (int choice = 0; choice < choices; ++choice) {
            const float weight = weights ? weights[first + choice] : 1.0f;
            const auto row = load<T, N>(rows + places[first + choice] * dim + i * N);
#pragma unroll
            for (int j = 0; j < N; ++j) sums[j] = __fadd_rn(sums[j], __fmul_rn(widen(row.at[j]), weight));
        }
        Pack<float, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j) out.at[j] = sums[j];
        store(y + blockIdx.x * dim + i * N, out);
    }
}

#define COMBINE(NAME, T, N)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                          \
        const T* rows, const int* experts, const float* weights, T* y, long long dim, long long choices,             \
        long long first_expert, long long own_experts, const T* shared, const T* x, const T* gate                    \
    ) {                                                                                                              \
        combine<T, N>(rows, experts, weights, y, dim, static_cast<int>(choices), static_cast<int>(first_expert),     \
                      static_cast<int>(own_experts), {shared, x, gate});                                             \
    }

COMBINE(experts_combine_f32_x1, float, 1)
COMBINE(experts_combine_f32_x4, float, 4)
COMBINE(experts_combine_bf16_x1, bf16, 1)
COMBINE(experts_combine_bf16_x8, bf16, 8)

#define GATHER(NAME, T, N)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                      \
        const T* rows, const long long* places, const float* weights, float* y, long long dim, long long choices \
    ) {                                                                                                          \
        gather<T, N>(rows, places, weights, y, dim, static_cast<int>(choices));                                  \
    }

GATHER(experts_gather_f32_x1, float, 1)
GATHER(experts_gather_f32_x4, float, 4)
GATHER(experts_gather_bf16_x1, bf16, 1)
GATHER(experts_gather_bf16_x8, bf16, 8)
