// One warp's attention of a few query heads over units of 16 tokens, on tensor cores. A row's own keys and values are loaded from memory directly
// into registers, in the layout of the multiplications: the order of head columns within a multiplication and of outputs within a tile is free, so
// 16-byte loads fit.
#pragma once
#include "async.cuh"
#include "attention.cuh"
#include "cluster.cuh"
#include "mma.cuh"
#include "scalar.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 8;  // query heads per multiplication
constexpr int STAGES = 4;   // units of a shared part in shared memory, all but one in flight
constexpr float LOG2E = 1.4426950408889634f;

struct Geometry {
    int kv_heads, group, block_shift, max_blocks;  // 2^block_shift tokens per block
    float scale;

    __device__ __forceinline__ int chunks() const { return (group + COLUMNS - 1) / COLUMNS; }
};

// A layer's keys and values and, for e4m3, one scale per token and head.
template <typename E>
struct Cache {
    const E* __restrict__ k;  // [blocks, Hkv, block_size, hd]
    const E* __restrict__ v;  // like k
    const float* __restrict__ k_scales;  // [blocks, Hkv, block_size]
    const float* __restrict__ v_scales;  // like k_scales
};

__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(from));
    return out;
}

// A chunk of a unit's row in a ring: TMA copies 128 bytes of every row at once, and mixes their chunks by the row.
__device__ __forceinline__ const uint4& ring_chunk(const unsigned char* unit, int row, int chunk) {
    return *reinterpret_cast<const uint4*>(unit + chunk / 8 * (UNIT * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16);
}

// XOR pattern for the position of a 16-byte chunk within a row in shared memory, so that loads of neither multiplication have bank conflicts.
__device__ __forceinline__ int mix(int row) { return (row & 6) ^ (row & 1) << 2; }

// Masks tokens before `from` and after `to` in a unit.
template <int M, int U>
__device__ __forceinline__ void mask(float (&s)[M][U][4], int lane, int u, int from, int to) {
    if (from <= 0 && to >= UNIT) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int token = 2 * (lane % 4) + k / 2 * 8 + k % 2;
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (token < from || token >= to) s[m][u][k] = -INFINITY;
    }
}

// The maximum of a head's values, of which each lane of a quad has one.
__device__ __forceinline__ float quad_max(float top) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
}

// A head's score from the halves of its sum. Where bits matter, roundings are explicit, because a compiler could contract operations.
__device__ __forceinline__ float scaled(float even, float odd, float scale) { return __fmul_rn(__fadd_rn(even, odd), scale); }

// The largest score of a head over this lane's quad.
template <int U>
__device__ __forceinline__ float top_of(const float (&s)[U][4]) {
    float top = s[0][0];
#pragma unroll
    for (int k = 1; k < 4 * U; ++k) top = fmaxf(top, s[k / 4][k % 4]);
    return quad_max(top);
}

// Converts scores to weights relative to `peak`, in the layout of the second multiplication, and returns their sum.
template <int U>
__device__ __forceinline__ void weigh_units(float (&s)[U][4], float peak, float& sum, unsigned (&weights)[U][2]) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int k = 0; k < 4; ++k) s[u][k] = exp2_fast(__fsub_rn(s[u][k], peak));
        sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(s[u][0], s[u][1]), __fadd_rn(s[u][2], s[u][3])));
        weights[u][0] = pack(s[u][0], s[u][1]), weights[u][1] = pack(s[u][2], s[u][3]);
    }
}

// The sum over a quad, equal in all its lanes.
__device__ __forceinline__ float quad_sum(float sum) {
    const float total = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    return __fadd_rn(total, __shfl_xor_sync(~0u, total, 2));
}

// Updates maxima to include `top`, and rescales what was summed so far.
template <int M, int PAIRS>
__device__ __forceinline__ void raise(float (&out)[M][PAIRS][4], float (&peak)[M], float (&sum)[M], const float (&top)[M],
                                      bool is_higher, int lane) {
    if (!__any_sync(~0u, is_higher)) return;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        const float higher = fmaxf(peak[m], top[m]), shrink = exp2_fast(peak[m] - higher);
        peak[m] = higher, sum[m] = __fmul_rn(sum[m], shrink);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float own = __shfl_sync(~0u, shrink, (2 * (lane % 4) + k) * 4);  // for head 2 c + k
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) out[m][i][k] *= own, out[m][i][k + 2] *= own;
        }
    }
}

// Steps of U units of which a warp has every `stride`th from `first` on.
template <int U>
__device__ __forceinline__ int steps_of(int base, int end, int first, int stride) {
    const int units = (end - base + UNIT - 1) / UNIT;
    return units > first ? (units - first + U * stride - 1) / (U * stride) : 0;
}

// Processes the units at `place` from token `begin` on; a warp's loads of the next ones are in flight while it computes. `after` is called after each
// step, with the number of steps so far.
template <int M, int U, class Work, class E, class P, class After>
__device__ __forceinline__ void attend_units(Work& work, const Cache<E>& cache, P place, int begin, const After& after) {
    const int end = place.end, steps = steps_of<U>(place.base, end, place.first, place.stride);
    if (steps == 0) return;
    long long now[U];
#pragma unroll
    for (int u = 0; u < U; ++u) now[u] = place(u), work.load_keys(u, cache.k + now[u], cache.k_scales + now[u] / P::WIDTH);
#pragma unroll
    for (int u = 0; u < U; ++u) work.load_values(u, cache.v + now[u], cache.v_scales + now[u] / P::WIDTH, end - place.token(u));
    for (int step = 0; step < steps; ++step) {
        const bool has_next = step + 1 < steps;
        float s[M][U][4];
        unsigned weights[M][U][2];
        work.score(s, place.shape.scale * LOG2E);
        if (has_next) {
#pragma unroll
            for (int u = 0; u < U; ++u) now[u] = place(U * (step + 1) + u), work.load_keys(u, cache.k + now[u], cache.k_scales + now[u] / P::WIDTH);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int token = place.token(U * step + u);
            mask(s, work.lane, u, begin - token, end - token);
        }
        work.weigh(s, weights);
        work.accumulate(weights);
        if (has_next) {
#pragma unroll
            for (int u = 0; u < U; ++u) work.load_values(u, cache.v + now[u], cache.v_scales + now[u] / P::WIDTH, end - place.token(U * (step + 1) + u));
        }
        after(step + 1);
    }
}

// One warp's attention of up to 8 query heads of M rows, U units at once. With r = lane / 4 and c = lane % 4, a lane has scores of head r and tokens
// 2 c, 2 c + 1, 2 c + 8, 2 c + 9, and outputs of columns 64 h + 8 r .. + 8 for heads 2 c and 2 c + 1.
template <int HD, int M, int U>
struct Warp {
    static constexpr int HALVES = HD / 64;
    using Stage = bf16[2][UNIT][HD];
    uint4 query[M][HD / 32];     // head r, columns 32 j + 8 c .. + 8
    uint4 keys[U][HD / 32][2];   // tokens r and r + 8, the same columns
    uint4 values[U][HALVES][4];  // tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9; columns 64 h + 8 r .. + 8
    float out[M][HD / 16][4];    // [4 h + i]: (64 h + 8 r + 2 i, head 2 c), (.., 2 c + 1), (64 h + 8 r + 2 i + 1, 2 c), ..
    float peak[M], sum[M];       // of head r, base 2; the sum over this lane's tokens only
    int lane;

    __device__ __forceinline__ Warp() : lane(threadIdx.x % 32) { reset(); }

    // Forgets what was attended to.
    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            peak[m] = -INFINITY, sum[m] = 0.0f;
#pragma unroll
            for (int i = 0; i < HD / 16; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) out[m][i][k] = 0.0f;
        }
    }

    __device__ __forceinline__ void load_query(int m, const bf16* q, int heads) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int j = 0; j < HD / 32; ++j)
            query[m][j] = r < heads ? *reinterpret_cast<const uint4*>(q + r * HD + 32 * j + 8 * c) : uint4{0, 0, 0, 0};
    }

    __device__ __forceinline__ void load_keys(int u, const bf16* unit, const float*) {
        const bf16* from = unit + lane / 4 * HD + lane % 4 * 8;
#pragma unroll
        for (int j = 0; j < HD / 32; ++j)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const bf16* at = from + 32 * j + 8 * t * HD;
                keys[u][j][t] = load_once(at);
            }
    }

    // Entries beyond the end may contain data of another sequence.
    __device__ __forceinline__ void load_values(int u, const bf16* unit, const float*, int count) {
        const int first = lane % 4 * 2;
        const bf16* from = unit + first * HD + lane / 4 * 8;
        const bool is_whole = count >= UNIT;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int token = k / 2 * 8 + k % 2;
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const bf16* at = from + token * HD + 64 * h;
                if (is_whole || first + token < count)
                    values[u][h][k] = load_once(at);
                else
                    values[u][h][k] = uint4{0, 0, 0, 0};
            }
        }
    }

    // Loads keys and values from a unit in a ring.
    __device__ __forceinline__ void take_keys(int u, const unsigned char* unit) {
#pragma unroll
        for (int j = 0; j < HD / 32; ++j)
#pragma unroll
            for (int t = 0; t < 2; ++t) keys[u][j][t] = ring_chunk(unit, lane / 4 + 8 * t, 4 * j + lane % 4);
    }
    __device__ __forceinline__ void take_values(int u, const unsigned char* unit, int count) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int token = lane % 4 * 2 + k / 2 * 8 + k % 2;
#pragma unroll
            for (int h = 0; h < HALVES; ++h) values[u][h][k] = token < count ? ring_chunk(unit, token, 8 * h + lane / 4) : uint4{0, 0, 0, 0};
        }
    }

    // Scores of the loaded keys, base 2: for tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of every unit.
    __device__ __forceinline__ void score(float (&s)[M][U][4], float scale) const {
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                float even[4] = {}, odd[4] = {};  // rows of the second member in the upper half
#pragma unroll
                for (int j = 0; j < HD / 32; ++j) {
                    const uint4 a = query[0][j], b = M == 2 ? query[M - 1][j] : uint4{0, 0, 0, 0};
                    multiply(even, a.x, b.x, a.y, b.y, keys[u][j][t].x, keys[u][j][t].y);
                    multiply(odd, a.z, b.z, a.w, b.w, keys[u][j][t].z, keys[u][j][t].w);
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int k = 0; k < 2; ++k) s[m][u][2 * t + k] = scaled(even[2 * m + k], odd[2 * m + k], scale);
            }
    }

    // Converts scores to weights, in the layout of the second multiplication. At least one token has a weight, so the maximum is finite.
    __device__ __forceinline__ void weigh(float (&s)[M][U][4], unsigned (&weights)[M][U][2]) {
        float top[M];
        bool is_higher = false;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            top[m] = top_of(s[m]);
            is_higher |= top[m] > peak[m];
        }
        raise(out, peak, sum, top, is_higher, lane);
#pragma unroll
        for (int m = 0; m < M; ++m) weigh_units(s[m], peak[m], sum[m], weights[m]);
    }

    __device__ __forceinline__ void accumulate(const unsigned (&weights)[M][U][2]) {
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const unsigned* v[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) v[k] = reinterpret_cast<const unsigned*>(&values[u][h][k]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned a0 = __byte_perm(v[0][i], v[1][i], 0x5410), a1 = __byte_perm(v[0][i], v[1][i], 0x7632);
                    const unsigned a2 = __byte_perm(v[2][i], v[3][i], 0x5410), a3 = __byte_perm(v[2][i], v[3][i], 0x7632);
#pragma unroll
                    for (int m = 0; m < M; ++m) multiply(out[m][4 * h + i], a0, a1, a2, a3, weights[m][u][0], weights[m][u][1]);
                }
            }
    }

    // Addresses of units in the caches. Each lane keeps the block of one of 32 units; `n` counts units from 0.
    struct Places {
        static constexpr int WIDTH = HD;
        const int* table;
        const Geometry& shape;
        int kv_head, base, first, stride, end, blocks;

        __device__ __forceinline__ int token(int n) const { return base + (first + n * stride) * UNIT; }
        __device__ __forceinline__ long long operator()(int n) {
            if (n % 32 == 0) {
                const int mine = token(n + threadIdx.x % 32);
                blocks = mine < end ? table[mine >> shape.block_shift] : 0;
            }
            const long long head = __shfl_sync(~0u, blocks, n % 32) * shape.kv_heads + kv_head;
            return ((head << shape.block_shift) + (token(n) & ((1 << shape.block_shift) - 1))) * HD;
        }
    };

    template <class After>
    __device__ __forceinline__ void attend(const Cache<bf16>& cache, const int* table, const Geometry& shape,
                                           int kv_head, int begin, int end, int first, int stride, const After& after) {
        attend_units<M, U>(*this, cache, Places{table, shape, kv_head, begin / UNIT * UNIT, first, stride, end, 0}, begin, after);
    }

    // Processes all units of tokens begin .. end, which are whole, through `stages` in shared memory, by all warps of the block together.
    __device__ __forceinline__ void attend_shared(Stage (&stages)[STAGES], const Cache<bf16>& cache, const int* table,
                                                  const Geometry& shape, int kv_head, int begin, int end) {
        constexpr int CHUNKS = HD / 8;
        const int steps = (end - begin) / UNIT, r = lane / 4, c = lane % 4;
        Places place = {table, shape, kv_head, begin, 0, 1, end, 0};
        const auto fetch = [&](int step) {
            if (step < steps) {
                const long long unit = place(step);
#pragma unroll
                for (int k = 0; k < UNIT * CHUNKS / THREADS; ++k) {
                    const int at = threadIdx.x + k * THREADS, row = at / CHUNKS, chunk = at % CHUNKS;
                    const int to = (chunk ^ mix(row)) * 8;
                    copy_16(shared_address(&stages[step % STAGES][0][row][to]), cache.k + unit + at * 8, 16);
                    copy_16(shared_address(&stages[step % STAGES][1][row][to]), cache.v + unit + at * 8, 16);
                }
            }
            commit_copies();
        };
        const auto read = [&](const bf16 (&tile)[UNIT][HD], int row, int chunk) {
            return *reinterpret_cast<const uint4*>(&tile[row][(chunk ^ mix(row)) * 8]);
        };
        for (int step = 0; step < STAGES - 1; ++step) fetch(step);
        for (int step = 0; step < steps; ++step) {
            wait_copies<STAGES - 2>();
            __syncthreads();  // the unit is complete, and the previous stage is free
            fetch(step + STAGES - 1);
            const auto& stage = stages[step % STAGES];
#pragma unroll
            for (int j = 0; j < HD / 32; ++j)
#pragma unroll
                for (int t = 0; t < 2; ++t) keys[0][j][t] = read(stage[0], r + 8 * t, 4 * j + c);
            float s[M][U][4];
            unsigned weights[M][U][2];
            score(s, shape.scale * LOG2E);
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int h = 0; h < HALVES; ++h)
                    values[0][h][k] = read(stage[1], 2 * c + k / 2 * 8 + k % 2, 8 * h + r);
            weigh(s, weights);
            accumulate(weights);
        }
    }

    // Stores out, peak and sum of a member as rows of heads: [8][stride], [8], [8].
    __device__ __forceinline__ void store(int m, float* to, int stride, float* peaks, float* sums) const {
        const int r = lane / 4, c = lane % 4;
        const float total = quad_sum(sum[m]);
        if (c == 0) peaks[r] = peak[m], sums[r] = total;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float* row = to + (2 * c + k) * stride;
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int i = 0; i < 4; i += 2) 
                    *reinterpret_cast<float4*>(row + 64 * h + 8 * r + 2 * i) = make_float4(
                        out[m][4 * h + i][k], out[m][4 * h + i][k + 2], out[m][4 * h + i + 1][k], out[m][4 * h + i + 1][k + 2]);
        }
    }
};
