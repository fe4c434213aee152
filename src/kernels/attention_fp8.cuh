// One warp's attention over an 8-bit cache, e4m3 or int8, with one scale per token and head. Multiplications are in f16, which represents all values
// of both types. A key's scale multiplies its score; a value's scale multiplies its weight. The weight's maximum takes the scale into account, so
// that no weight exceeds 1.
#pragma once
#include "attention_warp.cuh"

// sum += a b in f16: a [16, 16] in rows, b [16, 8] in columns.
__device__ __forceinline__ void multiply_f16(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                             unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Packs two consecutive values as f16, rounded to nearest.
__device__ __forceinline__ unsigned pack_f16(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Converts two values of type E, in the lower or the upper half of a word, to f16. e4m3 (unsigned char) has an instruction, which can read either
// half without a shift; int8 (signed char) is placed in the last bits of 1024 + 128 + x, from which 1152 is subtracted.
template <typename E>
__device__ __forceinline__ unsigned widen_low(unsigned word) {
    unsigned both = 0;
    if constexpr (static_cast<E>(-1) < static_cast<E>(0)) {
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(__byte_perm(word ^ 0x80808080u, 0x64646464u, 0x4140)), "r"(0x64806480u));
    } else {
#if __CUDA_ARCH__ >= 890
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(both) : "r"(word));
#endif
    }
    return both;
}
template <typename E>
__device__ __forceinline__ unsigned widen_high(unsigned word) {
    unsigned both = 0;
    if constexpr (static_cast<E>(-1) < static_cast<E>(0)) {
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(__byte_perm(word ^ 0x80808080u, 0x64646464u, 0x4342)), "r"(0x64806480u));
    } else {
#if __CUDA_ARCH__ >= 890
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(both) : "r"(word));
#endif
    }
    return both;
}

__device__ __forceinline__ float log2_fast(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Keys, values and their scales, in the cache's format or as staged in shared memory.
template <int HD>
struct alignas(16) EightBitStage {
    unsigned char entries[2][UNIT][HD];  // as they are
    float scales[2][UNIT];
};

// With r = lane / 4 and c = lane % 4, a lane has scores of head r and tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9, and outputs of the columns from HD / 8 r
// on for heads 2 c and 2 c + 1.
template <int HD, int M, int U, typename E>
struct EightBitWarp {
    using Stage = EightBitStage<HD>;
    static constexpr int WORDS = HD / 32;  // of a value per lane: HD / 8 columns
    uint4 query[M][HD / 32];       // f16; head r, columns 64 (j / 2) + 16 c + 8 (j % 2) .. + 8
    uint4 keys[U][HD / 64][2];     // tokens r and r + 8, columns 64 j + 16 c .. + 16
    unsigned values[U][4][WORDS];  // tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9; columns HD / 8 r ..
    float key_scales[U][4], value_scales[U][4];  // for the same tokens
    float out[M][HD / 16][4];      // [column pair i]: (HD / 8 r + 2 i, head 2 c), (.., 2 c + 1), (HD / 8 r + 2 i + 1, 2 c), ..
    float peak[M], sum[M];         // of head r, base 2, for weights times scales; the sum over this lane's tokens only, without scales
    int lane;

    __device__ __forceinline__ EightBitWarp() : lane(threadIdx.x % 32) {
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
        const auto narrowed = [](unsigned pair) {
            const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
            const auto within = [](float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };  // NaN is kept
            return pack_f16(within(low), within(high));
        };
#pragma unroll
        for (int j = 0; j < HD / 32; ++j) {
            const bf16* from = q + r * HD + 64 * (j / 2) + 16 * c + 8 * (j % 2);
            const uint4 eight = r < heads ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            query[m][j] = make_uint4(narrowed(eight.x), narrowed(eight.y), narrowed(eight.z), narrowed(eight.w));
        }
    }

    __device__ __forceinline__ void load_keys(int u, const E* unit, const float* scales) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int j = 0; j < HD / 64; ++j)
#pragma unroll
            for (int t = 0; t < 2; ++t) keys[u][j][t] = load_once(unit + (r + 8 * t) * HD + 64 * j + 16 * c);
        load_scales(key_scales[u], scales, UNIT);
    }

    // Entries beyond the end may contain data of another sequence.
    __device__ __forceinline__ void load_values(int u, const E* unit, const float* scales, int count) {
        const int first = lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int token = first + k / 2 * 8 + k % 2;
            const auto* from = reinterpret_cast<const unsigned*>(unit + token * HD + lane / 4 * (HD / 8));
#pragma unroll
            for (int w = 0; w < WORDS; ++w) values[u][k][w] = 0;
            if (token < count) {
                if constexpr (WORDS == 4) {
                    const uint4 all = load_once(from);
                    values[u][k][0] = all.x, values[u][k][1] = all.y, values[u][k][2] = all.z, values[u][k][3] = all.w;
                } else {
                    const uint2 all = __ldg(reinterpret_cast<const uint2*>(from));
                    values[u][k][0] = all.x, values[u][k][1] = all.y;
                }
            }
        }
        load_scales(value_scales[u], scales, count);
    }

    __device__ __forceinline__ void load_scales(float (&to)[4], const float* scales, int count) const {
        const int first = lane % 4 * 2;
        const float2 low = *reinterpret_cast<const float2*>(scales + first);
        const float2 high = *reinterpret_cast<const float2*>(scales + first + 8);
        to[0] = first < count ? low.x : 1.0f, to[1] = first + 1 < count ? low.y : 1.0f;
        to[2] = first + 8 < count ? high.x : 1.0f, to[3] = first + 9 < count ? high.y : 1.0f;
    }

    // Scores of the loaded keys, base 2: for tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of every unit.
    __device__ __forceinline__ void score(float (&s)[M][U][4], float scale) const {
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                float even[4] = {}, odd[4] = {};  // rows of the second member in the upper half
#pragma unroll
                for (int j = 0; j < HD / 64; ++j)
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        const uint4 a = query[0][2 * j + s], b = M == 2 ? query[M - 1][2 * j + s] : uint4{0, 0, 0, 0};
                        const unsigned low = s == 0 ? keys[u][j][t].x : keys[u][j][t].z;
                        const unsigned high = s == 0 ? keys[u][j][t].y : keys[u][j][t].w;
                        multiply_f16(even, a.x, b.x, a.y, b.y, widen_low<E>(low), widen_high<E>(low));
                        multiply_f16(odd, a.z, b.z, a.w, b.w, widen_low<E>(high), widen_high<E>(high));
                    }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        s[m][u][2 * t + k] = (even[2 * m + k] + odd[2 * m + k]) * (scale * key_scales[u][2 * t + k]);
            }
    }

    // Converts scores to weights times the values' scales, in the layout of the second multiplication. At least one token has a weight, so the
    // maximum is finite.
    __device__ __forceinline__ void weigh(float (&s)[M][U][4], unsigned (&weights)[M][U][2]) {
        float logs[U][4], top[M];
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int k = 0; k < 4; ++k) logs[u][k] = log2_fast(fmaxf(value_scales[u][k], 1e-30f));
        bool is_higher = false;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            top[m] = s[m][0][0] + logs[0][0];
#pragma unroll
            for (int k = 1; k < 4 * U; ++k) top[m] = fmaxf(top[m], s[m][k / 4][k % 4] + logs[k / 4][k % 4]);
            top[m] = quad_max(top[m]);
            is_higher |= top[m] > peak[m];
        }
        raise(out, peak, sum, top, is_higher, lane);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int u = 0; u < U; ++u) {
#pragma unroll
                for (int k = 0; k < 4; ++k) s[m][u][k] = exp2_fast(s[m][u][k] - peak[m]);
                sum[m] += (s[m][u][0] + s[m][u][1]) + (s[m][u][2] + s[m][u][3]);
#pragma unroll
                for (int k = 0; k < 4; ++k) s[m][u][k] *= value_scales[u][k];
                weights[m][u][0] = pack_f16(s[m][u][0], s[m][u][1]), weights[m][u][1] = pack_f16(s[m][u][2], s[m][u][3]);
            }
    }

    __device__ __forceinline__ void accumulate(const unsigned (&weights)[M][U][2]) {
#pragma unroll
        for (int u = 0; u < U; ++u)
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
#pragma unroll
                for (int half = 0; half < 2; ++half) {  // halves of a word's four columns
                    const unsigned order = half == 0 ? 0x5140 : 0x7362;  // one column of both tokens, then the next column
                    const unsigned first = __byte_perm(values[u][0][w], values[u][1][w], order);
                    const unsigned second = __byte_perm(values[u][2][w], values[u][3][w], order);
                    const unsigned a0 = widen_low<E>(first), a1 = widen_high<E>(first);
                    const unsigned a2 = widen_low<E>(second), a3 = widen_high<E>(second);
#pragma unroll
                    for (int m = 0; m < M; ++m)
                        multiply_f16(out[m][2 * w + half], a0, a1, a2, a3, weights[m][u][0], weights[m][u][1]);
                }
    }

    using Places = typename Warp<HD, M, U>::Places;

    template <class After>
    __device__ __forceinline__ void attend(const Cache<E>& cache, const int* table, const Geometry& shape,
                                           int kv_head, int begin, int end, int first, int stride, const After& after) {
        attend_units<M, U>(*this, cache, Places{table, shape, kv_head, begin / UNIT * UNIT, first, stride, end, 0}, begin, after);
    }

    // Processes all units of tokens begin .. end, which are whole, through `stages` in shared memory, by all warps of the block together.
    __device__ __forceinline__ void attend_shared(Stage (&stages)[STAGES], const Cache<E>& cache, const int* table,
                                                  const Geometry& shape, int kv_head, int begin, int end) {
        constexpr int CHUNKS = HD / 16, OF_ENTRIES = UNIT * CHUNKS, OF_SCALES = UNIT / 4;  // in units of 16 bytes
        const int steps = (end - begin) / UNIT, r = lane / 4, c = lane % 4;
        Places place = {table, shape, kv_head, begin, 0, 1, end, 0};
        const auto place_of = [](int row, int chunk) { return (chunk ^ mix(row) & CHUNKS - 1) * 16; };
        const auto fetch = [&](int step) {
            if (step < steps) {
                const long long unit = place(step);
                Stage& stage = stages[step % STAGES];
#pragma unroll
                for (int k = 0; k < 2 * OF_ENTRIES / THREADS; ++k) {
                    const int at = threadIdx.x + k * THREADS, which = at / OF_ENTRIES, chunk = at % OF_ENTRIES;
                    const int row = chunk / CHUNKS;
                    copy_16(shared_address(&stage.entries[which][row][place_of(row, chunk % CHUNKS)]),
                            (which == 0 ? cache.k : cache.v) + unit + chunk * 16, 16);
                }
                if (threadIdx.x < 2 * OF_SCALES) {
                    const int which = threadIdx.x / OF_SCALES, at = threadIdx.x % OF_SCALES * 4;
                    const float* from = (which == 0 ? cache.k_scales : cache.v_scales) + unit / HD + at;
                    copy_16(shared_address(&stage.scales[which][at]), from, 16);
                }
            }
            commit_copies();
        };
        for (int step = 0; step < STAGES - 1; ++step) fetch(step);
        for (int step = 0; step < steps; ++step) {
            wait_copies<STAGES - 2>();
            __syncthreads();  // the unit is complete, and the previous stage is free
            fetch(step + STAGES - 1);
            const Stage& stage = stages[step % STAGES];
#pragma unroll
            for (int j = 0; j < HD / 64; ++j)
#pragma unroll
                for (int t = 0; t < 2; ++t)
                    keys[0][j][t] = *reinterpret_cast<const uint4*>(
                        &stage.entries[0][r + 8 * t][place_of(r + 8 * t, 4 * j + c)]);
            load_scales(key_scales[0], stage.scales[0], UNIT);
            float s[M][U][4];
            unsigned weights[M][U][2];
            score(s, shape.scale * LOG2E);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int token = 2 * c + k / 2 * 8 + k % 2, column = r * (HD / 8);
                const auto* from = reinterpret_cast<const unsigned*>(
                    &stage.entries[1][token][place_of(token, column / 16) + column % 16]);
#pragma unroll
                for (int w = 0; w < WORDS; ++w) values[0][k][w] = from[w];
            }
            load_scales(value_scales[0], stage.scales[1], UNIT);
            weigh(s, weights);
            accumulate(weights);
        }
    }

    // Stores out, peak and sum of a member as rows of heads: [8][stride], [8], [8].
    __device__ __forceinline__ void store(int m, float* to, int stride, float* peaks, float* sums) const {
        const int r = lane / 4, c = lane % 4;
        float total = sum[m] + __shfl_xor_sync(~0u, sum[m], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (c == 0) peaks[r] = peak[m], sums[r] = total;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float* row = to + (2 * c + k) * stride;
#pragma unroll
            for (int i = 0; i < HD / 16; i += 2)
                *reinterpret_cast<float4*>(row + HD / 8 * r + 2 * i) =
                    make_float4(out[m][i][k], out[m][i][k + 2], out[m][i + 1][k], out[m][i + 1][k + 2]);
        }
    }
};
