// One warp's attention of M rows to an item of SPLIT tokens, with the same bits as an own part in paged_attention.cu with a fixed split. There, an
// item is divided among four warps, each with every fourth unit of 16 tokens, two at once. Here one warp does the work of all four for its rows, one
// after the other: first all scores and weights of the item, then the multiplication with values, a slice of columns at a time. So data is read once
// for all rows. Rows of a multiplication do not affect each other. Tokens after a row's end do not enter its sums: their scores are masked, their
// values count as zeros, and steps that the row does not have are skipped.
#pragma once
#include "attention_merge.cuh"

constexpr int SPLIT = 256;  // tokens per item
constexpr int STEPS = SPLIT / (WARPS * UNITS * UNIT);

// Moves a value that every lane of a quad has for head lane / 4 to the lanes that need it for head 2 (lane % 4) + k.
__device__ __forceinline__ float of_head(float value, int k) {
    return __shfl_sync(~0u, value, (2 * (threadIdx.x % 4) + k) * 4);
}

// `Keys` and `Values` are read by the unit's first token within the item, a row of the unit and a chunk of 8 columns. `next` is called before each
// unit is read: units in the order of WARPS, STEPS and UNITS, for values once per slice.
template <int HD, int M>
struct ItemWarp {
    static constexpr int PARTS = 8 / M < 4 ? 8 / M : 4;  // pairs of columns per lane in a slice
    static constexpr int SLICES = HD / 16 / PARTS;
    using Query = uint4[M][HD / 32];   // head lane / 4, columns 32 j + 8 (lane % 4) .. + 8
    using Slice = float[M][PARTS][4];  // [i]: (column + 2 i, head 2 c), (.., 2 c + 1), (column + 2 i + 1, 2 c), ..

    unsigned weights[WARPS][STEPS][M][UNITS][2];
    float shrink[WARPS][M], share[WARPS][M];  // factors for sums of a warp's first step, and for all its sums
    float highest[M], total[M];               // for head lane / 4
    int len[M], lane, least, most;            // tokens of each row, 0: none; of the first and of the last one

    // The first of 8 columns of which a lane has PARTS pairs in a slice, and which of the pairs.
    __device__ __forceinline__ int chunk_of(int slice) const { return 8 * (slice * PARTS / 4) + lane / 4; }
    __device__ __forceinline__ static int pair_of(int slice) { return slice * PARTS % 4; }

    // Computes scores and weights of the item from token `start` on.
    template <typename Keys>
    __device__ __forceinline__ void score(Keys& keys, const Query& query, int start, int window, float scale) {
        const int r = lane / 4, c = lane % 4;
        float peaks[WARPS][M], sums[WARPS][M];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
#pragma unroll
            for (int m = 0; m < M; ++m) peaks[w][m] = -INFINITY, sums[w][m] = 0.0f, shrink[w][m] = 1.0f;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int from = (w + step * UNITS * WARPS) * UNIT;
                float s[M][UNITS][4];
                if (start + from < most) {
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) {
                        const int unit = from + u * WARPS * UNIT;
                        keys.next();
#pragma unroll
                        for (int t = 0; t < 2; ++t) {
                            float even[M / 2][4] = {}, odd[M / 2][4] = {};
#pragma unroll
                            for (int j = 0; j < HD / 32; ++j) {
                                const uint4 key = *reinterpret_cast<const uint4*>(keys.key(unit, 8 * t + r, 4 * j + c));
#pragma unroll
                                for (int p = 0; p < M / 2; ++p) {
                                    const uint4 a = query[2 * p][j], b = query[2 * p + 1][j];
                                    multiply(even[p], a.x, b.x, a.y, b.y, key.x, key.y);
                                    multiply(odd[p], a.z, b.z, a.w, b.w, key.z, key.w);
                                }
                            }
#pragma unroll
                            for (int m = 0; m < M; ++m)
#pragma unroll
                                for (int k = 0; k < 2; ++k)
                                    s[m][u][2 * t + k] = scaled(even[m / 2][m % 2 * 2 + k], odd[m / 2][m % 2 * 2 + k], scale);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    unsigned (&packed)[UNITS][2] = weights[w][step][m];
                    if (start + from < len[m]) {
                        float (&own)[1][UNITS][4] = *reinterpret_cast<float (*)[1][UNITS][4]>(&s[m]);
                        const int begin = window > 0 ? max(0, len[m] - window) : 0;
#pragma unroll
                        for (int u = 0; u < UNITS; ++u) {
                            const int token = start + from + u * WARPS * UNIT;
                            mask(own, lane, u, begin - token, len[m] - token);
                        }
                        const float top = top_of(own[0]);
                        if (__any_sync(~0u, top > peaks[w][m])) {
                            const float higher = fmaxf(peaks[w][m], top), less = exp2_fast(__fsub_rn(peaks[w][m], higher));
                            peaks[w][m] = higher, sums[w][m] = __fmul_rn(sums[w][m], less);
                            if (step > 0) shrink[w][m] = less;
                        }
                        weigh_units(own[0], peaks[w][m], sums[w][m], packed);
                    } else {
#pragma unroll
                        for (int u = 0; u < UNITS; ++u) packed[u][0] = packed[u][1] = 0;
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            highest[m] = -INFINITY, total[m] = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) highest[m] = fmaxf(highest[m], peaks[w][m]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                share[w][m] = share_of(peaks[w][m], highest[m]);
                total[m] = __fmaf_rn(quad_sum(sums[w][m]), share[w][m], total[m]);
            }
        }
    }

    // Multiplies the item's weights with values; each slice is passed to `take`.
    template <typename Values, typename Take>
    __device__ __forceinline__ void accumulate(Values& values, int start, const Take& take) const {
        const int c = lane % 4;
#pragma unroll 1
        for (int slice = 0; slice < SLICES; ++slice) {
            Slice all = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (start + w * UNIT >= most) continue;
                Slice out = {};
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const int from = (w + step * UNITS * WARPS) * UNIT;
                    if (start + from >= most) continue;
                    if (step > 0) {
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int k = 0; k < 2; ++k) {
                                const float own = of_head(shrink[w][m], k);
#pragma unroll
                                for (int i = 0; i < PARTS; ++i) out[m][i][k] = __fmul_rn(out[m][i][k], own), out[m][i][k + 2] = __fmul_rn(out[m][i][k + 2], own);
                            }
                    }
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) {
                        const int unit = from + u * WARPS * UNIT;
                        values.next();
                        unsigned v[4][PARTS];
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            const bf16* at = values.value(unit, 2 * c + k / 2 * 8 + k % 2, chunk_of(slice)) + 2 * pair_of(slice);
                            const Pack<unsigned, PARTS> pack = load<unsigned, PARTS>(reinterpret_cast<const unsigned*>(at));
#pragma unroll
                            for (int i = 0; i < PARTS; ++i) v[k][i] = pack.at[i];
                        }
                        if (start + unit + UNIT <= least) {  // all rows attend to the whole unit
#pragma unroll
                            for (int i = 0; i < PARTS; ++i) {
                                const unsigned a0 = __byte_perm(v[0][i], v[1][i], 0x5410), a1 = __byte_perm(v[0][i], v[1][i], 0x7632);
                                const unsigned a2 = __byte_perm(v[2][i], v[3][i], 0x5410), a3 = __byte_perm(v[2][i], v[3][i], 0x7632);
#pragma unroll
                                for (int m = 0; m < M; ++m)
                                    multiply(out[m][i], a0, a1, a2, a3, weights[w][step][m][u][0], weights[w][step][m][u][1]);
                            }
                        } else {
#pragma unroll
                            for (int m = 0; m < M; ++m) {
                                if (start + from >= len[m]) continue;
                                const int count = len[m] - start - unit;
                                bool is_there[4];
#pragma unroll
                                for (int k = 0; k < 4; ++k) is_there[k] = 2 * c + k / 2 * 8 + k % 2 < count;
#pragma unroll
                                for (int i = 0; i < PARTS; ++i) {
                                    unsigned own[4];
#pragma unroll
                                    for (int k = 0; k < 4; ++k) own[k] = is_there[k] ? v[k][i] : 0;
                                    multiply(out[m][i], __byte_perm(own[0], own[1], 0x5410), __byte_perm(own[0], own[1], 0x7632),
                                             __byte_perm(own[2], own[3], 0x5410), __byte_perm(own[2], own[3], 0x7632),
                                             weights[w][step][m][u][0], weights[w][step][m][u][1]);
                                }
                            }
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        const float own = of_head(share[w][m], k);
#pragma unroll
                        for (int i = 0; i < PARTS; ++i) {
                            all[m][i][k] = __fmaf_rn(out[m][i][k], own, all[m][i][k]);
                            all[m][i][k + 2] = __fmaf_rn(out[m][i][k + 2], own, all[m][i][k + 2]);
                        }
                    }
            }
            take(slice, all);
        }
    }
};
