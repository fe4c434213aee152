// Attention of one new token per sequence over its context in the paged cache, o = softmax(scale q k^T) v, in bf16 on tensor cores. Query heads of
// one key/value head share loads: up to 8 of them are half of the rows in the m16n8k16 multiplications that give scores, and the columns in those
// that give outputs, so that weights stay in their registers. A row's own keys and values are loaded from memory directly into registers, in the
// layout of the multiplications: the order of head columns within a multiplication and of outputs within a tile is free, so 16-byte loads fit. On
// Hopper TMA brings them to shared memory first if the cache is bf16, heads are at most 128 wide and the plan chose the split: that is faster there.
//
// `plan_attention` divides all contexts of a step into items, once for all layers; blocks of four warps take items as they become free. The warps of
// an item either process every fourth unit of 16 tokens of one row (its own part), or two rows each of a group with a common prefix (the shared part,
// whose tokens pass once through shared memory for all of them). In plans with a fixed split, a shared part is a whole split of every row, and each
// row gets the same bits as from an own part. A row of several pieces has partial results; the last item to finish merges them in order. The cache is
// bf16, or e4m3 or int8 with one scale per token and head.
#include "attention_fp8.cuh"
#include "attention_item.cuh"
#include "attention_ring.cuh"

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

// Shared memory of a block with rings: before the results, the rings of own parts or the stages of a shared part. With a little more, two blocks fit on
// a multiprocessor.
constexpr int SHARED_BYTES = 114688;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_RINGS = true;
#else
constexpr bool HAS_RINGS = false;
#endif
template <int HD>
struct RingedPool {
    static constexpr int OUTS = SHARED_BYTES - static_cast<int>(sizeof(Outs<HD>)), STEP_BYTES = WARPS * UNITS * UNIT * HD * 2;
    static constexpr int MOST_HALVES = 6, HALVES = OUTS / STEP_BYTES < MOST_HALVES ? OUTS / STEP_BYTES : MOST_HALVES;
    static_assert(HALVES >= 2 && sizeof(Stages<HD, bf16>) <= OUTS, "");
};

// How a block's warps read own parts: directly, or through rings; `early` is called early, once.
struct Direct {
    static constexpr bool RINGED = false;
};
template <typename R, typename Early>
struct ThroughRings {
    static constexpr bool RINGED = true;
    R& ring;
    const Early& early;
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
            attend_ring<UNITS>(work, reader.ring, shape, item.begin, item.end, reader.early);
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

template <int HD, typename E, bool SINKS, Split SPLIT_KIND>
__device__ __forceinline__ void attend_items(Column<HD, E, SINKS> column, Header* header, const Item* __restrict__ items) {
    __shared__ alignas(16) Pool<HD, E> pool;
    __shared__ int next;
    if constexpr (sizeof(E) == 1) let_next_begin();
    wait_for_inputs();
    int index = blockIdx.x;
    Item item = items[index / column.columns];  // every block can read one, even if it is not of this step
    const int total = header->num_items * column.columns;
    while (index < total) {
        if (threadIdx.x == 0) next = gridDim.x + atomicAdd(&header->next, 1);
        column.move_to(index % column.columns);
        Item upcoming = {};
        const auto look_ahead = [&] { if (next < total) upcoming = items[next / column.columns]; };
        bool is_done = false;
        if constexpr (!IS_WIDE<HD> && SPLIT_KIND != FIXED) {
            if (item.is_shared) {
                if constexpr (SPLIT_KIND == FIXED_SHARED) column.attend_split(item, pool.stages);
                else column.attend_shared(item, pool.stages);
                __syncthreads();
                look_ahead();
                is_done = true;
            }
        }
        if (!is_done) column.template attend_own<SPLIT_KIND>(item, pool.outs, Direct{}, look_ahead);
        index = next, item = upcoming;
        __syncthreads();  // all have read `next`, and shared memory is free
    }
    leave(header);
}

// `attend_items` with own parts through rings, which copy the next own part while one ends. Own parts follow the shared parts.
template <int HD, bool SINKS>
__device__ __forceinline__ void attend_items_by_rings(
    Column<HD, bf16, SINKS> column, Header* header, const Item* __restrict__ items, const TensorMap* k_boxes, const TensorMap* v_boxes
) {
    using Sizes = RingedPool<HD>;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[WARPS * Sizes::HALVES];
    __shared__ int next;
    auto& outs = *reinterpret_cast<Outs<HD>*>(memory + Sizes::OUTS);
    Ring<HD, UNITS, Sizes::HALVES> ring(memory, shared_address(barriers), column.shape, k_boxes, v_boxes);
    wait_for_inputs();
    int index = blockIdx.x;
    Item item = items[index / column.columns];  // every block can read one, even if it is not of this step
    const int total = header->num_items * column.columns;
    const auto take_number = [&] { return static_cast<int>(gridDim.x) + atomicAdd(&header->next, 1); };
    const auto follow = [&](const Item& own, int number) {
        ring.follow(column.table_of(own.rows[0]), number % column.columns / column.shape.chunks(), own.begin, own.end);
    };
    bool is_started = false;  // whether the rings copy this item and all that follow
    const auto start = [&] {
        if (is_started || index >= total || item.is_shared) return;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // shared parts have used the memory
        follow(item, index);
        ring.fill();
        is_started = true;
    };
    if (threadIdx.x == 0 && index < total) next = take_number();
    start();
    __syncthreads();
    while (index < total) {
        const int following = next;
        int number = 0;
        if (threadIdx.x == 0) number = take_number();  // needed later
        column.move_to(index % column.columns);
        Item upcoming = {};
        const auto look_ahead = [&] {
            if (following < total) upcoming = items[following / column.columns];
            if (threadIdx.x == 0) next = number;
        };
        const auto early = [&] { if (following < total) follow(items[following / column.columns], following); };
        if (item.is_shared) {
            column.attend_shared(item, *reinterpret_cast<Stages<HD, bf16>*>(memory));
            __syncthreads();
            look_ahead();
        } else {
            column.template attend_own<CHOSEN>(item, outs, ThroughRings<decltype(ring), decltype(early)>{ring, early}, look_ahead);
        }
        index = following, item = upcoming;
        __syncthreads();  // all have read `next`, and shared memory is free
        start();
    }
    leave(header);
}

template <int HD, typename E, bool SINKS, Split SPLIT_KIND>
__device__ __forceinline__ void paged_attention(
    const Column<HD, E, SINKS>& column, Header* header, const Item* items, const TensorMap* k_boxes, const TensorMap* v_boxes
) {
    if constexpr (HAS_RINGS && !IS_WIDE<HD> && sizeof(E) == 2 && SPLIT_KIND == CHOSEN)
        attend_items_by_rings(column, header, items, k_boxes, v_boxes);
    else
        attend_items<HD, E, SINKS, SPLIT_KIND>(column, header, items);
}

// The maps are for boxes of the caches [blocks Hkv block_size, hd], for rings.
#define STEP(E)                                                                                                    \
    const __grid_constant__ TensorMap k_boxes, const __grid_constant__ TensorMap v_boxes, const bf16 *q,           \
        const E *k_cache, const E *v_cache, const int *block_tables, bf16 *o, Header *header,                      \
        const Item *items, const Pieces *pieces, int *arrived, float *partials
#define SIZES long long kv_heads, long long group, long long block_shift, long long max_blocks, float scale
#define ATTEND(HD, E, SINKS, SPLIT_KIND, K_SCALES, V_SCALES, AT)                                                     \
    const Geometry shape = {static_cast<int>(kv_heads), static_cast<int>(group), static_cast<int>(block_shift),    \
                            static_cast<int>(max_blocks), scale};                                                  \
    paged_attention<HD, E, SINKS, SPLIT_KIND>({q, {k_cache, v_cache, K_SCALES, V_SCALES}, block_tables, o, pieces,   \
                                             arrived, reinterpret_cast<Partial<HD>*>(partials), AT, shape,         \
                                             shape.kv_heads * shape.chunks()},                                     \
                                            header, items, &k_boxes, &v_boxes)
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 2)

#define PAGED_ATTENTION(NAME, HD, SPLIT_KIND) \
    KERNEL NAME(STEP(bf16), SIZES) { ATTEND(HD, bf16, false, SPLIT_KIND, nullptr, nullptr, nullptr); }
#define PAGED_ATTENTION_SINKS(NAME, HD) \
    KERNEL NAME(STEP(bf16), SIZES, const bf16* sinks) { ATTEND(HD, bf16, true, CHOSEN, nullptr, nullptr, sinks); }
#define PAGED_ATTENTION_8(NAME, HD, E)                                                      \
    KERNEL NAME(STEP(E), const float* k_scales, const float* v_scales, SIZES) {            \
        ATTEND(HD, E, false, CHOSEN, k_scales, v_scales, nullptr);                         \
    }
#define PAGED_ATTENTION_8_SINKS(NAME, HD, E)                                                         \
    KERNEL NAME(STEP(E), const float* k_scales, const float* v_scales, SIZES, const bf16* sinks) {  \
        ATTEND(HD, E, true, CHOSEN, k_scales, v_scales, sinks);                                     \
    }

PAGED_ATTENTION(paged_attention_bf16_64, 64, CHOSEN)
PAGED_ATTENTION(paged_attention_bf16_128, 128, CHOSEN)
PAGED_ATTENTION(paged_attention_bf16_256, 256, CHOSEN)
PAGED_ATTENTION(paged_attention_bf16_64_fixed, 64, FIXED)
PAGED_ATTENTION(paged_attention_bf16_128_fixed, 128, FIXED)
PAGED_ATTENTION(paged_attention_bf16_64_fixed_shared, 64, FIXED_SHARED)
PAGED_ATTENTION(paged_attention_bf16_128_fixed_shared, 128, FIXED_SHARED)
PAGED_ATTENTION_8(paged_attention_bf16_64_fp8, 64, unsigned char)
PAGED_ATTENTION_8(paged_attention_bf16_128_fp8, 128, unsigned char)
PAGED_ATTENTION_8(paged_attention_bf16_64_int8, 64, signed char)
PAGED_ATTENTION_8(paged_attention_bf16_128_int8, 128, signed char)
PAGED_ATTENTION_SINKS(paged_attention_bf16_64_sinks, 64)
PAGED_ATTENTION_SINKS(paged_attention_bf16_128_sinks, 128)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_64_fp8_sinks, 64, unsigned char)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_128_fp8_sinks, 128, unsigned char)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_64_int8_sinks, 64, signed char)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_128_int8_sinks, 128, signed char)
