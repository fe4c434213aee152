// Processing of a logit before it is compared, shared by `sample` and `filter`: repetition penalty, temperature, cut.
#pragma once
#include "scalar.cuh"

// Maps a float's bits to unsigned integers in the same order.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Penalty and filters. `seen` null: no penalty. `cut` null: no filter.
struct Process {
    const unsigned* seen;  // [ceil(V / 32)] bits by id
    const unsigned* cut;   // [2]: smallest ordered value that is kept, and the highest id kept among those with that value
    float penalty;

    // The value to which noise is added; -inf if a filter forbids the id.
    __device__ __forceinline__ float operator()(float logit, float scale, int id) const {
        if (seen && seen[id / 32] >> (id % 32) & 1) logit = logit > 0.0f ? __fdiv_rn(logit, penalty) : logit * penalty;
        const float value = scale * logit;
        if (!cut) return value;
        const unsigned order = ordered(value);
        return order > cut[0] || (order == cut[0] && id <= static_cast<int>(cut[1])) ? value : -INFINITY;
    }
};
