// Attention of one new token per sequence over its context in the paged cache, o = softmax(scale q k^T) v, in bf16 on tensor
// cores. Query heads of one key/value head share what is read: up to 8 of them are half the rows of the m16n8k16 products
// that give scores and the columns of those that give outputs, so that weights pass from one to the other in place. Keys and
// values of a row's own go from memory straight to registers in the products' layout: the order of head columns within a
// product and of outputs within a tile is free, so 16-byte loads fit.
//
// `plan_attention` cuts all contexts of a step into items, once for all layers; blocks of four warps take items as they
// become free. The warps of an item either have every fourth 16 tokens of one row (its own part), or two rows each of a group
// whose contexts begin alike (the shared part: its tokens pass once through shared memory for all of them).
// A row of several items leaves partial results; the last item to finish merges them in item order.
#include "attention.cuh"
#include "scalar.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 8;  // query heads of a product
constexpr int STAGES = 4;   // units of a shared part in shared memory, all but one under way
constexpr float LOG2E = 1.4426950408889634f;

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

// 16 bytes to shared memory, in the background.
__device__ __forceinline__ void copy_async(bf16* to, const bf16* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from));
}

// What the place of a 16-byte chunk within a row in shared memory is mixed with, so that neither product's loads collide.
__device__ __forceinline__ int mix(int row) { return (row & 6) ^ (row & 1) << 2; }

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
template <int HD, int M, int U>
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
                keys[u][j][t] = load_once(at);
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
                    values[u][h][k] = load_once(at);
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

    // Where a unit stands in the caches. A lane keeps the block of one of 32 units; `n` counts the units up from 0.
    struct Places {
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

    // Units first, first + stride .. of tokens begin .. end.
    __device__ __forceinline__ void attend(const bf16* k_cache, const bf16* v_cache, const int* table,
                                           const Geometry& shape, int kv_head, int begin, int end, int first, int stride) {
        const int base = begin / UNIT * UNIT, units = (end - base + UNIT - 1) / UNIT;
        const int steps = units > first ? (units - first + U * stride - 1) / (U * stride) : 0;
        Places place = {table, shape, kv_head, base, first, stride, end, 0};
        if (steps == 0) return;
        long long now[U];
#pragma unroll
        for (int u = 0; u < U; ++u) now[u] = place(u), load_keys(u, k_cache + now[u]);
#pragma unroll
        for (int u = 0; u < U; ++u) load_values(u, v_cache + now[u], end - place.token(u));
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
                const int token = place.token(U * step + u);
                mask(s, u, begin - token, end - token);
            }
            weigh(s, weights);
            accumulate(weights);
            if (has_next) {
#pragma unroll
                for (int u = 0; u < U; ++u) load_values(u, v_cache + now[u], end - place.token(U * (step + 1) + u));
            }
        }
    }

    // All units of tokens begin .. end, whole ones, through `stages` in shared memory; by all warps of the block together.
    __device__ __forceinline__ void attend_shared(bf16 (&stages)[STAGES][2][UNIT][HD], const bf16* k_cache,
                                                  const bf16* v_cache, const int* table, const Geometry& shape,
                                                  int kv_head, int begin, int end) {
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
                    copy_async(&stages[step % STAGES][0][row][to], k_cache + unit + at * 8);
                    copy_async(&stages[step % STAGES][1][row][to], v_cache + unit + at * 8);
                }
            }
            asm volatile("cp.async.commit_group;");
        };
        const auto read = [&](const bf16 (&tile)[UNIT][HD], int row, int chunk) {
            return *reinterpret_cast<const uint4*>(&tile[row][(chunk ^ mix(row)) * 8]);
        };
        for (int step = 0; step < STAGES - 1; ++step) fetch(step);
        for (int step = 0; step < steps; ++step) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
            __syncthreads();  // the unit is there for all, and the stage before it is free
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

// The count so far; what those who counted wrote is there.
__device__ __forceinline__ int look(const int* counter) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now;
}

// One partial result: outputs not yet divided by their sums.
template <int HD>
struct Partial {
    float out[COLUMNS][HD];
    float peak[COLUMNS], sum[COLUMNS];
};

// N columns of one head: outputs not yet divided by `sum`, weighed against `peak`.
template <int N>
struct Part {
    float peak = -INFINITY, sum = 0.0f, out[N] = {};

    __device__ __forceinline__ void write(bf16* to) const {
        Pack<bf16, N> packed;
#pragma unroll
        for (int k = 0; k < N; ++k) narrow(sum > 0.0f ? out[k] / sum : 0.0f, packed.at[k]);
        *reinterpret_cast<Pack<bf16, N>*>(to) = packed;
    }
};

// The row's partial results, in order; the one of place `own` is at hand and not read.
template <int HD, int N>
__device__ __forceinline__ Part<N> merge(const Partial<HD>* partials, int count, int pitch, int head, int column, int own,
                                         const Part<N>& at_hand) {
    constexpr int AT_ONCE = 8;  // partial results whose loads are in flight together
    Part<N> all;
    for (int first = 0; first < count; first += AT_ONCE) {
        Part<N> parts[AT_ONCE];
        float higher = all.peak;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= count) continue;
            const Partial<HD>& one = partials[static_cast<long long>(first + i) * pitch];
            parts[i] = at_hand;
            if (first + i == own) continue;
            parts[i].peak = __ldcg(&one.peak[head]), parts[i].sum = __ldcg(&one.sum[head]);
#pragma unroll
            for (int k = 0; k < N; k += 4) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(&one.out[head][column + k]));
                parts[i].out[k] = four.x, parts[i].out[k + 1] = four.y;
                parts[i].out[k + 2] = four.z, parts[i].out[k + 3] = four.w;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) higher = fmaxf(higher, parts[i].peak);
        const float shrink = exp2_fast(all.peak - higher);
        all.peak = higher, all.sum *= shrink;
#pragma unroll
        for (int k = 0; k < N; ++k) all.out[k] *= shrink;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float weight = exp2_fast(parts[i].peak - higher);
            all.sum += parts[i].sum * weight;
#pragma unroll
            for (int k = 0; k < N; ++k) all.out[k] += parts[i].out[k] * weight;
        }
    }
    return all;
}

// The warps' results of an own part in shared memory to one.
template <int HD, int N>
__device__ __forceinline__ Part<N> merge_warps(const float (&outs)[WARPS][COLUMNS][HD + 8],
                                               const float (&peaks)[WARPS][COLUMNS],
                                               const float (&sums)[WARPS][COLUMNS], int head, int column) {
    Part<N> all;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) all.peak = fmaxf(all.peak, peaks[warp][head]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float weight = all.peak == -INFINITY ? 0.0f : exp2_fast(peaks[warp][head] - all.peak);
        all.sum += sums[warp][head] * weight;
#pragma unroll
        for (int k = 0; k < N; ++k) all.out[k] += outs[warp][head][column + k] * weight;
    }
    return all;
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
    union Pool {
        float outs[WARPS][COLUMNS][HD + 8];
        bf16 stages[STAGES][2][UNIT][HD];
    };
    __shared__ alignas(16) Pool pool;
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
            int rows[MEMBERS];
#pragma unroll
            for (int k = 0; k < PARTY; ++k)  // every index known when it is compiled: the item stays in registers
                if (k / MEMBERS == warp) rows[k % MEMBERS] = item.rows[k];
            Warp<HD, MEMBERS, 1> work;
#pragma unroll
            for (int m = 0; m < MEMBERS; ++m) work.load_query(m, q + query_of(rows[m]), rows[m] >= 0 ? heads : 0);
            work.attend_shared(pool.stages, k_cache, v_cache, table_of(item.rows[0]), shape, kv_head, item.begin, item.end);
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
                    for (int k = work.lane; k < heads * (HD / 8); k += 32) {
                        const int head = k / (HD / 8), column = k % (HD / 8) * 8;
                        merge<HD, 8>(partial, own.count, columns, head, column, -1, {})
                            .write(o + query_of(row) + head * HD + column);
                    }
                    if (work.lane == 0) arrived[row * columns + at] = 0;
                }
            }
            __syncthreads();
            if (next < total) upcoming = items[next / columns];
        } else {
            const int row = item.rows[0];
            const Pieces own = {item.rows[1], item.rows[2]};
            Partial<HD>* partial = partials + static_cast<long long>(own.first) * columns + at;
            Partial<HD>* mine = partial + static_cast<long long>(item.piece) * columns;
            Warp<HD, 1, UNITS> work;
            work.load_query(0, q + query_of(row), heads);
            work.attend(k_cache, v_cache, table_of(row), shape, kv_head, item.begin, item.end, warp, WARPS);
            work.store(0, pool.outs[warp][0], HD + 8, peaks[warp], sums[warp]);
            // Where all other pieces are there by now, this one need not leave the block.
            int* counter = &arrived[row * columns + at];
            if (threadIdx.x == 0) is_last = own.count > 1 && look(counter) == own.count - 1;
            __syncthreads();
            if (next < total) upcoming = items[next / columns];
            constexpr int N = COLUMNS * HD / THREADS;  // columns of a thread
            const int head = threadIdx.x / (HD / N), column = threadIdx.x % (HD / N) * N;
            bf16* to = o + query_of(row) + head * HD + column;
            Part<N> part;
            if (head < heads) part = merge_warps<HD, N>(pool.outs, peaks, sums, head, column);
            if (own.count > 1 && !is_last) {
                if (head < heads) {
#pragma unroll
                    for (int k = 0; k < N; ++k) __stcg(&mine->out[head][column + k], part.out[k]);
                    if (column == 0) __stcg(&mine->peak[head], part.peak), __stcg(&mine->sum[head], part.sum);
                }
                __syncthreads();
                if (threadIdx.x == 0) is_last = arrive(counter) == own.count - 1;
                __syncthreads();
            }
            if (own.count == 1 || is_last) {
                if (own.count > 1 && head < heads)
                    part = merge<HD, N>(partial, own.count, columns, head, column, item.piece, part);
                if (head < heads) part.write(to);
                if (own.count > 1 && threadIdx.x == 0) *counter = 0;
            }
        }
        index = next, item = upcoming;
        __syncthreads();  // all have read `next`, and shared memory is free
    }
    if (threadIdx.x == 0) {
        if (atomicAdd(&header->done, 1) == static_cast<int>(gridDim.x) - 1) header->next = 0, header->done = 0;
    }
}

#define PAGED_ATTENTION(NAME, HD)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(                                                  \
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
