// AdamW with decoupled weight decay (arXiv 1711.05101), one pass over a flat range: master weights and both moments are
// updated in place, and the weights that the network computes with are written on the way. Per element 28 bytes of float
// state and the gradient and weight in their types. Every operation rounds alone, in the order of ops::adamw.
#include "scalar.cuh"

template <typename Grad, typename Weight>
__device__ __forceinline__ void adamw(
    float* __restrict__ master,      // [n]
    float* __restrict__ m,           // [n]
    float* __restrict__ v,           // [n]
    const Grad* __restrict__ grad,   // [n]
    Weight* __restrict__ weight,     // [n] or null
    long long n,
    float keep,       // 1 - lr * weight_decay
    float beta1,
    float gain1,      // grad_scale * (1 - beta1)
    float beta2,
    float gain2,      // grad_scale * sqrt(1 - beta2)
    float root_scale, // 1 / sqrt(1 - beta2^step)
    float eps,
    float rate        // -lr / (1 - beta1^step)
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
            const float first_moment = __fadd_rn(__fmul_rn(m_[k], beta1), __fmul_rn(g_[k], gain1));
            const float root = __fmul_rn(g_[k], gain2);
            const float second_moment = __fadd_rn(__fmul_rn(v_[k], beta2), __fmul_rn(root, root));
            const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(second_moment), root_scale), eps);
            const float change = __fdiv_rn(__fmul_rn(first_moment, rate), denominator);
            const float updated = __fadd_rn(__fmul_rn(p_[k], keep), change);
            master[i] = updated, m[i] = first_moment, v[i] = second_moment;
            if (weight) narrow(updated, weight[i]);
        }
    }
}

#define ADAMW(NAME, GRAD, WEIGHT)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                         \
        float* master, float* m, float* v, const GRAD* grad, WEIGHT* weight, long long n, float keep, float beta1,  \
        float gain1, float beta2, float gain2, float root_scale, float eps, float rate) {                           \
        adamw(master, m, v, grad, weight, n, keep, beta1, gain1, beta2, gain2, root_scale, eps, rate);              \
    }

ADAMW(adamw_f32_f32, float, float)
ADAMW(adamw_f32_bf16, float, bf16)
ADAMW(adamw_bf16_f32, bf16, float)
ADAMW(adamw_bf16_bf16, bf16, bf16)
