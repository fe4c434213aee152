// Around the gated delta rule, 128 channels of a chunk of tokens at a time; four of a row a lane, eight rows a warp.
//
// delta_mix: causal convolution over four tokens with SiLU; queries and keys then have unit length.
// delta_mix_backward: its gradients, of the weight as one sum a chunk.
// delta_norm: rms_norm(x) weight silu(z) of every head, and its backward.
#include "delta.cuh"

constexpr int WIDTH = 4, ROWS = 8, MIX_WARPS = CHUNK / ROWS;
constexpr float LENGTH_EPS = 1e-6f;

struct Four {
    float at[4];
};

__device__ __forceinline__ Four widen(uint2 both) { return {low(both.x), high(both.x), low(both.y), high(both.y)}; }
__device__ __forceinline__ Four widen_four(const bf16* from) { return widen(*reinterpret_cast<const uint2*>(from)); }
__device__ __forceinline__ void store_four(bf16* to, const Four& x) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(x.at[0], x.at[1]), pack(x.at[2], x.at[3]));
}
__device__ __forceinline__ float dot(const Four& a, const Four& b) {
    return a.at[0] * b.at[0] + a.at[1] * b.at[1] + a.at[2] * b.at[2] + a.at[3] * b.at[3];
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

struct Mix {
    const bf16 *x, *weight, *tails;  // [T, C], [C, 4], [N, 3, C] or null
    const Chunk* chunks;
    int channels, unit_groups;  // groups of channels that are queries or keys
};

// Rows first - 3 to first + COUNT - 3 of the chunk, all on their way at once: before the sequence its tails, behind `end` zeros.
template <int COUNT>
__device__ __forceinline__ void load_rows(uint2 (&to)[COUNT], const Mix& of, const Chunk& chunk, int first, int end, int channel) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int row = first + i - (WIDTH - 1), position = chunk.position + row;
        const bf16* from = of.x + (static_cast<long long>(chunk.first) + row) * of.channels + channel;
        if (position < 0)
            from = of.tails + (static_cast<long long>(chunk.sequence) * (WIDTH - 1) + WIDTH - 1 + position) * of.channels + channel;
        to[i] = row < end && (position >= 0 || of.tails) ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
    }
}

// Of four channels, tap by tap: the last one is the token's own.
__device__ __forceinline__ void load_taps(Four (&taps)[WIDTH], const bf16* weight, int channel) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const Four own = widen_four(weight + (channel + c) * WIDTH);
#pragma unroll
        for (int tap = 0; tap < WIDTH; ++tap) taps[tap].at[c] = own.at[tap];
    }
}

// rows[0] is the oldest.
__device__ __forceinline__ Four convolve(const uint2* rows, const Four (&taps)[WIDTH]) {
    Four sum = {};
#pragma unroll
    for (int tap = WIDTH - 1; tap >= 0; --tap) {
        const Four row = widen(rows[tap]);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum.at[c] += row.at[c] * taps[tap].at[c];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(256) delta_mix(
    const bf16* x, const bf16* weight, const bf16* tails, const Chunk* chunks, bf16* y, long long channels, long long unit_groups
) {
    const Mix of = {x, weight, tails, chunks, static_cast<int>(channels), static_cast<int>(unit_groups)};
    const int groups = of.channels / DIM, group = blockIdx.x % groups, channel = group * DIM + threadIdx.x % 32 * 4;
    const Chunk chunk = chunks[blockIdx.x / groups];
    const int first = threadIdx.x / 32 * ROWS;
    if (first >= chunk.count) return;
    Four taps[WIDTH];
    uint2 window[ROWS + WIDTH - 1];
    load_rows(window, of, chunk, first, chunk.count, channel);
    load_taps(taps, weight, channel);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = first + r;
        if (row >= chunk.count) break;
        Four out = convolve(window + r, taps);
#pragma unroll
        for (int c = 0; c < 4; ++c) out.at[c] *= sigmoid(out.at[c]);
        if (group < of.unit_groups) {
            const float factor = rsqrtf(warp_sum(dot(out, out)) + LENGTH_EPS);
#pragma unroll
            for (int c = 0; c < 4; ++c) out.at[c] *= factor;
        }
        store_four(y + (static_cast<long long>(chunk.first) + row) * of.channels + channel, out);
    }
}

// d_q and d_k [T, H, DIM]: `shared` value heads have one head of queries and keys; d_v [T, H, DIM]. lengths: of the sequences.
extern "C" __global__ void __launch_bounds__(256, 2) delta_mix_backward(
    const bf16* x, const bf16* weight, const bf16* tails, const Chunk* chunks, const int* lengths, const bf16* d_q, const bf16* d_k,
    const bf16* d_v, bf16* d_x, float* d_tails, float* d_weight, long long channels, long long unit_groups, long long shared
) {
    __shared__ float sums[MIX_WARPS][WIDTH][DIM];
    const Mix of = {x, weight, tails, chunks, static_cast<int>(channels), static_cast<int>(unit_groups)};
    const int groups = of.channels / DIM, group = blockIdx.x % groups, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channel = group * DIM + lane * 4, key_heads = of.unit_groups / 2, heads = groups - of.unit_groups;
    const Chunk chunk = chunks[blockIdx.x / groups];
    const int first = warp * ROWS, left = lengths[chunk.sequence] - chunk.position;  // rows of the sequence from the chunk on
    const bool is_unit = group < of.unit_groups;
    const bf16* from = group < key_heads ? d_q : is_unit ? d_k : d_v;
    const int head = is_unit ? group % key_heads * static_cast<int>(shared) : group - of.unit_groups;
    Four of_taps[WIDTH] = {};
    const int begin = warp == 0 && chunk.position == 0 ? -(WIDTH - 1) : 0;  // tails of the sequence have gradients, too
    if (first < chunk.count) {
        constexpr int ALL = ROWS + WIDTH - 1;  // later rows read the own ones
        uint2 window[ALL + WIDTH - 1];
        Four slopes[ALL] = {}, taps[WIDTH];
        load_rows(window, of, chunk, first, left, channel);
        const bf16* d_first = from + ((static_cast<long long>(chunk.first) + first) * heads + head) * DIM + lane * 4;
        for (int s = 0; s < (is_unit ? static_cast<int>(shared) : 1); ++s) {
            uint2 parts[ALL];
#pragma unroll
            for (int r = 0; r < ALL; ++r)
                parts[r] = first + r < left
                    ? *reinterpret_cast<const uint2*>(d_first + (static_cast<long long>(r) * heads + s) * DIM) : make_uint2(0, 0);
#pragma unroll
            for (int r = 0; r < ALL; ++r) {
                const Four part = widen(parts[r]);
#pragma unroll
                for (int c = 0; c < 4; ++c) slopes[r].at[c] += part.at[c];
            }
        }
        load_taps(taps, weight, channel);
        const int end = min(first + ROWS, chunk.count);  // behind the last own row
#pragma unroll
        for (int r = 0; r < ALL; ++r) {  // rows behind the sequence have no gradient
            const Four pre = convolve(window + r, taps);
            Four& d = slopes[r];
            Four gate, y;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                gate.at[c] = sigmoid(pre.at[c]);
                y.at[c] = pre.at[c] * gate.at[c];
            }
            if (is_unit) {
                const float factor = rsqrtf(warp_sum(dot(y, y)) + LENGTH_EPS);
                const float along = warp_sum(dot(y, d)) * factor * factor;
#pragma unroll
                for (int c = 0; c < 4; ++c) d.at[c] = (d.at[c] - along * y.at[c]) * factor;
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) d.at[c] *= gate.at[c] * (1.0f + pre.at[c] * (1.0f - gate.at[c]));
            if (r >= ROWS) continue;
#pragma unroll
            for (int tap = 0; tap < WIDTH; ++tap) {
                const Four row = widen(window[r + tap]);
#pragma unroll
                for (int c = 0; c < 4; ++c) of_taps[tap].at[c] += d.at[c] * row.at[c];
            }
        }
#pragma unroll
        for (int r = -(WIDTH - 1); r < ROWS; ++r) {
            const int done = first + r;
            if (r < begin || done >= end) continue;
            Four d = {};
#pragma unroll
            for (int later = 0; later < WIDTH; ++later) {
                if (r + later < 0) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c) d.at[c] += slopes[r + later].at[c] * taps[WIDTH - 1 - later].at[c];
            }
            if (r >= 0) {
                store_four(d_x + (static_cast<long long>(chunk.first) + done) * of.channels + channel, d);
            } else if (d_tails) {
                float* to = d_tails + (static_cast<long long>(chunk.sequence) * (WIDTH - 1) + WIDTH - 1 + done) * of.channels + channel;
                *reinterpret_cast<float4*>(to) = make_float4(d.at[0], d.at[1], d.at[2], d.at[3]);
            }
        }
    }
#pragma unroll
    for (int tap = 0; tap < WIDTH; ++tap)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[warp][tap][lane * 4 + c] = of_taps[tap].at[c];
    __syncthreads();
    for (int i = threadIdx.x; i < WIDTH * DIM; i += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < MIX_WARPS; ++w) sum += sums[w][i % WIDTH][i / WIDTH];
        d_weight[static_cast<long long>(blockIdx.x / groups) * of.channels * WIDTH + group * DIM * WIDTH + i] = sum;
    }
}

// A row of a head a warp; rows [R, DIM].
extern "C" __global__ void __launch_bounds__(256) delta_norm(
    const bf16* x, const bf16* z, const bf16* weight, bf16* y, long long rows, float eps
) {
    const int lane = threadIdx.x % 32;
    const Four w = widen_four(weight + lane * 4);
    const long long step = static_cast<long long>(gridDim.x) * 8;
    for (long long row = blockIdx.x * 8ll + threadIdx.x / 32; row < rows; row += step) {
        const long long at = row * DIM + lane * 4;
        const Four own = widen_four(x + at), gate = widen_four(z + at);
        const float factor = rsqrtf(warp_sum(dot(own, own)) / DIM + eps);
        Four out;
#pragma unroll
        for (int c = 0; c < 4; ++c) out.at[c] = own.at[c] * factor * w.at[c] * gate.at[c] * sigmoid(gate.at[c]);
        store_four(y + at, out);
    }
}

// d_weight: a block's sum [blocks, DIM].
extern "C" __global__ void __launch_bounds__(256) delta_norm_backward(
    const bf16* d_y, const bf16* x, const bf16* z, const bf16* weight, bf16* d_x, bf16* d_z, float* d_weight, long long rows, float eps
) {
    __shared__ float sums[8][DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Four w = widen_four(weight + lane * 4);
    Four of_w = {};
    const long long step = static_cast<long long>(gridDim.x) * 8;
    for (long long row = blockIdx.x * 8ll + warp; row < rows; row += step) {
        const long long at = row * DIM + lane * 4;
        const Four own = widen_four(x + at), gate = widen_four(z + at), d = widen_four(d_y + at);
        const float factor = rsqrtf(warp_sum(dot(own, own)) / DIM + eps);
        Four normed, d_normed, d_gate;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float open = sigmoid(gate.at[c]), silu = gate.at[c] * open;
            normed.at[c] = own.at[c] * factor;
            d_gate.at[c] = d.at[c] * normed.at[c] * w.at[c] * open * (1.0f + gate.at[c] * (1.0f - open));
            of_w.at[c] += d.at[c] * silu * normed.at[c];
            d_normed.at[c] = d.at[c] * silu * w.at[c];
        }
        const float along = warp_sum(dot(d_normed, normed)) / DIM;
        Four out;
#pragma unroll
        for (int c = 0; c < 4; ++c) out.at[c] = (d_normed.at[c] - along * normed.at[c]) * factor;
        store_four(d_x + at, out);
        store_four(d_z + at, d_gate);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[warp][lane * 4 + c] = of_w.at[c];
    __syncthreads();
    if (threadIdx.x < DIM) {
        float sum = 0.0f;
        for (int i = 0; i < 8; ++i) sum += sums[i][threadIdx.x];
        d_weight[static_cast<long long>(blockIdx.x) * DIM + threadIdx.x] = sum;
    }
}
