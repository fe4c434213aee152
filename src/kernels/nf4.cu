// Dequantizes NF4 weights (QLoRA, arXiv 2305.14314) to the network's type: code * scale, where the scale itself is an 8-bit code.
#include "scalar.cuh"

// 16 codes per thread, the first of two in the upper half of its byte. 64 weights share a scale, 256 scales share a maximum. Row r of the matrix
// [rows, columns] is written to row r / period * stride + r % period of y.
template <typename T>
__device__ __forceinline__ void dequantize(const uint2* __restrict__ codes, const unsigned char* __restrict__ scales,
                                           const float* __restrict__ maxima, const float* __restrict__ offset,
                                           const float* __restrict__ levels, const float* __restrict__ scale_levels,
                                           T* __restrict__ y, long long n, long long columns, long long period,
                                           long long stride) {
    __shared__ float level[16];
    if (threadIdx.x < 16) level[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n / 16; i += threads) {
        const uint2 packed = codes[i];
        const long long block = i / 4, at = i * 16, row = at / columns;
        const float scale = __fadd_rn(__fmul_rn(scale_levels[scales[block]], maxima[block / 256]), *offset);
        Pack<T, 8> out[2];
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const unsigned word = k < 8 ? packed.x : packed.y;
            const unsigned code = word >> ((k % 8 / 2) * 8 + (k % 2 == 0 ? 4 : 0)) & 15u;
            narrow(level[code] * scale, out[k / 8].at[k % 8]);
        }
        T* to = y + (row / period * stride + row % period) * columns + at % columns;
        reinterpret_cast<Pack<T, 8>*>(to)[0] = out[0];
        reinterpret_cast<Pack<T, 8>*>(to)[1] = out[1];
    }
}

#define NF4(SUFFIX, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) nf4_dequantize_##SUFFIX(                                      \
        const uint2* codes, const unsigned char* scales, const float* maxima, const float* offset,                  \
        const float* levels, const float* scale_levels, T* y, long long n, long long columns, long long period,     \
        long long stride) {                                                                                         \
        dequantize<T>(codes, scales, maxima, offset, levels, scale_levels, y, n, columns, period, stride);          \
    }

NF4(f32, float)
NF4(bf16, bf16)
