// y = a(gate) * up on the interleaved layout g0 u0 g1 u1 .., in one pass, rounded once, where a is SiLU (swiglu) or GELU's tanh approximation
// (geglu); or with clamped gate and up, a steeper SiLU and up + 1 (clamped). The backward also recomputes y, which the next weight's gradient needs.
#include "clamped.cuh"
#include "rounded_rows.cuh"

// The activation of a gate, and its derivative.
struct Activated {
    float value, slope;
};

// The activated gate is multiplied by up itself.
struct PlainUp {
    static __device__ __forceinline__ float factor(float up) { return up; }

    // The gradient of up, given that of the multiplier.
    static __device__ __forceinline__ float passed(float d, float) { return d; }
};

struct Silu : PlainUp {
    static __device__ __forceinline__ float of(float x) { return x * sigmoid(x); }

    static __device__ __forceinline__ Activated with_slope(float x) {
        const float share = sigmoid(x), silu = x * share;
        return {silu, share + silu * (1.0f - share)};
    }
};

// x (1 + t) / 2 with t = tanh(A (x + B x^3)), whose slope is (1 + t) / 2 + x (1 - t^2) A (1 + 3 B x^2) / 2.
struct GeluTanh : PlainUp {
    static constexpr float A = 0.7978845608028654f, B = 0.044715f;

    static __device__ __forceinline__ float of(float x) { return 0.5f * x * (1.0f + tanhf(A * (x + B * x * x * x))); }

    static __device__ __forceinline__ Activated with_slope(float x) {
        const float t = tanhf(A * (x + B * x * x * x));
        return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * A * (1.0f + 3.0f * B * x * x)};
    }
};

struct Clamped {
    static __device__ __forceinline__ float of(float x) { return swish(below_limit(x)); }

    static __device__ __forceinline__ Activated with_slope(float x) {
        const float cut = below_limit(x), share = sigmoid(SWISH_SLOPE * cut), value = cut * share;
        return {value, x > SWISH_LIMIT ? 0.0f : share + SWISH_SLOPE * value * (1.0f - share)};
    }

    static __device__ __forceinline__ float factor(float up) { return clamped_factor(up); }

    static __device__ __forceinline__ float passed(float d, float up) { return fabsf(up) > SWISH_LIMIT ? 0.0f : d; }
};

// n outputs, N per thread at once.
template <typename Act, typename T, int N>
__device__ __forceinline__ void forward(const T* __restrict__ gate_up, T* __restrict__ y, long long n) {
    wait_for_inputs();
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n / N; i += stride) {
        const auto pairs = reinterpret_cast<const Pack<T, 2 * N>*>(gate_up)[i];
        Pack<T, N> out;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float gate = widen(pairs.at[2 * k]);
            narrow(Act::of(gate) * Act::factor(widen(pairs.at[2 * k + 1])), out.at[k]);
        }
        reinterpret_cast<Pack<T, N>*>(y)[i] = out;
    }
}

// The gradients of N pairs, and their activations.
template <typename Act, typename T, int N>
__device__ __forceinline__ void gradients_of(
    const Pack<T, 2 * N>& pairs, const Pack<T, N>& grads, Pack<T, 2 * N>& out, Pack<T, N>& act
) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const float gate = widen(pairs.at[2 * k]), up = widen(pairs.at[2 * k + 1]), grad = widen(grads.at[k]);
        const auto [value, slope] = Act::with_slope(gate);
        const float factor = Act::factor(up);
        narrow(grad * factor * slope, out.at[2 * k]);
        narrow(Act::passed(grad * value, up), out.at[2 * k + 1]);
        narrow(value * factor, act.at[k]);
    }
}

// d_gate_up may be gate_up itself: every thread reads its pairs before it writes them.
template <typename Act, typename T, int N>
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
        gradients_of<Act>(pairs, grads, out, act);
        reinterpret_cast<Pack<T, N>*>(y)[i] = act;
        reinterpret_cast<Pack<T, 2 * N>*>(d_gate_up)[i] = out;
    }
}

// The backward of y times a weight per row: returns the weighted y, and the gradient of each row's weight, the sum of y dy without the weight. One
// block per row.
template <typename Act, typename T, int N>
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
            const auto [value, slope] = Act::with_slope(gate);
            const float weighted = grad * weight, factor = Act::factor(up);
            narrow(weighted * factor * slope, out.at[2 * k]);
            narrow(Act::passed(weighted * value, up), out.at[2 * k + 1]);
            narrow(value * factor * weight, act.at[k]);
            sum += value * factor * grad;
        }
        reinterpret_cast<Pack<T, N>*>(y)[first + i] = act;
        reinterpret_cast<Pack<T, 2 * N>*>(d_gate_up)[first + i] = out;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_weights[blockIdx.x] = sum;
}

#define GATED(UNIT, ACT, SUFFIX, T, N)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) UNIT##_forward_##SUFFIX(const T* gate_up, T* y, long long n) { \
        forward<ACT, T, N>(gate_up, y, n);                                                                          \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                               \
        UNIT##_backward_##SUFFIX(const T* dy, const T* gate_up, T* d_gate_up, T* y, long long n) {                  \
        backward<ACT, T, N>(dy, gate_up, d_gate_up, y, n);                                                          \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) UNIT##_weighted_backward_##SUFFIX(                            \
        const T* dy, const float* weights, const T* gate_up, T* d_gate_up, T* y, float* d_weights, long long columns \
    ) {                                                                                                             \
        weighted_backward<ACT, T, N>(dy, weights, gate_up, d_gate_up, y, d_weights, columns);                       \
    }
#define GATED_ALL(UNIT, ACT)         \
    GATED(UNIT, ACT, f32_x1, float, 1) \
    GATED(UNIT, ACT, f32_x2, float, 2) \
    GATED(UNIT, ACT, bf16_x1, bf16, 1) \
    GATED(UNIT, ACT, bf16_x4, bf16, 4)

GATED_ALL(swiglu, Silu)
GATED_ALL(geglu, GeluTanh)
GATED_ALL(clamped, Clamped)

// Kernels whose results are rounded to bf16 and then quantized: a block has a row, which stays in shared memory until its largest value is
// known.

// The block's row, once its inputs are ready.
template <typename Kept>
struct RowOfBlock {
    Kept* waiting;     // in shared memory
    int packs;         // in F
    long long first;   // index of the element in [T, F]
    const Pack<bf16, 8>* pairs;
};

template <typename Kept>
__device__ __forceinline__ RowOfBlock<Kept> row_of_block(const bf16* gate_up /* [T, 2 F] */, long long columns) {
    extern __shared__ uint4 shared[];
    auto* waiting = reinterpret_cast<Kept*>(shared);
    wait_for_inputs();
    const int packs = static_cast<int>(columns / 8);
    const long long first = blockIdx.x * columns;
    return {waiting, packs, first, reinterpret_cast<const Pack<bf16, 8>*>(gate_up + 2 * first)};
}

// Rows of F outputs. y may be null.
template <typename Act, typename Form>
__device__ __forceinline__ void forward_rounded(
    const bf16* __restrict__ gate_up,  // [T, 2 F]
    bf16* __restrict__ y,              // [T, F] or null
    const RoundedRows& rounded, long long columns, const Form& form
) {
    const auto [row, packs, first, pairs] = row_of_block<typename Form::Kept>(gate_up, columns);
    unsigned bits = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < Form::visits(packs); i += blockDim.x) {
        const bool is_in = i < packs;
        Pack<bf16, 8> out;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!is_in) break;
            const auto four = pairs[2 * i + half];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float gate = widen(four.at[2 * j]);
                narrow(Act::of(gate) * Act::factor(widen(four.at[2 * j + 1])), out.at[4 * half + j]);
            }
        }
        const auto kept = form.keep(out, is_in);
        if (!is_in) continue;
        row[i] = kept;
        if (y) store(y + first + 8 * i, out);
        bits = Form::most(kept, bits);
    }
    write_row(row, packs, bits, rounded.from(blockIdx.x, columns), form);
}

// The backward. d_gate_up may be gate_up itself.
template <typename Act>
__device__ __forceinline__ void backward_fp8(
    const bf16* __restrict__ dy,  // [T, F]
    const bf16* gate_up,          // [T, 2 F]
    bf16* d_gate_up,              // [T, 2 F]
    bf16* __restrict__ y,         // [T, F]
    unsigned char* __restrict__ values, float* __restrict__ scales, long long columns
) {
    const auto [row, packs, first, pairs] = row_of_block<Pack<bf16, 8>>(gate_up, columns);
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
            gradients_of<Act>(own[half], grad, d, part);
#pragma unroll
            for (int j = 0; j < 4; ++j) act.at[4 * half + j] = part.at[j];
            out[2 * i + half] = row[2 * i + half] = d;
            bits = most_bits(d, bits);
        }
        store(y + first + 8 * i, act);
    }
    write_row(row, 2 * packs, bits, {values + 2 * first, scales + blockIdx.x}, E4m3Form(0));
}

// `block`: columns of a Hadamard matrix, for int8.
#define GATED_ROUNDED(NAME, ACT, FORM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(640) NAME(                                                                \
        const bf16* gate_up, bf16* y, unsigned char* values, float* scales, long long columns, long long block            \
    ) {                                                                                                                   \
        forward_rounded<ACT>(gate_up, y, {values, scales}, columns, FORM(block));                                         \
    }
#define GATED_CODED(UNIT, ACT)                                                                                             \
    GATED_ROUNDED(UNIT##_forward_fp8, ACT, E4m3Form)                                                                       \
    GATED_ROUNDED(UNIT##_forward_int8, ACT, Int8Form)                                                                      \
    extern "C" __global__ void __launch_bounds__(512) UNIT##_backward_fp8(                                                 \
        const bf16* dy, const bf16* gate_up, bf16* d_gate_up, bf16* y, unsigned char* values, float* scales, long long columns \
    ) {                                                                                                                   \
        backward_fp8<ACT>(dy, gate_up, d_gate_up, y, values, scales, columns);                                            \
    }

GATED_CODED(swiglu, Silu)
GATED_CODED(geglu, GeluTanh)
GATED_CODED(clamped, Clamped)
