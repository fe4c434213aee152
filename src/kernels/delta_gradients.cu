// Backward of the gated delta rule over chunks of 64 tokens (src/ops/delta_net/rule.rs has the formulas).
//
// delta_reverse: the pass over the chunks of a sequence from its end, with the transposed gradient of the state in registers. It computes the
// gradient of the chunks' written values, through the system of each chunk: R = T^T d_new.
//
// delta_gradients: each chunk of a head separately. With N its written values, S the state before it and E the gradient of the state after it: d_v =
// beta R, d_W = -R S^T, d_A = -R N^T below the diagonal.
#include "delta_products.cuh"

struct Reverse {
    const bf16 *mixed, *w, *p, *t, *d_o;  // d_o [T, H, DIM]
    const Gates* gates;
    const Chunk* chunks;
    const Sequence* sequences;
    const float* d_last;   // [N, H, dk, dv] or null
    bf16 *ends, *solved;   // E [B, H] states, R [B, H, CHUNK, DIM]
    float* d_initial;      // [N, H, dk, dv] or null
    int heads, key_heads, channels;
};

// A chunk's tiles: halves of W, Q and K; P and T; the gradient of outputs; then gates.
constexpr int Q_AT = WIDE_BYTES, K_AT = 2 * WIDE_BYTES, P_AT = 3 * WIDE_BYTES, T_AT = P_AT + PAIRS_BYTES, OUT_AT = T_AT + PAIRS_BYTES;
constexpr int GATES_AT = OUT_AT + WIDE_BYTES, REVERSE_BYTES = GATES_AT + SWIZZLED, HALF = WIDE_BYTES / 2;
constexpr int SOLVED_AT = 2 * REVERSE_BYTES;  // results after both stages, on their way to memory

__device__ __forceinline__ void copy_stage(
    const Reverse& of, unsigned stage, const Chunk& chunk, int index, int head, int first_part, int parts
) {
    const int key_head = head / (of.heads / of.key_heads);
    const long long item = static_cast<long long>(index) * of.heads + head;
    const bf16* rows = of.mixed + static_cast<long long>(chunk.first) * of.channels;
    const bf16* d_o = of.d_o + (static_cast<long long>(chunk.first) * of.heads + head) * DIM;
    copy_halves<HALF>(stage, of.w + item * CHUNK * DIM, DIM, CHUNK);
    copy_halves<HALF>(stage + Q_AT, rows + key_head * DIM, of.channels, chunk.count);
    copy_halves<HALF>(stage + K_AT, rows + (of.key_heads + key_head) * DIM, of.channels, chunk.count);
    copy_pairs(stage + P_AT, of.p + item * CHUNK * CHUNK);
    copy_pairs(stage + T_AT, of.t + item * CHUNK * CHUNK);
    copy_rows(stage + OUT_AT, d_o, of.heads * DIM, chunk.count, first_part, parts);
    copy_plain(stage + GATES_AT, of.gates[item].now, 2 * CHUNK * 4);
}

template <int WARPS>
__device__ __forceinline__ void reverse(const Reverse& of) {
    extern __shared__ __align__(16) unsigned char memory[];
    const unsigned tiles = (shared_address(memory) + SWIZZLED - 1) / SWIZZLED * SWIZZLED;
    constexpr int SLICES = 8 / WARPS;
    const int slice = blockIdx.x % SLICES, head = blockIdx.x / SLICES % of.heads;
    const Sequence sequence = of.sequences[blockIdx.x / SLICES / of.heads];
    const int parts = 2 * WARPS, first_part = slice * parts;
    const int value = (slice * WARPS + threadIdx.x / 32) * 16;
    const Lane lane;
    float state[64];  // the gradient [16 dv, 128 dk]
    const long long whole = (static_cast<long long>(sequence.sequence) * of.heads + head) * DIM * DIM;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        state[i] = of.d_last ? of.d_last[whole + (i / 4 * 8 + lane.pair + (i & 1)) * DIM + value + lane.group + (i & 2) * 4] : 0.0f;
    Chunk chunk = {};
    const int last = sequence.first_chunk + sequence.chunks - 1;
    if (sequence.chunks > 0) {
        chunk = of.chunks[last];
        copy_stage(of, tiles, chunk, last, head, first_part, parts);
    }
    commit_copies();
    for (int step = 0; step < sequence.chunks; ++step) {
        const int index = last - step;
        const long long item = static_cast<long long>(index) * of.heads + head;
        const unsigned stage = tiles + step % 2 * REVERSE_BYTES;
        Chunk next = chunk;
        if (step + 1 < sequence.chunks) {
            next = of.chunks[index - 1];
            copy_stage(of, tiles + (step + 1) % 2 * REVERSE_BYTES, next, index - 1, head, first_part, parts);
        }
        commit_copies();
        wait_copies<1>();
        publish_copies();
        __syncthreads();
        const unsigned now = stage + GATES_AT, end = now + CHUNK * 4;
        float fresh[32] = {};  // the gradient of the chunk's written values [16 dv, 64 tokens]
        unsigned start[8][4];
#pragma unroll
        for (int t = 0; t < 8; ++t) as_factor(start[t], state + 8 * t);
        begin_products();
#pragma unroll
        for (int t = 0; t < 8; ++t) add_by_columns<HALF>(fresh, start[t], stage + K_AT, t);
        commit_products();
        write_state(of.ends + item * DIM * DIM, value, start);
        unsigned out[4][4], read[4][4];  // the gradient of outputs [16 dv, 64 tokens], as it is and scaled for the state that they read
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            load_transposed(out[t], wide_at(stage + OUT_AT, 16 * t + lane.row_y, value / 8 + lane.part_y));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 by = read_pair(now + (16 * t + i / 2 * 8 + lane.pair) * 4);
                read[t][i] = pack(low(out[t][i]) * (by.x * SCALE), high(out[t][i]) * (by.y * SCALE));
            }
        }
        const float decay = read_float(now + (CHUNK - 1) * 4);
        finish_products<0>(fresh);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const float2 rest = read_pair(end + (8 * t + lane.pair) * 4);
            fresh[4 * t] *= rest.x, fresh[4 * t + 1] *= rest.y, fresh[4 * t + 2] *= rest.x, fresh[4 * t + 3] *= rest.y;
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) state[i] *= decay;
        begin_products();
#pragma unroll
        for (int t = 0; t < 4; ++t) add_by_rows<0>(fresh, out[t], stage + P_AT, t);
        commit_products();
#pragma unroll
        for (int t = 0; t < 4; ++t) add_by_rows<HALF>(state, read[t], stage + Q_AT, t);
        commit_products();
        finish_products<1>(fresh);
        unsigned own[4][4], minus[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            as_factor(own[t], fresh + 8 * t);
#pragma unroll
            for (int i = 0; i < 4; ++i) minus[t][i] = own[t][i] ^ 0x80008000u;
        }
        float through[32] = {};  // R^T
        begin_products();
#pragma unroll
        for (int t = 0; t < 4; ++t) add_by_rows<0>(through, own[t], stage + T_AT, t);
        commit_products();
#pragma unroll
        for (int t = 0; t < 4; ++t) add_by_rows<HALF>(state, minus[t], stage, t);
        commit_products();
        finish_products<1>(through);
        unsigned rounded[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) as_factor(rounded[t], through + 8 * t);
        stage_tokens(tiles + SOLVED_AT, value, lane, rounded);
        finish_products<0>(state);
        __syncthreads();
        write_tokens<2 * WARPS>(of.solved + item * CHUNK * DIM, DIM, CHUNK, tiles + SOLVED_AT, first_part);
        chunk = next;
    }
    wait_copies<0>();
    if (!of.d_initial) return;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        of.d_initial[whole + (i / 4 * 8 + lane.pair + (i & 1)) * DIM + value + lane.group + (i & 2) * 4] = state[i];
}

#define REVERSE(WARPS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) delta_reverse_##WARPS(                                    \
        const bf16* mixed, const bf16* w, const bf16* p, const bf16* t, const bf16* d_o, const Gates* gates,              \
        const Chunk* chunks, const Sequence* sequences, const float* d_last, bf16* ends, bf16* solved, float* d_initial,  \
        long long heads, long long key_heads, long long channels                                                          \
    ) {                                                                                                                   \
        const Reverse of = {mixed, w, p, t, d_o, gates, chunks, sequences, d_last, ends, solved, d_initial,               \
                            static_cast<int>(heads), static_cast<int>(key_heads), static_cast<int>(channels)};            \
        reverse<WARPS>(of);                                                                                               \
    }

REVERSE(4)
REVERSE(8)

// Sums over a quad of lanes, which share a row.
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Dot products of the rows of a warp's sums [16, 32] with those of a tile: rows row + group, + 8.
__device__ __forceinline__ float2 row_products(const float (&sums)[4][4], unsigned tile, int row, int column, const Lane& lane) {
    float2 dots = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const unsigned upper = read_shared(wide_at(tile, row + lane.group, column / 8 + n) + lane.pair * 2);
        const unsigned lower = read_shared(wide_at(tile, row + 8 + lane.group, column / 8 + n) + lane.pair * 2);
        dots.x += sums[n][0] * low(upper) + sums[n][1] * high(upper);
        dots.y += sums[n][2] * low(lower) + sums[n][3] * high(lower);
    }
    return {quad_sum(dots.x), quad_sum(dots.y)};
}

__device__ __forceinline__ void keep(float (*parts)[CHUNK], int part, int row, const Lane& lane, float2 sums) {
    if (lane.pair != 0) return;
    parts[part][row + lane.group] = sums.x;
    parts[part][row + 8 + lane.group] = sums.y;
}

__device__ __forceinline__ void write_rows(bf16* to, long long stride, int count, int row, const Lane& lane, const float (&sums)[4][4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        if (row + lane.group < count)
            *reinterpret_cast<unsigned*>(to + (row + lane.group) * stride + 8 * n + lane.pair) = pack(sums[n][0], sums[n][1]);
        if (row + 8 + lane.group < count)
            *reinterpret_cast<unsigned*>(to + (row + 8 + lane.group) * stride + 8 * n + lane.pair) = pack(sums[n][2], sums[n][3]);
    }
}

// Partial sums of a chunk's rows, one for each quarter of the columns, with the chunk and head; index -1: none.
struct Parts {
    Chunk chunk;
    int index, head;
    float across[4][CHUNK], down[4][CHUNK];      // of the tables of pairs, along rows and along columns
    float by_query[4][CHUNK], by_read[4][CHUNK], by_end[4][CHUNK], by_key[4][CHUNK], by_value[CHUNK];
    float whole[16];
};

// Loads a square of a state from shared memory.
__device__ __forceinline__ void load_square(unsigned (&to)[4], unsigned state, int values, int keys) {
    const uint4 own = read_shared_16(state + square_at(values, keys) * 16);
    to[0] = own.x, to[1] = own.y, to[2] = own.z, to[3] = own.w;
}

struct Gradients {
    const bf16 *mixed, *d_o, *states, *news, *ends, *solved;
    const bf16 *a, *a_log, *dt_bias;  // [T, H], [H] twice
    const Gates* gates;
    const Chunk* chunks;
    bf16 *d_mixed, *d_a, *d_b;  // [T, C], [T, H] twice
    float* of_heads;            // sums over a chunk for A_log and dt_bias [2, B, H]
    int heads, key_heads, channels, pairs;
};

// Tiles in shared memory; queries and keys of two key heads, the current one and the next.
struct Tiles {
    unsigned keys, out, news, r, state, end, by_scores, by_system, by_keys;
    __device__ __forceinline__ explicit Tiles(unsigned first) {
        keys = first, out = keys + 4 * WIDE_BYTES, news = out + WIDE_BYTES, r = news + WIDE_BYTES, state = r + WIDE_BYTES, end = state + STATE_BYTES;
        by_scores = end + STATE_BYTES, by_system = by_scores + PAIRS_BYTES, by_keys = by_system + PAIRS_BYTES;
    }
};

// A step of a block: value head `part` among those that share the key head of a pair (chunk, key head).
struct Step {
    int pair, part;
    __device__ __forceinline__ void advance(int shared) {
        if (++part == shared) part = 0, pair += gridDim.x;
    }
};

// Starts a step's copies in the order of their use, in one group each: queries, keys, gradients and gates; written values; both states. The first
// group may start while the previous step still reads the others.
__device__ __forceinline__ void copy_first(const Gradients& of, const Tiles& tiles, const Step& step, int shared, int turn, unsigned own) {
    if (step.pair < of.pairs) {
        const int index = step.pair / of.key_heads, key_head = step.pair % of.key_heads, head = key_head * shared + step.part;
        const Chunk chunk = of.chunks[index];
        const long long item = static_cast<long long>(index) * of.heads + head, first = chunk.first;
        if (step.part == 0) {
            const bf16* rows = of.mixed + first * of.channels;
            copy_rows(tiles.keys + turn * 2 * WIDE_BYTES, rows + key_head * DIM, of.channels, chunk.count);
            copy_rows(tiles.keys + (turn * 2 + 1) * WIDE_BYTES, rows + (of.key_heads + key_head) * DIM, of.channels, chunk.count);
        }
        copy_rows(tiles.out, of.d_o + (first * of.heads + head) * DIM, static_cast<long long>(of.heads) * DIM, chunk.count);
        copy_rows(tiles.r, of.solved + item * CHUNK * DIM, DIM, CHUNK);
        copy_plain(own, of.gates + item, sizeof(Gates));
    }
    commit_copies();
}

__device__ __forceinline__ void copy_rest(const Gradients& of, const Tiles& tiles, const Step& step, int shared) {
    const bool is_there = step.pair < of.pairs;
    const int head = step.pair % of.key_heads * shared + step.part;
    const long long item = static_cast<long long>(step.pair / of.key_heads) * of.heads + head;
    if (is_there) copy_rows(tiles.news, of.news + item * CHUNK * DIM, DIM, CHUNK);
    commit_copies();
    if (is_there) copy_plain(tiles.state, of.states + item * DIM * DIM, STATE_BYTES);
    commit_copies();
    if (is_there) copy_plain(tiles.end, of.ends + item * DIM * DIM, STATE_BYTES);
    commit_copies();
}

// Computes the gradients of a chunk's gates; one warp. A decay affects all later tokens, so its gradient is a sum from its token on: lane l has the
// tokens 2 l, 2 l + 1.
__device__ __forceinline__ void gates_backward(const Gradients& of, const Parts& parts, const Gates& own) {
    const int lane = threadIdx.x % 32, index = parts.index, head = parts.head;
    const Chunk chunk = parts.chunk;
    const auto sum = [](const float (*of)[CHUNK], int i) { return of[0][i] + of[1][i] + of[2][i] + of[3][i]; };
    float values[2], to_end = 0.0f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = 2 * lane + e;
        const float by_end = sum(parts.by_end, i);
        to_end += by_end;
        values[e] = sum(parts.across, i) - sum(parts.down, i) + sum(parts.by_query, i) + own.beta[i] * sum(parts.by_read, i) - by_end;
    }
    to_end = warp_sum(to_end);
    if (lane == 31) {
        float whole = 0.0f;
        for (int i = 0; i < 16; ++i) whole += parts.whole[i];
        values[1] += to_end + whole * own.now[CHUNK - 1];
    }
    float later = values[0] + values[1];
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(0xffffffffu, later, step);
        if (lane + step < 32) later += other;
    }
    const float rate = -expf(widen(of.a_log[head])), bias = widen(of.dt_bias[head]);
    float to_log = 0.0f, to_bias = 0.0f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = 2 * lane + e;
        if (i >= chunk.count) break;
        const long long at = (static_cast<long long>(chunk.first) + i) * of.heads + head;
        const float d_g = e == 0 ? later : later - values[0], x = widen(of.a[at]) + bias;
        const float d_a = d_g * rate / (1.0f + expf(-x)), d_beta = sum(parts.by_key, i) + parts.by_value[i];
        to_log += d_g * rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
        to_bias += d_a;
        narrow(d_a, of.d_a[at]);
        narrow(d_beta * own.beta[i] * (1.0f - own.beta[i]), of.d_b[at]);
    }
    to_log = warp_sum(to_log), to_bias = warp_sum(to_bias);
    if (lane != 0) return;
    float* to = of.of_heads + static_cast<long long>(index) * of.heads + head;
    to[0] = to_log, to[static_cast<long long>(of.pairs / of.key_heads) * of.heads] = to_bias;
}

// A warp whose part of the tables of pairs is zero; meanwhile it computes the gates of the previous step.
constexpr int GATES_WARP = 15;

// 16 warps: four groups of 16 rows times four quarters of the columns. A block processes the value heads of a key head one after another and sums
// their gradients of queries and keys; tiles of the next one are loaded during the last multiplications.
extern "C" __global__ void __launch_bounds__(512, 1) delta_gradients(
    const bf16* mixed, const bf16* d_o, const bf16* states, const bf16* news_of, const bf16* ends, const bf16* solved,
    const bf16* a, const bf16* a_log, const bf16* dt_bias, const Gates* gates, const Chunk* chunks, bf16* d_mixed, bf16* d_a, bf16* d_b,
    float* of_heads, long long heads, long long key_heads, long long channels, long long pairs
) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Gates owns[2];
    __shared__ Parts of_steps[2];
    const Gradients of = {mixed, d_o, states, news_of, ends, solved, a, a_log, dt_bias, gates, chunks, d_mixed, d_a, d_b, of_heads,
                          static_cast<int>(heads), static_cast<int>(key_heads), static_cast<int>(channels), static_cast<int>(pairs)};
    const int shared = of.heads / of.key_heads;
    const Tiles tiles((shared_address(memory) + 127) / 128 * 128);
    const unsigned out = tiles.out, news_tile = tiles.news, r = tiles.r, state = tiles.state, end = tiles.end, by_scores = tiles.by_scores,
                   by_system = tiles.by_system, by_keys = tiles.by_keys;
    const Lane lane;
    const int warp = threadIdx.x / 32, quarter = warp / 4, row = warp % 4 * 16, column = quarter * 32;
    // The row group of the tables, of which a warp has 16 columns; non-zero parts are spread over the four schedulers.
    const int pairs_row = (warp + (quarter == 2 ? 2 : quarter == 3 ? 1 : 0)) % 4 * 16;
    float sum_query[4][4], sum_key[4][4];
    Step step = {static_cast<int>(blockIdx.x), 0};
    int turn = 0, buffer = 0;
    copy_first(of, tiles, step, shared, turn, shared_address(&owns[0]));
    copy_rest(of, tiles, step, shared);
    if (threadIdx.x == 0) of_steps[1].index = -1;
    for (; step.pair < of.pairs; buffer ^= 1) {
        const Gates& own = owns[buffer];
        Parts& parts = of_steps[buffer];
        const int index = step.pair / of.key_heads, key_head = step.pair % of.key_heads, head = key_head * shared + step.part;
        const unsigned q = tiles.keys + turn * 2 * WIDE_BYTES, k = q + WIDE_BYTES;
        const Chunk chunk = chunks[index];
        const long long first = static_cast<long long>(chunk.first) * channels;
        const int of_value = (2 * of.key_heads + head) * DIM;
        uint4 values_of[CHUNK * 16 / 512];
#pragma unroll
        for (int i = 0; i < CHUNK * 16 / 512; ++i) {
            const int token = (threadIdx.x + i * 512) / 16;
            values_of[i] = token < chunk.count
                ? *reinterpret_cast<const uint4*>(mixed + first + token * channels + of_value + threadIdx.x % 16 * 8) : make_uint4(0, 0, 0, 0);
        }
        wait_copies<2>();
        __syncthreads();
        if (threadIdx.x == 0) parts.chunk = chunk, parts.index = index, parts.head = head;
        {  // tables of pairs: columns from 16 quarter on of 16 rows
            float scores[2][4] = {}, dots[2][4] = {}, d_scores[2][4] = {}, d_system[2][4] = {};
            if (quarter * 16 <= pairs_row) {
#pragma unroll
                for (int t = 0; t < 8; ++t) {
                    unsigned a[4], columns[4];
                    load_matrices(columns, wide_at(k, 16 * quarter + lane.row_y, 2 * t + lane.part_y));
                    load_matrices(a, wide_at(q, pairs_row + lane.row_x, 2 * t + lane.part_x));
                    multiply_two(scores[0], scores[1], a, columns);
                    load_matrices(a, wide_at(k, pairs_row + lane.row_x, 2 * t + lane.part_x));
                    multiply_two(dots[0], dots[1], a, columns);
                    load_matrices(columns, wide_at(news_tile, 16 * quarter + lane.row_y, 2 * t + lane.part_y));
                    load_matrices(a, wide_at(out, pairs_row + lane.row_x, 2 * t + lane.part_x));
                    multiply_two(d_scores[0], d_scores[1], a, columns);
                    load_matrices(a, wide_at(r, pairs_row + lane.row_x, 2 * t + lane.part_x));
                    multiply_two(d_system[0], d_system[1], a, columns);
                }
            } else if (warp == GATES_WARP && of_steps[buffer ^ 1].index >= 0) {
                gates_backward(of, of_steps[buffer ^ 1], owns[buffer ^ 1]);
            }
            float across[2] = {}, down[2][2] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = pairs_row + lane.group + 8 * half, j = 16 * quarter + 8 * n + lane.pair;
                    float first_values[2], second[2], third[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int at = 2 * half + e;
                        const float decay = i >= j + e ? __expf(static_cast<float>(own.sum[i] - own.sum[j + e])) : 0.0f;
                        first_values[e] = d_scores[n][at] * decay * SCALE;
                        second[e] = i > j + e ? -d_system[n][at] * decay : 0.0f;
                        third[e] = second[e] * own.beta[i];
                        const float through = first_values[e] * scores[n][at] + third[e] * dots[n][at];
                        across[half] += through;
                        down[n][e] += through;
                    }
                    const int to = 2 * quarter + n;
                    write_shared(pairs_at(by_scores, i, to) + lane.pair * 2, pack(first_values[0], first_values[1]));
                    write_shared(pairs_at(by_system, i, to) + lane.pair * 2, pack(second[0], second[1]));
                    write_shared(pairs_at(by_keys, i, to) + lane.pair * 2, pack(third[0], third[1]));
                }
            keep(parts.across, quarter, pairs_row, lane, {quad_sum(across[0]), quad_sum(across[1])});
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    for (int step = 4; step < 32; step *= 2) down[n][e] += __shfl_xor_sync(0xffffffffu, down[n][e], step);
                    if (lane.group == 0) parts.down[pairs_row / 16][16 * quarter + 8 * n + lane.pair + e] = down[n][e];
                }
        }
        {  // d_v, and the part of beta's gradient from values
#pragma unroll
            for (int i = 0; i < CHUNK * 16 / 512; ++i) {
                const int token = (threadIdx.x + i * 512) / 16, part = threadIdx.x % 16;
                const uint4 of_r = read_shared_16(wide_at(r, token, part));
                const unsigned from[4] = {of_r.x, of_r.y, of_r.z, of_r.w};
                unsigned to[4];
                float dot = 0.0f;
                if (token < chunk.count) {
                    const uint4 values = values_of[i];
                    const unsigned v[4] = {values.x, values.y, values.z, values.w};
                    const float beta = own.beta[token];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        dot += low(from[e]) * low(v[e]) + high(from[e]) * high(v[e]);
                        to[e] = pack(low(from[e]) * beta, high(from[e]) * beta);
                    }
                    *reinterpret_cast<uint4*>(d_mixed + first + token * channels + of_value + part * 8) = make_uint4(to[0], to[1], to[2], to[3]);
                }
                for (int step = 8; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                if (part == 0) parts.by_value[token] = dot;
            }
        }
        wait_copies<1>();
        __syncthreads();
        float by_query[4][4] = {}, by_read[4][4] = {}, by_end[4][4] = {};
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            unsigned a[4], c[4];
            load_matrices(a, wide_at(out, row + lane.row_x, 2 * t + lane.part_x));
            load_matrices(c, wide_at(r, row + lane.row_x, 2 * t + lane.part_x));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                unsigned b[4];
                load_square(b, state, t, column / 16 + n);
                multiply_two(by_query[2 * n], by_query[2 * n + 1], a, b);
                multiply_two(by_read[2 * n], by_read[2 * n + 1], c, b);
            }
        }
        wait_copies<0>();
        __syncthreads();
        Step after = step;
        after.advance(shared);
        const int next_turn = after.part == 0 ? turn ^ 1 : turn;
        copy_first(of, tiles, after, shared, next_turn, shared_address(&owns[buffer ^ 1]));
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            unsigned a[4];
            load_matrices(a, wide_at(news_tile, row + lane.row_x, 2 * t + lane.part_x));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                unsigned b[4];
                load_square(b, end, t, column / 16 + n);
                multiply_two(by_end[2 * n], by_end[2 * n + 1], a, b);
            }
        }
        const int upper = row + lane.group, lower = upper + 8;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = e < 2 ? upper : lower;
                by_query[n][e] *= own.now[i] * SCALE;
                by_read[n][e] *= -own.now[i];
                by_end[n][e] *= own.end[i];
            }
        keep(parts.by_query, quarter, row, lane, row_products(by_query, q, row, column, lane));
        keep(parts.by_read, quarter, row, lane, row_products(by_read, k, row, column, lane));
        keep(parts.by_end, quarter, row, lane, row_products(by_end, k, row, column, lane));
        {  // the decay of the whole chunk
            float dot = 0.0f;
            for (int i = threadIdx.x; i < STATE_BYTES / 16; i += blockDim.x) {
                const uint4 x = read_shared_16(state + i * 16), y = read_shared_16(end + i * 16);
                dot += low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y);
                dot += low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
            }
            for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
            if (threadIdx.x % 32 == 0) parts.whole[warp] = dot;
        }
        __syncthreads();  // all tiles have been read
        copy_rest(of, tiles, after, shared);
        // by_query becomes d_q, by_read the gradient of beta k, by_end d_k.
        for (int t = 0; t <= warp % 4; ++t) {
            unsigned a[4], c[4];
            load_matrices(a, pairs_at(by_scores, row + lane.row_x, 2 * t + lane.part_x));
            load_matrices(c, pairs_at(by_system, row + lane.row_x, 2 * t + lane.part_x));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                unsigned b[4];
                load_transposed(b, wide_at(k, 16 * t + lane.row_x, column / 8 + 2 * n + lane.part_x));
                multiply_two(by_query[2 * n], by_query[2 * n + 1], a, b);
                multiply_two(by_read[2 * n], by_read[2 * n + 1], c, b);
            }
        }
        keep(parts.by_key, quarter, row, lane, row_products(by_read, k, row, column, lane));
        for (int t = warp % 4; t < 4; ++t) {
            unsigned a[4], c[4];
            load_transposed(a, pairs_at(by_scores, 16 * t + lane.row_y, row / 8 + lane.part_y));
            load_transposed(c, pairs_at(by_keys, 16 * t + lane.row_y, row / 8 + lane.part_y));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                unsigned b[4];
                load_transposed(b, wide_at(q, 16 * t + lane.row_x, column / 8 + 2 * n + lane.part_x));
                multiply_two(by_end[2 * n], by_end[2 * n + 1], a, b);
                load_transposed(b, wide_at(k, 16 * t + lane.row_x, column / 8 + 2 * n + lane.part_x));
                multiply_two(by_end[2 * n], by_end[2 * n + 1], c, b);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                by_end[n][e] += by_read[n][e] * own.beta[e < 2 ? upper : lower];
                sum_query[n][e] = step.part == 0 ? by_query[n][e] : sum_query[n][e] + by_query[n][e];
                sum_key[n][e] = step.part == 0 ? by_end[n][e] : sum_key[n][e] + by_end[n][e];
            }
        if (after.part == 0) {
            write_rows(d_mixed + first + key_head * DIM + column, channels, chunk.count, row, lane, sum_query);
            write_rows(d_mixed + first + (of.key_heads + key_head) * DIM + column, channels, chunk.count, row, lane, sum_key);
        }
        step = after, turn = next_turn;
    }
    __syncthreads();
    if (warp == GATES_WARP && of_steps[buffer ^ 1].index >= 0) gates_backward(of, of_steps[buffer ^ 1], owns[buffer ^ 1]);
}
