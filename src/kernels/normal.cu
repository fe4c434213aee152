// Counter-based random numbers, equal to those of `RandomKey` on the host: standard normal numbers (Box-Muller in f64), and dropout masks.
#include "philox.cuh"
#include "scalar.cuh"

// The random words of a block of a row.
__device__ __forceinline__ void draw(unsigned long long key, unsigned long long block, unsigned long long row,
                                     unsigned words[4]) {
    const unsigned halves[2] = {static_cast<unsigned>(key), static_cast<unsigned>(key >> 32)};
    philox(halves, static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), static_cast<unsigned>(row),
           static_cast<unsigned>(row >> 32), words);
}

__device__ __forceinline__ void box_muller(unsigned a, unsigned b, float* out) {
    const double scale = 1.0 / 4294967296.0, tau = 6.28318530717958647692;
    const double radius = sqrt(-2.0 * log((a + 0.5) * scale));
    double sine, cosine;
    sincos(tau * b * scale, &sine, &cosine);
    out[0] = static_cast<float>(radius * cosine);
    out[1] = static_cast<float>(radius * sine);
}

// Numbers 0 .. n of row 0, times scale.
template <typename T>
__device__ __forceinline__ void fill(T* out, long long n, unsigned long long key, float scale) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long block = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; 4 * block < n; block += stride) {
        unsigned words[4];
        float normal[4];
        draw(key, block, 0, words);
        box_muller(words[0], words[1], normal);
        box_muller(words[2], words[3], normal + 2);
        for (int k = 0; k < 4 && 4 * block + k < n; ++k) narrow(normal[k] * scale, out[4 * block + k]);
    }
}

extern "C" __global__ void normal_f32(float* out, long long n, unsigned long long key, float scale) {
    fill(out, n, key, scale);
}
extern "C" __global__ void normal_bf16(bf16* out, long long n, unsigned long long key, float scale) {
    fill(out, n, key, scale);
}

// y = x * scale, or 0 if the word of (row, column) is below the threshold; 4 columns per thread.
template <typename T>
__device__ __forceinline__ void drop(const T* x, T* y, long long rows, long long columns, unsigned long long key,
                                     long long threshold, float scale) {
    const long long blocks = (columns + 3) / 4, stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * blocks; i += stride) {
        const unsigned long long row = i / blocks, block = i % blocks;
        unsigned words[4];
        draw(key, block, row, words);
        for (int k = 0; k < 4 && 4 * block + k < columns; ++k) {
            const long long at = row * columns + 4 * block + k;
            narrow(words[k] < threshold ? 0.0f : widen(x[at]) * scale, y[at]);
        }
    }
}

extern "C" __global__ void dropout_f32(const float* x, float* y, long long rows, long long columns, unsigned long long key,
                                       long long threshold, float scale) {
    drop(x, y, rows, columns, key, threshold, scale);
}
extern "C" __global__ void dropout_bf16(const bf16* x, bf16* y, long long rows, long long columns, unsigned long long key,
                                        long long threshold, float scale) {
    drop(x, y, rows, columns, key, threshold, scale);
}
