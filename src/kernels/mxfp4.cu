// MXFP4 of matrices of experts: their quantization, and GEMMs on chips that are not Hopper, for rows that route.cu has sorted into tiles.
#include "async.cuh"
#include "cluster.cuh"
#include "mxfp4.cuh"

constexpr int ROWS = 64;  // of a tile
constexpr int STAGES = 4;
constexpr int PER_PROCESSOR = 2;
constexpr int ROW_BYTES = 2 * UNIT;  // of a row's 64 columns, swizzled in shared memory
constexpr int X_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = X_BYTES + UNIT_BYTES;

// Copies a step's rows and weights into a stage.
__device__ __forceinline__ void copy_step(
    const Product& of, const unsigned char* const (&rows)[ROWS / 16], const unsigned char* w, int count, int step, unsigned to
) {
    const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const bool has = step * ROW_BYTES + chunk * 16 < of.k * 2;
    for (int i = threadIdx.x; i < UNIT_BYTES / 16; i += UNIT_THREADS)
        copy_16(to + X_BYTES + i * 16, w + static_cast<long long>(step) * UNIT_BYTES + i * 16, 16);
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i) {
        if (i * 16 < count)
            copy_16(to + (line + i * 16) * ROW_BYTES + ((chunk ^ (line % 8)) * 16), has ? rows[i] + step * ROW_BYTES : rows[i], has ? 16 : 0);
    }
}

// sums += a step's weights times its rows.
__device__ __forceinline__ void multiply_step(float (&sums)[ROWS / 2], unsigned at, int count) {
    const int lane = threadIdx.x % 32, line = lane % 8, matrix = lane / 8;
    const unsigned codes = at + X_BYTES + threadIdx.x * 16, x_at = at + (matrix / 2 * 8 + line) * ROW_BYTES;
    unsigned w[4], factors;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(codes));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(factors) : "r"(at + X_BYTES + UNIT_CODES + threadIdx.x / 4 * 4));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        unsigned a[4];
        if (k < 2) weights_of<0>(w[k], Factors(factors), a);
        else weights_of<1>(w[k], Factors(factors), a);
#pragma unroll
        for (int j = 0; j < ROWS / 8; j += 2) {
            if (j * 8 >= count) break;
            unsigned b[4];
            load_matrices(b, x_at + j * 8 * ROW_BYTES + (((2 * k + matrix % 2) ^ line) * 16));
            multiply(reinterpret_cast<float (&)[4]>(sums[j * 4]), a[0], a[1], a[2], a[3], b[0], b[1]);
            multiply(reinterpret_cast<float (&)[4]>(sums[j * 4 + 4]), a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// Four warps multiply one unit of features with a tile's rows at a time.
template <bool DOWN, bool BIASED>
__device__ __forceinline__ void product(const Product& of) {
    extern __shared__ unsigned char memory[];
    const unsigned stages = (shared_address(memory) + 127) / 128 * 128;
    const int units = of.units(), steps = of.steps(), lane = threadIdx.x % 32;
    wait_for_inputs();
    const int items = of.tiles[0].expert * units;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = of.tiles[1 + item / units];
        const int unit = item % units, feature = unit * UNIT + threadIdx.x / 32 * 16 + lane / 4 * 2;
        const unsigned char *w = of.w + (static_cast<long long>(tile.expert) * units + unit) * steps * UNIT_BYTES, *rows[ROWS / 16];
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) {
            const int sorted = tile.first + min(static_cast<int>(threadIdx.x) / 8 + i * 16, tile.count - 1);
            const int row = DOWN ? sorted : of.order[sorted] / of.choices;
            rows[i] = reinterpret_cast<const unsigned char*>(of.x + static_cast<long long>(row) * of.k) + threadIdx.x % 8 * 16;
        }
        const float2 bias = biases_of<BIASED>(of, tile, feature);
        float sums[ROWS / 2] = {};
        for (int step = 0; step < STAGES - 1; ++step) {
            if (step < steps) copy_step(of, rows, w, tile.count, step, stages + step * STAGE_BYTES);
            commit_copies();
        }
        for (int step = 0; step < steps; ++step) {
            wait_copies<STAGES - 2>();
            __syncthreads();
            const int ahead = step + STAGES - 1;
            if (ahead < steps) copy_step(of, rows, w, tile.count, ahead, stages + ahead % STAGES * STAGE_BYTES);
            commit_copies();
            multiply_step(sums, stages + step % STAGES * STAGE_BYTES, tile.count);
        }
        wait_copies<0>();
        __syncthreads();
        write<DOWN, BIASED>(sums, of, tile, feature, bias);
    }
}

// Quantizes bfloat16 matrices [E, features, K]. A block quantizes one unit.
extern "C" __global__ void __launch_bounds__(UNIT_THREADS) mxfp4_quantize(
    const bf16* w, unsigned char* to, long long w_expert, long long w_row, long long features, long long k
) {
    const int units = (features + UNIT - 1) / UNIT, steps = (k + UNIT - 1) / UNIT;
    const int step = blockIdx.x % steps, unit = blockIdx.x / steps % units, expert = blockIdx.x / steps / units;
    const int lane = threadIdx.x % 32, first = unit * UNIT + threadIdx.x / 32 * 16 + lane / 4 * 2;
    unsigned char* out = to + static_cast<long long>(blockIdx.x) * UNIT_BYTES;
    unsigned factors = 0, words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned c[2][2][2][2];  // [step of 16][row][later eight columns][column]
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int feature = first + odd;
            const bf16* row = w + expert * w_expert + feature * w_row;
            float values[2][2][2];
            unsigned most = 0;
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int later = 0; later < 2; ++later)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int at = step * UNIT + half * 32 + s * 16 + later * 8 + lane % 4 * 2 + h;
                        const float value = feature < features && at < k ? widen(row[at]) : 0.0f;
                        values[s][later][h] = value, most = max(most, __float_as_uint(value) & 0x7fffffffu);
                    }
            most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
            const int exponent = most >> 23;
            const int factor = exponent == 255 ? NO_FACTOR : min(max(exponent + TO_FACTOR, LEAST_FACTOR), MOST_FACTOR);
            // The scale is 2^(factor - 221); divides by it.
            const float inverse = __uint_as_float(static_cast<unsigned>(221 - factor + 127) << 23);
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int later = 0; later < 2; ++later)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float value = values[s][later][h], a = fabsf(value) * inverse;
                        const unsigned code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
                        c[s][odd][later][h] = code | __float_as_uint(value) >> 31 << 3;
                    }
            factors |= static_cast<unsigned>(factor) << (16 * half + 8 * odd);
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) words[half * 2 + s] = placed(c[s][0][0], c[s][1][0], c[s][0][1], c[s][1][1]);
    }
    reinterpret_cast<uint4*>(out)[threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
    if (lane % 4 == 0) reinterpret_cast<unsigned*>(out + UNIT_CODES)[threadIdx.x / 4] = factors;
}

PRODUCT(mxfp4_gate_up_any, UNIT_THREADS, PER_PROCESSOR, (product<false, false>))
PRODUCT(mxfp4_down_any, UNIT_THREADS, PER_PROCESSOR, (product<true, false>))
PRODUCT(mxfp4_gate_up_clamped_any, UNIT_THREADS, PER_PROCESSOR, (product<false, true>))
PRODUCT(mxfp4_down_biased_any, UNIT_THREADS, PER_PROCESSOR, (product<true, true>))
