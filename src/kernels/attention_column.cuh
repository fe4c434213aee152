// The part of decode attention that is common to its kernels: a column of a layer, which is up to 8 query heads of one key/value head, and how a block
// processes the items of a plan. See paged_attention.cu.
#pragma once
#include "attention_fp8.cuh"
#include "attention_item.cuh"

// How contexts are split into pieces: as the plan chose; into SPLIT tokens; into SPLIT tokens with whole splits that rows share. The kernel for the last
// is four times as large as the one for the second, and takes longer to load in every layer.
enum Split { CHOSEN, FIXED, FIXED_SHARED };

// The warp class for a cache of type E.
template <typename E, int HD, int M, int U>
struct WarpOf {
    using type = Warp<HD, M, U>;
};
template <int HD, int M, int U>
struct WarpOf<unsigned char, HD, M, U> {
    using type = EightBitWarp<HD, M, U, unsigned char>;
};
template <int HD, int M, int U>
struct WarpOf<signed char, HD, M, U> {
    using type = EightBitWarp<HD, M, U, signed char>;
};

// Signals that this block or warp is done with some pieces: its writes are visible to those that arrive later. Returns the number of pieces before.
__device__ __forceinline__ int arrive(int* counter, int pieces) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(pieces) : "memory");
    return before;
}

// Number of pieces that are done so far; the writes of those that arrived are visible.
__device__ __forceinline__ int look(const int* counter) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now;
}

// For heads of width 256 a warp holds one unit of one row; shared parts are for narrower heads only.
template <int HD>
constexpr bool IS_WIDE = HD > 128;

// The warp class for own parts.
template <int HD, typename E>
using OwnWarp = typename WarpOf<E, HD, 1, IS_WIDE<HD> ? 1 : UNITS>::type;

template <int HD, typename E>
using Stages = typename WarpOf<E, HD, MEMBERS, 1>::type::Stage[IS_WIDE<HD> ? 1 : STAGES];

// Results of an own part's warps.
template <int PITCH>
using Outs = float[WARPS][COLUMNS][PITCH];

template <int HD, typename E>
union Pool {
    Outs<HD + 8> outs;
    Stages<HD, E> stages;
};

// A block's warps load own parts into registers.
struct Direct {
    static constexpr bool RINGED = false;
};

// Streams keys and then values of an item that rows share, for ItemWarp, through a ring in shared memory, by all warps of a block together: keys one
// unit at a time, values as many bytes of 64 columns.
template <int HD>
struct ItemStream {
    static constexpr int RING = 2 * STAGES, KEYS = SPLIT / UNIT, TOGETHER = HD / 64, SLOTS = 2 * KEYS;
    using Slot = bf16[UNIT * HD];
    Slot (&ring)[RING];
    const Cache<bf16>& cache;
    const Geometry& shape;
    int blocks;    // for unit threadIdx.x % 32
    int kv_head, offset;  // offset of the item within a block
    int fetched = 0, read = -1, of_slot = 0;  // slots fetched and read, and units of values in the slot that is read

    // Tokens of unit n, in the order in which they are processed.
    __device__ __forceinline__ static int unit_of(int n) { return n / (STEPS * UNITS) + n % (STEPS * UNITS) * WARPS; }

    __device__ __forceinline__ ItemStream(Slot (&ring)[RING], const Cache<bf16>& cache, const int* table, const Geometry& shape,
                                          int kv_head, int begin)
        : ring(ring), cache(cache), shape(shape), kv_head(kv_head), offset(begin) {
        const int unit = threadIdx.x % 32;
        blocks = unit < KEYS ? table[(begin + unit * UNIT) >> shape.block_shift] : 0;
#pragma unroll 1
        for (int slot = 0; slot < RING - 1; ++slot) fetch();
    }

    __device__ __forceinline__ long long place(int unit) const {
        const long long head = static_cast<long long>(__shfl_sync(~0u, blocks, unit)) * shape.kv_heads + kv_head;
        return ((head << shape.block_shift) + ((offset + unit * UNIT) & ((1 << shape.block_shift) - 1))) * HD;
    }

    __device__ __forceinline__ void fetch() {
        if (fetched < SLOTS) {
            bf16* to = ring[fetched % RING];
            const int values = fetched - KEYS;
            constexpr int PIECES = UNIT * HD / 8 / THREADS;  // of 16 bytes, per thread
            const long long first = values < 0 ? place(unit_of(fetched)) : place(unit_of(values * TOGETHER % KEYS));
            const long long second = values < 0 || TOGETHER == 1 ? first : place(unit_of(values * TOGETHER % KEYS + 1));
#pragma unroll
            for (int k = 0; k < PIECES; ++k) {
                const int at = threadIdx.x + k * THREADS;
                if (values < 0) {
                    const int row = at / (HD / 8), chunk = at % (HD / 8);
                    copy_16(shared_address(to + row * HD + (chunk ^ mix(row)) * 8), cache.k + first + at * 8, 16);
                } else {
                    const int row = at / 8, chunk = at % 8, slice = values * TOGETHER / KEYS;
                    const long long unit = k < PIECES / TOGETHER ? first : second;
                    copy_16(shared_address(to + row * 64 + (chunk ^ mix(row)) * 8), cache.v + unit + row % UNIT * HD + slice * 64 + chunk * 8, 16);
                }
            }
        }
        commit_copies(), ++fetched;
    }

    __device__ __forceinline__ void next() {
        if (read >= KEYS && TOGETHER == 2 && of_slot == 0) {
            of_slot = 1;
            return;
        }
        of_slot = 0, ++read;
        wait_copies<RING - 2>();
        __syncthreads();  // the slot is complete, and the previous one is free
        fetch();
    }
    __device__ __forceinline__ const bf16* key(int, int row, int chunk) const { return ring[read % RING] + row * HD + (chunk ^ mix(row)) * 8; }
    __device__ __forceinline__ const bf16* value(int, int row, int chunk) const {
        return ring[read % RING] + (of_slot * UNIT + row) * 64 + (chunk % 8 ^ mix(row)) * 8;
    }
};

// One column of a layer: up to 8 query heads of one key/value head. With SINKS each query head has a logit without a key.
template <int HD, typename E, bool SINKS>
struct Column {
    const bf16* __restrict__ q;             // [S, H, hd]
    Cache<E> cache;
    const int* __restrict__ block_tables;   // [S, max_blocks]
    bf16* __restrict__ o;                   // [S, H, hd]
    const Pieces* __restrict__ pieces;      // [S]
    int* __restrict__ arrived;              // [S, Hkv chunks], 0 between launches
    Partial<HD>* __restrict__ partials;     // [pieces, Hkv chunks]
    const bf16* __restrict__ sinks;         // [H], or null
    const Geometry& shape;
    int columns;                  // Hkv chunks
    int at, kv_head, chunk, heads;  // index of the column, its key/value head, its chunk of query heads, and their number

    __device__ __forceinline__ void move_to(int column) {
        const int chunks = shape.chunks();
        at = column, kv_head = column / chunks, chunk = column % chunks;
        heads = min(COLUMNS, shape.group - chunk * COLUMNS);
    }
    __device__ __forceinline__ long long query_of(int row) const {
        return ((static_cast<long long>(row) * shape.kv_heads + kv_head) * shape.group + chunk * COLUMNS) * HD;
    }
    __device__ __forceinline__ const int* table_of(int row) const {
        return block_tables + static_cast<long long>(row) * shape.max_blocks;
    }
    __device__ __forceinline__ Partial<HD>* partial_of(const Pieces& own) const {
        return partials + static_cast<long long>(own.first) * columns + at;
    }

    // Adds a head's sink to its sum; a row without keys has no sink.
    template <int N>
    __device__ __forceinline__ void add_sink(Part<N>& part, int head) const {
        const float sink = widen(sinks[kv_head * shape.group + chunk * COLUMNS + head]) * LOG2E;
        if (part.sum != 0.0f) part.sum += exp2_fast(sink - part.peak);
    }

    // A warp's rows of a shared part.
    __device__ __forceinline__ static void rows_of(const Item& item, int (&rows)[MEMBERS]) {
        const int warp = threadIdx.x / 32;
#pragma unroll
        for (int k = 0; k < PARTY; ++k)  // all indices are compile-time constants, so the item stays in registers
            if (k / MEMBERS == warp) rows[k % MEMBERS] = item.rows[k];
    }

    // A shared part: each warp has two of its rows, and merges those that it completes.
    __device__ __forceinline__ void attend_shared(const Item& item, Stages<HD, E>& stages) const {
        int rows[MEMBERS];
        rows_of(item, rows);
        typename WarpOf<E, HD, MEMBERS, 1>::type work;
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m) work.load_query(m, q + query_of(rows[m]), rows[m] >= 0 ? heads : 0);
        work.attend_shared(stages, cache, table_of(item.rows[0]), shape, kv_head, item.begin, item.end);
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m) {
            if (rows[m] < 0) continue;
            Partial<HD>* mine = partial_of(pieces[rows[m]]) + static_cast<long long>(item.piece) * columns;
            work.store(m, mine->out[0], HD, mine->peak, mine->sum);
        }
        complete(rows);
    }

    // A shared part of a whole split, with the same bits as own parts.
    __device__ __forceinline__ void attend_split(const Item& item, Stages<HD, E>& stages) const {
        using Work = ItemWarp<HD, MEMBERS>;
        int rows[MEMBERS];
        rows_of(item, rows);
        Work work;
        work.lane = threadIdx.x % 32, work.least = work.most = SPLIT;
        const int r = work.lane / 4, c = work.lane % 4;
        typename Work::Query query;
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m) {
            work.len[m] = SPLIT;
#pragma unroll
            for (int j = 0; j < HD / 32; ++j)
                query[m][j] = rows[m] >= 0 && r < heads ? *reinterpret_cast<const uint4*>(q + query_of(rows[m]) + r * HD + 32 * j + 8 * c)
                                                        : uint4{0, 0, 0, 0};
        }
        auto& ring = *reinterpret_cast<typename ItemStream<HD>::Slot (*)[ItemStream<HD>::RING]>(&stages);
        ItemStream<HD> stream(ring, cache, table_of(item.rows[0]), shape, kv_head, item.begin);
        work.score(stream, query, 0, 0, shape.scale * LOG2E);
        Partial<HD>* mine[MEMBERS];
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m) {
            if (rows[m] < 0) continue;
            mine[m] = partial_of(pieces[rows[m]]) + static_cast<long long>(item.piece) * columns;
            if (c == 0) mine[m]->peak[r] = work.highest[m], mine[m]->sum[r] = work.total[m];
        }
        work.accumulate(stream, 0, [&](int slice, const typename Work::Slice& all) {
#pragma unroll
            for (int m = 0; m < MEMBERS; ++m) {
                if (rows[m] < 0) continue;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float* to = &mine[m]->out[2 * c + k][work.chunk_of(slice) * 8];
#pragma unroll
                    for (int i = 0; i < Work::PARTS; i += 2)
                        *reinterpret_cast<float4*>(to + 2 * i) = make_float4(all[m][i][k], all[m][i][k + 2], all[m][i + 1][k], all[m][i + 1][k + 2]);
                }
            }
        });
        complete(rows);
    }

    // Signals that a part of each of a warp's rows is done, and merges all parts of those for which it was the last.
    __device__ __forceinline__ void complete(const int (&rows)[MEMBERS]) const {
        const int lane = threadIdx.x % 32;
        int row = -1;
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m)
            if (lane == m) row = rows[m];
        const Pieces own = row < 0 ? Pieces{0, 0} : pieces[row];
        __syncwarp();
        const bool is_last = row >= 0 && arrive(&arrived[row * columns + at], 1) == own.count - 1;
        for (unsigned last = __ballot_sync(~0u, is_last); last != 0; last &= last - 1) {
            const int m = __ffs(last) - 1, of = __shfl_sync(~0u, row, m), count = __shfl_sync(~0u, own.count, m);
            const Partial<HD>* parts = partial_of({__shfl_sync(~0u, own.first, m), count});
            for (int k = lane; k < heads * (HD / 8); k += 32) {
                const int head = k / (HD / 8), column = k % (HD / 8) * 8;
                Part<8> all = merge<HD, 8>(parts, count, columns, head, column, -1, {});
                if constexpr (SINKS) add_sink(all, head);
                all.write(o + query_of(of) + head * HD + column);
            }
        }
        if (is_last) arrived[row * columns + at] = 0;
    }

    // An own part: the warps process every fourth unit. With a fixed split it may be several pieces, whose loads follow each other without a pause.
    // `meanwhile` is called between the work and the merge.
    template <Split SPLIT_KIND, int PITCH, typename Reader, typename Meanwhile>
    __device__ __forceinline__ void attend_own(
        const Item& item, Outs<PITCH>& outs, const Reader& reader, const Meanwhile& meanwhile
    ) const {
        __shared__ float peaks[WARPS][COLUMNS], sums[WARPS][COLUMNS];
        __shared__ int is_last;
        constexpr int N = COLUMNS * HD / THREADS;  // columns per thread
        const int warp = threadIdx.x / 32, row = item.rows[0], head = threadIdx.x / (HD / N), column = threadIdx.x % (HD / N) * N;
        const Pieces own = {item.rows[1], item.rows[2]};
        const int count = SPLIT_KIND == CHOSEN ? 1 : item.rows[3], last = item.piece + count - 1;
        Partial<HD>* partial = partial_of(own);
        const auto keep = [&](const Part<N>& part, int piece) {
            Partial<HD>* mine = partial + static_cast<long long>(piece) * columns;
#pragma unroll
            for (int k = 0; k < N; ++k) __stcg(&mine->out[head][column + k], part.out[k]);
            if (column == 0) __stcg(&mine->peak[head], part.peak), __stcg(&mine->sum[head], part.sum);
        };
        OwnWarp<HD, E> work;
        work.load_query(0, q + query_of(row), heads);
        if constexpr (Reader::RINGED) {
            static_assert(SPLIT_KIND == CHOSEN, "one piece");
            reader.attend(work, shape, item.begin, item.end);
        } else {
            work.attend(cache, table_of(row), shape, kv_head, item.begin, item.end, warp, WARPS, [&](int steps) {
                if constexpr (SPLIT_KIND != CHOSEN) {
                    if (steps % STEPS != 0 || steps / STEPS >= count) return;
                    work.store(0, outs[warp][0], PITCH, peaks[warp], sums[warp]);
                    work.reset();
                    __syncthreads();
                    if (head < heads) keep(merge_warps<N>(outs, peaks, sums, head, column), item.piece + steps / STEPS - 1);
                    __syncthreads();
                }
            });
        }
        work.store(0, outs[warp][0], PITCH, peaks[warp], sums[warp]);
        // If all other pieces are already done, this one need not leave the block.
        int* counter = &arrived[row * columns + at];
        if (threadIdx.x == 0) is_last = own.count > 1 && look(counter) == own.count - count;
        __syncthreads();
        meanwhile();
        Part<N> part;
        if (head < heads) part = merge_warps<N>(outs, peaks, sums, head, column);
        if (own.count > 1 && !is_last) {
            if (head < heads) keep(part, last);
            __syncthreads();
            if (threadIdx.x == 0) is_last = arrive(counter, count) == own.count - count;
            __syncthreads();
        }
        if (own.count == 1 || is_last) {
            if (own.count > 1 && head < heads)
                part = merge<HD, N>(partial, own.count, columns, head, column, last, part);
            if constexpr (SINKS)
                if (head < heads) add_sink(part, head);
            if (head < heads) part.write(o + query_of(row) + head * HD + column);
            if (own.count > 1 && threadIdx.x == 0) *counter = 0;
        }
    }
};

// Leaves the kernel; the last block resets the header.
__device__ __forceinline__ void leave(Header* header) {
    if (threadIdx.x == 0) {
        if (atomicAdd(&header->done, 1) == static_cast<int>(gridDim.x) - 1) header->next = 0, header->done = 0;
    }
}

// Parameters that all kernels have.
#define STEP(E)                                                                                                    \
    const bf16 *q, const E *k_cache, const E *v_cache, const int *block_tables, bf16 *o, Header *header,           \
        const Item *items, const Pieces *pieces, int *arrived, float *partials
#define SIZES long long kv_heads, long long group, long long block_shift, long long max_blocks, float scale
#define SHAPE                                                                                                      \
    const Geometry shape = {static_cast<int>(kv_heads), static_cast<int>(group), static_cast<int>(block_shift),    \
                            static_cast<int>(max_blocks), scale}
#define COLUMN(HD, K_SCALES, V_SCALES, SINKS)                                                                      \
    {q, {k_cache, v_cache, K_SCALES, V_SCALES}, block_tables, o, pieces, arrived,                                  \
     reinterpret_cast<Partial<HD>*>(partials), SINKS, shape, shape.kv_heads * shape.chunks()}
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 2)
