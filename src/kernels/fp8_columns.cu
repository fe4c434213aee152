// Kernels that quantize a bf16 matrix [N, K] to e4m3 and transpose it, with one scale per column. Columns are padded with zeros to a multiple of 16
// rows. There are two passes: the first finds the largest absolute value of every column, the second transposes tiles in shared memory.
#include "fp8.cuh"

constexpr int THREADS = 256;
constexpr int TILE_ROWS = 128;
constexpr int TILE_COLUMNS = 64;

#if __CUDA_ARCH__ >= 890

// Finds the largest absolute value of each column, as bf16 bits; their integer order is the order of the values, with NaN as the largest. A warp
// reads 256 columns of every eighth row of its block. `peaks` must be zero before.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_column_peaks(
    const bf16* __restrict__ x,    // [N, K]
    unsigned* __restrict__ peaks,  // [K]
    long long rows, long long columns,
    long long strips  // blocks that split the rows of some columns
) {
    constexpr int UNROLL = 8;  // loads in flight per thread
    __shared__ uint4 of_warps[THREADS / 32][32];
    wait_for_inputs();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long column = (blockIdx.x / strips * 32 + lane) * 8, step = strips * (THREADS / 32);
    uint4 most = {};
    if (column < columns) {
        for (long long first = blockIdx.x % strips * (THREADS / 32) + warp; first < rows; first += UNROLL * step) {
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
    const long long own = blockIdx.x / strips * THREADS + threadIdx.x;
    if (own >= columns) return;
    unsigned peak = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w)
        peak = max(peak, static_cast<unsigned>(reinterpret_cast<const unsigned short*>(of_warps[w])[threadIdx.x]));
    atomicMax(peaks + own, peak);
}

// A block transposes a tile. A thread has 8 columns of 4 neighbouring rows; the 4 codes of a column are one word of the transpose. The words of a
// column are rotated by the number of its pack of 8 columns, so that a warp's stores and loads touch every bank of shared memory once.
extern "C" __global__ void __launch_bounds__(THREADS) fp8_columns(
    const bf16* __restrict__ x,          // [N, K]
    const unsigned* __restrict__ peaks,  // [K]
    unsigned char* __restrict__ values,  // [K, padded]
    float* __restrict__ scales,          // [K]
    long long rows, long long columns,
    long long padded  // N up to a multiple of 16
) {
    constexpr int WORDS = TILE_ROWS / 4;
    __shared__ uint4 tile[TILE_COLUMNS][WORDS / 4];
    __shared__ float factors[TILE_COLUMNS];
    wait_for_inputs();
    const long long tiles_across = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const long long first_row = blockIdx.x / tiles_across * TILE_ROWS, first_column = blockIdx.x % tiles_across * TILE_COLUMNS;
    const int pack = threadIdx.x % 8, word = threadIdx.x / 8;
    const long long row = first_row + 4 * word, column = first_column + 8 * pack;
    const bool is_inside = row < padded && column < columns;
    Pack<bf16, 8> from[4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
        from[r] = is_inside && row + r < rows ? load<bf16, 8>(x + (row + r) * columns + column) : Pack<bf16, 8>{};
    if (threadIdx.x < TILE_COLUMNS && first_column + threadIdx.x < columns) {
        const RowScale of_column(peaks[first_column + threadIdx.x]);
        factors[threadIdx.x] = of_column.factor;
        if (first_row == 0) scales[first_column + threadIdx.x] = of_column.scale;
    }
    __syncthreads();
    auto* words = reinterpret_cast<unsigned*>(tile);
    if (is_inside) {
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
        if (first_column + k < columns && first_row + 16 * four < padded)
            *reinterpret_cast<uint4*>(values + (first_column + k) * padded + first_row + 16 * four) =
                tile[k][(four + k / 8) % (WORDS / 4)];
    }
}

#else

extern "C" __global__ void fp8_column_peaks(const bf16*, unsigned*, long long, long long, long long) {}
extern "C" __global__ void fp8_columns(const bf16*, const unsigned*, unsigned char*, float*, long long, long long, long long) {}

#endif
