// Counter-based standard normal numbers, as `RandomKey::fill_normal` draws them on the host: Philox4x32-10, Box-Muller in f64.
#include "scalar.cuh"

__device__ __forceinline__ uint4 philox(uint2 key, uint4 counter) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned low0 = 0xD2511F53u * counter.x, high0 = __umulhi(0xD2511F53u, counter.x);
        const unsigned low1 = 0xCD9E8D57u * counter.z, high1 = __umulhi(0xCD9E8D57u, counter.z);
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
    }
    return counter;
}

__device__ __forceinline__ void box_muller(unsigned a, unsigned b, float* out) {
    const double scale = 1.0 / 4294967296.0, tau = 6.28318530717958647692;
    const double radius = sqrt(-2.0 * log((a + 0.5) * scale));
    double sine, cosine;
    sincos(tau * b * scale, &sine, &cosine);
    out[0] = static_cast<float>(radius * cosine);
    out[1] = static_cast<float>(radius * sine);
}

// Entries 0 .. n of row 0, times scale.
template <typename T>
__device__ __forceinline__ void fill(T* out, long long n, unsigned long long key, float scale) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long block = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; 4 * block < n; block += stride) {
        const uint2 words = make_uint2(static_cast<unsigned>(key), static_cast<unsigned>(key >> 32));
        const uint4 drawn =
            philox(words, make_uint4(static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), 0u, 0u));
        float normal[4];
        box_muller(drawn.x, drawn.y, normal);
        box_muller(drawn.z, drawn.w, normal + 2);
        for (int k = 0; k < 4 && 4 * block + k < n; ++k) narrow(normal[k] * scale, out[4 * block + k]);
    }
}

extern "C" __global__ void normal_f32(float* out, long long n, unsigned long long key, float scale) {
    fill(out, n, key, scale);
}
extern "C" __global__ void normal_bf16(bf16* out, long long n, unsigned long long key, float scale) {
    fill(out, n, key, scale);
}
