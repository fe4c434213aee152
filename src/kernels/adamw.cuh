// Shared by the AdamW kernels: the coefficients of a step, and the update of one element. Every operation rounds separately, in the order of
// ops::adamw.
#pragma once
#include "scalar.cuh"

// The coefficients, in the order of a kernel's last parameters.
struct Factors {
    float keep;        // 1 - lr * weight_decay
    float beta1;
    float gain1;       // grad_scale * (1 - beta1)
    float beta2;
    float gain2;       // grad_scale * sqrt(1 - beta2)
    float root_scale;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float rate;        // -lr / (1 - beta1^step)
};

#define FACTOR_PARAMETERS \
    float keep, float beta1, float gain1, float beta2, float gain2, float root_scale, float eps, float rate
#define FACTORS {keep, beta1, gain1, beta2, gain2, root_scale, eps, rate}

// Returns the new master weight; m and v become the new moments.
__device__ __forceinline__ float adamw_step(float p, float g, float& m, float& v, const Factors& of) {
    const float root = __fmul_rn(g, of.gain2);
    m = __fadd_rn(__fmul_rn(m, of.beta1), __fmul_rn(g, of.gain1));
    v = __fadd_rn(__fmul_rn(v, of.beta2), __fmul_rn(root, root));
    const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), of.root_scale), of.eps);
    const float change = __fdiv_rn(__fmul_rn(m, of.rate), denominator);
    return __fadd_rn(__fmul_rn(p, of.keep), change);
}
