// Merges two attention results of the same queries over disjoint keys: lse = log(e^lse_a + e^lse_b), o = e^(lse_a - lse) o_a + e^(lse_b - lse) o_b.
// One pass, rounded once. `o_a` and `o_b` [T, H, hd] are contiguous, hd = 8 * packs; a log-sum-exp [T, H] has a stride for rows and one for heads. n
// is the number of packs.
#include "scalar.cuh"

extern "C" __global__ void __launch_bounds__(256) merge_attention_bf16(
    const bf16* __restrict__ o_a, const float* __restrict__ lse_a, long long row_a, long long head_a,
    const bf16* __restrict__ o_b, const float* __restrict__ lse_b, long long row_b, long long head_b, bf16* __restrict__ o,
    float* __restrict__ lse, long long row, long long head, long long heads, long long packs, long long n) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
        const long long t = i / packs / heads, h = i / packs % heads;
        const float a = lse_a[t * row_a + h * head_a], b = lse_b[t * row_b + h * head_b];
        const float whole = fmaxf(a, b) + log1pf(expf(-fabsf(a - b)));
        const float share_a = expf(a - whole), share_b = expf(b - whole);
        const auto pack_a = reinterpret_cast<const Pack<bf16, 8>*>(o_a)[i];
        const auto pack_b = reinterpret_cast<const Pack<bf16, 8>*>(o_b)[i];
        Pack<bf16, 8> out;
#pragma unroll
        for (int k = 0; k < 8; ++k) narrow(share_a * widen(pack_a.at[k]) + share_b * widen(pack_b.at[k]), out.at[k]);
        reinterpret_cast<Pack<bf16, 8>*>(o)[i] = out;
        if (i % packs == 0) lse[t * row + h * head] = whole;
    }
}
