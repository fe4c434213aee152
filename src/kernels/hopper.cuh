// Hopper's instructions for copies and multiplications: TMA into shared memory, barriers that count its bytes, wgmma.
#pragma once
#include "cluster.cuh"

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

constexpr int ROW_BYTES = 128;  // of K at once, the swizzled row in shared memory
constexpr int GROUP = 128;      // threads of a warpgroup

// Types of operands. An instruction multiplies 32 bytes of K. Sums are exchanged as the bits of a float.
struct FloatSums {
    using Sum = float;
    static __device__ __forceinline__ float bits(float sum) { return sum; }
    static __device__ __forceinline__ float add(float a, float b) { return a + b; }
    static __device__ __forceinline__ float scaled(float sum, float of_row, float of_feature) { return sum * of_row * of_feature; }
};
struct Bf16 : FloatSums {
    static constexpr int STEP = 64;  // elements of K at once
    static constexpr bool IS_SCALED = false;
};
struct E4m3 : FloatSums {  // has one scale per row
    static constexpr int STEP = 128;
    static constexpr bool IS_SCALED = true;
};
struct Int8 {  // has one scale per row; sums are exact, so all kernels give the same bits
    using Sum = int;
    static constexpr int STEP = 128;
    static constexpr bool IS_SCALED = true;
    static __device__ __forceinline__ float bits(int sum) { return __int_as_float(sum); }
    static __device__ __forceinline__ float add(float a, float b) { return bits(__float_as_int(a) + __float_as_int(b)); }
    static __device__ __forceinline__ float scaled(float sum, float of_row, float of_feature) {
        return __fmul_rn(__fmul_rn(__int2float_rn(__float_as_int(sum)), of_row), of_feature);
    }
};

// Adds sums that are exchanged.
template <typename Kind>
__device__ __forceinline__ void add_sums(float4& to, float4 more) {
    to.x = Kind::add(to.x, more.x), to.y = Kind::add(to.y, more.y), to.z = Kind::add(to.z, more.z), to.w = Kind::add(to.w, more.w);
}

// A thread's sums for eight rows, of a tile whose left operand is the weight.
template <typename Kind, int SUMS>
__device__ __forceinline__ float4 sums_of(const typename Kind::Sum (&d)[SUMS], int eight) {
    const int at = 4 * eight;
    return make_float4(Kind::bits(d[at]), Kind::bits(d[at + 1]), Kind::bits(d[at + 2]), Kind::bits(d[at + 3]));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ void init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of the cluster's block `rank`.
__device__ __forceinline__ void arrive_at(unsigned barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}

// Copies the box at (k, row) to shared memory.
__device__ __forceinline__ void copy(
    unsigned to, const TensorMap* map, int k, int row, unsigned barrier, unsigned long long policy
) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// Copies the box at (k, row) to the same place in the cluster's `blocks` (one bit each), whose barriers count it.
__device__ __forceinline__ void copy_to(
    unsigned to, const TensorMap* map, int k, int row, unsigned barrier, short blocks, unsigned long long policy
) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
        : "memory");
}

// Copies, for a matrix in groups of sixteen rows, their eight gates before their eight ups.
__device__ __forceinline__ void copy_pairs(
    unsigned to, const TensorMap* map, int k, int sixteen, unsigned barrier, unsigned long long policy
) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(k), "r"(0), "r"(sixteen), "r"(barrier), "l"(policy)
        : "memory");
}

// L2 policies: how long the cache keeps what is copied.
__device__ __forceinline__ unsigned long long copied_once() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ unsigned long long copied_often() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Fills `count` stages with steps begin .. end of a GEMM, each when `empty` signals that the stage is no longer read: weights by `copy_w`, the first
// of them while the preceding kernel still runs, and x by `copy_x`. One thread.
template <typename W, typename X>
__device__ __forceinline__ void fill(int begin, int end, int count, unsigned empty, const W& copy_w, const X& copy_x) {
    const int early = min(end - begin, count);
    for (int stage = 0; stage < early; ++stage) copy_w(begin + stage, stage);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int stage = 0; stage < early; ++stage) copy_x(begin + stage, stage);
    int stage = 0, parity = 0;
    for (int step = begin + early; step < end; ++step) {
        wait(empty + 8 * stage, parity);
        copy_w(step, stage);
        copy_x(step, stage);
        if (++stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// Descriptor of rows of 128 swizzled bytes, eight rows 1024 bytes apart.
__device__ __forceinline__ unsigned long long descriptor(unsigned at) {
    return (static_cast<unsigned long long>(at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The registers of a thread's sums, as text and as operands with the constraint C.
#define QUAD(A, B, C, D) "%" #A ", %" #B ", %" #C ", %" #D
#define OWN(C, I) C(d[I]), C(d[I + 1]), C(d[I + 2]), C(d[I + 3])
#define R4 QUAD(0, 1, 2, 3)
#define D4(C) OWN(C, 0)
#define R8 \
    R4 ", " QUAD(4, 5, 6, 7)
#define D8(C) \
    OWN(C, 0), OWN(C, 4)
#define R16 \
    R8 ", " QUAD(8, 9, 10, 11) ", " QUAD(12, 13, 14, 15)
#define D16(C) \
    D8(C), OWN(C, 8), OWN(C, 12)
#define R20 \
    R16 ", " QUAD(16, 17, 18, 19)
#define D20(C) \
    D16(C), OWN(C, 16)
#define R24 \
    R20 ", " QUAD(20, 21, 22, 23)
#define D24(C) \
    D20(C), OWN(C, 20)
#define R32 \
    R24 ", " QUAD(24, 25, 26, 27) ", " QUAD(28, 29, 30, 31)
#define D32(C) \
    D24(C), OWN(C, 24), OWN(C, 28)
#define R64                                                                                                  \
    R32 ", " QUAD(32, 33, 34, 35) ", " QUAD(36, 37, 38, 39) ", " QUAD(40, 41, 42, 43) ", " QUAD(44, 45, 46, 47) ", " \
    QUAD(48, 49, 50, 51) ", " QUAD(52, 53, 54, 55) ", " QUAD(56, 57, 58, 59) ", " QUAD(60, 61, 62, 63)
#define D64(C) \
    D32(C), OWN(C, 32), OWN(C, 36), OWN(C, 40), OWN(C, 44), OWN(C, 48), OWN(C, 52), OWN(C, 56), OWN(C, 60)
#define R72                                                                                                  \
    R64 ", " QUAD(64, 65, 66, 67) ", " QUAD(68, 69, 70, 71)
#define D72(C) \
    D64(C), OWN(C, 64), OWN(C, 68)
#define R128                                                                                                 \
    R72 ", " QUAD(72, 73, 74, 75) ", " QUAD(76, 77, 78, 79) ", " QUAD(80, 81, 82, 83) ", " QUAD(84, 85, 86, 87) ", " \
    QUAD(88, 89, 90, 91) ", " QUAD(92, 93, 94, 95) ", " QUAD(96, 97, 98, 99) ", " QUAD(100, 101, 102, 103) ", "      \
    QUAD(104, 105, 106, 107) ", " QUAD(108, 109, 110, 111) ", " QUAD(112, 113, 114, 115) ", "                      \
    QUAD(116, 117, 118, 119) ", " QUAD(120, 121, 122, 123) ", " QUAD(124, 125, 126, 127)
#define D128(C)                                                                                                   \
    D72(C), OWN(C, 72), OWN(C, 76), OWN(C, 80), OWN(C, 84), OWN(C, 88), OWN(C, 92), OWN(C, 96), OWN(C, 100), OWN(C, 104), \
    OWN(C, 108), OWN(C, 112), OWN(C, 116), OWN(C, 120), OWN(C, 124)

// d = a b^T, or d += a b^T if `add`; 64 rows of a, N of b, 32 bytes of K. TAIL: signs of float operands, and that neither is transposed.
#define MULTIPLY_AS(KIND, SUM, CONSTRAINT, NAME, TAIL, N, SUMS, A, B, ADD)                                        \
    __device__ __forceinline__ void multiply(                                                                     \
        KIND, SUM (&d)[SUMS], unsigned long long a, unsigned long long b, int add                                 \
    ) {                                                                                                           \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N NAME " {" R##SUMS "}, %" #A ", %" #B                  \
                     ", add" TAIL ";\n}"                                                                          \
                     : D##SUMS(CONSTRAINT)                                                                        \
                     : "l"(a), "l"(b), "r"(add));                                                                 \
    }
#define MULTIPLY_KIND(KIND, NAME, TRANSPOSED, N, SUMS, A, B, ADD) \
    MULTIPLY_AS(KIND, float, "+f", NAME, ", 1, 1" TRANSPOSED, N, SUMS, A, B, ADD)
#define MULTIPLY(N, SUMS, A, B, ADD)                                                 \
    MULTIPLY_KIND(Bf16, "k16.f32.bf16.bf16", ", 0, 0", N, SUMS, A, B, ADD)           \
    MULTIPLY_KIND(E4m3, "k32.f32.e4m3.e4m3", "", N, SUMS, A, B, ADD)
#define MULTIPLY_INT8(N, SUMS, A, B, ADD) MULTIPLY_AS(Int8, int, "+r", "k32.s32.s8.s8", "", N, SUMS, A, B, ADD)

template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#endif
