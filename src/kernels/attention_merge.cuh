// Results of several parts of a context as one: those of a block's warps, and those of a row's items.
#pragma once
#include "attention_warp.cuh"

// One partial result: outputs not yet divided by their sums.
template <int HD>
struct Partial {
    float out[COLUMNS][HD];
    float peak[COLUMNS], sum[COLUMNS];
};

// N columns of one head: outputs not yet divided by `sum`, weighed against `peak`.
template <int N>
struct Part {
    float peak = -INFINITY, sum = 0.0f, out[N] = {};

    __device__ __forceinline__ void write(bf16* to) const {
        Pack<bf16, N> packed;
#pragma unroll
        for (int k = 0; k < N; ++k) narrow(sum == 0.0f ? 0.0f : out[k] / sum, packed.at[k]);  // a sum that is NaN stays one
        *reinterpret_cast<Pack<bf16, N>*>(to) = packed;
    }
};

// The row's partial results, in order; the one of place `own` is at hand and not read.
template <int HD, int N>
__device__ __forceinline__ Part<N> merge(const Partial<HD>* partials, int count, int pitch, int head, int column, int own,
                                         const Part<N>& at_hand) {
    constexpr int AT_ONCE = 8;  // partial results whose loads are in flight together
    Part<N> all;
    for (int first = 0; first < count; first += AT_ONCE) {
        Part<N> parts[AT_ONCE];
        float higher = all.peak;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= count) continue;
            const Partial<HD>& one = partials[static_cast<long long>(first + i) * pitch];
            parts[i] = at_hand;
            if (first + i == own) continue;
            parts[i].peak = __ldcg(&one.peak[head]), parts[i].sum = __ldcg(&one.sum[head]);
#pragma unroll
            for (int k = 0; k < N; k += 4) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(&one.out[head][column + k]));
                parts[i].out[k] = four.x, parts[i].out[k + 1] = four.y;
                parts[i].out[k + 2] = four.z, parts[i].out[k + 3] = four.w;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) higher = fmaxf(higher, parts[i].peak);
        const float shrink = exp2_fast(all.peak - higher);
        all.peak = higher, all.sum *= shrink;
#pragma unroll
        for (int k = 0; k < N; ++k) all.out[k] *= shrink;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float weight = exp2_fast(parts[i].peak - higher);
            all.sum += parts[i].sum * weight;
#pragma unroll
            for (int k = 0; k < N; ++k) all.out[k] += parts[i].out[k] * weight;
        }
    }
    return all;
}

// The warps' results of an own part in shared memory to one.
template <int HD, int N>
__device__ __forceinline__ Part<N> merge_warps(const float (&outs)[WARPS][COLUMNS][HD + 8],
                                               const float (&peaks)[WARPS][COLUMNS],
                                               const float (&sums)[WARPS][COLUMNS], int head, int column) {
    Part<N> all;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) all.peak = fmaxf(all.peak, peaks[warp][head]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float weight = all.peak == -INFINITY ? 0.0f : exp2_fast(peaks[warp][head] - all.peak);
        all.sum += sums[warp][head] * weight;
#pragma unroll
        for (int k = 0; k < N; ++k) all.out[k] += outs[warp][head][column + k] * weight;
    }
    return all;
}
