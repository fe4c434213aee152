// AdamW with decoupled weight decay (arXiv 1711.05101), one pass over a flat range. Master weights and both moments are updated in place, and the
// weights that the network computes with are written as well. Per element this moves 28 bytes of float state, plus the gradient and the weight in
// their types.
#include "adamw.cuh"

template <typename Grad, typename Weight>
__device__ __forceinline__ void adamw(
    float* __restrict__ master,      // [n]
    float* __restrict__ m,           // [n]
    float* __restrict__ v,           // [n]
    const Grad* __restrict__ grad,   // [n]
    Weight* __restrict__ weight,     // [n] or null
    long long n,
    const Factors& factors
) {
    constexpr int UNROLL = 4;  // loads in flight per array and thread
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long start = first; start < n; start += UNROLL * stride) {
        float p_[UNROLL], m_[UNROLL], v_[UNROLL], g_[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const long long i = start + k * stride;
            if (i < n) p_[k] = master[i], m_[k] = m[i], v_[k] = v[i], g_[k] = widen(grad[i]);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const long long i = start + k * stride;
            if (i >= n) break;
            const float updated = adamw_step(p_[k], g_[k], m_[k], v_[k], factors);
            master[i] = updated, m[i] = m_[k], v[i] = v_[k];
            if (weight) narrow(updated, weight[i]);
        }
    }
}

#define ADAMW(NAME, GRAD, WEIGHT)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                         \
        float* master, float* m, float* v, const GRAD* grad, WEIGHT* weight, long long n, FACTOR_PARAMETERS) {      \
        adamw<GRAD, WEIGHT>(master, m, v, grad, weight, n, FACTORS);                                                \
    }

ADAMW(adamw_f32_f32, float, float)
ADAMW(adamw_f32_bf16, float, bf16)
ADAMW(adamw_bf16_f32, bf16, float)
ADAMW(adamw_bf16_bf16, bf16, bf16)
