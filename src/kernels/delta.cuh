// Tiles of the gated delta rule in shared memory, and loads from them in the layout of tensor cores. A head's keys and values have width 128, a chunk
// has 64 tokens.
#pragma once
#include "async.cuh"
#include "cluster.cuh"
#include "mma.cuh"
#include "scalar.cuh"

constexpr int CHUNK = 64, DIM = 128;
constexpr int WIDE_BYTES = CHUNK * DIM * 2, PAIRS_BYTES = CHUNK * CHUNK * 2, STATE_BYTES = DIM * DIM * 2;
constexpr int SWIZZLED = 1024;  // alignment of swizzled tiles
constexpr float SCALE = 0.08838834764831845f;  // 1 / sqrt(DIM)

// A chunk's decays and write strengths of one head.
struct alignas(16) Gates {
    double sum[CHUNK];  // of the logarithms of decays, from the chunk's start
    float now[CHUNK];   // exp(sum)
    float end[CHUNK];   // exp(last sum - sum)
    float beta[CHUNK];  // 0 after the last token
};

// A chunk: rows `first` to `first + count`, at `position` in its sequence.
struct alignas(16) Chunk {
    int first, count, sequence, position;
};

// Sequences, the longest first, and their chunks.
struct alignas(16) Sequence {
    int sequence, first_chunk, chunks, length;
};

// The address of 16 bytes of a row in shared memory, swizzled so that elements of a column are in different banks. For rows of 256 and of 128 bytes.
__device__ __forceinline__ unsigned wide_at(unsigned tile, int row, int part) {
    return tile + row * 256 + ((part ^ (row & 7)) << 4);
}
__device__ __forceinline__ unsigned pairs_at(unsigned tile, int row, int part) {
    return tile + row * 128 + ((part ^ (row & 7)) << 4);
}

// A lane's row and part of four matrices: by rows of 16 (operands [m, k] as stored, and [k, n]), or by parts (operands [n, k] as stored, and [k, m]).
struct Lane {
    int row_x, part_x, row_y, part_y, group, pair;
    __device__ __forceinline__ Lane() {
        const int lane = threadIdx.x % 32;
        row_x = lane & 15;
        part_x = lane >> 4;
        row_y = (lane & 7) + ((lane >> 4) << 3);
        part_y = (lane >> 3) & 1;
        group = lane / 4;
        pair = lane % 4 * 2;
    }
};

__device__ __forceinline__ void load_transposed(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// Transposes 8 x 8 bf16 elements among the lanes of a warp.
__device__ __forceinline__ unsigned transposed(unsigned matrix) {
    unsigned out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}

__device__ __forceinline__ float low(unsigned both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(unsigned both) { return __uint_as_float(both & 0xffff0000u); }

__device__ __forceinline__ unsigned read_shared(unsigned at) {
    unsigned value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}
__device__ __forceinline__ void write_shared(unsigned at, unsigned value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ float read_float(unsigned at) { return __uint_as_float(read_shared(at)); }
__device__ __forceinline__ float2 read_pair(unsigned at) { return {read_float(at), read_float(at + 4)}; }
__device__ __forceinline__ uint4 read_shared_16(unsigned at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// sums += a b, for 16 x 16 of a and two tiles of 8 columns of b.
__device__ __forceinline__ void multiply_two(float (&left)[4], float (&right)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    multiply(left, a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply(right, a[0], a[1], a[2], a[3], b[2], b[3]);
}

// Copies rows of a chunk [CHUNK, DIM], `stride` elements apart, with zeros after `count`; the parts first_part to first_part + parts of each.
__device__ __forceinline__ void copy_rows(
    unsigned tile, const bf16* from, long long stride, int count, int first_part = 0, int parts = DIM / 8
) {
    for (int i = threadIdx.x; i < CHUNK * parts; i += blockDim.x) {
        const int row = i / parts, part = first_part + i % parts;
        copy_16(wide_at(tile, row, part), from + (row < count ? row : 0) * stride + part * 8, row < count ? 16 : 0);
    }
}

__device__ __forceinline__ void copy_pairs(unsigned tile, const bf16* from) {
    for (int i = threadIdx.x; i < CHUNK * 8; i += blockDim.x) copy_16(pairs_at(tile, i / 8, i % 8), from + i * 8, 16);
}

__device__ __forceinline__ void copy_plain(unsigned to, const void* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) copy_16(to + i * 16, static_cast<const char*>(from) + i * 16, 16);
}

// Stores a warp's [16 dv, 64 tokens] as rows of tokens in a tile.
__device__ __forceinline__ void stage_tokens(unsigned tile, int value, const Lane& lane, const unsigned (&values)[4][4]) {
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            write_shared(wide_at(tile, 8 * t + lane.group, value / 8 + half) + lane.pair * 2, transposed(values[t / 2][t % 2 * 2 + half]));
}

// Writes the first `count` rows of a tile, parts first_part to first_part + PARTS, to rows `stride` elements apart.
template <int PARTS>
__device__ __forceinline__ void write_tokens(bf16* to, long long stride, int count, unsigned tile, int first_part) {
    for (int i = threadIdx.x; i < count * PARTS; i += blockDim.x) {
        const int row = i / PARTS, part = first_part + i % PARTS;
        *reinterpret_cast<uint4*>(to + row * stride + part * 8) = read_shared_16(wide_at(tile, row, part));
    }
}

// The position of a square in a state [dv, dk]. It is stored in squares [16, 16], each in the order in which the lanes of a warp need it as a second
// operand whose rows are values: four words per lane.
__device__ __forceinline__ int square_at(int values, int keys) { return (values * (DIM / 16) + keys) * 32 + threadIdx.x % 32; }

// Writes a warp's [16 dv, 128 dk] to a state.
__device__ __forceinline__ void write_state(bf16* to, int value, const unsigned (&values)[8][4]) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const unsigned (&own)[4] = values[t];
        reinterpret_cast<uint4*>(to)[square_at(value / 16, t)] =
            make_uint4(transposed(own[0]), transposed(own[1]), transposed(own[2]), transposed(own[3]));
    }
}
