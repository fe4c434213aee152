// The first half of narrow LoRA adapters of experts, in bf16 with float32 sums on tensor cores: low = x A^T, for rows that route.cu has sorted into
// tiles, each with its expert's A, in sorted order. experts.cu multiplies low with B.
//
// There are few outputs of long rows, so a block has all of K for a tile: each warp has a part of K, and the parts are added in order. Both operands
// go directly to registers, 16 bytes a lane: the order of columns within a multiplication is free as long as both agree. A block loads the adapter
// that it will most likely use before the preceding kernel has ended, on the assumption that every expert has one tile: that kernel must not write A,
// and must itself have waited for any that does.
//
// The parts and the order of sums depend only on K. So a row's bits depend neither on other rows nor on the tile.
#include "mma.cuh"
#include "scalar.cuh"
#include "tiles.cuh"

constexpr int WARPS = 16;  // parts of K
constexpr int THREADS = 32 * WARPS;
constexpr int INNER = 16;  // most columns of low
constexpr int ROWS = 16;   // of a tile at once
constexpr int DEPTH = 32;  // columns of K per step, 8 per lane
constexpr int STEPS = 4;   // that a warp loads at once
constexpr int PITCH = INNER + 4;  // between rows of sums, such that lanes use different banks

struct Inner {
    const bf16* x;      // [rows, K]
    const bf16* a;      // [E, r, K] with a_expert, a_row
    bf16* low;          // [sorted rows, r]
    const int* order;   // choices in sorted order
    const Tile* tiles;  // the number of tiles, then the tiles
    // With several stacked adapters, the adapter of each column of low and of each token; or null.
    const int* owners;
    const int* adapters;
    long long a_expert, a_row;
    int k, inner, choices, sure;  // sure: experts that most likely have one tile each; 0: unknown
};

// Whether a product belongs to another adapter than the sorted row's.
__device__ __forceinline__ bool is_others(const Inner& of, int sorted, int column) {
    return of.owners && of.owners[column] != of.adapters[of.order[sorted] / of.choices];
}

__device__ __forceinline__ uint4 load_once(const bf16* from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(from));
    return out;
}

// A warp's steps of K.
struct Part {
    int begin, end, columns;

    __device__ __forceinline__ explicit Part(int k) : columns(k) {
        const int steps = (k + DEPTH - 1) / DEPTH, warp = threadIdx.x / 32;
        begin = warp * steps / WARPS, end = (warp + 1) * steps / WARPS;
    }
    // This lane's first column of a step, or -1 if it has none.
    __device__ __forceinline__ int column(int step) const {
        const int at = step * DEPTH + threadIdx.x % 4 * 8;
        return step < end && at < columns ? at : -1;
    }
};

// Loads steps of a lane's share of an expert's A, from step `first` on: rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void load_adapter(uint4 (&to)[STEPS][2], const Inner& of, const Part& part, int expert, int first) {
    const int line = threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bf16* row = of.a + expert * of.a_expert + min(line + 8 * half, of.inner - 1) * of.a_row;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int column = part.column(first + s);
            to[s][half] = column < 0 ? uint4{0, 0, 0, 0} : load_once(row + column);
        }
    }
}

// OF_TOKENS: x has a row per token, not per sorted row.
template <bool OF_TOKENS>
__device__ __forceinline__ void low_products(const Inner& of) {
    __shared__ alignas(16) float sums_of[WARPS][ROWS][PITCH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, quad = lane % 4;
    const Part part(of.k);
    const bool is_held = (of.k + DEPTH - 1) / DEPTH <= WARPS * STEPS;  // a warp holds all of its part of A
    uint4 a[STEPS][2], x[ROWS / 8][STEPS];
    int expert = -1;  // of `a`
    if (is_held && static_cast<int>(blockIdx.x) < of.sure) load_adapter(a, of, part, expert = blockIdx.x, part.begin);
    wait_for_inputs();
    Tile tile = of.tiles[1 + blockIdx.x];
    const int tiles = of.tiles[0].expert;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        if (index != static_cast<int>(blockIdx.x)) tile = of.tiles[1 + index];
        for (int from = 0; from < tile.count; from += ROWS) {
            const int first = tile.first + from, count = tile.count - from;
            const bf16* rows[ROWS / 8];
#pragma unroll
            for (int g = 0; g < ROWS / 8; ++g) {
                const int sorted = first + min(g * 8 + line, count - 1);
                rows[g] = of.x + static_cast<long long>(OF_TOKENS ? of.order[sorted] / of.choices : sorted) * of.k;
            }
            float sums[ROWS / 8][4] = {};
            for (int base = part.begin; base < part.end; base += STEPS) {
#pragma unroll
                for (int g = 0; g < ROWS / 8; ++g) {
                    if (g * 8 >= count) break;
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) {
                        const int column = part.column(base + s);
                        x[g][s] = column < 0 ? uint4{0, 0, 0, 0} : __ldcg(reinterpret_cast<const uint4*>(rows[g] + column));
                    }
                }
                if (!is_held || expert != tile.expert) load_adapter(a, of, part, expert = tile.expert, base);
#pragma unroll
                for (int g = 0; g < ROWS / 8; ++g) {
                    if (g * 8 >= count) break;
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) {
                        multiply(sums[g], a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, x[g][s].x, x[g][s].y);
                        multiply(sums[g], a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w, x[g][s].z, x[g][s].w);
                    }
                }
            }
#pragma unroll
            for (int g = 0; g < ROWS / 8; ++g)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums_of[warp][g * 8 + quad * 2 + i % 2][line + i / 2 * 8] = sums[g][i];
            __syncthreads();
            const int row = threadIdx.x / (INNER / 2), pair = threadIdx.x % (INNER / 2) * 2;
            if (row < min(count, ROWS) && pair < of.inner) {
                float2 all = {0.0f, 0.0f};
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float2 next = *reinterpret_cast<const float2*>(&sums_of[w][row][pair]);
                    all.x += next.x, all.y += next.y;
                }
                const int sorted = first + row;
                if (is_others(of, sorted, pair)) all.x = 0.0f;
                if (is_others(of, sorted, pair + 1)) all.y = 0.0f;
                *reinterpret_cast<unsigned*>(of.low + static_cast<long long>(sorted) * of.inner + pair) = pack(all.x, all.y);
            }
            __syncthreads();  // the sums have been read
        }
    }
}

#define LOW(NAME, OF_TOKENS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(                                                   \
        const bf16* x, const bf16* a, bf16* low, const int* order, const Tile* tiles, const int* owners,             \
        const int* adapters, long long a_expert, long long a_row, long long k, long long inner, long long choices,   \
        long long sure                                                                                               \
    ) {                                                                                                              \
        low_products<OF_TOKENS>({x, a, low, order, tiles, owners, adapters, a_expert, a_row, static_cast<int>(k),    \
                                 static_cast<int>(inner), static_cast<int>(choices), static_cast<int>(sure)});       \
    }

LOW(experts_low_tokens, true)
LOW(experts_low_rows, false)
