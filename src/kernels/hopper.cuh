// Hopper's instructions for copies and multiplications: TMA into shared memory, barriers that count its bytes, wgmma.
#pragma once
#include "cluster.cuh"

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

constexpr int ROW_BYTES = 128;  // of K at once, the swizzled row in shared memory
constexpr int GROUP = 128;      // threads of a warpgroup

// Types of operands. An instruction multiplies 32 bytes of K.
struct Bf16 {
    static constexpr int STEP = 64;  // elements of K at once
    static constexpr bool IS_SCALED = false;
};
struct E4m3 {  // has one scale per row
    static constexpr int STEP = 128;
    static constexpr bool IS_SCALED = true;
};

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

// The registers of a thread's sums, as text and as operands.
#define R4(A, B, C, D) "%" #A ", %" #B ", %" #C ", %" #D
#define D4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define R16 \
    R4(0, 1, 2, 3) ", " R4(4, 5, 6, 7) ", " R4(8, 9, 10, 11) ", " R4(12, 13, 14, 15)
#define D16 \
    D4(0), D4(4), D4(8), D4(12)
#define R20 \
    R16 ", " R4(16, 17, 18, 19)
#define D20 \
    D16, D4(16)
#define R32 \
    R20 ", " R4(20, 21, 22, 23) ", " R4(24, 25, 26, 27) ", " R4(28, 29, 30, 31)
#define D32 \
    D20, D4(20), D4(24), D4(28)
#define R64                                                                                                  \
    R32 ", " R4(32, 33, 34, 35) ", " R4(36, 37, 38, 39) ", " R4(40, 41, 42, 43) ", " R4(44, 45, 46, 47) ", " \
    R4(48, 49, 50, 51) ", " R4(52, 53, 54, 55) ", " R4(56, 57, 58, 59) ", " R4(60, 61, 62, 63)
#define D64 \
    D32, D4(32), D4(36), D4(40), D4(44), D4(48), D4(52), D4(56), D4(60)
#define R72                                                                                                  \
    R64 ", " R4(64, 65, 66, 67) ", " R4(68, 69, 70, 71)
#define D72 \
    D64, D4(64), D4(68)
#define R128                                                                                                 \
    R72 ", " R4(72, 73, 74, 75) ", " R4(76, 77, 78, 79) ", " R4(80, 81, 82, 83) ", " R4(84, 85, 86, 87) ", " \
    R4(88, 89, 90, 91) ", " R4(92, 93, 94, 95) ", " R4(96, 97, 98, 99) ", " R4(100, 101, 102, 103) ", "      \
    R4(104, 105, 106, 107) ", " R4(108, 109, 110, 111) ", " R4(112, 113, 114, 115) ", "                      \
    R4(116, 117, 118, 119) ", " R4(120, 121, 122, 123) ", " R4(124, 125, 126, 127)
#define D128                                                                                                  \
    D72, D4(72), D4(76), D4(80), D4(84), D4(88), D4(92), D4(96), D4(100), D4(104), D4(108), D4(112), D4(116), \
    D4(120), D4(124)

// d = a b^T, or d += a b^T if `add`; 64 rows of a, N of b, 32 bytes of K. TRANSPOSED: how the type states that neither operand is transposed.
#define MULTIPLY_KIND(KIND, NAME, TRANSPOSED, N, SUMS, A, B, ADD)                                                 \
    __device__ __forceinline__ void multiply(                                                                     \
        KIND, float (&d)[SUMS], unsigned long long a, unsigned long long b, int add                               \
    ) {                                                                                                           \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N NAME " {" R##SUMS "}, %" #A ", %" #B                  \
                     ", add, 1, 1" TRANSPOSED ";\n}"                                                              \
                     : D##SUMS                                                                                    \
                     : "l"(a), "l"(b), "r"(add));                                                                 \
    }
#define MULTIPLY(N, SUMS, A, B, ADD)                                                 \
    MULTIPLY_KIND(Bf16, "k16.f32.bf16.bf16", ", 0, 0", N, SUMS, A, B, ADD)           \
    MULTIPLY_KIND(E4m3, "k32.f32.e4m3.e4m3", "", N, SUMS, A, B, ADD)

template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#endif
