// Matrix multiplications of the gated delta rule whose first operand and sums are in registers: 16 rows per warp. On Hopper, warpgroups read the
// second operand from shared memory (wgmma); on other GPUs each warp loads it.
#pragma once
#include "delta.cuh"
#include "hopper.cuh"

// The address of 16 bytes of a row of 128 elements, whose halves are HALF bytes apart, in rows of 128 bytes with the 128-byte swizzle of TMA and
// wgmma.
template <int HALF>
__device__ __forceinline__ unsigned half_at(unsigned tile, int row, int part) {
    return tile + part / 8 * HALF + row * 128 + (((part & 7) ^ (row & 7)) << 4);
}

// Copies rows of a chunk like `copy_rows`, in halves.
template <int HALF>
__device__ __forceinline__ void copy_halves(unsigned tile, const bf16* from, long long stride, int count) {
    for (int i = threadIdx.x; i < CHUNK * 16; i += blockDim.x) {
        const int row = i / 16, part = i % 16;
        copy_16(half_at<HALF>(tile, row, part), from + (row < count ? row : 0) * stride + part * 8, row < count ? 16 : 0);
    }
}

// Converts two tiles of sums [16, 8] to an operand [16, 16] of another multiplication.
__device__ __forceinline__ void as_factor(unsigned (&to)[4], const float* sums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = pack(sums[2 * i], sums[2 * i + 1]);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Must precede multiplications: makes registers that threads have written visible to wgmma.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void publish_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until at most PENDING groups of multiplications are unfinished, and `sums` are complete.
template <int PENDING, int COUNT>
__device__ __forceinline__ void finish_products(float (&sums)[COUNT]) {
    wait_products<PENDING>();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

#define MULTIPLY_FROM(N, SUMS, A0, A1, A2, A3, B, BY_ROWS)                                                                   \
    template <int IS_BY_ROWS>                                                                                                \
    __device__ __forceinline__ void multiply_from(float (&d)[SUMS], const unsigned (&a)[4], unsigned long long b) {          \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" R##SUMS "}, {" QUAD(A0, A1, A2, A3) "}, %" #B \
                     ", add, 1, 1, %" #BY_ROWS ";\n}"                                                                        \
                     : D##SUMS("+f")                                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(IS_BY_ROWS));                                 \
    }
MULTIPLY_FROM(64, 32, 32, 33, 34, 35, 36, 37)
MULTIPLY_FROM(128, 64, 64, 65, 66, 67, 68, 69)

// sums [16, 2 COUNT] += a b^T, for the columns from 16 step on of b's rows. Complete when `finish_products` returns.
template <int HALF, int COUNT>
__device__ __forceinline__ void add_by_columns(float (&sums)[COUNT], const unsigned (&a)[4], unsigned b, int step) {
    multiply_from<0>(sums, a, descriptor(b + step / 4 * HALF + step % 4 * 32));
}

// sums [16, 2 COUNT] += a b, for the rows from 16 step on of b.
template <int HALF, int COUNT>
__device__ __forceinline__ void add_by_rows(float (&sums)[COUNT], const unsigned (&a)[4], unsigned b, int step) {
    constexpr unsigned long long HALVES = static_cast<unsigned long long>(HALF / 16) << 16;
    multiply_from<1>(sums, a, (descriptor(b + step * 16 * 128) & ~(0x3fffull << 16)) | HALVES);
}

#else

__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void commit_products() {}
__device__ __forceinline__ void publish_copies() {}
template <int PENDING, int COUNT>
__device__ __forceinline__ void finish_products(float (&)[COUNT]) {}

template <int COUNT>
__device__ __forceinline__ void multiply_pair(float (&sums)[COUNT], int n, const unsigned (&a)[4], const unsigned (&b)[4]) {
    multiply(reinterpret_cast<float(&)[4]>(sums[8 * n]), a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply(reinterpret_cast<float(&)[4]>(sums[8 * n + 4]), a[0], a[1], a[2], a[3], b[2], b[3]);
}

template <int HALF, int COUNT>
__device__ __forceinline__ void add_by_columns(float (&sums)[COUNT], const unsigned (&a)[4], unsigned b, int step) {
    const Lane lane;
#pragma unroll
    for (int n = 0; n < COUNT / 8; ++n) {
        unsigned rows[4];
        load_matrices(rows, half_at<HALF>(b, 16 * n + lane.row_y, 2 * step + lane.part_y));
        multiply_pair(sums, n, a, rows);
    }
}

template <int HALF, int COUNT>
__device__ __forceinline__ void add_by_rows(float (&sums)[COUNT], const unsigned (&a)[4], unsigned b, int step) {
    const Lane lane;
#pragma unroll
    for (int n = 0; n < COUNT / 8; ++n) {
        unsigned rows[4];
        load_transposed(rows, half_at<HALF>(b, 16 * step + lane.row_x, 2 * n + lane.part_x));
        multiply_pair(sums, n, a, rows);
    }
}

#endif
