// Attention of one new token per sequence over its context in the paged cache, o = softmax(scale q k^T) v, for shapes and types without a tensor-core
// kernel in paged_attention.cu.
#include "fp8.cuh"
#include "scalar.cuh"

constexpr int THREADS = 128;

// Converts an entry of the cache; for e4m3 and int8 the result must be multiplied by the token's scale.
__device__ __forceinline__ float widen(signed char number) { return static_cast<float>(number); }
__device__ __forceinline__ float widen(unsigned char bits) {
    float value = 0.0f;
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b32 both;\n.reg .b16 low, high;\ncvt.rn.f16x2.e4m3x2 both, %1;\nmov.b32 {low, high}, both;\n"
        "cvt.f32.f16 %0, low;\n}"
        : "=f"(value)
        : "h"(static_cast<unsigned short>(bits)));
#endif
    return value;
}

// Any type, head width and group; a block has one query head of one row and processes its context 128 tokens at a time. Slow.
template <typename T, typename E>
__device__ __forceinline__ void attend(
    const T* __restrict__ q,                // [S, H, hd]
    const E* __restrict__ k_cache,          // [blocks, Hkv, block_size, hd]
    const E* __restrict__ v_cache,          // like k_cache
    const int* __restrict__ block_tables,   // [S, max_blocks]
    const int* __restrict__ context_lens,   // [S], including the new token; 0: no sequence, o is 0
    T* __restrict__ o,                      // [S, H, hd]
    int heads, int kv_heads, int dim, int block_size, int max_blocks, int window, float scale,
    const T* __restrict__ sinks,  // [H], logits without keys; or null
    const float* __restrict__ k_scales = nullptr,  // [blocks, Hkv, block_size], or null
    const float* __restrict__ v_scales = nullptr   // like k_scales
) {
    wait_for_inputs();
    constexpr int MOST = 4;  // columns of o per thread
    extern __shared__ float query[];  // [hd]
    __shared__ float weights[THREADS];
    __shared__ long long entries[THREADS];
    const int row = blockIdx.x / heads, head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    const long long place = static_cast<long long>(blockIdx.x) * dim;
    for (int i = threadIdx.x; i < dim; i += THREADS) query[i] = widen(q[place + i]) * scale;
    const int end = context_lens[row], begin = window > 0 ? max(0, end - window) : min(end, -window);
    float peak = -INFINITY, sum = 0.0f, out[MOST] = {};
    for (int start = begin; start < end; start += THREADS) {
        const int token = start + threadIdx.x;
        float score = -INFINITY;
        __syncthreads();  // the query is complete; data of the last round has been read
        if (token < end) {
            const long long block = block_tables[static_cast<long long>(row) * max_blocks + token / block_size];
            const long long entry = ((block * kv_heads + kv_head) * block_size + token % block_size) * dim;
            score = 0.0f;
            for (int i = 0; i < dim; ++i) score += query[i] * widen(k_cache[entry + i]);
            if (k_scales) score *= k_scales[entry / dim];
            entries[threadIdx.x] = entry;
        }
        const float new_peak = fmaxf(peak, block_max(score)), shrink = expf(peak - new_peak);
        const float weight = expf(score - new_peak);
        weights[threadIdx.x] = v_scales && token < end ? weight * v_scales[entries[threadIdx.x] / dim] : weight;
        sum = sum * shrink + block_sum(weight);  // also a barrier for the weights
        peak = new_peak;
        const int count = min(THREADS, end - start);
#pragma unroll
        for (int m = 0; m < MOST; ++m) {
            const int column = threadIdx.x + m * THREADS;
            if (column >= dim) break;
            out[m] *= shrink;
            for (int i = 0; i < count; ++i) out[m] += weights[i] * widen(v_cache[entries[i] + column]);
        }
    }
    if (sinks) sum += expf(widen(sinks[head]) - peak);
#pragma unroll
    for (int m = 0; m < MOST; ++m) {
        const int column = threadIdx.x + m * THREADS;
        if (column < dim) narrow(end > 0 ? out[m] / sum : 0.0f, o[place + column]);
    }
}

#define ATTEND(NAME, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                     \
        const T* q, const T* k_cache, const T* v_cache, const int* block_tables, const int* context_lens, T* o,     \
        long long heads, long long kv_heads, long long dim, long long block_size, long long max_blocks,             \
        long long window, float scale, const T* sinks) {                                                            \
        attend<T, T>(q, k_cache, v_cache, block_tables, context_lens, o, heads, kv_heads, dim, block_size, max_blocks, \
                  window, scale, sinks);                                                                                   \
    }

ATTEND(paged_attention_any_f32, float)
ATTEND(paged_attention_any_bf16, bf16)

#define ATTEND_8(NAME, E)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                     \
        const bf16* q, const E* k_cache, const E* v_cache, const int* block_tables, const int* context_lens, bf16* o, \
        long long heads, long long kv_heads, long long dim, long long block_size, long long max_blocks,             \
        long long window, float scale, const float* k_scales, const float* v_scales, const bf16* sinks) {           \
        attend<bf16, E>(q, k_cache, v_cache, block_tables, context_lens, o, heads, kv_heads, dim, block_size,       \
                        max_blocks, window, scale, sinks, k_scales, v_scales);                                             \
    }

ATTEND_8(paged_attention_any_fp8, unsigned char)
ATTEND_8(paged_attention_any_int8, signed char)
