// What `sample` and `filter` make of a logit before it is compared: repetition penalty, temperature, cut.
#pragma once
#include "scalar.cuh"

// A float's bits in an order that unsigned integers have.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Penalty and filters. `seen` null: no penalty. `cut` null: no filter.
struct Process {
    const unsigned* seen;  // [ceil(V / 32)] bits by id
    const unsigned* cut;   // [2]: least ordered value that is kept, and of those the highest id
    float penalty;

    // The value that noise is added to, -inf where a filter forbids the id.
    __device__ __forceinline__ float operator()(float logit, float scale, int id) const {
        if (seen && seen[id / 32] >> (id % 32) & 1) logit = logit > 0.0f ? __fdiv_rn(logit, penalty) : logit * penalty;
        const float value = scale * logit;
        if (!cut) return value;
        const unsigned order = ordered(value);
        return order > cut[0] || (order == cut[0] && id <= static_cast<int>(cut[1])) ? value : -INFINITY;
    }
};
