// AdamW with block-wise 8-bit moments (arXiv 2110.02861), one pass over a flat range that decays as a whole. A warp has 256 neighbours
// at a time, whose moments share a scale: it makes moments of the codes, steps, finds the new scales and rounds to codes again. Per
// element 12 bytes of state and the gradient and weight in their types. Every operation rounds alone, in the order of ops::adamw8bit.
#include "scalar.cuh"

constexpr int THREADS = 256;
constexpr int BLOCK = 256;   // moments that share a scale
constexpr int LEVELS = 256;  // of a map
constexpr int PER_LANE = BLOCK / 32;

// Values of codes, and the middles between neighbours.
struct Map {
    float levels[LEVELS];
    float bounds[LEVELS];
};

__device__ __forceinline__ void fill(Map& map, const float* __restrict__ levels) {
    for (int i = threadIdx.x; i < LEVELS; i += THREADS) {
        map.levels[i] = levels[i];
        if (i + 1 < LEVELS) map.bounds[i] = __fmul_rn(__fadd_rn(levels[i], levels[i + 1]), 0.5f);
    }
}

// The number of bounds below x.
__device__ __forceinline__ unsigned char nearest(const Map& map, float x) {
    int code = 0;
#pragma unroll
    for (int step = LEVELS / 2; step > 0; step /= 2) {
        if (map.bounds[code + step - 1] < x) code += step;
    }
    return static_cast<unsigned char>(code);
}

__device__ __forceinline__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

template <typename Grad, typename Weight>
__device__ __forceinline__ void adamw8bit(
    float* __restrict__ master,           // [num_blocks BLOCK]
    unsigned char* __restrict__ m_codes,  // [num_blocks BLOCK]
    unsigned char* __restrict__ v_codes,  // [num_blocks BLOCK]
    float* __restrict__ m_absmax,         // [num_blocks]
    float* __restrict__ v_absmax,         // [num_blocks]
    const float* __restrict__ m_levels,   // [LEVELS]
    const float* __restrict__ v_levels,   // [LEVELS]
    const Grad* __restrict__ grad,        // [num_blocks BLOCK]
    Weight* __restrict__ weight,          // [num_blocks BLOCK]
    long long num_blocks,
    float keep,       // 1 - lr * weight_decay
    float beta1,
    float gain1,      // grad_scale * (1 - beta1)
    float beta2,
    float gain2,      // grad_scale * sqrt(1 - beta2)
    float root_scale, // 1 / sqrt(1 - beta2^step)
    float eps,
    float rate        // -lr / (1 - beta1^step)
) {
    __shared__ Map m_map, v_map;
    fill(m_map, m_levels);
    fill(v_map, v_levels);
    __syncthreads();
    const long long stride = static_cast<long long>(gridDim.x) * (THREADS / 32);
    for (long long block = static_cast<long long>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32; block < num_blocks;
         block += stride) {
        const long long first = block * BLOCK + threadIdx.x % 32 * PER_LANE;
        const auto p = load<float, PER_LANE>(master + first);
        const auto g = load<Grad, PER_LANE>(grad + first);
        auto m_code = load<unsigned char, PER_LANE>(m_codes + first);
        auto v_code = load<unsigned char, PER_LANE>(v_codes + first);
        const float m_scale = m_absmax[block], v_scale = v_absmax[block];
        float m[PER_LANE], v[PER_LANE], m_peak = 0.0f, v_peak = 0.0f;
        Pack<float, PER_LANE> updated;
        Pack<Weight, PER_LANE> narrowed;
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
            const float gradient = widen(g.at[k]), root = __fmul_rn(gradient, gain2);
            const float old_m = __fmul_rn(m_map.levels[m_code.at[k]], m_scale);
            const float old_v = __fmul_rn(v_map.levels[v_code.at[k]], v_scale);
            m[k] = __fadd_rn(__fmul_rn(old_m, beta1), __fmul_rn(gradient, gain1));
            v[k] = __fadd_rn(__fmul_rn(old_v, beta2), __fmul_rn(root, root));
            const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v[k]), root_scale), eps);
            const float change = __fdiv_rn(__fmul_rn(m[k], rate), denominator);
            updated.at[k] = __fadd_rn(__fmul_rn(p.at[k], keep), change);
            narrow(updated.at[k], narrowed.at[k]);
            m_peak = fmaxf(m_peak, fabsf(m[k]));
            v_peak = fmaxf(v_peak, v[k]);
        }
        store(master + first, updated);
        store(weight + first, narrowed);
        m_peak = warp_max(m_peak);
        v_peak = warp_max(v_peak);
        const float m_divisor = m_peak > 0.0f ? m_peak : 1.0f, v_divisor = v_peak > 0.0f ? v_peak : 1.0f;
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
            m_code.at[k] = nearest(m_map, __fdiv_rn(m[k], m_divisor));
            v_code.at[k] = nearest(v_map, __fdiv_rn(v[k], v_divisor));
        }
        store(m_codes + first, m_code);
        store(v_codes + first, v_code);
        if (threadIdx.x % 32 == 0) m_absmax[block] = m_peak, v_absmax[block] = v_peak;
    }
}

#define ADAMW8BIT(NAME, GRAD, WEIGHT)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                     \
        float* master, unsigned char* m_codes, unsigned char* v_codes, float* m_absmax, float* v_absmax,            \
        const float* m_levels, const float* v_levels, const GRAD* grad, WEIGHT* weight, long long num_blocks,       \
        float keep, float beta1, float gain1, float beta2, float gain2, float root_scale, float eps, float rate) {  \
        adamw8bit(master, m_codes, v_codes, m_absmax, v_absmax, m_levels, v_levels, grad, weight, num_blocks, keep, \
                  beta1, gain1, beta2, gain2, root_scale, eps, rate);                                               \
    }

ADAMW8BIT(adamw8bit_f32_f32, float, float)
ADAMW8BIT(adamw8bit_f32_bf16, float, bf16)
ADAMW8BIT(adamw8bit_bf16_f32, bf16, float)
ADAMW8BIT(adamw8bit_bf16_bf16, bf16, bf16)
