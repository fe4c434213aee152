// MXFP4 (OCP microscaling) of matrices of experts: 32 numbers of a row in 4 bits (e2m1), with one power of two. Here in the order in which lanes of a
// multiplication read them: a unit of 64 features and 64 columns has 128 threads' codes, 16 bytes each, and then the exponents of 64 rows.
//
// A thread has two features, 2 (lane / 4) of its warp's 16 and the next. Each of its four words has codes of 16 columns: A and C of the even feature,
// B and D of the odd one; A and B of the columns 2 (lane % 4) and the next, C and D of those eight columns later. The even column is in the low half
// of the word. Bits of codes are placed such that a shift or two, an exclusive or and a mask turn them into bfloat16 numbers x 2^-126.
#pragma once
#include "clamped.cuh"
#include "mma.cuh"
#include "tiles.cuh"

constexpr int UNIT = 64;                                  // features and columns of a unit
constexpr int UNIT_CODES = UNIT * UNIT / 2;               // bytes
constexpr int UNIT_BYTES = UNIT_CODES + UNIT * UNIT / 32;  // with the exponents
constexpr int UNIT_THREADS = 128;

// Weights are multiplied as numbers x 2^-32, so that factors of all scales up to 2^33 are bfloat16 numbers.
constexpr float FROM_PRODUCT = 4294967296.0f;
// The exponents of bfloat16 that multiply codes: the largest number's exponent + TO_FACTOR. Smaller ones would not be exact.
constexpr int TO_FACTOR = 92, LEAST_FACTOR = 131, MOST_FACTOR = 254, NO_FACTOR = 255;

constexpr unsigned PLACES = 0x81c081c0u;  // of the sign and the three bits of a code in both bfloat16 numbers

// The positions of both columns' codes in a word.
__device__ __forceinline__ unsigned placed(const unsigned (&a)[2], const unsigned (&b)[2], const unsigned (&c)[2], const unsigned (&d)[2]) {
    unsigned halves[2];
#pragma unroll
    for (int h = 1; h >= 0; --h) {
        unsigned w = (a[h] & 8) << 12 | (a[h] & 7) << 6 | (b[h] & 8) << 9 | (b[h] & 7) << 3;
        w |= (c[h] ^ w >> 5) & 7;
        w |= ((d[h] << 3 ^ w >> 1) & 0x38) << 6;
        w |= (c[h] << 11 ^ w << 5) & 0x4000;
        w |= (d[h] << 10 ^ (h ? 0 : halves[1] << 11)) & 0x2000;
        halves[h] = w;
    }
    return halves[0] | halves[1] << 16;
}

// The factors of a thread's features in a unit: in the low half those of the first 32 columns, in the high half those of the others.
struct Factors {
    unsigned even, odd;

    __device__ __forceinline__ explicit Factors(unsigned bytes) : even(bytes << 7 & 0x7f807f80u), odd(bytes >> 1 & 0x7f807f80u) {}
};

// Multiplies two numbers with the factor of a half of the columns. The instruction itself takes a half of its operand twice.
template <int HALF>
__device__ __forceinline__ unsigned scaled(unsigned numbers, unsigned factors) {
    unsigned both;
    asm("{\n.reg .b16 half<2>;\n.reg .b32 factor;\nmov.b32 {half0, half1}, %2;\nmov.b32 factor, {half%4, half%4};\n"
        "fma.rn.bf16x2 %0, %1, factor, %3;\n}"
        : "=r"(both)
        : "r"(numbers), "r"(factors), "r"(0x80008000u), "n"(HALF));
    return both;
}

// The weights of a word, x 2^-32, as the left operand of a multiplication with 16 columns of a half.
template <int HALF>
__device__ __forceinline__ void weights_of(unsigned w, const Factors& factors, unsigned* to) {
    to[0] = scaled<HALF>(w & PLACES, factors.even);
    to[1] = scaled<HALF>((w << 3) & PLACES, factors.odd);
    to[2] = scaled<HALF>((w << 6 ^ w << 1) & PLACES, factors.even);
    to[3] = scaled<HALF>((w >> 3 ^ w << 2) & PLACES, factors.odd);
}

// gate_up: act = silu(gate) * up of a token's row, in sorted order, or with biases the clamped SwiGLU; features g0 u0 g1 u1 .. down: a sorted row of
// act, plus biases, written to the position of its choice.
struct Product {
    const bf16* x;           // [T, K]; for down sorted rows [T k, K]
    const unsigned char* w;  // [E, units of features, units of K, UNIT_BYTES]
    bf16* out;               // [T k, features / 2], sorted; for down [T k, features]
    const int* order;        // choices in sorted order
    const Tile* tiles;       // the number of tiles, then the tiles
    const bf16* bias;        // [E, features] or null
    long long bias_expert;
    int k, features, choices, sure;  // sure: experts that most likely have one tile each; 0: unknown

    __device__ __forceinline__ int units() const { return (features + UNIT - 1) / UNIT; }
    __device__ __forceinline__ int steps() const { return (k + UNIT - 1) / UNIT; }
};

// The biases of a feature and the next.
template <bool BIASED>
__device__ __forceinline__ float2 biases_of(const Product& of, const Tile& tile, int feature) {
    if (!BIASED || feature >= of.features) return {};
    const bf16* bias = of.bias + tile.expert * of.bias_expert + feature;
    return {widen(bias[0]), widen(bias[1])};
}

// Writes a unit's sums of two features and of a pair of rows in each eight, as multiplications leave them: both rows of the even feature, then both
// of the odd one.
template <bool DOWN, bool BIASED, int SUMS>
__device__ __forceinline__ void write(const float (&sums)[SUMS], const Product& of, const Tile& tile, int feature, float2 bias) {
    const int lane = threadIdx.x % 32;
    if (feature >= of.features) return;
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int at = lane % 4 * 2 + j * 8 + odd;
            if (at >= tile.count) continue;
            float low = sums[j * 4 + odd] * FROM_PRODUCT, high = sums[j * 4 + 2 + odd] * FROM_PRODUCT;
            if constexpr (BIASED) low += bias.x, high += bias.y;
            if constexpr (DOWN) {
                const long long row = of.order[tile.first + at];
                *reinterpret_cast<unsigned*>(of.out + row * of.features + feature) = pack(low, high);
            } else {
                narrow(BIASED ? clamped_swiglu(low, high) : silu_mul(low, high),
                       of.out[static_cast<long long>(tile.first + at) * (of.features / 2) + feature / 2]);
            }
        }
    }
}

#define PRODUCT(NAME, THREADS, PER_PROCESSOR, CALL)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) NAME(                                      \
        const bf16* x, const unsigned char* w, bf16* out, const int* order, const Tile* tiles, const bf16* bias,     \
        long long bias_expert, long long k, long long features, long long choices, long long sure                    \
    ) {                                                                                                              \
        CALL({x, w, out, order, tiles, bias, bias_expert, static_cast<int>(k), static_cast<int>(features),           \
              static_cast<int>(choices), static_cast<int>(sure)});                                                   \
    }
