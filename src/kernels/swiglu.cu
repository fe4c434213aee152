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

// The gradients of N pairs, and their activations.
template <typename T, int N>
__device__ __forceinline__ void gradients_of(
    const Pack<T, 2 * N>& pairs, const Pack<T, N>& grads, Pack<T, 2 * N>& out, Pack<T, N>& act
) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const float gate = widen(pairs.at[2 * k]), up = widen(pairs.at[2 * k + 1]), grad = widen(grads.at[k]);
        const float share = sigmoid(gate), silu = gate * share;
        narrow(grad * up * (share + silu * (1.0f - share)), out.at[2 * k]);
        narrow(grad * silu, out.at[2 * k + 1]);
        narrow(silu * up, act.at[k]);
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
        gradients_of(pairs, grads, out, act);
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

// Kernels whose results are rounded to bf16 and then to e4m3: a block has a row, which waits in shared memory until its largest value is known.

// The block's row, once its inputs are there.
struct RowOfBlock {
    Pack<bf16, 8>* waiting;  // in shared memory
    int packs;               // of F
    long long first;         // element of [T, F]
    const Pack<bf16, 8>* pairs;
};

__device__ __forceinline__ RowOfBlock row_of_block(const bf16* gate_up /* [T, 2 F] */, long long columns) {
    extern __shared__ uint4 shared[];
    auto* waiting = reinterpret_cast<Pack<bf16, 8>*>(shared);
    wait_for_inputs();
    const int packs = static_cast<int>(columns / 8);
    const long long first = blockIdx.x * columns;
    return {waiting, packs, first, reinterpret_cast<const Pack<bf16, 8>*>(gate_up + 2 * first)};
}

// Rows of F outputs. y may be null.
extern "C" __global__ void __launch_bounds__(640) swiglu_forward_fp8(
    const bf16* __restrict__ gate_up,  // [T, 2 F]
    bf16* __restrict__ y,              // [T, F] or null
    unsigned char* __restrict__ values, float* __restrict__ scales, long long columns
) {
    const auto [row, packs, first, pairs] = row_of_block(gate_up, columns);
    unsigned bits = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack<bf16, 8> out;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto four = pairs[2 * i + half];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float gate = widen(four.at[2 * j]);
                narrow(gate * sigmoid(gate) * widen(four.at[2 * j + 1]), out.at[4 * half + j]);
            }
        }
        row[i] = out;
        if (y) store(y + first + 8 * i, out);
        bits = most_bits(out, bits);
    }
    write_fp8(row, packs, bits, {values + first, scales + blockIdx.x});
}

// The backward. d_gate_up may be gate_up itself.
extern "C" __global__ void __launch_bounds__(512) swiglu_backward_fp8(
    const bf16* __restrict__ dy,  // [T, F]
    const bf16* gate_up,          // [T, 2 F]
    bf16* d_gate_up,              // [T, 2 F]
    bf16* __restrict__ y,         // [T, F]
    unsigned char* __restrict__ values, float* __restrict__ scales, long long columns
) {
    const auto [row, packs, first, pairs] = row_of_block(gate_up, columns);
    auto* out = reinterpret_cast<Pack<bf16, 8>*>(d_gate_up + 2 * first);
    unsigned bits = 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const auto grads = load<bf16, 8>(dy + first + 8 * i);
        const Pack<bf16, 8> own[2] = {pairs[2 * i], pairs[2 * i + 1]};
        Pack<bf16, 8> act;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Pack<bf16, 4> grad, part;
#pragma unroll
            for (int j = 0; j < 4; ++j) grad.at[j] = grads.at[4 * half + j];
            Pack<bf16, 8> d;
            gradients_of(own[half], grad, d, part);
#pragma unroll
            for (int j = 0; j < 4; ++j) act.at[4 * half + j] = part.at[j];
            out[2 * i + half] = row[2 * i + half] = d;
            bits = most_bits(d, bits);
        }
        store(y + first + 8 * i, act);
    }
    write_fp8(row, 2 * packs, bits, {values + 2 * first, scales + blockIdx.x});
}
