// Matrix multiplication of a warp on tensor cores, bf16 with float32 sums.
#pragma once

// sum += a b: a [16, 16] in rows, b [16, 8] in columns.
__device__ __forceinline__ void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Packs two consecutive values as bf16, rounded to nearest.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Transposes an 8 x 8 matrix in a warp's registers; each lane has two consecutive elements of a row.
__device__ __forceinline__ unsigned transpose(unsigned values) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(values));
    return transposed;
}

// silu(gate) up; both are first rounded, as if they were stored.
__device__ __forceinline__ float silu_mul(float gate, float up) {
    const unsigned both = pack(gate, up);
    const float rounded = __uint_as_float(both << 16);
    return __fdividef(rounded, 1.0f + __expf(-rounded)) * __uint_as_float(both & 0xffff0000u);
}
