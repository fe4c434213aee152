// Forward of the gated delta rule over chunks of 64 tokens (arXiv 2412.06464; src/ops/delta_net/rule.rs has the formulas).
//
// delta_prepare: each chunk of a head separately: decays, T = (I + A)^-1, U = T (beta v), W = T (beta exp(G) k), P = q k^T D / sqrt(dk). delta_scan:
// the pass over the chunks of a sequence. A warp has 16 columns of the transposed state in registers, where the sums of one multiplication are an
// operand of the next.
#include "delta_products.cuh"

constexpr int STRIDE = CHUNK + 4;  // of A and T in shared memory

struct Prepare {
    const bf16 *mixed, *a, *b, *a_log, *dt_bias;  // [T, C], [T, H] twice, [H] twice
    const Chunk* chunks;
    bf16 *u, *w, *p, *t;  // [B, H, CHUNK, DIM] twice, [B, H, CHUNK, CHUNK] twice; t may be null
    Gates* gates;         // [B, H]
    int heads, key_heads, channels;
};

__device__ __forceinline__ void gates_of_chunk(const Prepare& of, const Chunk& chunk, int head, Gates& gates) {
    __shared__ double whole;
    const int i = threadIdx.x;
    double sum = 0.0;
    if (i < CHUNK) {
        float beta = 0.0f, g = 0.0f;
        if (i < chunk.count) {
            const long long at = static_cast<long long>(chunk.first + i) * of.heads + head;
            const float x = widen(of.a[at]) + widen(of.dt_bias[head]);
            g = -expf(widen(of.a_log[head])) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
            beta = 1.0f / (1.0f + expf(-widen(of.b[at])));
        }
        sum = g;
        for (int step = 1; step < 32; step *= 2) {
            const double other = __shfl_up_sync(0xffffffffu, sum, step);
            if (i % 32 >= step) sum += other;
        }
        gates.beta[i] = beta;
        if (i == 31) whole = sum;
    }
    __syncthreads();
    if (i >= 32 && i < CHUNK) sum += whole;
    if (i < CHUNK) gates.sum[i] = sum;
    __syncthreads();
    if (i < CHUNK) {
        gates.now[i] = expf(static_cast<float>(sum));
        gates.end[i] = expf(static_cast<float>(gates.sum[CHUNK - 1] - sum));
    }
    __syncthreads();
}

enum class Lower { None, Left, Right };

// to = sign left right for squares of SIZE, one of which may have zeros above its diagonal; by `threads` threads.
template <int SIZE, Lower LOWER>
__device__ __forceinline__ void square_product(float* to, const float* left, const float* right, int thread, int threads, float sign) {
    for (int i = thread; i < SIZE * SIZE / 8; i += threads) {
        constexpr bool BY_COLUMNS = LOWER == Lower::Right;  // a warp has few columns, otherwise few rows
        const int row = BY_COLUMNS ? i % 32 / 2 * 2 : i / (SIZE / 4) * 2;
        const int column = BY_COLUMNS ? i / 32 * 8 + i % 2 * 4 : i % (SIZE / 4) * 4;
        const int first = BY_COLUMNS ? column / 8 * 8 : 0, end = LOWER == Lower::Left ? row / 8 * 8 + 8 : SIZE;
        float sums[2][4] = {};
        for (int k = first; k < end; k += 4) {
            float4 a[2], b[4];
#pragma unroll
            for (int r = 0; r < 2; ++r) a[r] = *reinterpret_cast<const float4*>(left + (row + r) * STRIDE + k);
#pragma unroll
            for (int next = 0; next < 4; ++next) b[next] = *reinterpret_cast<const float4*>(right + (k + next) * STRIDE + column);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float factors[4] = {a[r].x, a[r].y, a[r].z, a[r].w};
#pragma unroll
                for (int next = 0; next < 4; ++next) {
                    sums[r][0] += factors[next] * b[next].x, sums[r][1] += factors[next] * b[next].y;
                    sums[r][2] += factors[next] * b[next].z, sums[r][3] += factors[next] * b[next].w;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float4*>(to + (row + r) * STRIDE + column) =
                make_float4(sign * sums[r][0], sign * sums[r][1], sign * sums[r][2], sign * sums[r][3]);
    }
}

// Computes (I + A)^-1 in A's place; A is strictly lower triangular. Rows 0 to 31 of columns 32 to 63 are overwritten.
__device__ __forceinline__ void invert(float* a) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    {  // squares of 16 on the diagonal, one column per lane
        float* own = a + warp * 16 * STRIDE + warp * 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
            for (int k = 0; k < 16; ++k)
                if (k < i) x[i] -= own[i * STRIDE + k] * x[k];
        }
        __syncwarp();
        if (lane < 16) {
#pragma unroll
            for (int i = 0; i < 16; ++i) own[i * STRIDE + lane] = x[i];
        }
    }
    __syncthreads();
    {  // squares of 32, two warps each
        const int square = warp / 2;
        float* own = a + square * 32 * (STRIDE + 1);
        float* between = own + 16;
        square_product<16, Lower::None>(between, own + 16 * STRIDE, own, threadIdx.x % 64, 64, 1.0f);
        __syncthreads();
        square_product<16, Lower::None>(own + 16 * STRIDE, own + 16 * (STRIDE + 1), between, threadIdx.x % 64, 64, -1.0f);
        __syncthreads();
        for (int i = threadIdx.x % 64; i < 16 * 16; i += 64) between[i / 16 * STRIDE + i % 16] = 0.0f;
    }
    __syncthreads();
    float* between = a + 32;
    square_product<32, Lower::Right>(between, a + 32 * STRIDE, a, threadIdx.x, 128, 1.0f);
    __syncthreads();
    square_product<32, Lower::Left>(a + 32 * STRIDE, a + 32 * (STRIDE + 1), between, threadIdx.x, 128, -1.0f);
    __syncthreads();
}

// Computes T diag(columns) diag(more) x into [CHUNK, DIM] via x's own tile, by all threads of the block. A warp has half of the columns of two groups
// of 16 rows, an early and a late one, so that all warps do the same work.
__device__ __forceinline__ void solve(bf16* to, const float* t, const float* columns, const float* more, unsigned x, const Lane& lane) {
    const int warp = threadIdx.x / 32;
    float sums[2][8][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int last = half == 0 ? warp : 3 - warp, row = 16 * last;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k > last) break;
            const int left = 16 * k + lane.pair, right = left + 8;
            float c[4] = {columns[left], columns[left + 1], columns[right], columns[right + 1]};
            if (more) c[0] *= more[left], c[1] *= more[left + 1], c[2] *= more[right], c[3] *= more[right + 1];
            const float *upper = t + (row + lane.group) * STRIDE, *lower = upper + 8 * STRIDE;
            const unsigned a[4] = {pack(upper[left] * c[0], upper[left + 1] * c[1]), pack(lower[left] * c[0], lower[left + 1] * c[1]),
                                   pack(upper[right] * c[2], upper[right + 1] * c[3]), pack(lower[right] * c[2], lower[right + 1] * c[3])};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                unsigned b[4];
                load_transposed(b, wide_at(x, 16 * k + lane.row_x, 8 * half + 2 * n + lane.part_x));
                multiply_two(sums[half][2 * n], sums[half][2 * n + 1], a, b);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * (half == 0 ? warp : 3 - warp) + lane.group;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            write_shared(wide_at(x, row, 8 * half + n) + lane.pair * 2, pack(sums[half][n][0], sums[half][n][1]));
            write_shared(wide_at(x, row + 8, 8 * half + n) + lane.pair * 2, pack(sums[half][n][2], sums[half][n][3]));
        }
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half)
        for (int i = threadIdx.x % 32; i < 16 * 8; i += 32) {
            const int row = 16 * (half == 0 ? warp : 3 - warp) + i / 8, part = 8 * half + i % 8;
            *reinterpret_cast<uint4*>(to + row * DIM + part * 8) = read_shared_16(wide_at(x, row, part));
        }
}

extern "C" __global__ void __launch_bounds__(128, 4) delta_prepare(
    const bf16* mixed, const bf16* a, const bf16* b, const bf16* a_log, const bf16* dt_bias, const Chunk* chunks, bf16* u, bf16* w,
    bf16* p, bf16* t, Gates* gates, long long heads, long long key_heads, long long channels
) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Gates own;
    const Prepare of = {mixed, a, b, a_log, dt_bias, chunks, u, w, p, t, gates, static_cast<int>(heads), static_cast<int>(key_heads),
                        static_cast<int>(channels)};
    const unsigned q_tile = (shared_address(memory) + 127) / 128 * 128, k_tile = q_tile + WIDE_BYTES;
    float* system = reinterpret_cast<float*>(memory + (k_tile + WIDE_BYTES - shared_address(memory)));
    const int index = blockIdx.x / of.heads, head = blockIdx.x % of.heads, key_head = head / (of.heads / of.key_heads);
    const Chunk chunk = chunks[index];
    const long long item = blockIdx.x;
    const bf16* rows = mixed + chunk.first * channels;
    copy_rows(q_tile, rows + key_head * DIM, channels, chunk.count);
    copy_rows(k_tile, rows + (of.key_heads + key_head) * DIM, channels, chunk.count);
    commit_copies();
    gates_of_chunk(of, chunk, head, own);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Gates) / 16); i += blockDim.x)
        reinterpret_cast<uint4*>(gates + item)[i] = reinterpret_cast<const uint4*>(&own)[i];
    wait_copies<0>();
    __syncthreads();
    const Lane lane;
    const int warp = threadIdx.x / 32;
    for (int part = warp + 1; part < 4; ++part) {  // pairs of a token with later tokens
        unsigned* above = reinterpret_cast<unsigned*>(p + (item * CHUNK + 16 * warp + lane.group) * CHUNK + 16 * part + lane.pair);
        above[0] = above[4] = above[4 * CHUNK] = above[4 * CHUNK + 4] = 0;
    }
    for (int square = warp; square < 10; square += 4) {  // of both tables, squares of 16 rows and columns on and below the diagonal
        const int of_row = square > 5 ? 3 : square > 2 ? 2 : square > 0 ? 1 : 0, part = square - of_row * (of_row + 1) / 2;
        const int row = 16 * of_row + lane.group;
        float scores[2][4] = {}, dots[2][4] = {};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            unsigned q_rows[4], k_rows[4], columns[4];
            load_matrices(q_rows, wide_at(q_tile, 16 * of_row + lane.row_x, 2 * k + lane.part_x));
            load_matrices(k_rows, wide_at(k_tile, 16 * of_row + lane.row_x, 2 * k + lane.part_x));
            load_matrices(columns, wide_at(k_tile, 16 * part + lane.row_y, 2 * k + lane.part_y));
            multiply_two(scores[0], scores[1], q_rows, columns);
            multiply_two(dots[0], dots[1], k_rows, columns);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row + 8 * half, j = 16 * part + 8 * n + lane.pair;
                float values[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float decay = i >= j + e ? __expf(static_cast<float>(own.sum[i] - own.sum[j + e])) : 0.0f;
                    values[e] = scores[n][2 * half + e] * decay * SCALE;
                    system[i * STRIDE + j + e] = i > j + e ? dots[n][2 * half + e] * decay * own.beta[i] : 0.0f;
                }
                *reinterpret_cast<unsigned*>(p + (item * CHUNK + i) * CHUNK + j) = pack(values[0], values[1]);
            }
        }
    }
    __syncthreads();
    const unsigned v_tile = q_tile;  // queries have been read
    copy_rows(v_tile, rows + (2 * of.key_heads + head) * DIM, channels, chunk.count);
    commit_copies();
    invert(system);
    if (t) {
        for (int i = threadIdx.x; i < CHUNK * CHUNK / 2; i += blockDim.x) {
            const int r = i / (CHUNK / 2), c = i % (CHUNK / 2) * 2;
            reinterpret_cast<unsigned*>(t)[item * CHUNK * CHUNK / 2 + i] =
                pack(c > r ? 0.0f : system[r * STRIDE + c], c + 1 > r ? 0.0f : system[r * STRIDE + c + 1]);
        }
    }
    solve(w + item * CHUNK * DIM, system, own.beta, own.now, k_tile, lane);
    wait_copies<0>();
    __syncthreads();
    solve(u + item * CHUNK * DIM, system, own.beta, nullptr, v_tile, lane);
}

struct Scan {
    const bf16 *mixed, *u, *w, *p;
    const Gates* gates;
    const Chunk* chunks;
    const Sequence* sequences;
    const float* initial;  // [N, H, dk, dv] or null
    bf16* o;               // [T, H, DIM]
    float* last;           // [N, H, dk, dv] or null
    bf16 *states, *news;   // states before every chunk [B, H], and values written by chunks [B, H, CHUNK, DIM]; null without a backward
    int heads, key_heads, channels;
};

// A chunk's tiles: halves of W and Q, W's rows before Q's; halves of K; P; U; then gates.
constexpr int K_AT = 2 * WIDE_BYTES, P_AT = K_AT + WIDE_BYTES, U_AT = P_AT + PAIRS_BYTES, GATES_AT = U_AT + WIDE_BYTES;
constexpr int SCAN_BYTES = GATES_AT + SWIZZLED;  // gates use 512 bytes of the last
constexpr int OUT_AT = 2 * SCAN_BYTES, NEWS_AT = OUT_AT + WIDE_BYTES;  // results after both stages, on their way to memory

__device__ __forceinline__ void copy_stage(const Scan& of, unsigned stage, const Chunk& chunk, int index, int head, int first_part, int parts) {
    const int key_head = head / (of.heads / of.key_heads);
    const long long item = static_cast<long long>(index) * of.heads + head;
    const bf16* rows = of.mixed + static_cast<long long>(chunk.first) * of.channels;
    copy_halves<WIDE_BYTES>(stage, of.w + item * CHUNK * DIM, DIM, CHUNK);
    copy_halves<WIDE_BYTES>(stage + WIDE_BYTES / 2, rows + key_head * DIM, of.channels, chunk.count);
    copy_halves<WIDE_BYTES / 2>(stage + K_AT, rows + (of.key_heads + key_head) * DIM, of.channels, chunk.count);
    copy_pairs(stage + P_AT, of.p + item * CHUNK * CHUNK);
    copy_rows(stage + U_AT, of.u + item * CHUNK * DIM, DIM, CHUNK, first_part, parts);
    copy_plain(stage + GATES_AT, of.gates[item].now, 2 * CHUNK * 4);
}

template <int WARPS>
__device__ __forceinline__ void scan(const Scan& of) {
    extern __shared__ __align__(16) unsigned char memory[];
    const unsigned tiles = (shared_address(memory) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    constexpr int SLICES = 8 / WARPS;
    const int slice = blockIdx.x % SLICES, head = blockIdx.x / SLICES % of.heads;
    const Sequence sequence = of.sequences[blockIdx.x / SLICES / of.heads];
    const int parts = 2 * WARPS, first_part = slice * parts;
    const int value = (slice * WARPS + threadIdx.x / 32) * 16;  // the warp's first
    const Lane lane;
    float state[64];  // [16 dv, 128 dk]
    const long long whole = (static_cast<long long>(sequence.sequence) * of.heads + head) * DIM * DIM;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        state[i] = of.initial ? of.initial[whole + (i / 4 * 8 + lane.pair + (i & 1)) * DIM + value + lane.group + (i & 2) * 4] : 0.0f;
    Chunk chunk = {};
    if (sequence.chunks > 0) {
        chunk = of.chunks[sequence.first_chunk];
        copy_stage(of, tiles, chunk, sequence.first_chunk, head, first_part, parts);
    }
    commit_copies();
    for (int step = 0; step < sequence.chunks; ++step) {
        const int index = sequence.first_chunk + step;
        const long long item = static_cast<long long>(index) * of.heads + head;
        const unsigned stage = tiles + step % 2 * SCAN_BYTES;
        Chunk next = chunk;
        if (step + 1 < sequence.chunks) {
            next = of.chunks[index + 1];
            copy_stage(of, tiles + (step + 1) % 2 * SCAN_BYTES, next, index + 1, head, first_part, parts);
        }
        commit_copies();
        wait_copies<1>();
        publish_copies();
        __syncthreads();
        const unsigned now = stage + GATES_AT, end = now + CHUNK * 4;
        float both[64];  // W S - U, and Q S: [16 dv, 64 tokens] each
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            unsigned own[4];
            load_transposed(own, wide_at(stage + U_AT, 16 * t + lane.row_y, value / 8 + lane.part_y));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                both[8 * t + 2 * i] = -low(own[i]), both[8 * t + 2 * i + 1] = -high(own[i]);
                both[32 + 8 * t + 2 * i] = both[32 + 8 * t + 2 * i + 1] = 0.0f;
            }
        }
        unsigned start[8][4];
#pragma unroll
        for (int t = 0; t < 8; ++t) as_factor(start[t], state + 8 * t);
        begin_products();
#pragma unroll
        for (int t = 0; t < 8; ++t) add_by_columns<WIDE_BYTES>(both, start[t], stage, t);
        commit_products();
        if (of.states) write_state(of.states + item * DIM * DIM, value, start);
        const float decay = read_float(now + (CHUNK - 1) * 4);
        finish_products<0>(both);
        float out[32];
        unsigned fresh[4][4], kept[4][4];  // the values that the chunk writes, and what remains of them after the chunk
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const float2 by = read_pair(now + (8 * t + lane.pair) * 4), rest = read_pair(end + (8 * t + lane.pair) * 4);
            const float* lost = both + 4 * t;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                out[4 * t + 2 * i] = lost[32 + 2 * i] * (by.x * SCALE), out[4 * t + 2 * i + 1] = lost[32 + 2 * i + 1] * (by.y * SCALE);
                fresh[t / 2][t % 2 * 2 + i] = pack(-lost[2 * i], -lost[2 * i + 1]);
                kept[t / 2][t % 2 * 2 + i] = pack(-lost[2 * i] * rest.x, -lost[2 * i + 1] * rest.y);
            }
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) state[i] *= decay;
        begin_products();
#pragma unroll
        for (int t = 0; t < 4; ++t) add_by_columns<0>(out, fresh[t], stage + P_AT, t);
        commit_products();
#pragma unroll
        for (int t = 0; t < 4; ++t) add_by_rows<WIDE_BYTES / 2>(state, kept[t], stage + K_AT, t);
        commit_products();
        if (of.news) stage_tokens(tiles + NEWS_AT, value, lane, fresh);
        finish_products<1>(out);
        unsigned rounded[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) as_factor(rounded[t], out + 8 * t);
        stage_tokens(tiles + OUT_AT, value, lane, rounded);
        finish_products<0>(state);
        __syncthreads();
        bf16* o = of.o + (static_cast<long long>(chunk.first) * of.heads + head) * DIM;
        write_tokens<2 * WARPS>(o, of.heads * DIM, chunk.count, tiles + OUT_AT, first_part);
        if (of.news) write_tokens<2 * WARPS>(of.news + item * CHUNK * DIM, DIM, CHUNK, tiles + NEWS_AT, first_part);
        chunk = next;
    }
    wait_copies<0>();
    if (!of.last) return;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        of.last[whole + (i / 4 * 8 + lane.pair + (i & 1)) * DIM + value + lane.group + (i & 2) * 4] = state[i];
}

#define SCAN(WARPS)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) delta_scan_##WARPS(                                         \
        const bf16* mixed, const bf16* u, const bf16* w, const bf16* p, const Gates* gates, const Chunk* chunks,            \
        const Sequence* sequences, const float* initial, bf16* o, float* last, bf16* states, bf16* news, long long heads,   \
        long long key_heads, long long channels                                                                             \
    ) {                                                                                                                     \
        const Scan of = {mixed, u, w, p, gates, chunks, sequences, initial, o, last, states, news, static_cast<int>(heads), \
                         static_cast<int>(key_heads), static_cast<int>(channels)};                                          \
        scan<WARPS>(of);                                                                                                    \
    }

SCAN(4)
SCAN(8)
