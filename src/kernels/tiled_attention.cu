// Causal attention of consecutive rows, o = softmax(scale q k^T) v, with the same bits for every row as paged_attention.cu with a fixed split: for
// the rows of a packed micro-batch over its keys and values, and for prompts in an engine over the paged cache. A block has rows of one sequence and
// up to 8 query heads of one key/value head, so that a context is read once for all of its rows. Items that a row does not have are skipped.
#include "attention_item.cuh"

constexpr int TILE_WARPS = 8;
constexpr int TILE_THREADS = 32 * TILE_WARPS;
constexpr int TILE_MEMBERS = 2;  // rows per warp, an even number

// Consecutive rows of one sequence, whose items start at the same token.
struct alignas(16) Tile {
    int first, count;  // rows
    int len;           // tokens that the first row attends to, including itself; each further row attends to one more
    int prompt;        // row of the sequence's first token,
    int prompt_len;    // number of rows from there on that are its first tokens
    int own;           // row of the token after them; for a paged cache the sequence's block table
    int reserved[2];

    __device__ __forceinline__ int last_len() const { return len + count - 1; }
};

// Positions of a sequence's tokens among the rows of a micro-batch.
struct PackedPlaces {
    int kv_heads;
    __device__ __forceinline__ long long operator()(const Tile& tile, int token, int kv_head) const {
        const long long row = token < tile.prompt_len ? tile.prompt + token : tile.own + token - tile.prompt_len;
        return row * kv_heads + kv_head;
    }
};

// Positions of a sequence's tokens in a paged cache [blocks, Hkv, block_size, hd].
struct CachePlaces {
    const int* __restrict__ tables;  // [B, max_blocks]
    int kv_heads, block_shift, max_blocks;
    __device__ __forceinline__ long long operator()(const Tile& tile, int token, int kv_head) const {
        const int block = tables[static_cast<long long>(tile.own) * max_blocks + (token >> block_shift)];
        return ((static_cast<long long>(block) * kv_heads + kv_head) << block_shift) + (token & ((1 << block_shift) - 1));
    }
};

__device__ __forceinline__ uint4 load_16(const void* from) {
    uint4 out;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

// An item's keys or values in shared memory, with swizzled chunks of 8 columns.
template <int HD>
struct WholeItem {
    const bf16 (&tokens)[SPLIT][HD];
    __device__ __forceinline__ void next() const {}
    __device__ __forceinline__ const bf16* key(int unit, int row, int chunk) const { return &tokens[unit + row][(chunk ^ mix(row)) * 8]; }
    __device__ __forceinline__ const bf16* value(int unit, int row, int chunk) const { return key(unit, row, chunk); }
};

// Rows of a warp, and the results of their items so far.
template <int HD, int M>
struct TileWarp : ItemWarp<HD, M> {
    using Base = ItemWarp<HD, M>;
    using Kept = float4[M * HD / 16][32];
    using Base::len, Base::PARTS, Base::SLICES;
    float peak[M], sum[M];  // for head lane / 4, over all items so far

    // Adds an item's weights and sums, then its outputs.
    __device__ __forceinline__ void take(const WholeItem<HD>& values, Kept& kept, int start, bool is_first) {
        Fold folds[M];
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (start < len[m]) folds[m] = fold(peak[m], sum[m], Base::highest[m], Base::total[m]);
        Base::accumulate(values, start, [&](int slice, const typename Base::Slice& all) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if (start >= len[m]) continue;
                const Fold even = {of_head(folds[m].shrink, 0), of_head(folds[m].weight, 0)};
                const Fold odd = {of_head(folds[m].shrink, 1), of_head(folds[m].weight, 1)};
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
                    float4& to = kept[(slice * M + m) * PARTS + i][Base::lane];
                    const float (&own)[4] = all[m][i];
                    if (is_first) {
                        to = make_float4(own[0], own[1], own[2], own[3]);
                    } else {
                        const float4 before = to;
                        to = make_float4(even.of(before.x, own[0]), odd.of(before.y, own[1]), even.of(before.z, own[2]), odd.of(before.w, own[3]));
                    }
                }
            }
        });
    }

    // Writes the outputs of row m.
    __device__ __forceinline__ void write(int m, const Kept& kept, bf16* o, int heads) const {
        const int c = Base::lane % 4;
        const float sums[2] = {of_head(sum[m], 0), of_head(sum[m], 1)};
        for (int slice = 0; slice < SLICES; ++slice) {
            const int column = Base::chunk_of(slice) * 8 + Base::pair_of(slice) * 2;
            Part<2 * PARTS> parts[2];
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const float4 four = kept[(slice * M + m) * PARTS + i][Base::lane];
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
    typename TileWarp<HD, M>::Kept kept[TILE_WARPS];
};

// Without `lse` no log-sum-exp is written.
template <int HD, int M, typename Places>
__device__ __forceinline__ void tiled_attention(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                                                const Places& place, const Tile* __restrict__ tiles, bf16* __restrict__ o,
                                                float* __restrict__ lse, long long tokens, int kv_heads, int group, int window, float scale) {
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
            const long long row = place(tile, min(token, last_len - 1), kv_head);
            copy_16(shared_address(&to[at][(piece ^ mix(at)) * 8]), from + row * HD + piece * 8, token < last_len ? 16 : 0);
        }
        commit_copies();
    };
    const auto head_of = [&](int m) {  // the first query head of row m
        return (static_cast<long long>(tile.first + first + m) * kv_heads + kv_head) * group + chunk * COLUMNS;
    };
    WholeItem<HD> keys = {memory.keys};
    const WholeItem<HD> values = {memory.values};
    fetch(memory.keys, k, base);
    for (int start = base; start < last_len; start += SPLIT) {
        typename TileWarp<HD, M>::Query query;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            const bf16* from = q + (head_of(m) + work.lane / 4) * HD + work.lane % 4 * 8;
#pragma unroll
            for (int j = 0; j < HD / 32; ++j)
                query[m][j] = work.len[m] > start && work.lane / 4 < heads ? load_16(from + 32 * j) : uint4{0, 0, 0, 0};
        }
        wait_copies<0>();
        __syncthreads();  // keys are complete, and the last values are no longer read
        fetch(memory.values, v, start);
        if (start < work.most) work.score(keys, query, start, window, scale * LOG2E);
        wait_copies<0>();
        __syncthreads();  // values are complete, and keys are no longer read
        if (start + SPLIT < last_len) fetch(memory.keys, k, start + SPLIT);
        if (start < work.most) work.take(values, memory.kept[warp], start, start == base);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
        if (work.len[m] == 0) continue;
        work.write(m, memory.kept[warp], o + head_of(m) * HD, heads);
        const long long head = kv_head * group + chunk * COLUMNS + work.lane / 4;
        if (lse && work.lane % 4 == 0 && work.lane / 4 < heads)
            lse[head * tokens + tile.first + first + m] = (work.peak[m] + log2f(work.sum[m])) / LOG2E;
    }
}

#define TILED_ATTENTION(NAME, HD)                                                                                              \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) NAME(                                                        \
        const bf16* q,     /* [T, H, hd] */                                                                                    \
        const bf16* k,     /* [T, Hkv, hd] */                                                                                  \
        const bf16* v,     /* like k */                                                                                        \
        const Tile* tiles, /* as many as the blocks, over Hkv times chunks of query heads */                                   \
        bf16* o,           /* like q */                                                                                        \
        float* lse,        /* [H, T] */                                                                                        \
        long long tokens, long long kv_heads, long long group, long long window, float scale) {                                \
        const PackedPlaces places = {static_cast<int>(kv_heads)};                                                              \
        tiled_attention<HD, TILE_MEMBERS>(q, k, v, places, tiles, o, lse, tokens, places.kv_heads, static_cast<int>(group),    \
                                          static_cast<int>(window), scale);                                                    \
    }

#define TILED_ATTENTION_CACHED(NAME, HD)                                                                                       \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) NAME(                                                        \
        const bf16* q,       /* [T, H, hd] */                                                                                  \
        const bf16* k,       /* [blocks, Hkv, block_size, hd] */                                                               \
        const bf16* v,       /* like k */                                                                                      \
        const int* tables,   /* [B, max_blocks] */                                                                             \
        const Tile* tiles, bf16* o, long long tokens, long long kv_heads, long long group, long long block_shift,              \
        long long max_blocks, long long window, float scale) {                                                                 \
        const CachePlaces places = {tables, static_cast<int>(kv_heads), static_cast<int>(block_shift),                         \
                                    static_cast<int>(max_blocks)};                                                             \
        tiled_attention<HD, TILE_MEMBERS>(q, k, v, places, tiles, o, nullptr, tokens, places.kv_heads,                         \
                                          static_cast<int>(group), static_cast<int>(window), scale);                           \
    }

TILED_ATTENTION(tiled_attention_bf16_64, 64)
TILED_ATTENTION(tiled_attention_bf16_128, 128)
TILED_ATTENTION_CACHED(tiled_attention_cached_bf16_64, 64)
TILED_ATTENTION_CACHED(tiled_attention_cached_bf16_128, 128)
