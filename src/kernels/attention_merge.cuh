// Merges results of several parts of a context: those of a block's warps, and those of a row's items.
#pragma once
#include "attention_warp.cuh"

// One partial result: outputs that are not yet divided by their sums.
template <int HD>
struct Partial {
    float out[COLUMNS][HD];
    float peak[COLUMNS], sum[COLUMNS];
};

// N columns of one head: outputs that are not yet divided by `sum`, with weights relative to `peak`.
template <int N>
struct Part {
    float peak = -INFINITY, sum = 0.0f, out[N] = {};

    __device__ __forceinline__ void write(bf16* to) const {
        Pack<bf16, N> packed;
#pragma unroll
        for (int k = 0; k < N; ++k)  // a NaN sum stays NaN; zeros have no sign, even if parts without weight were added
            narrow(sum == 0.0f ? 0.0f : __fadd_rn(out[k] / sum, 0.0f), packed.at[k]);
        *reinterpret_cast<Pack<bf16, N>*>(to) = packed;
    }
};

// The factors of the accumulated parts and of the next part in their sum.
struct Fold {
    float shrink, weight;

    __device__ __forceinline__ float of(float all, float next) const { return __fmaf_rn(next, weight, __fmul_rn(all, shrink)); }
};

// Adds the next part of a row: parts are added one after the other.
__device__ __forceinline__ Fold fold(float& peak, float& sum, float next_peak, float next_sum) {
    const float higher = fmaxf(peak, next_peak);
    const Fold both = {exp2_fast(__fsub_rn(peak, higher)), exp2_fast(__fsub_rn(next_peak, higher))};
    peak = higher, sum = both.of(sum, next_sum);
    return both;
}

// The factor of a warp's part, relative to the highest peak.
__device__ __forceinline__ float share_of(float peak, float highest) {
    return highest == -INFINITY ? 0.0f : exp2_fast(__fsub_rn(peak, highest));
}

// Merges the row's partial results in order; the one with index `own` is given and not read.
template <int HD, int N>
__device__ __forceinline__ Part<N> merge(const Partial<HD>* partials, int count, int pitch, int head, int column, int own,
                                         const Part<N>& at_hand) {
    constexpr int AT_ONCE = 8;  // partial results that are loaded at once
    Part<N> all;
    for (int first = 0; first < count; first += AT_ONCE) {
        Part<N> parts[AT_ONCE];
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
        for (int i = 0; i < AT_ONCE; ++i) {  // an absent one has no weight
            const Fold next = fold(all.peak, all.sum, parts[i].peak, parts[i].sum);
#pragma unroll
            for (int k = 0; k < N; ++k) all.out[k] = next.of(all.out[k], parts[i].out[k]);
        }
    }
    return all;
}

// Merges the warps' results of an own part, in shared memory.
template <int N, int PITCH>
__device__ __forceinline__ Part<N> merge_warps(const float (&outs)[WARPS][COLUMNS][PITCH],
                                               const float (&peaks)[WARPS][COLUMNS],
                                               const float (&sums)[WARPS][COLUMNS], int head, int column) {
    Part<N> all;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) all.peak = fmaxf(all.peak, peaks[warp][head]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float weight = share_of(peaks[warp][head], all.peak);
        all.sum = __fmaf_rn(sums[warp][head], weight, all.sum);
#pragma unroll
        for (int k = 0; k < N; ++k) all.out[k] = __fmaf_rn(outs[warp][head][column + k], weight, all.out[k]);
    }
    return all;
}
