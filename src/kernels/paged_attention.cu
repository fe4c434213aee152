// Attention of one new token per sequence over its context in the paged cache, o = softmax(scale q k^T) v, in bf16 on tensor
// cores. Query heads of one key/value head share what is read: up to 8 of them are the columns of m16n8k16 products whose
// rows are tokens (scores) or head columns (output). Keys and values go from memory straight to registers in the products'
// own layout: the order of head columns within a product and of outputs within a tile is free, so 16-byte loads fit.
//
// `plan_attention` cuts all contexts of a step into items, once for all layers; blocks of four warps take items as they
// become free. The warps of an item either have every fourth 16 tokens of one row (its own part), or two rows each of a group
// whose contexts begin alike, all over the same tokens (the shared part, which is then read once).
// A row of several items leaves partial results; the last item to finish merges them in item order.
#include "scalar.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int PLANNERS = 256;  // threads of plan_attention
constexpr int UNIT = 16;    // tokens of a warp's step
constexpr int COLUMNS = 8;  // query heads of a product
constexpr int MEMBERS = 2;  // rows that a warp has of a shared part
constexpr int PARTY = WARPS * MEMBERS;
constexpr int UNITS = 2;  // units that a warp has at once of an own part
constexpr int STEP = WARPS * UNITS * UNIT;
constexpr float LOG2E = 1.4426950408889634f;

// Tokens begin .. end of the rows' contexts.
struct alignas(16) Item {
    int rows[PARTY];  // of a shared part, -1: none; of an own part the row and its `Pieces`
    int begin, end;
    int piece;  // place among the partial results of a row
    int is_shared;
};

// Written by plan_attention; `next` and `done` are the takers' and back at 0 after every layer.
struct Header {
    int num_items, next, done, reserved;
};

// Where the partial results of a row stand.
struct Pieces {
    int first, count;
};

struct Geometry {
    int kv_heads, group, block_shift, max_blocks;  // 2^block_shift tokens a block
    float scale;

    __device__ __forceinline__ int chunks() const { return (group + COLUMNS - 1) / COLUMNS; }
};

__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(from));
    return out;
}

__device__ __forceinline__ uint4 load_shared(const void* from) {
    uint4 out;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(from));
    return out;
}

// c += a b: a [16, 16] by rows, b [16, 8] by columns.
__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// One warp's attention of up to 8 query heads of M rows, U units at once. With r = lane / 4 and c = lane % 4 a lane has scores
// of head r and tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9, and outputs of columns 64 h + 8 r .. + 8 for heads 2 c and 2 c + 1.
template <int HD, int M, int U, bool SHARED>
struct Warp {
    static constexpr int HALVES = HD / 64;
    uint4 query[M][HD / 32];     // head r, columns 32 j + 8 c .. + 8
    uint4 keys[U][HD / 32][2];   // tokens r and r + 8, the same columns
    uint4 values[U][HALVES][4];  // tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9; columns 64 h + 8 r .. + 8
    float out[M][HALVES][4][4];  // [half][column pair i]: (8 r + 2 i, head 2 c), (.., 2 c + 1), (8 r + 2 i + 1, 2 c), ..
    float peak[M], sum[M];       // of head r, base 2; the sum over this lane's tokens only
    int lane;

    __device__ __forceinline__ Warp() : lane(threadIdx.x % 32) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            peak[m] = -INFINITY, sum[m] = 0.0f;
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int k = 0; k < 4; ++k) out[m][h][i][k] = 0.0f;
        }
    }

    __device__ __forceinline__ void load_query(int m, const bf16* q, int heads) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int j = 0; j < HD / 32; ++j)
            query[m][j] = r < heads ? *reinterpret_cast<const uint4*>(q + r * HD + 32 * j + 8 * c) : uint4{0, 0, 0, 0};
    }

    __device__ __forceinline__ void load_keys(int u, const bf16* unit) {
        const bf16* from = unit + lane / 4 * HD + lane % 4 * 8;
#pragma unroll
        for (int j = 0; j < HD / 32; ++j)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const bf16* at = from + 32 * j + 8 * t * HD;
                keys[u][j][t] = SHARED ? load_shared(at) : load_once(at);
            }
    }

    // Entries past the end may be anything that another sequence left.
    __device__ __forceinline__ void load_values(int u, const bf16* unit, int count) {
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
                    values[u][h][k] = SHARED ? load_shared(at) : load_once(at);
                else
                    values[u][h][k] = uint4{0, 0, 0, 0};
            }
        }
    }

    // Scores of the loaded keys, base 2: of tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of every unit.
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
                    for (int k = 0; k < 2; ++k) s[m][u][2 * t + k] = (even[2 * m + k] + odd[2 * m + k]) * scale;
            }
    }

    // Tokens before `from` and after `to` of a unit weigh nothing.
    __device__ __forceinline__ void mask(float (&s)[M][U][4], int u, int from, int to) const {
        if (from <= 0 && to >= UNIT) return;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int token = 2 * (lane % 4) + k / 2 * 8 + k % 2;
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (token < from || token >= to) s[m][u][k] = -INFINITY;
        }
    }

    // Scores to weights, in the layout of the second product. At least one token weighs, so that the maximum is finite.
    __device__ __forceinline__ void weigh(float (&s)[M][U][4], unsigned (&weights)[M][U][2]) {
        const int c = lane % 4;
        float top[M];
        bool is_higher = false;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            top[m] = s[m][0][0];
#pragma unroll
            for (int k = 1; k < 4 * U; ++k) top[m] = fmaxf(top[m], s[m][k / 4][k % 4]);
            top[m] = fmaxf(top[m], __shfl_xor_sync(~0u, top[m], 1));
            top[m] = fmaxf(top[m], __shfl_xor_sync(~0u, top[m], 2));
            is_higher |= top[m] > peak[m];
        }
        if (__any_sync(~0u, is_higher)) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                const float higher = fmaxf(peak[m], top[m]), shrink = exp2_fast(peak[m] - higher);
                peak[m] = higher, sum[m] *= shrink;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float own = __shfl_sync(~0u, shrink, (2 * c + k) * 4);  // of head 2 c + k
#pragma unroll
                    for (int h = 0; h < HALVES; ++h)
#pragma unroll
                        for (int i = 0; i < 4; ++i) out[m][h][i][k] *= own, out[m][h][i][k + 2] *= own;
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int u = 0; u < U; ++u) {
#pragma unroll
                for (int k = 0; k < 4; ++k) s[m][u][k] = exp2_fast(s[m][u][k] - peak[m]);
                sum[m] += (s[m][u][0] + s[m][u][1]) + (s[m][u][2] + s[m][u][3]);
                weights[m][u][0] = pack(s[m][u][0], s[m][u][1]), weights[m][u][1] = pack(s[m][u][2], s[m][u][3]);
            }
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
                    for (int m = 0; m < M; ++m) multiply(out[m][h][i], a0, a1, a2, a3, weights[m][u][0], weights[m][u][1]);
                }
            }
    }

    // Units first, first + stride .. of tokens begin .. end.
    __device__ __forceinline__ void attend(const bf16* k_cache, const bf16* v_cache, const int* table,
                                           const Geometry& shape, int kv_head, int begin, int end, int first, int stride) {
        const int base = begin / UNIT * UNIT, units = (end - base + UNIT - 1) / UNIT;
        const int steps = units > first ? (units - first + U * stride - 1) / (U * stride) : 0;
        int blocks = 0;  // of this lane's unit among the next 32
        const auto token_of = [&](int n) { return base + (first + n * stride) * UNIT; };
        const auto place = [&](int n) -> long long {
            const int token = token_of(n);
            if (n % 32 == 0) {
                const int mine = token_of(n + lane);
                blocks = mine < end ? table[mine >> shape.block_shift] : 0;
            }
            const long long head = __shfl_sync(~0u, blocks, n % 32) * shape.kv_heads + kv_head;
            return ((head << shape.block_shift) + (token & ((1 << shape.block_shift) - 1))) * HD;
        };
        if (steps == 0) return;
        long long now[U];
#pragma unroll
        for (int u = 0; u < U; ++u) now[u] = place(u), load_keys(u, k_cache + now[u]);
#pragma unroll
        for (int u = 0; u < U; ++u) load_values(u, v_cache + now[u], end - token_of(u));
        for (int step = 0; step < steps; ++step) {
            const bool has_next = step + 1 < steps;
            float s[M][U][4];
            unsigned weights[M][U][2];
            score(s, shape.scale * LOG2E);
            if (has_next) {
#pragma unroll
                for (int u = 0; u < U; ++u) now[u] = place(U * (step + 1) + u), load_keys(u, k_cache + now[u]);
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const int token = token_of(U * step + u);
                mask(s, u, begin - token, end - token);
            }
            weigh(s, weights);
            accumulate(weights);
            if (has_next) {
#pragma unroll
                for (int u = 0; u < U; ++u) load_values(u, v_cache + now[u], end - token_of(U * (step + 1) + u));
            }
        }
    }

    // out, peak and sum of a member as rows of heads: [8][stride], [8], [8].
    __device__ __forceinline__ void store(int m, float* to, int stride, float* peaks, float* sums) const {
        const int r = lane / 4, c = lane % 4;
        float total = sum[m] + __shfl_xor_sync(~0u, sum[m], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (c == 0) peaks[r] = peak[m], sums[r] = total;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float* row = to + (2 * c + k) * stride;
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    *reinterpret_cast<float4*>(row + 64 * h + 8 * r + 2 * i) = make_float4(
                        out[m][h][i][k], out[m][h][i][k + 2], out[m][h][i + 1][k], out[m][h][i + 1][k + 2]);
        }
    }
};

// Counts this block, or warp, in: what its threads wrote is there for who counts after it. Returns the count before.
__device__ __forceinline__ int arrive(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// One partial result: outputs not yet divided by their sums.
template <int HD>
struct Partial {
    float out[COLUMNS][HD];
    float peak[COLUMNS], sum[COLUMNS];
};

// Merges the row's partial results in order, by `threads` threads of which this is `thread`.
template <int HD>
__device__ __forceinline__ void merge(const Partial<HD>* partials, int count, int pitch, bf16* o, int heads, int thread,
                                      int threads) {
    constexpr int AT_ONCE = 8;  // partial results whose loads are in flight together
    for (int at = thread; at < heads * (HD / 8); at += threads) {
        const int head = at / (HD / 8), column = at % (HD / 8) * 8;
        float peak = -INFINITY, sum = 0.0f, out[8] = {};
        for (int first = 0; first < count; first += AT_ONCE) {
            float peaks[AT_ONCE], sums[AT_ONCE], higher = peak;
            float4 low[AT_ONCE], high[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const Partial<HD>& one = partials[static_cast<long long>(min(first + k, count - 1)) * pitch];
                peaks[k] = first + k < count ? __ldcg(&one.peak[head]) : -INFINITY, sums[k] = __ldcg(&one.sum[head]);
                low[k] = __ldcg(reinterpret_cast<const float4*>(&one.out[head][column]));
                high[k] = __ldcg(reinterpret_cast<const float4*>(&one.out[head][column + 4]));
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) higher = fmaxf(higher, peaks[k]);
            const float shrink = exp2_fast(peak - higher);
            peak = higher, sum *= shrink;
#pragma unroll
            for (int k = 0; k < 8; ++k) out[k] *= shrink;
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const float weight = exp2_fast(peaks[k] - peak);
                sum += sums[k] * weight;
                out[0] += low[k].x * weight, out[1] += low[k].y * weight, out[2] += low[k].z * weight;
                out[3] += low[k].w * weight, out[4] += high[k].x * weight, out[5] += high[k].y * weight;
                out[6] += high[k].z * weight, out[7] += high[k].w * weight;
            }
        }
        Pack<bf16, 8> packed;
#pragma unroll
        for (int k = 0; k < 8; ++k) narrow(out[k] / sum, packed.at[k]);
        *reinterpret_cast<Pack<bf16, 8>*>(o + head * HD + column) = packed;
    }
}

// The warps' results in shared memory to one: into `o` where it is the row's only piece, else into `partial`.
template <int HD>
__device__ __forceinline__ void merge_warps(float (&outs)[WARPS][COLUMNS][HD + 8], float (&peaks)[WARPS][COLUMNS],
                                            float (&sums)[WARPS][COLUMNS], Partial<HD>* partial, bf16* o, int heads) {
    constexpr int N = COLUMNS * HD / THREADS;  // columns of a thread
    const int head = threadIdx.x / (HD / N), column = threadIdx.x % (HD / N) * N;
    if (head >= heads) return;
    float peak = -INFINITY, sum = 0.0f, out[N] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) peak = fmaxf(peak, peaks[warp][head]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float weight = peak == -INFINITY ? 0.0f : exp2_fast(peaks[warp][head] - peak);
        sum += sums[warp][head] * weight;
#pragma unroll
        for (int k = 0; k < N; ++k) out[k] += outs[warp][head][column + k] * weight;
    }
    if (partial) {
#pragma unroll
        for (int k = 0; k < N; ++k) __stcg(&partial->out[head][column + k], out[k]);
        if (column == 0) __stcg(&partial->peak[head], peak), __stcg(&partial->sum[head], sum);
    } else {
        Pack<bf16, N> packed;
#pragma unroll
        for (int k = 0; k < N; ++k) narrow(sum > 0.0f ? out[k] / sum : 0.0f, packed.at[k]);
        *reinterpret_cast<Pack<bf16, N>*>(o + head * HD + column) = packed;
    }
}

template <int HD>
__device__ __forceinline__ void paged_attention(
    const bf16* __restrict__ q,             // [S, H, hd]
    const bf16* __restrict__ k_cache,       // [blocks, Hkv, block_size, hd]
    const bf16* __restrict__ v_cache,       // like k_cache
    const int* __restrict__ block_tables,   // [S, max_blocks]
    bf16* __restrict__ o,                   // [S, H, hd]
    Header* header,
    const Item* __restrict__ items,
    const Pieces* __restrict__ pieces,      // [S]
    int* __restrict__ arrived,              // [S, Hkv chunks], 0 between launches
    Partial<HD>* __restrict__ partials,     // [pieces, Hkv chunks]
    const Geometry& shape
) {
    __shared__ float outs[WARPS][COLUMNS][HD + 8];
    __shared__ float peaks[WARPS][COLUMNS], sums[WARPS][COLUMNS];
    __shared__ int next, is_last;
    const int warp = threadIdx.x / 32, chunks = shape.chunks(), columns = shape.kv_heads * chunks;
    wait_for_inputs();
    int index = blockIdx.x;
    Item item = items[index / columns];  // there is one for every block, if not of this step
    const int total = header->num_items * columns;
    while (index < total) {
        if (threadIdx.x == 0) next = gridDim.x + atomicAdd(&header->next, 1);
        const int at = index % columns, kv_head = at / chunks, chunk = at % chunks;
        const int heads = min(COLUMNS, shape.group - chunk * COLUMNS);
        const auto query_of = [&](int row) {
            return ((static_cast<long long>(row) * shape.kv_heads + kv_head) * shape.group + chunk * COLUMNS) * HD;
        };
        const auto table_of = [&](int row) { return block_tables + static_cast<long long>(row) * shape.max_blocks; };
        Item upcoming = {};
        if (item.is_shared) {
            const int rows[MEMBERS] = {item.rows[MEMBERS * warp], item.rows[MEMBERS * warp + 1]};
            if (rows[0] >= 0) {
                Warp<HD, MEMBERS, 1, true> work;
#pragma unroll
                for (int m = 0; m < MEMBERS; ++m) work.load_query(m, q + query_of(rows[m]), rows[m] >= 0 ? heads : 0);
                work.attend(k_cache, v_cache, table_of(rows[0]), shape, kv_head, item.begin, item.end, 0, 1);
#pragma unroll
                for (int m = 0; m < MEMBERS; ++m) {
                    const int row = rows[m];
                    if (row < 0) continue;
                    const Pieces own = pieces[row];
                    Partial<HD>* partial = partials + static_cast<long long>(own.first) * columns + at;
                    Partial<HD>* mine = partial + static_cast<long long>(item.piece) * columns;
                    work.store(m, mine->out[0], HD, mine->peak, mine->sum);
                    __syncwarp();
                    int before = 0;
                    if (work.lane == 0) before = arrive(&arrived[row * columns + at]);
                    if (__shfl_sync(~0u, before, 0) == own.count - 1) {
                        merge<HD>(partial, own.count, columns, o + query_of(row), heads, work.lane, 32);
                        if (work.lane == 0) arrived[row * columns + at] = 0;
                    }
                }
            }
            __syncthreads();
            if (next < total) upcoming = items[next / columns];
        } else {
            const int row = item.rows[0];
            const Pieces own = {item.rows[1], item.rows[2]};
            Partial<HD>* partial = partials + static_cast<long long>(own.first) * columns + at;
            Partial<HD>* mine = partial + static_cast<long long>(item.piece) * columns;
            Warp<HD, 1, UNITS, false> work;
            work.load_query(0, q + query_of(row), heads);
            work.attend(k_cache, v_cache, table_of(row), shape, kv_head, item.begin, item.end, warp, WARPS);
            work.store(0, outs[warp][0], HD + 8, peaks[warp], sums[warp]);
            __syncthreads();
            if (next < total) upcoming = items[next / columns];
            merge_warps<HD>(outs, peaks, sums, own.count > 1 ? mine : nullptr, o + query_of(row), heads);
            if (own.count > 1) {
                __syncthreads();
                if (threadIdx.x == 0) is_last = arrive(&arrived[row * columns + at]) == own.count - 1;
                __syncthreads();
                if (is_last) {
                    merge<HD>(partial, own.count, columns, o + query_of(row), heads, threadIdx.x, THREADS);
                    if (threadIdx.x == 0) arrived[row * columns + at] = 0;
                }
            }
        }
        index = next, item = upcoming;
        __syncthreads();  // all have read `next`, and shared memory is free
    }
    if (threadIdx.x == 0) {
        if (atomicAdd(&header->done, 1) == static_cast<int>(gridDim.x) - 1) header->next = 0, header->done = 0;
    }
}

#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif

#define PAGED_ATTENTION(NAME, HD)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) NAME(                                                  \
        const bf16* q, const bf16* k_cache, const bf16* v_cache, const int* block_tables, bf16* o, Header* header,  \
        const Item* items, const Pieces* pieces, int* arrived, float* partials, long long kv_heads, long long group, \
        long long block_shift, long long max_blocks, float scale) {                                                 \
        const Geometry shape = {static_cast<int>(kv_heads), static_cast<int>(group), static_cast<int>(block_shift), \
                                static_cast<int>(max_blocks), scale};                                               \
        paged_attention<HD>(q, k_cache, v_cache, block_tables, o, header, items, pieces, arrived,                   \
                            reinterpret_cast<Partial<HD>*>(partials), shape);                                       \
    }

PAGED_ATTENTION(paged_attention_bf16_64, 64)
PAGED_ATTENTION(paged_attention_bf16_128, 128)

// Exclusive sum over the block of `value`, and the total.
__device__ __forceinline__ int scan(int value, int& total) {
    __shared__ int warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // readers of an earlier scan are done
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < PLANNERS / 32; ++i) {
        if (i < warp) before += warps[i];
        total += warps[i];
    }
    return before + sum - value;
}

#ifndef MOST_STEPS
#define MOST_STEPS 8
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef MOST_PIECES
#define MOST_PIECES 32
#endif
#ifndef SHARED_STEPS
#define SHARED_STEPS 4
#endif

__device__ __forceinline__ int pieces_of(int tokens, int split) { return (tokens + split - 1) / split; }

// Items of a step. One block; a thread has neighbouring rows, and the groups of the same numbers.
extern "C" __global__ void __launch_bounds__(PLANNERS) plan_attention(
    const int* __restrict__ context_lens,   // [S]
    const int* __restrict__ groups,         // [S] or null
    const int* __restrict__ shared_blocks,  // [S] or null
    Header* header, Item* items, Pieces* pieces,
    int* scratch,                           // [4, S]
    long long num_rows, long long block_size, long long window,
    long long columns,                      // of items: key/value heads times chunks of query heads
    long long num_blocks,                   // of threads, that take items
    long long fixed_split,                  // tokens of a piece; 0: chosen here
    long long capacity                      // partial results of a column
) {
    wait_for_inputs();
    const int rows = static_cast<int>(num_rows), per_thread = (rows + PLANNERS - 1) / PLANNERS;
    const int first_row = threadIdx.x * per_thread, end_row = min(rows, first_row + per_thread);
    int *members = scratch, *prefix = scratch + rows, *rank = scratch + 2 * rows, *first_item = scratch + 3 * rows;
    __shared__ int longest;  // steps of the longest own part
    if (threadIdx.x == 0) longest = 1;
    for (int g = first_row; g < end_row; ++g) members[g] = 0, prefix[g] = INT_MAX;
    __syncthreads();
    for (int s = first_row; s < end_row; ++s) {
        const int len = context_lens[s], group = groups && window == 0 && len > 0 ? groups[s] : -1;
        rank[s] = group < 0 ? -1 : atomicAdd(&members[group], 1);
        const int block = static_cast<int>(block_size);
        if (group >= 0) atomicMin(&prefix[group], min(shared_blocks[s] * block, (len - 1) / block * block));
    }
    __syncthreads();
    const auto shared_by = [&](int group) { return members[group] > 1 ? prefix[group] : 0; };
    const auto shared_of = [&](int s) { return rank[s] < 0 ? 0 : shared_by(groups[s]); };
    const auto begin_of = [&](int s) {
        return window > 0 ? max(0, context_lens[s] - static_cast<int>(window)) : shared_of(s);
    };
    const auto parties_of = [&](int group) { return (members[group] + PARTY - 1) / PARTY; };

    int steps = 0, own_units = 0, shared_units = 0, total_steps, total_own, total_shared, unused;
    for (int s = first_row; s < end_row; ++s) {
        const int own = pieces_of(context_lens[s] - begin_of(s), STEP);
        atomicMax(&longest, own);
        own_units += own, steps += own, shared_units += shared_of(s) / UNIT;
    }
    for (int g = first_row; g < end_row; ++g)
        if (shared_by(g) > 0) steps += shared_by(g) / (UNITS * UNIT) * parties_of(g);
    scan(steps, total_steps), scan(own_units, total_own), scan(shared_units, total_shared);
    // Steps of an item: few rounds of the blocks, and not too many pieces of a row for one block to merge.
    long long per_item = min(static_cast<long long>(MOST_STEPS), (total_steps * columns + num_blocks * ROUNDS - 1) / (num_blocks * ROUNDS));
    per_item = max(per_item, static_cast<long long>(pieces_of(longest, MOST_PIECES)));
    while (2 * num_rows + total_own / per_item + total_shared / (per_item * SHARED_STEPS) > capacity) per_item *= 2;
    const int split = fixed_split > 0 ? static_cast<int>(fixed_split) : static_cast<int>(per_item) * STEP;
    const int shared_split = fixed_split > 0 ? split : static_cast<int>(per_item) * UNIT * SHARED_STEPS;

    const auto prefix_pieces = [&](int group) { return pieces_of(shared_by(group), shared_split); };
    const auto own_pieces = [&](int s) { return max(1, pieces_of(context_lens[s] - begin_of(s) / UNIT * UNIT, split)); };
    int group_items = 0, row_items = 0, slots = 0, num_shared, num_own;
    for (int g = first_row; g < end_row; ++g)
        if (shared_by(g) > 0) group_items += prefix_pieces(g) * parties_of(g);
    for (int s = first_row; s < end_row; ++s) {
        const int own = own_pieces(s), all = own + (shared_of(s) > 0 ? prefix_pieces(groups[s]) : 0);
        row_items += own, slots += all > 1 ? all : 0;
    }
    int group_item = scan(group_items, num_shared), row_item = num_shared + scan(row_items, num_own);
    int slot = scan(slots, unused);
    for (int g = first_row; g < end_row; ++g) {
        first_item[g] = group_item;
        if (shared_by(g) > 0) group_item += prefix_pieces(g) * parties_of(g);
    }
    __syncthreads();
    for (int s = first_row; s < end_row; ++s) {
        const int ahead = shared_of(s) > 0 ? prefix_pieces(groups[s]) : 0, own = own_pieces(s);
        pieces[s] = {slot, own + ahead};
        slot += own + ahead > 1 ? own + ahead : 0;
        const int begin = begin_of(s), base = begin / UNIT * UNIT, end = context_lens[s];
        for (int k = 0; k < own; ++k) {
            Item& item = items[row_item++];
            item.rows[0] = s, item.rows[1] = pieces[s].first, item.rows[2] = pieces[s].count;
            item.begin = max(begin, base + k * split), item.end = min(end, base + (k + 1) * split);
            item.piece = ahead + k, item.is_shared = 0;
        }
        for (int k = 0; k < ahead; ++k) {
            Item& item = items[first_item[groups[s]] + rank[s] / PARTY * ahead + k];
            item.rows[rank[s] % PARTY] = s;
            if (rank[s] == members[groups[s]] - 1)
                for (int none = rank[s] % PARTY + 1; none < PARTY; ++none) item.rows[none] = -1;
            if (rank[s] % PARTY > 0) continue;
            item.begin = k * shared_split, item.end = min(shared_of(s), (k + 1) * shared_split);
            item.piece = k, item.is_shared = 1;
        }
    }
    if (threadIdx.x == 0) *header = {num_shared + num_own, 0, 0, 0};
}
