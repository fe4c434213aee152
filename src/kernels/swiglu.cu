// y = silu(gate) * up on the interleaved layout g0 u0 g1 u1 .., one pass, rounded once. The backward makes y again on its way:
// the next weight's gradient needs it.
#include "fp8.cuh"
#include "scalar.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// n outputs, N a thread at once.
template <typename T, int N>
__device__ __forceinline__ void forward(const T* __restrict__ gate_up, T* __restrict__ y, long long n) {
    wait_for_inputs();
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n / N; i += stride) {
        const auto pairs = reinterpret_cast<const Pack<T, 2 * N>*>(gate_up)[i];
        Pack<T, N> out;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float gate = widen(pairs.at[2 * k]);
            narrow(gate * sigmoid(gate) * widen(pairs.at[2 * k + 1]), out.at[k]);
        }
        reinterpret_cast<Pack<T, N>*>(y)[i] = out;
    }
}

// d_gate_up may be gate_up itself: every thread reads its pairs before it writes them.
template <typename T, int N>
__device__ __forceinline__ void backward(
    const T* __restrict__ dy, const T* gate_up, T* d_gate_up, T* __restrict__ y, long long n
) {
    wait_for_inputs();
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n / N; i += stride) {
        const auto pairs = reinterpret_cast<const Pack<T, 2 * N>*>(gate_up)[i];
        const auto grads = reinterpret_cast<const Pack<T, N>*>(dy)[i];
        Pack<T, 2 * N> out;
        Pack<T, N> act;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float gate = widen(pairs.at[2 * k]), up = widen(pairs.at[2 * k + 1]), grad = widen(grads.at[k]);
            const float share = sigmoid(gate), silu = gate * share;
            narrow(grad * up * (share + silu * (1.0f - share)), out.at[2 * k]);
            narrow(grad * silu, out.at[2 * k + 1]);
            narrow(silu * up, act.at[k]);
        }
        reinterpret_cast<Pack<T, N>*>(y)[i] = act;
        reinterpret_cast<Pack<T, 2 * N>*>(d_gate_up)[i] = out;
    }
}

// The same of y times a weight that each row has: y is weighted, and a row's weight gets its gradient, the sum of y dy without it. A
// block has a row.
template <typename T, int N>
__device__ __forceinline__ void weighted_backward(
    const T* __restrict__ dy, const float* __restrict__ weights, const T* gate_up, T* d_gate_up, T* __restrict__ y,
    float* __restrict__ d_weights, long long columns
) {
    wait_for_inputs();
    const long long first = blockIdx.x * (columns / N);
    const float weight = weights[blockIdx.x];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns / N; i += blockDim.x) {
        const auto pairs = reinterpret_cast<const Pack<T, 2 * N>*>(gate_up)[first + i];
        const auto grads = reinterpret_cast<const Pack<T, N>*>(dy)[first + i];
        Pack<T, 2 * N> out;
        Pack<T, N> act;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float gate = widen(pairs.at[2 * k]), up = widen(pairs.at[2 * k + 1]), grad = widen(grads.at[k]);
            const float share = sigmoid(gate), silu = gate * share, weighted = grad * weight;
            narrow(weighted * up * (share + silu * (1.0f - share)), out.at[2 * k]);
            narrow(weighted * silu, out.at[2 * k + 1]);
            narrow(silu * up * weight, act.at[k]);
            sum += silu * up * grad;
        }
        reinterpret_cast<Pack<T, N>*>(y)[first + i] = act;
        reinterpret_cast<Pack<T, 2 * N>*>(d_gate_up)[first + i] = out;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_weights[blockIdx.x] = sum;
}

#define SWIGLU(SUFFIX, T, N)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) swiglu_forward_##SUFFIX(const T* gate_up, T* y, long long n) { \
        forward<T, N>(gate_up, y, n);                                                                               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        swiglu_backward_##SUFFIX(const T* dy, const T* gate_up, T* d_gate_up, T* y, long long n) {                  \
        backward<T, N>(dy, gate_up, d_gate_up, y, n);                                                               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) swiglu_weighted_backward_##SUFFIX(                            \
        const T* dy, const float* weights, const T* gate_up, T* d_gate_up, T* y, float* d_weights, long long columns \
    ) {                                                                                                             \
        weighted_backward<T, N>(dy, weights, gate_up, d_gate_up, y, d_weights, columns);                            \
    }

SWIGLU(f32_x1, float, 1)
SWIGLU(f32_x2, float, 2)
SWIGLU(bf16_x1, bf16, 1)
SWIGLU(bf16_x4, bf16, 4)

constexpr int MOST = 4;  // packs of a row that one thread has

// Rows of F outputs, each with a block, rounded to bf16 and then to e4m3. y may be null.
extern "C" __global__ void __launch_bounds__(1024) swiglu_forward_fp8(
    const bf16* __restrict__ gate_up,  // [T, 2 F]
    bf16* __restrict__ y,              // [T, F] or null
    unsigned char* __restrict__ values, float* __restrict__ scales, long long columns
) {
    wait_for_inputs();
    const int packs = static_cast<int>(columns / 8);
    const auto* pairs = reinterpret_cast<const Pack<bf16, 8>*>(gate_up + 2 * blockIdx.x * columns);
    auto* plain = reinterpret_cast<Pack<bf16, 8>*>(y + blockIdx.x * columns);
    Pack<bf16, 8> row[MOST];
#pragma unroll
    for (int k = 0; k < MOST; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i >= packs) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto four = pairs[2 * i + half];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float gate = widen(four.at[2 * j]);
                narrow(gate * sigmoid(gate) * widen(four.at[2 * j + 1]), row[k].at[4 * half + j]);
            }
        }
        if (y) plain[i] = row[k];
    }
    write_fp8(row, packs, {values + blockIdx.x * columns, scales + blockIdx.x});
}
