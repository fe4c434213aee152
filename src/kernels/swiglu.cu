// y = silu(gate) * up on the interleaved layout g0 u0 g1 u1 .., one pass, rounded once. The backward makes y again on its way:
// the next weight's gradient needs it.
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

#define SWIGLU(SUFFIX, T, N)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) swiglu_forward_##SUFFIX(const T* gate_up, T* y, long long n) { \
        forward<T, N>(gate_up, y, n);                                                                               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        swiglu_backward_##SUFFIX(const T* dy, const T* gate_up, T* d_gate_up, T* y, long long n) {                  \
        backward<T, N>(dy, gate_up, d_gate_up, y, n);                                                               \
    }

SWIGLU(f32_x1, float, 1)
SWIGLU(f32_x2, float, 2)
SWIGLU(bf16_x1, bf16, 1)
SWIGLU(bf16_x4, bf16, 4)
