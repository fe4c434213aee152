// Kernels that quantize bf16 matrices [E, N, K] to e4m3 and transpose them, with one scale per column. Columns are padded with zeros to a multiple of
// 16 rows. Other kernels do this for a matrix whose rows are sorted by group, with one scale per group and column. Both have two passes: the first
// finds the largest absolute value of every column, the second transposes tiles in shared memory.
#include "fp8.cuh"

constexpr int THREADS = 256;
constexpr int TILE_ROWS = 128;
constexpr int TILE_COLUMNS = 64;

#if __CUDA_ARCH__ >= 890

// Finds the largest absolute value of each column, as bf16 bits; their integer order is the order of the values, with NaN as the largest. A warp
// reads 256 columns of every eighth row of its block. `peaks` must be zero before.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_column_peaks(
    const bf16* __restrict__ x,    // [E, N, K]
    unsigned* __restrict__ peaks,  // [E, K]
    long long rows, long long columns,
    long long strips,  // blocks that split the rows of some columns
    long long blocks   // per matrix
) {
    constexpr int UNROLL = 8;  // loads in flight per thread
    __shared__ uint4 of_warps[THREADS / 32][32];
    wait_for_inputs();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long matrix = blockIdx.x / blocks, block = blockIdx.x % blocks;
    x += matrix * rows * columns, peaks += matrix * columns;
    const long long column = (block / strips * 32 + lane) * 8, step = strips * (THREADS / 32);
    uint4 most = {};
    if (column < columns) {
        for (long long first = block % strips * (THREADS / 32) + warp; first < rows; first += UNROLL * step) {
            uint4 packs[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                const long long row = min(first + k * step, rows - 1);  // repeating the last row changes nothing
                packs[k] = *reinterpret_cast<const uint4*>(x + row * columns + column);
            }
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                most.x = __vmaxu2(most.x, packs[k].x & 0x7fff7fffu), most.y = __vmaxu2(most.y, packs[k].y & 0x7fff7fffu);
                most.z = __vmaxu2(most.z, packs[k].z & 0x7fff7fffu), most.w = __vmaxu2(most.w, packs[k].w & 0x7fff7fffu);
            }
        }
    }
    of_warps[warp][lane] = most;
    __syncthreads();
    // One column per thread.
    const long long own = block / strips * THREADS + threadIdx.x;
    if (own >= columns) return;
    unsigned peak = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w)
        peak = max(peak, static_cast<unsigned>(reinterpret_cast<const unsigned short*>(of_warps[w])[threadIdx.x]));
    atomicMax(peaks + own, peak);
}

// Transposes a tile of TILE_ROWS rows by TILE_COLUMNS columns. `load_row(r)` returns a thread's 8 columns of the tile's row r, or zeros outside the
// matrix. The transpose gets `columns` rows of `rows` bytes, `pitch` bytes apart; the scales are written unless `scales` is null. A thread has 8
// columns of 4 neighbouring rows; the 4 codes of a column are one word of the transpose. The words of a column are rotated by the number of its pack
// of 8 columns, so that a warp's stores and loads touch every bank of shared memory once.
template <typename Load>
__device__ __forceinline__ void turn(
    const Load& load_row, const unsigned* peaks, float* scales, unsigned char* values, long long pitch, long long columns, long long rows
) {
    constexpr int WORDS = TILE_ROWS / 4;
    __shared__ uint4 tile[TILE_COLUMNS][WORDS / 4];
    __shared__ float factors[TILE_COLUMNS];
    const int pack = threadIdx.x % 8, word = threadIdx.x / 8;
    Pack<bf16, 8> from[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) from[r] = load_row(4 * word + r);
    if (threadIdx.x < TILE_COLUMNS && threadIdx.x < columns) {
        const RowScale of_column(peaks[threadIdx.x]);
        factors[threadIdx.x] = of_column.factor;
        if (scales) scales[threadIdx.x] = of_column.scale;
    }
    __syncthreads();
    auto* words = reinterpret_cast<unsigned*>(tile);
    if (4 * word < rows && 8 * pack < columns) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float factor = factors[8 * pack + j];
            const auto of = [&](int r) { return __fmul_rn(widen(from[r].at[j]), factor); };
            words[(8 * pack + j) * WORDS + (word + 4 * pack) % WORDS] = e4m3_pair(of(0), of(1)) | e4m3_pair(of(2), of(3)) << 16;
        }
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < TILE_COLUMNS * WORDS / 4 / THREADS; ++part) {
        const int i = part * THREADS + threadIdx.x, k = i / (WORDS / 4), four = i % (WORDS / 4);
        if (k < columns && 16 * four < rows)
            *reinterpret_cast<uint4*>(values + k * pitch + 16 * four) = tile[k][(four + k / 8) % (WORDS / 4)];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fp8_columns(
    const bf16* __restrict__ x,          // [E, N, K]
    const unsigned* __restrict__ peaks,  // [E, K]
    unsigned char* __restrict__ values,  // [E, K, padded]
    float* __restrict__ scales,          // [E, K]
    long long rows, long long columns,
    long long padded,  // N up to a multiple of 16
    long long blocks   // of a matrix
) {
    wait_for_inputs();
    const long long tiles_across = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const long long matrix = blockIdx.x / blocks, block = blockIdx.x % blocks;
    x += matrix * rows * columns, peaks += matrix * columns;
    values += matrix * columns * padded, scales += matrix * columns;
    const long long first_row = block / tiles_across * TILE_ROWS, first_column = block % tiles_across * TILE_COLUMNS;
    const long long column = first_column + threadIdx.x % 8 * 8;
    const auto load_row = [&](int r) {
        const bool is_inside = first_row + r < rows && column < columns;
        return is_inside ? load<bf16, 8>(x + (first_row + r) * columns + column) : Pack<bf16, 8>{};
    };
    turn(load_row, peaks + first_column, first_row == 0 ? scales + first_column : nullptr,
         values + first_column * padded + first_row, padded, columns - first_column, padded - first_row);
}

// A tile has up to TILE_ROWS rows of a group. A group's last tile is padded with zeros.
struct GroupTile {
    int group;  // -1: no tile
    int first, rows, is_first;
};

// Computes the tiles of a matrix whose rows are sorted by group, with a single block.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_group_tiles(
    const int* __restrict__ ends,     // [E] the first row behind each group
    int* __restrict__ starts,         // [E + 1] number of tiles before each group, and of all tiles
    GroupTile* __restrict__ tiles,    // [most]
    long long groups, long long most
) {
    __shared__ int warps[THREADS / 32];
    wait_for_inputs();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int all = 0;
    for (int base = 0; base < groups; base += THREADS) {
        const int group = base + threadIdx.x;
        const bool is_inside = group < groups;
        const int first = is_inside && group > 0 ? ends[group - 1] : 0, rows = is_inside ? ends[group] - first : 0;
        const int count = (rows + TILE_ROWS - 1) / TILE_ROWS;
        int sum = count;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        __syncthreads();  // readers of earlier sums are done
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        int at = all + sum - count;
        for (int other = 0; other < THREADS / 32; ++other) {
            if (other < warp) at += warps[other];
            all += warps[other];
        }
        if (is_inside) starts[group] = at;
        for (int tile = 0; tile < count; ++tile)
            tiles[at + tile] = {group, first + tile * TILE_ROWS, min(rows - tile * TILE_ROWS, TILE_ROWS), tile == 0};
    }
    if (threadIdx.x == 0) starts[groups] = all;
    for (int tile = all + threadIdx.x; tile < most; tile += THREADS) tiles[tile].group = -1;
}

// Where a tile's row is: of what tokens have, that of its token.
__device__ __forceinline__ long long row_at(const GroupTile& tile, const long long* tokens, int r) {
    return tokens ? tokens[tile.first + r] : tile.first + r;
}

// Finds the largest absolute value of each group and column, in the format of `fp8_column_peaks`. A block has 256 columns of a tile.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_group_peaks(
    const bf16* __restrict__ x,           // [R, K], or [T, K]
    const long long* __restrict__ tokens, // [R] or null: the row of x that each row has
    const GroupTile* __restrict__ tiles,
    unsigned* __restrict__ peaks,         // [E, K] zeros before
    long long columns, long long across
) {
    constexpr int EACH = TILE_ROWS * 32 / THREADS;  // rows of a warp
    __shared__ uint4 of_warps[THREADS / 32][32];
    wait_for_inputs();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const GroupTile tile = tiles[blockIdx.x / across];
    if (tile.group < 0) return;
    const long long first_column = blockIdx.x % across * THREADS, column = first_column + lane * 8;
    uint4 most = {};
    if (column < columns) {
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int r = min(warp * EACH + k, tile.rows - 1);  // the last once more changes nothing
            const uint4 pack = *reinterpret_cast<const uint4*>(x + row_at(tile, tokens, r) * columns + column);
            most.x = __vmaxu2(most.x, pack.x & 0x7fff7fffu), most.y = __vmaxu2(most.y, pack.y & 0x7fff7fffu);
            most.z = __vmaxu2(most.z, pack.z & 0x7fff7fffu), most.w = __vmaxu2(most.w, pack.w & 0x7fff7fffu);
        }
    }
    of_warps[warp][lane] = most;
    __syncthreads();
    const long long own = first_column + threadIdx.x;
    if (own >= columns) return;
    unsigned peak = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w)
        peak = max(peak, static_cast<unsigned>(reinterpret_cast<const unsigned short*>(of_warps[w])[threadIdx.x]));
    atomicMax(peaks + tile.group * columns + own, peak);
}

// Quantizes and transposes a matrix whose rows are sorted by group, with one scale per group and column.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_group_columns(
    const bf16* __restrict__ x,            // [R, K], or [T, K]
    const long long* __restrict__ tokens,  // [R] or null
    const GroupTile* __restrict__ tiles,
    const unsigned* __restrict__ peaks,    // [E, K]
    unsigned char* __restrict__ values,    // [K, pitch], a tile TILE_ROWS of the pitch
    float* __restrict__ scales,            // [E, K], of groups that have rows
    long long columns, long long across, long long pitch
) {
    wait_for_inputs();
    const long long number = blockIdx.x / across, first_column = blockIdx.x % across * TILE_COLUMNS;
    const GroupTile tile = tiles[number];
    if (tile.group < 0) return;
    const long long column = first_column + threadIdx.x % 8 * 8, of_group = tile.group * columns + first_column;
    const auto load_row = [&](int r) {
        const bool is_inside = r < tile.rows && column < columns;
        return is_inside ? load<bf16, 8>(x + row_at(tile, tokens, r) * columns + column) : Pack<bf16, 8>{};
    };
    turn(load_row, peaks + of_group, tile.is_first ? scales + of_group : nullptr,
         values + first_column * pitch + number * TILE_ROWS, pitch, columns - first_column, TILE_ROWS);
}

#else

extern "C" __global__ void fp8_column_peaks(const bf16*, unsigned*, long long, long long, long long, long long) {}
extern "C" __global__ void fp8_columns(
    const bf16*, const unsigned*, unsigned char*, float*, long long, long long, long long, long long
) {}
extern "C" __global__ void fp8_group_tiles(const int*, int*, void*, long long, long long) {}
extern "C" __global__ void fp8_group_peaks(const bf16*, const long long*, const void*, unsigned*, long long, long long) {}
extern "C" __global__ void fp8_group_columns(
    const bf16*, const long long*, const void*, const unsigned*, unsigned char*, float*, long long, long long, long long
) {}

#endif
