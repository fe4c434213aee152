// AdamW with block-wise 8-bit moments (arXiv 2110.02861), one pass over a flat range that decays as a whole. A warp processes 256 consecutive
// elements, whose moments share a scale: it dequantizes the moments, updates them, finds the new scales and quantizes again. Per element this moves
// 12 bytes of state, plus the gradient and the weight in their types. Every operation rounds separately, in the order of ops::adamw8bit.
//
// A binary search of 8 steps in shared memory for each new code would take longer than memory does. The levels of a map are evenly spaced within each
// power of ten, so a logarithm and one multiplication give a code that is at most one off; its two bounds decide.
#include "adamw.cuh"

constexpr int THREADS = 256;
constexpr int BLOCK = 256;   // moments that share a scale
constexpr int LEVELS = 256;  // of a map
constexpr int POWERS = 7;    // powers of ten that a map divides evenly, from 1e-7 on
constexpr int N = 4;         // consecutive elements per lane
constexpr int PARTS = BLOCK / 32 / N;

// The value and the bounds of each code. A value x has the code c if lower[c] < x <= upper[c]: the nearest level, or the lower one of two.
struct Map {
    float levels[LEVELS];
    float2 bounds[LEVELS];
    float2 lines[POWERS];  // per power of ten: the number of levels between 0 and x is about lines.x * x + lines.y
};

// Fills the map; its smallest power of ten has `parts` levels, the next one twice as many, and so on.
__device__ __forceinline__ void fill(Map& map, const float* __restrict__ levels, int parts) {
    for (int i = threadIdx.x; i < LEVELS; i += THREADS) {
        auto middle = [&](int at) { return __fmul_rn(__fadd_rn(levels[at], levels[at + 1]), 0.5f); };
        map.levels[i] = levels[i];
        map.bounds[i] = make_float2(i > 0 ? middle(i - 1) : -INFINITY, i + 1 < LEVELS ? middle(i) : INFINITY);
    }
    if (threadIdx.x < POWERS) {
        float slope = 1.0f;
        for (int power = threadIdx.x; power + 1 < POWERS; ++power) slope *= 5.0f;
        const float count = static_cast<float>(parts << threadIdx.x);
        map.lines[threadIdx.x] = make_float2(slope * parts * (64.0f / 0.9f), count * (8.0f / 9.0f) - parts);
    }
}

// Returns the code of x, which is in [-1, 1]. `zero` is the code of level 0; in the map of unsigned values it is the first.
__device__ __forceinline__ unsigned char nearest(const Map& map, int zero, float x) {
    const float size = fabsf(x);
    const int power = __float2int_rd(__log2f(fmaxf(size, 1e-30f)) * 0.30103f + POWERS);
    const float2 line = map.lines[max(0, min(power, POWERS - 1))];
    const int above = 1 + __float2int_rd(size * line.x + line.y);  // levels between 0 and x, including x's own
    int code = max(0, min(x < 0.0f ? zero - above : zero + above, LEVELS - 1));
    float2 bounds = map.bounds[code];
    while (bounds.y < x) bounds = map.bounds[++code];
    while (code > 0 && !(bounds.x < x)) bounds = map.bounds[--code];
    return static_cast<unsigned char>(code);
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
    const Factors& factors
) {
    constexpr int M_ZERO = 127, V_ZERO = 0;
    __shared__ Map m_map, v_map;
    fill(m_map, m_levels, 1);
    fill(v_map, v_levels, 2);
    __syncthreads();
    const long long stride = static_cast<long long>(gridDim.x) * (THREADS / 32);
    for (long long block = static_cast<long long>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32; block < num_blocks;
         block += stride) {
        const long long first = block * BLOCK + threadIdx.x % 32 * N;
        Pack<float, N> p[PARTS];
        Pack<Grad, N> g[PARTS];
        Pack<unsigned char, N> m_code[PARTS], v_code[PARTS];
        const float m_scale = m_absmax[block], v_scale = v_absmax[block];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const long long at = first + part * 32 * N;
            p[part] = load<float, N>(master + at), g[part] = load<Grad, N>(grad + at);
            m_code[part] = load<unsigned char, N>(m_codes + at), v_code[part] = load<unsigned char, N>(v_codes + at);
        }
        float m[PARTS][N], v[PARTS][N], m_peak = 0.0f, v_peak = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            Pack<Weight, N> narrowed;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                m[part][k] = __fmul_rn(m_map.levels[m_code[part].at[k]], m_scale);
                v[part][k] = __fmul_rn(v_map.levels[v_code[part].at[k]], v_scale);
                const float gradient = widen(g[part].at[k]);
                p[part].at[k] = adamw_step(p[part].at[k], gradient, m[part][k], v[part][k], factors);
                narrow(p[part].at[k], narrowed.at[k]);
                m_peak = fmaxf(m_peak, fabsf(m[part][k]));
                v_peak = fmaxf(v_peak, v[part][k]);
            }
            store(master + first + part * 32 * N, p[part]);
            store(weight + first + part * 32 * N, narrowed);
        }
        m_peak = warp_max(m_peak);
        v_peak = warp_max(v_peak);
        const float m_divisor = m_peak > 0.0f ? m_peak : 1.0f, v_divisor = v_peak > 0.0f ? v_peak : 1.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                m_code[part].at[k] = nearest(m_map, M_ZERO, __fdiv_rn(m[part][k], m_divisor));
                v_code[part].at[k] = nearest(v_map, V_ZERO, __fdiv_rn(v[part][k], v_divisor));
            }
            store(m_codes + first + part * 32 * N, m_code[part]);
            store(v_codes + first + part * 32 * N, v_code[part]);
        }
        if (threadIdx.x % 32 == 0) m_absmax[block] = m_peak, v_absmax[block] = v_peak;
    }
}

#define ADAMW8BIT(NAME, GRAD, WEIGHT)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                     \
        float* master, unsigned char* m_codes, unsigned char* v_codes, float* m_absmax, float* v_absmax,            \
        const float* m_levels, const float* v_levels, const GRAD* grad, WEIGHT* weight, long long num_blocks,       \
        FACTOR_PARAMETERS) {                                                                                        \
        adamw8bit<GRAD, WEIGHT>(master, m_codes, v_codes, m_absmax, v_absmax, m_levels, v_levels, grad, weight,      \
                                num_blocks, FACTORS);                                                               \
    }

ADAMW8BIT(adamw8bit_f32_f32, float, float)
ADAMW8BIT(adamw8bit_f32_bf16, float, bf16)
ADAMW8BIT(adamw8bit_bf16_f32, bf16, float)
ADAMW8BIT(adamw8bit_bf16_bf16, bf16, bf16)
