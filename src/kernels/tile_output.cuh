// How Hopper GEMMs whose left operand is the weight write a tile: a warp has sixteen features, and sums of eight rows at a time.
#pragma once
#include "product.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Scales and biases of a thread's two features: eight apart, or with SwiGLU a gate and its up. They are read early, so the preceding kernel must not
// write them.
template <bool SWIGLU>
struct Features {
    int first;  // of the warp's sixteen
    float scales[2], bias[2] = {};
    __device__ __forceinline__ Features(const Output& out, int first) : first(first) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int feature = SWIGLU ? min(first, out.features - 16) + lane / 4 * 2 + i : min(first + lane / 4 + 8 * i, out.features - 1);
            scales[i] = out.w_scales[feature];
            if (!SWIGLU && out.bias) bias[i] = widen(out.bias[feature]);
        }
    }
};

// Writes results from sums of two consecutive rows of the eight from `row` on: for a thread's first feature (x and y) and for its second (z and w).
// `of_rows`: the scales of the two rows.
template <typename Kind, bool SWIGLU>
__device__ __forceinline__ void emit(
    float4 v, const Output& out, float2 of_rows, int row, const Features<SWIGLU>& of
) {
    const int lane = threadIdx.x % 32;
    v.x = Kind::scaled(v.x, of_rows.x, of.scales[0]) + of.bias[0], v.y = Kind::scaled(v.y, of_rows.y, of.scales[0]) + of.bias[0];
    v.z = Kind::scaled(v.z, of_rows.x, of.scales[1]) + of.bias[1], v.w = Kind::scaled(v.w, of_rows.y, of.scales[1]) + of.bias[1];
    row += lane / 4;
    if (SWIGLU) {
        const unsigned y = transpose(pack(silu_mul(v.x, v.z), silu_mul(v.y, v.w)));
        if (row < out.rows && of.first < out.features)
            *reinterpret_cast<unsigned*>(out.at + row * out.leading + of.first / 2 + lane % 4 * 2) = y;
        return;
    }
    const unsigned left = transpose(pack(v.x, v.y)), right = transpose(pack(v.z, v.w));
    const int feature = of.first + lane % 4 * 2;
    unsigned* to = reinterpret_cast<unsigned*>(out.at + row * out.leading + feature);
    if (row < out.rows && feature < out.features) to[0] = left;
    if (row < out.rows && feature + 8 < out.features) to[4] = right;
}

#endif
