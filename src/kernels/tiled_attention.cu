// Causal attention of the rows of a packed micro-batch, o = softmax(scale q k^T) v, with the bits of paged_attention.cu for every row
// in plans of a fixed split without shared parts. A block has neighbouring rows of one sequence and up to 8 query heads of one key/value
// head, so that a context is read once for all of its rows.
//
// There an item of SPLIT tokens is shared out among four warps, each with every fourth unit of 16 tokens, two at once. Here one warp does
// the work of all four for its M rows, one after the other: first all scores and weights of an item, then the products with values, a
// slice of the columns at a time. Rows of a product do not see each other. What lies behind a row's end is no part of its sums: its
// scores are masked, values count as zeros, and steps and items that it does not have are left out.
#include "attention_merge.cuh"

constexpr int SPLIT = 256;  // tokens of an item
constexpr int TILE_WARPS = 8;
constexpr int TILE_THREADS = 32 * TILE_WARPS;
constexpr int TILE_MEMBERS = 2;  // rows of a warp, an even number
constexpr int STEPS = SPLIT / (WARPS * UNITS * UNIT);

// Neighbouring rows of one sequence, whose items begin at the same token.
struct alignas(16) Tile {
    int first, count;  // rows
    int len;           // tokens that the first one sees, itself included; the next one sees one more
    int prompt;        // row of the sequence's first token,
    int prompt_len;    // and how many rows from there on are its first tokens
    int own;           // row of the token behind them
    int reserved[2];

    __device__ __forceinline__ int last_len() const { return len + count - 1; }
    __device__ __forceinline__ int row_of(int token) const {
        return token < prompt_len ? prompt + token : own + token - prompt_len;
    }
};

__device__ __forceinline__ uint4 load_16(const void* from) {
    uint4 out;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

// What every lane of a quad has for head lane / 4, for head 2 (lane % 4) + k.
__device__ __forceinline__ float of_head(float value, int k) {
    return __shfl_sync(~0u, value, (2 * (threadIdx.x % 4) + k) * 4);
}

template <int HD, int M>
struct TileWarp {
    static constexpr int PARTS = 8 / M < 4 ? 8 / M : 4;  // pairs of columns of a lane in a slice
    static constexpr int SLICES = HD / 16 / PARTS;
    using Tokens = bf16[SPLIT][HD];

    unsigned weights[WARPS][STEPS][M][UNITS][2];
    float shrink[WARPS][M], share[WARPS][M];  // of sums of a warp's first step, and of all its sums
    float peak[M], sum[M];                    // of head lane / 4, of all items so far
    Fold folds[M];                            // of the newest item
    int len[M], lane, least, most;            // tokens of each row, 0: none; of the first and of the last one

    // Scores and weights of the item from token `start` on.
    __device__ __forceinline__ void score(const Tokens& keys, const uint4 (&query)[M][HD / 32], int start, int window, float scale) {
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
                    for (int u = 0; u < UNITS; ++u)
#pragma unroll
                        for (int t = 0; t < 2; ++t) {
                            float even[M / 2][4] = {}, odd[M / 2][4] = {};
                            const int row = from + u * WARPS * UNIT + 8 * t + r;
#pragma unroll
                            for (int j = 0; j < HD / 32; ++j) {
                                const uint4 key = *reinterpret_cast<const uint4*>(&keys[row][((4 * j + c) ^ mix(r)) * 8]);
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
            if (start >= len[m]) continue;
            float highest = -INFINITY, total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, peaks[w][m]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                share[w][m] = share_of(peaks[w][m], highest);
                total = __fmaf_rn(quad_sum(sums[w][m]), share[w][m], total);
            }
            folds[m] = fold(peak[m], sum[m], highest, total);
        }
    }

    // Products of the item's weights with values, a slice of columns at a time, added to what is kept of the items before.
    __device__ __forceinline__ void accumulate(const Tokens& values, float4 (&kept)[M * HD / 16][32], int start, bool is_first) const {
        const int r = lane / 4, c = lane % 4;
#pragma unroll 1
        for (int slice = 0; slice < SLICES; ++slice) {
            const int column = (8 * (slice * PARTS / 4) + r) * 8, part = slice * PARTS % 4;  // the first of 8, and which pair of them
            float all[M][PARTS][4] = {};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                if (start + w * UNIT >= most) continue;
                float out[M][PARTS][4] = {};
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
                        unsigned v[4][PARTS];
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            const int row = 2 * c + k / 2 * 8 + k % 2;
                            const int at = (column / 8 ^ mix(row)) * 8 + part * 2;
                            const unsigned* from = reinterpret_cast<const unsigned*>(&values[unit + row][at]);
                            const Pack<unsigned, PARTS> pack = load<unsigned, PARTS>(from);
#pragma unroll
                            for (int i = 0; i < PARTS; ++i) v[k][i] = pack.at[i];
                        }
                        if (start + unit + UNIT <= least) {  // all rows see all of it
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
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if (start >= len[m]) continue;
                const Fold even = {of_head(folds[m].shrink, 0), of_head(folds[m].weight, 0)};
                const Fold odd = {of_head(folds[m].shrink, 1), of_head(folds[m].weight, 1)};
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
                    float4& to = kept[(slice * M + m) * PARTS + i][lane];
                    const float (&own)[4] = all[m][i];
                    if (is_first) {
                        to = make_float4(own[0], own[1], own[2], own[3]);
                    } else {
                        const float4 before = to;
                        to = make_float4(even.of(before.x, own[0]), odd.of(before.y, own[1]), even.of(before.z, own[2]), odd.of(before.w, own[3]));
                    }
                }
            }
        }
    }

    // Outputs of row m.
    __device__ __forceinline__ void write(int m, const float4 (&kept)[M * HD / 16][32], bf16* o, int heads) const {
        const int r = lane / 4, c = lane % 4;
        const float sums[2] = {of_head(sum[m], 0), of_head(sum[m], 1)};
        for (int slice = 0; slice < SLICES; ++slice) {
            const int column = (8 * (slice * PARTS / 4) + r) * 8 + slice * PARTS % 4 * 2;
            Part<2 * PARTS> parts[2];
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const float4 four = kept[(slice * M + m) * PARTS + i][lane];
                parts[0].out[2 * i] = four.x, parts[1].out[2 * i] = four.y;
                parts[0].out[2 * i + 1] = four.z, parts[1].out[2 * i + 1] = four.w;
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                parts[k].sum = sums[k];
                if (2 * c + k < heads) parts[k].write(o + (2 * c + k) * HD + column);
            }
        }
    }
};

template <int HD, int M>
struct TileMemory {
    bf16 keys[SPLIT][HD], values[SPLIT][HD];
    float4 kept[TILE_WARPS][M * HD / 16][32];
};

template <int HD, int M>
__device__ __forceinline__ void tiled_attention(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                                                const Tile* __restrict__ tiles, bf16* __restrict__ o, float* __restrict__ lse,
                                                long long tokens, int kv_heads, int group, int window, float scale) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    TileMemory<HD, M>& memory = *reinterpret_cast<TileMemory<HD, M>*>(dynamic);
    wait_for_inputs();
    const int chunks = (group + COLUMNS - 1) / COLUMNS, columns = kv_heads * chunks;
    const int kv_head = blockIdx.x % columns / chunks, chunk = blockIdx.x % chunks, heads = min(COLUMNS, group - chunk * COLUMNS);
    const Tile tile = tiles[blockIdx.x / columns];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), first = warp * M, last_len = tile.last_len();
    const int base = (window > 0 ? max(0, tile.len - window) : 0) / UNIT * UNIT;

    TileWarp<HD, M> work;
    work.lane = threadIdx.x % 32, work.least = tile.len + first, work.most = 0;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        work.len[m] = first + m < tile.count ? tile.len + first + m : 0;
        work.most = max(work.most, work.len[m]);
        work.peak[m] = -INFINITY, work.sum[m] = 0.0f;
    }
    const auto fetch = [&](bf16 (&to)[SPLIT][HD], const bf16* from, int start) {
        constexpr int PIECES = HD / 8, AT_ONCE = TILE_THREADS / PIECES;  // 16 bytes each
        const int piece = threadIdx.x % PIECES;
#pragma unroll 4
        for (int at = threadIdx.x / PIECES; at < SPLIT; at += AT_ONCE) {
            const int token = start + at;
            const long long row = tile.row_of(min(token, last_len - 1));
            copy_16(shared_address(&to[at][(piece ^ mix(at)) * 8]), from + (row * kv_heads + kv_head) * HD + piece * 8, token < last_len ? 16 : 0);
        }
        commit_copies();
    };
    const auto head_of = [&](int m) {  // the first query head of row m
        return (static_cast<long long>(tile.first + first + m) * kv_heads + kv_head) * group + chunk * COLUMNS;
    };
    fetch(memory.keys, k, base);
    for (int start = base; start < last_len; start += SPLIT) {
        uint4 query[M][HD / 32];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const bf16* from = q + (head_of(m) + work.lane / 4) * HD + work.lane % 4 * 8;
#pragma unroll
            for (int j = 0; j < HD / 32; ++j)
                query[m][j] = work.len[m] > start && work.lane / 4 < heads ? load_16(from + 32 * j) : uint4{0, 0, 0, 0};
        }
        wait_copies<0>();
        __syncthreads();  // keys are there, and the last values are no longer read
        fetch(memory.values, v, start);
        if (start < work.most) work.score(memory.keys, query, start, window, scale * LOG2E);
        wait_copies<0>();
        __syncthreads();  // values are there, and keys are no longer read
        if (start + SPLIT < last_len) fetch(memory.keys, k, start + SPLIT);
        if (start < work.most) work.accumulate(memory.values, memory.kept[warp], start, start == base);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
        if (work.len[m] == 0) continue;
        work.write(m, memory.kept[warp], o + head_of(m) * HD, heads);
        const long long head = kv_head * group + chunk * COLUMNS + work.lane / 4;
        if (work.lane % 4 == 0 && work.lane / 4 < heads)
            lse[head * tokens + tile.first + first + m] = (work.peak[m] + log2f(work.sum[m])) / LOG2E;
    }
}

#define TILED_ATTENTION(NAME, HD, BLOCKS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, BLOCKS) NAME(                                                   \
        const bf16* q,     /* [T, H, hd] */                                                                                    \
        const bf16* k,     /* [T, Hkv, hd] */                                                                                  \
        const bf16* v,     /* like k */                                                                                        \
        const Tile* tiles, /* as many as the blocks, over Hkv times chunks of query heads */                                   \
        bf16* o,           /* like q */                                                                                        \
        float* lse,        /* [H, T] */                                                                                        \
        long long tokens, long long kv_heads, long long group, long long window, float scale) {                                \
        tiled_attention<HD, TILE_MEMBERS>(q, k, v, tiles, o, lse, tokens, static_cast<int>(kv_heads),                          \
                                          static_cast<int>(group), static_cast<int>(window), scale);                           \
    }

TILED_ATTENTION(tiled_attention_bf16_64, 64, 1)
TILED_ATTENTION(tiled_attention_bf16_128, 128, 1)
