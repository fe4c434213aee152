// Computes log-probabilities and entropies from a chunk of logits, and the gradient of the logits; one block per row.
#include "scalar.cuh"

constexpr int THREADS = 512;

// Softmax statistics of a part of a row, kept relative to its largest element so that nothing overflows.
struct Statistics {
    float max;      // m
    float sum;      // sum of e^(l - m)
    float weighted; // sum of (l - m) e^(l - m)

    __device__ __forceinline__ void raise(float to) {
        const float shift = max - to, factor = __expf(shift);
        weighted = factor * (weighted + shift * sum), sum *= factor, max = to;
    }
    __device__ __forceinline__ void add(float logit) {
        const float shift = logit - max, term = __expf(shift);
        sum += term, weighted += shift * term;
    }
    __device__ __forceinline__ void merge(Statistics other) {
        const float largest = fmaxf(max, other.max);
        raise(largest), other.raise(largest);
        sum += other.sum, weighted += other.weighted;
    }
};

// Merges the statistics of all threads in a fixed order; equal in every thread.
__device__ __forceinline__ Statistics block_merge(Statistics own) {
    __shared__ Statistics warps[32];
    for (int step = 16; step > 0; step /= 2) {
        Statistics other;
        other.max = __shfl_xor_sync(0xffffffffu, own.max, step);
        other.sum = __shfl_xor_sync(0xffffffffu, own.sum, step);
        other.weighted = __shfl_xor_sync(0xffffffffu, own.weighted, step);
        own.merge(other);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
    Statistics all = warps[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) all.merge(warps[warp]);
    return all;
}

// N consecutive elements per load, UNROLL loads in flight.
template <int N, int UNROLL>
__device__ __forceinline__ void forward(
    const float* __restrict__ logits,       // [c, V]
    const long long* __restrict__ targets,  // [c]
    float* __restrict__ logprobs,           // [c]
    float* __restrict__ entropy,            // [c]
    float* __restrict__ lse,                // [c], log-sum-exp of logits / temperature
    long long vocabulary,
    float inverse_temperature
) {
    const float* row = logits + blockIdx.x * vocabulary;
    Statistics own = {-1e30f, 0.0f, 0.0f};
    const long long stride = static_cast<long long>(blockDim.x) * N;
    for (long long start = threadIdx.x * N; start < vocabulary; start += UNROLL * stride) {
        Pack<float, N> part[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * stride < vocabulary) part[u] = load<float, N>(row + start + u * stride);
        float largest = own.max;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (start + u * stride >= vocabulary) break;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                part[u].at[k] *= inverse_temperature;
                largest = fmaxf(largest, part[u].at[k]);
            }
        }
        if (largest > own.max) own.raise(largest);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (start + u * stride >= vocabulary) break;
#pragma unroll
            for (int k = 0; k < N; ++k) own.add(part[u].at[k]);
        }
    }
    const Statistics all = block_merge(own);
    if (threadIdx.x == 0) {
        const float log_sum = logf(all.sum);
        lse[blockIdx.x] = all.max + log_sum;
        logprobs[blockIdx.x] = row[targets[blockIdx.x]] * inverse_temperature - all.max - log_sum;
        entropy[blockIdx.x] = log_sum - all.weighted / all.sum;
    }
}

// d_logits = (dlogprobs * (onehot - p) - dentropy * p * (log p + entropy)) / temperature, in the logits' own memory: row r starts where the logits'
// row r does. Narrower elements overwrite no logit that is still to be read, because all threads have read their part of a stretch before any of it
// is written.
template <typename T, int N, int UNROLL>
__device__ __forceinline__ void backward(
    float* logits,                           // [c, V]
    const long long* __restrict__ targets,   // [c]
    const float* __restrict__ lse,           // [c]
    const float* __restrict__ entropy,       // [c]
    const float* __restrict__ dlogprobs,     // [c]
    const float* __restrict__ dentropy,      // [c] or null
    long long vocabulary,
    float inverse_temperature
) {
    float* row = logits + blockIdx.x * vocabulary;
    T* out = reinterpret_cast<T*>(row);
    const float log_sum = lse[blockIdx.x], own_entropy = entropy[blockIdx.x];
    const float pull = dlogprobs[blockIdx.x] * inverse_temperature;
    const float spread = dentropy ? dentropy[blockIdx.x] * inverse_temperature : 0.0f;
    const long long target = targets[blockIdx.x], stride = static_cast<long long>(blockDim.x) * N;
    for (long long first = 0; first < vocabulary; first += UNROLL * stride) {
        const long long start = first + threadIdx.x * N;
        Pack<float, N> part[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (start + u * stride < vocabulary) part[u] = load<float, N>(row + start + u * stride);
        __syncthreads();
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long at = start + u * stride;
            if (at >= vocabulary) break;
            Pack<T, N> result;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float log_p = part[u].at[k] * inverse_temperature - log_sum;
                const float slope = -__expf(log_p) * (pull + spread * (log_p + own_entropy));
                narrow(at + k == target ? slope + pull : slope, result.at[k]);
            }
            store(out + at, result);
        }
    }
}

#define HEAD(SUFFIX, N)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) head_forward_##SUFFIX(                                        \
        const float* logits, const long long* targets, float* logprobs, float* entropy, float* lse,                 \
        long long vocabulary, float inverse_temperature) {                                                          \
        forward<N, 16 / N>(logits, targets, logprobs, entropy, lse, vocabulary, inverse_temperature);               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) head_backward_f32_##SUFFIX(                                   \
        float* logits, const long long* targets, const float* lse, const float* entropy, const float* dlogprobs,    \
        const float* dentropy, long long vocabulary, float inverse_temperature) {                                   \
        backward<float, N, 16 / N>(logits, targets, lse, entropy, dlogprobs, dentropy, vocabulary, inverse_temperature); \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) head_backward_bf16_##SUFFIX(                                  \
        float* logits, const long long* targets, const float* lse, const float* entropy, const float* dlogprobs,    \
        const float* dentropy, long long vocabulary, float inverse_temperature) {                                   \
        backward<bf16, N, 16 / N>(logits, targets, lse, entropy, dlogprobs, dentropy, vocabulary, inverse_temperature); \
    }

HEAD(x1, 1)
HEAD(x4, 4)
