// The gated delta rule over chunks of 64 tokens, backward (src/ops/delta_net/rule.rs has the formulas).
//
// delta_reverse: the pass over the chunks of a sequence from its end, with the gradient of the state, transposed, in registers; gives
// that of what chunks wrote, through the system of the chunk: R = T^T d_new.
// delta_gradients: a chunk of a head by itself. With N what it wrote, S the state before it and E the gradient of the state behind it:
// d_v = beta R, d_W = -R S^T, d_A = -R N^T below the diagonal.
#include "delta.cuh"

struct Reverse {
    const bf16 *mixed, *w, *p, *t, *d_o;  // d_o [T, H, DIM]
    const Gates* gates;
    const Chunk* chunks;
    const Sequence* sequences;
    const float* d_last;   // [N, H, dk, dv] or null
    bf16 *ends, *solved;   // E [B, H, dv, dk], R [B, H, CHUNK, DIM]
    float* d_initial;      // [N, H, dk, dv] or null
    int heads, key_heads, channels;
};

constexpr int REVERSE_BYTES = 4 * WIDE_BYTES + 2 * PAIRS_BYTES + 2 * CHUNK * 4;

__device__ __forceinline__ void copy_stage(
    const Reverse& of, unsigned stage, const Chunk& chunk, int index, int head, int first_part, int parts
) {
    const int key_head = head / (of.heads / of.key_heads);
    const long long item = static_cast<long long>(index) * of.heads + head;
    const bf16* rows = of.mixed + static_cast<long long>(chunk.first) * of.channels;
    copy_rows(stage, of.w + item * CHUNK * DIM, DIM, CHUNK);
    copy_rows(stage + WIDE_BYTES, of.d_o + (static_cast<long long>(chunk.first) * of.heads + head) * DIM, of.heads * DIM, chunk.count, first_part, parts);
    copy_rows(stage + 2 * WIDE_BYTES, rows + key_head * DIM, of.channels, chunk.count);
    copy_rows(stage + 3 * WIDE_BYTES, rows + (of.key_heads + key_head) * DIM, of.channels, chunk.count);
    copy_pairs(stage + 4 * WIDE_BYTES, of.p + item * CHUNK * CHUNK);
    copy_pairs(stage + 4 * WIDE_BYTES + PAIRS_BYTES, of.t + item * CHUNK * CHUNK);
    copy_plain(stage + 4 * WIDE_BYTES + 2 * PAIRS_BYTES, of.gates[item].now, 2 * CHUNK * 4);
}

template <int WARPS>
__device__ __forceinline__ void reverse(const Reverse& of) {
    extern __shared__ __align__(16) unsigned char memory[];
    const unsigned tiles = (shared_address(memory) + 127) / 128 * 128;
    constexpr int SLICES = 8 / WARPS;
    const int slice = blockIdx.x % SLICES, head = blockIdx.x / SLICES % of.heads;
    const Sequence sequence = of.sequences[blockIdx.x / SLICES / of.heads];
    const int parts = 2 * WARPS, first_part = slice * parts;
    const int value = (slice * WARPS + threadIdx.x / 32) * 16;
    const Lane lane;
    float state[16][4];  // the gradient [16 dv, 128 dk]
    const long long whole = (static_cast<long long>(sequence.sequence) * of.heads + head) * DIM * DIM;
#pragma unroll
    for (int t = 0; t < 16; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            state[t][e] = of.d_last
                ? of.d_last[whole + (8 * t + lane.pair + (e & 1)) * DIM + value + lane.group + (e >> 1) * 8] : 0.0f;
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
        __syncthreads();
        const unsigned w = stage, d_o = stage + WIDE_BYTES, q = d_o + WIDE_BYTES, k = q + WIDE_BYTES, p = k + WIDE_BYTES;
        const unsigned inverse = p + PAIRS_BYTES, now = inverse + PAIRS_BYTES, end = now + CHUNK * 4;
        float fresh[8][4] = {};  // the gradient of what the chunk wrote [16 dv, 64 tokens]
        {
            unsigned* to = reinterpret_cast<unsigned*>(of.ends + (item * DIM + value + lane.group) * DIM + lane.pair);
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                unsigned a[4];
                as_factor(a, state[2 * t], state[2 * t + 1]);
                to[8 * t] = a[0];
                to[8 * t + 8 * DIM / 2] = a[1];
                to[8 * t + 4] = a[2];
                to[8 * t + 8 * DIM / 2 + 4] = a[3];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    unsigned b[4];
                    load_matrices(b, wide_at(k, 16 * n + lane.row_y, 2 * t + lane.part_y));
                    multiply_two(fresh[2 * n], fresh[2 * n + 1], a, b);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const float left = __uint_as_float(read_shared(end + (8 * t + lane.pair) * 4));
            const float right = __uint_as_float(read_shared(end + (8 * t + lane.pair + 1) * 4));
            fresh[t][0] *= left; fresh[t][1] *= right; fresh[t][2] *= left; fresh[t][3] *= right;
        }
        const float decay = __uint_as_float(read_shared(now + (CHUNK - 1) * 4));
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) state[t][e] *= decay;
#pragma unroll
        for (int t = 0; t < 4; ++t) {  // tokens whose outputs read it
            unsigned a[4];
            load_transposed(a, wide_at(d_o, 16 * t + lane.row_y, value / 8 + lane.part_y));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (n > t) continue;
                unsigned b[4];
                load_transposed(b, pairs_at(p, 16 * t + lane.row_x, 2 * n + lane.part_x));
                multiply_two(fresh[2 * n], fresh[2 * n + 1], a, b);
            }
            const float2 left = {__uint_as_float(read_shared(now + (16 * t + lane.pair) * 4)) * SCALE,
                                 __uint_as_float(read_shared(now + (16 * t + lane.pair + 1) * 4)) * SCALE};
            const float2 right = {__uint_as_float(read_shared(now + (16 * t + 8 + lane.pair) * 4)) * SCALE,
                                  __uint_as_float(read_shared(now + (16 * t + 8 + lane.pair + 1) * 4)) * SCALE};
            a[0] = pack(low(a[0]) * left.x, high(a[0]) * left.y);
            a[1] = pack(low(a[1]) * left.x, high(a[1]) * left.y);
            a[2] = pack(low(a[2]) * right.x, high(a[2]) * right.y);
            a[3] = pack(low(a[3]) * right.x, high(a[3]) * right.y);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                unsigned b[4];
                load_transposed(b, wide_at(q, 16 * t + lane.row_x, 2 * n + lane.part_x));
                multiply_two(state[2 * n], state[2 * n + 1], a, b);
            }
        }
        float through[8][4] = {};  // R^T
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            unsigned a[4];
            as_factor(a, fresh[2 * t], fresh[2 * t + 1]);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (n > t) continue;
                unsigned b[4];
                load_transposed(b, pairs_at(inverse, 16 * t + lane.row_x, 2 * n + lane.part_x));
                multiply_two(through[2 * n], through[2 * n + 1], a, b);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] ^= 0x80008000u;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                unsigned b[4];
                load_transposed(b, wide_at(w, 16 * t + lane.row_x, 2 * n + lane.part_x));
                multiply_two(state[2 * n], state[2 * n + 1], a, b);
            }
        }
        write_tokens(of.solved + item * CHUNK * DIM + value, DIM, CHUNK, lane, through);
        chunk = next;
        __syncthreads();
    }
    wait_copies<0>();
    if (!of.d_initial) return;
#pragma unroll
    for (int t = 0; t < 16; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            of.d_initial[whole + (8 * t + lane.pair + (e & 1)) * DIM + value + lane.group + (e >> 1) * 8] = state[t][e];
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

REVERSE(2)
REVERSE(4)
REVERSE(8)

// Sums over a quad of lanes, which have one row.
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// What the rows of a warp's sums [16, 32] and of a tile have in common: rows row + group, + 8.
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

// Partial sums of a chunk's rows, one for each quarter of the columns.
struct Parts {
    float across[4][CHUNK], down[4][CHUNK];      // of the tables of pairs, by rows and by columns
    float by_query[4][CHUNK], by_read[4][CHUNK], by_end[4][CHUNK], by_key[4][CHUNK], by_value[CHUNK];
    float whole[16];
};

// 16 warps: four times 16 rows, and a quarter of the columns.
extern "C" __global__ void __launch_bounds__(512, 1) delta_gradients(
    const bf16* mixed, const bf16* d_o, const bf16* states, const bf16* news, const bf16* ends, const bf16* solved,
    const Gates* gates, const Chunk* chunks, bf16* d_q, bf16* d_k, bf16* d_v, float* d_g, float* d_beta, long long heads,
    long long key_heads, long long channels
) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Gates own;
    __shared__ Parts parts;
    const unsigned q = (shared_address(memory) + 127) / 128 * 128, k = q + WIDE_BYTES, out = k + WIDE_BYTES, news_tile = out + WIDE_BYTES,
                   r = news_tile + WIDE_BYTES, state = r + WIDE_BYTES, end = state + STATE_BYTES, by_scores = end + STATE_BYTES,
                   by_system = by_scores + PAIRS_BYTES, by_keys = by_system + PAIRS_BYTES;
    const int index = blockIdx.x / heads, head = blockIdx.x % heads, key_head = head / (heads / key_heads);
    const Chunk chunk = chunks[index];
    const long long item = blockIdx.x;
    const bf16* rows = mixed + chunk.first * channels;
    copy_rows(q, rows + key_head * DIM, channels, chunk.count);
    copy_rows(k, rows + (key_heads + key_head) * DIM, channels, chunk.count);
    copy_rows(out, d_o + (chunk.first * heads + head) * DIM, heads * DIM, chunk.count);
    copy_rows(news_tile, news + item * CHUNK * DIM, DIM, CHUNK);
    copy_rows(r, solved + item * CHUNK * DIM, DIM, CHUNK);
    copy_plain(shared_address(&own), gates + item, sizeof(Gates));
    commit_copies();
    copy_rows(state, states + item * DIM * DIM, DIM, CHUNK);
    copy_rows(state + WIDE_BYTES, states + item * DIM * DIM + CHUNK * DIM, DIM, CHUNK);
    commit_copies();
    copy_rows(end, ends + item * DIM * DIM, DIM, CHUNK);
    copy_rows(end + WIDE_BYTES, ends + item * DIM * DIM + CHUNK * DIM, DIM, CHUNK);
    commit_copies();
    wait_copies<2>();
    __syncthreads();

    const Lane lane;
    const int warp = threadIdx.x / 32, quarter = warp / 4, row = warp % 4 * 16, column = quarter * 32;
    const long long first = (static_cast<long long>(chunk.first) * heads + head) * DIM, stride = heads * DIM;
    {  // d_v, and what beta has of values
        for (int i = threadIdx.x; i < CHUNK * 16; i += blockDim.x) {
            const int token = i / 16, part = i % 16;
            const uint4 of_r = read_shared_16(wide_at(r, token, part));
            const unsigned from[4] = {of_r.x, of_r.y, of_r.z, of_r.w};
            unsigned to[4];
            float dot = 0.0f;
            if (token < chunk.count) {
                const uint4 values = *reinterpret_cast<const uint4*>(rows + token * channels + (2 * key_heads + head) * DIM + part * 8);
                const unsigned v[4] = {values.x, values.y, values.z, values.w};
                const float beta = own.beta[token];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    dot += low(from[e]) * low(v[e]) + high(from[e]) * high(v[e]);
                    to[e] = pack(low(from[e]) * beta, high(from[e]) * beta);
                }
                *reinterpret_cast<uint4*>(d_v + first + token * stride + part * 8) = make_uint4(to[0], to[1], to[2], to[3]);
            }
            for (int step = 8; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
            if (part == 0) parts.by_value[token] = dot;
        }
    }
    {  // tables of pairs: columns 16 quarter .. of the warp's rows
        float scores[2][4] = {}, dots[2][4] = {}, d_scores[2][4] = {}, d_system[2][4] = {};
        if (quarter * 16 <= row) {
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                unsigned a[4], columns[4];
                load_matrices(columns, wide_at(k, 16 * quarter + lane.row_y, 2 * t + lane.part_y));
                load_matrices(a, wide_at(q, row + lane.row_x, 2 * t + lane.part_x));
                multiply_two(scores[0], scores[1], a, columns);
                load_matrices(a, wide_at(k, row + lane.row_x, 2 * t + lane.part_x));
                multiply_two(dots[0], dots[1], a, columns);
                load_matrices(columns, wide_at(news_tile, 16 * quarter + lane.row_y, 2 * t + lane.part_y));
                load_matrices(a, wide_at(out, row + lane.row_x, 2 * t + lane.part_x));
                multiply_two(d_scores[0], d_scores[1], a, columns);
                load_matrices(a, wide_at(r, row + lane.row_x, 2 * t + lane.part_x));
                multiply_two(d_system[0], d_system[1], a, columns);
            }
        }
        float across[2] = {}, down[2][2] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row + lane.group + 8 * half, j = 16 * quarter + 8 * n + lane.pair;
                float first_values[2], second[2], third[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int at = 2 * half + e;
                    const float decay = i >= j + e ? expf(static_cast<float>(own.sum[i] - own.sum[j + e])) : 0.0f;
                    first_values[e] = d_scores[n][at] * decay * SCALE;
                    second[e] = i > j + e ? -d_system[n][at] * decay : 0.0f;
                    third[e] = second[e] * own.beta[i];
                    const float through = first_values[e] * scores[n][at] + third[e] * dots[n][at];
                    across[half] += through;
                    down[n][e] += through;
                }
                const unsigned to = (2 * quarter + n) ;
                write_shared(pairs_at(by_scores, i, to) + lane.pair * 2, pack(first_values[0], first_values[1]));
                write_shared(pairs_at(by_system, i, to) + lane.pair * 2, pack(second[0], second[1]));
                write_shared(pairs_at(by_keys, i, to) + lane.pair * 2, pack(third[0], third[1]));
            }
        keep(parts.across, quarter, row, lane, {quad_sum(across[0]), quad_sum(across[1])});
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                for (int step = 4; step < 32; step *= 2) down[n][e] += __shfl_xor_sync(0xffffffffu, down[n][e], step);
                if (lane.group == 0) parts.down[warp % 4][16 * quarter + 8 * n + lane.pair + e] = down[n][e];
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
            load_transposed(b, wide_at(state, 16 * t + lane.row_x, column / 8 + 2 * n + lane.part_x));
            multiply_two(by_query[2 * n], by_query[2 * n + 1], a, b);
            multiply_two(by_read[2 * n], by_read[2 * n + 1], c, b);
        }
    }
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        unsigned a[4];
        load_matrices(a, wide_at(news_tile, row + lane.row_x, 2 * t + lane.part_x));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            unsigned b[4];
            load_transposed(b, wide_at(end, 16 * t + lane.row_x, column / 8 + 2 * n + lane.part_x));
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
    {  // the whole chunk's decay
        float dot = 0.0f;
        for (int i = threadIdx.x; i < STATE_BYTES / 16; i += blockDim.x) {
            const uint4 x = read_shared_16(state + i * 16), y = read_shared_16(end + i * 16);
            dot += low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y);
            dot += low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
        }
        for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
        if (threadIdx.x % 32 == 0) parts.whole[warp] = dot;
    }
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
    write_rows(d_q + first + column, stride, chunk.count, row, lane, by_query);
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
        for (int e = 0; e < 4; ++e) by_end[n][e] += by_read[n][e] * own.beta[e < 2 ? upper : lower];
    write_rows(d_k + first + column, stride, chunk.count, row, lane, by_end);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // Sums of decays reach every later token, so that a token's decay has the sum over all from it on: lane l has tokens 2 l, 2 l + 1.
    const auto sum = [](const float (*of)[CHUNK], int i) { return of[0][i] + of[1][i] + of[2][i] + of[3][i]; };
    float values[2], to_end = 0.0f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = 2 * threadIdx.x + e;
        const float by_end_of_row = sum(parts.by_end, i);
        to_end += by_end_of_row;
        values[e] = sum(parts.across, i) - sum(parts.down, i) + sum(parts.by_query, i) + own.beta[i] * sum(parts.by_read, i) - by_end_of_row;
        if (i < chunk.count) d_beta[(chunk.first + i) * heads + head] = sum(parts.by_key, i) + parts.by_value[i];
    }
    for (int step = 16; step > 0; step /= 2) to_end += __shfl_xor_sync(0xffffffffu, to_end, step);
    if (threadIdx.x == 31) {
        float whole = 0.0f;
        for (int i = 0; i < 16; ++i) whole += parts.whole[i];
        values[1] += to_end + whole * own.now[CHUNK - 1];
    }
    float later = values[0] + values[1];
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(0xffffffffu, later, step);
        if (threadIdx.x + step < 32) later += other;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = 2 * threadIdx.x + e;
        if (i < chunk.count) d_g[(chunk.first + i) * heads + head] = e == 0 ? later : later - values[0];
    }
}
