// Training kernels around the gated delta rule, for heads of 128 channels. The lanes of a team have CHANNELS consecutive channels each.
//
// delta_mix: causal convolution over four tokens with SiLU; queries and keys are then normalized to length 1. A team processes the tokens of a chunk
// with the last rows in registers, and loads BATCH rows at once. delta_mix_backward: its gradients; that of the weight as one sum per chunk.
// delta_norm: rms_norm(x) weight silu(z) for every head, and its backward.
#include "delta.cuh"

constexpr int WIDTH = 4;
constexpr int CHANNELS = 4;
constexpr int MIX_THREADS = 128;
constexpr int NORM_THREADS = 256;
constexpr int TEAM = DIM / CHANNELS, BATCH = 8, NORM_ROWS = 2;
constexpr float LENGTH_EPS = 1e-6f;

struct Wide {
    float at[CHANNELS];
};
using Raw = Pack<unsigned, CHANNELS / 2>;

__device__ __forceinline__ Wide widen(const Raw& raw) {
    Wide wide;
#pragma unroll
    for (int c = 0; c < CHANNELS; c += 2) wide.at[c] = low(raw.at[c / 2]), wide.at[c + 1] = high(raw.at[c / 2]);
    return wide;
}
__device__ __forceinline__ Raw load_raw(const bf16* from, bool is_there = true) {
    return is_there ? load<unsigned, CHANNELS / 2>(reinterpret_cast<const unsigned*>(from)) : Raw{};
}
__device__ __forceinline__ void store_wide(bf16* to, const Wide& x) {
    Raw raw;
#pragma unroll
    for (int c = 0; c < CHANNELS; c += 2) raw.at[c / 2] = pack(x.at[c], x.at[c + 1]);
    store(reinterpret_cast<unsigned*>(to), raw);
}
__device__ __forceinline__ float dot(const Wide& a, const Wide& b) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) sum += a.at[c] * b.at[c];
    return sum;
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The sum over a team.
__device__ __forceinline__ float team_sum(float value) {
    const unsigned mask = TEAM == 32 ? 0xffffffffu : ((1u << TEAM % 32) - 1) << (threadIdx.x % 32 / TEAM * TEAM);
#pragma unroll
    for (int step = TEAM / 2; step > 0; step /= 2) value += __shfl_xor_sync(mask, value, step);
    return value;
}

struct Mix {
    const bf16 *x, *weight, *tails;  // [T, C], [C, 4], [N, 3, C] or null
    const Chunk* chunks;
    int channels, unit_groups, items;  // groups of channels that are queries or keys; groups in all chunks
};

// A team's chunk and channels.
struct Item {
    Chunk chunk;
    int index, group, channel;
    long long first;  // element of the chunk's channels
    __device__ __forceinline__ Item(const Mix& of, int item) {
        const int groups = of.channels / DIM;
        index = item / groups, group = item % groups, channel = group * DIM + threadIdx.x % TEAM * CHANNELS;
        chunk = of.chunks[index];
        first = static_cast<long long>(chunk.first) * of.channels + channel;
    }
};

// The row that is `back` rows before the chunk; before the sequence's start it comes from the tails.
__device__ __forceinline__ Raw earlier(const Mix& of, const Item& item, int back) {
    const int position = item.chunk.position - back;
    if (position >= 0) return load_raw(of.x + item.first - static_cast<long long>(back) * of.channels);
    if (!of.tails) return Raw{};
    return load_raw(of.tails + (static_cast<long long>(item.chunk.sequence) * (WIDTH - 1) + WIDTH - 1 + position) * of.channels + item.channel);
}

// Loads the convolution's taps; the last one is the token's own.
__device__ __forceinline__ void load_taps(Wide (&taps)[WIDTH], const bf16* weight, int channel) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const auto own = load<bf16, WIDTH>(weight + (channel + c) * WIDTH);
#pragma unroll
        for (int tap = 0; tap < WIDTH; ++tap) taps[tap].at[c] = widen(own.at[tap]);
    }
}

// Converts the last rows; row i is at index i % WIDTH, and `newest` is the last row's index.
__device__ __forceinline__ void widen_rows(Wide (&wide)[WIDTH], const Raw (&rows)[WIDTH], int newest) {
#pragma unroll
    for (int tap = 0; tap < WIDTH; ++tap) wide[tap] = widen(rows[(newest + 1 + tap) % WIDTH]);
}

__device__ __forceinline__ float convolve(const Wide (&rows)[WIDTH], const Wide (&taps)[WIDTH], int channel) {
    float sum = 0.0f;
#pragma unroll
    for (int tap = WIDTH - 1; tap >= 0; --tap) sum += rows[tap].at[channel] * taps[tap].at[channel];
    return sum;
}

extern "C" __global__ void __launch_bounds__(MIX_THREADS, 6) delta_mix(
    const bf16* x, const bf16* weight, const bf16* tails, const Chunk* chunks, bf16* y, long long channels, long long unit_groups,
    long long items
) {
    const Mix of = {x, weight, tails, chunks, static_cast<int>(channels), static_cast<int>(unit_groups), static_cast<int>(items)};
    const int index = (blockIdx.x * MIX_THREADS + threadIdx.x) / TEAM;
    if (index >= of.items) return;
    const Item item(of, index);
    const int end = item.chunk.count;
    Wide taps[WIDTH];
    Raw rows[WIDTH];
#pragma unroll
    for (int back = 1; back < WIDTH; ++back) rows[WIDTH - back] = earlier(of, item, back);
    load_taps(taps, weight, item.channel);
    for (int base = 0; base < end; base += BATCH) {
        Raw batch[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) batch[i] = load_raw(x + item.first + (base + i) * channels, base + i < end);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            rows[i % WIDTH] = batch[i];
            Wide window[WIDTH], out;
            widen_rows(window, rows, i);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                out.at[c] = convolve(window, taps, c);
                out.at[c] *= sigmoid(out.at[c]);
            }
            if (item.group < of.unit_groups) {
                const float factor = rsqrtf(team_sum(dot(out, out)) + LENGTH_EPS);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) out.at[c] *= factor;
            }
            if (base + i < end) store_wide(y + item.first + (base + i) * channels, out);
        }
    }
}

// The gradient before SiLU, given the gradient after it; queries and keys are normalized to length 1.
__device__ __forceinline__ void slope_of(Wide& d, const Wide& before, bool is_unit) {
    Wide gate, y;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        gate.at[c] = sigmoid(before.at[c]);
        y.at[c] = before.at[c] * gate.at[c];
    }
    if (is_unit) {
        const float factor = rsqrtf(team_sum(dot(y, y)) + LENGTH_EPS);
        const float along = team_sum(dot(y, d)) * factor * factor;
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) d.at[c] = (d.at[c] - along * y.at[c]) * factor;
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) d.at[c] *= gate.at[c] * (1.0f + before.at[c] * (1.0f - gate.at[c]));
}

// d_y has the shape of y; lengths are those of the sequences. Later rows read the chunk's rows, so the three rows after the chunk are computed too.
extern "C" __global__ void __launch_bounds__(MIX_THREADS, 4) delta_mix_backward(
    const bf16* x, const bf16* weight, const bf16* tails, const Chunk* chunks, const int* lengths, const bf16* d_y, bf16* d_x,
    float* d_tails, float* d_weight, long long channels, long long unit_groups, long long items
) {
    const Mix of = {x, weight, tails, chunks, static_cast<int>(channels), static_cast<int>(unit_groups), static_cast<int>(items)};
    const int index = (blockIdx.x * MIX_THREADS + threadIdx.x) / TEAM;
    if (index >= of.items) return;
    const Item item(of, index);
    const int end = item.chunk.count, stop = end + WIDTH - 1;
    const int last = min(stop, lengths[item.chunk.sequence] - item.chunk.position);  // rows after the sequence have no gradient
    const bool is_unit = item.group < of.unit_groups, has_tails = item.chunk.position == 0 && d_tails;
    float* tail = d_tails + static_cast<long long>(item.chunk.sequence) * (WIDTH - 1) * channels + item.channel;
    Wide taps[WIDTH], of_taps[WIDTH] = {}, slopes[WIDTH] = {};  // the slope of row i at i % WIDTH
    Raw rows[WIDTH];
#pragma unroll
    for (int back = 1; back < WIDTH; ++back) rows[WIDTH - back] = earlier(of, item, back);
    load_taps(taps, weight, item.channel);
    for (int base = 0; base < stop; base += BATCH) {
        Raw batch[BATCH], d_batch[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            batch[i] = load_raw(x + item.first + (base + i) * channels, base + i < last);
            d_batch[i] = load_raw(d_y + item.first + (base + i) * channels, base + i < last);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int row = base + i, done = row - (WIDTH - 1);
            rows[i % WIDTH] = batch[i];
            Wide window[WIDTH], before, d = widen(d_batch[i]), to = {};
            widen_rows(window, rows, i);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) before.at[c] = convolve(window, taps, c);
            slope_of(d, before, is_unit);
            slopes[i % WIDTH] = d;
            if (row < end) {
#pragma unroll
                for (int tap = 0; tap < WIDTH; ++tap)
#pragma unroll
                    for (int c = 0; c < CHANNELS; ++c) of_taps[tap].at[c] += d.at[c] * window[tap].at[c];
            }
#pragma unroll
            for (int later = 0; later < WIDTH; ++later)
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) to.at[c] += slopes[(i + 1 + later) % WIDTH].at[c] * taps[WIDTH - 1 - later].at[c];
            if (done >= 0 && done < end) {
                store_wide(d_x + item.first + done * channels, to);
            } else if (done < 0 && has_tails) {  // the sequence's tails have gradients too
                Pack<float, CHANNELS> wide;
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) wide.at[c] = to.at[c];
                store(tail + row * channels, wide);
            }
        }
    }
    float* sums = d_weight + (static_cast<long long>(item.index) * channels + item.channel) * WIDTH;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        Pack<float, WIDTH> own;
#pragma unroll
        for (int tap = 0; tap < WIDTH; ++tap) own.at[tap] = of_taps[tap].at[c];
        store(sums + c * WIDTH, own);
    }
}

// Rows of heads [R, DIM], one per team; NORM_ROWS are loaded at once.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) delta_norm(
    const bf16* x, const bf16* z, const bf16* weight, bf16* y, long long rows, float eps
) {
    const int channel = threadIdx.x % TEAM * CHANNELS;
    const Wide w = widen(load_raw(weight + channel));
    const long long step = static_cast<long long>(gridDim.x) * (NORM_THREADS / TEAM);
    const long long first = (static_cast<long long>(blockIdx.x) * NORM_THREADS + threadIdx.x) / TEAM;
    for (long long row = first; row < rows; row += NORM_ROWS * step) {
        Raw own_rows[NORM_ROWS], gates[NORM_ROWS];
#pragma unroll
        for (int r = 0; r < NORM_ROWS; ++r) {
            const long long at = (row + r * step) * DIM + channel;
            own_rows[r] = load_raw(x + at, row + r * step < rows), gates[r] = load_raw(z + at, row + r * step < rows);
        }
#pragma unroll
        for (int r = 0; r < NORM_ROWS; ++r) {
            const Wide own = widen(own_rows[r]), gate = widen(gates[r]);
            const float factor = rsqrtf(team_sum(dot(own, own)) / DIM + eps);
            Wide out;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) out.at[c] = own.at[c] * factor * w.at[c] * gate.at[c] * sigmoid(gate.at[c]);
            if (row + r * step < rows) store_wide(y + (row + r * step) * DIM + channel, out);
        }
    }
}

// d_weight: one sum per block [blocks, DIM].
extern "C" __global__ void __launch_bounds__(NORM_THREADS) delta_norm_backward(
    const bf16* d_y, const bf16* x, const bf16* z, const bf16* weight, bf16* d_x, bf16* d_z, float* d_weight, long long rows, float eps
) {
    constexpr int TEAMS = NORM_THREADS / TEAM;
    __shared__ float sums[TEAMS][DIM];
    const int channel = threadIdx.x % TEAM * CHANNELS, team = threadIdx.x / TEAM;
    const Wide w = widen(load_raw(weight + channel));
    Wide of_w = {};
    const long long step = static_cast<long long>(gridDim.x) * TEAMS;
    for (long long row = static_cast<long long>(blockIdx.x) * TEAMS + team; row < rows; row += NORM_ROWS * step) {
        Raw own_rows[NORM_ROWS], gates[NORM_ROWS], d_rows[NORM_ROWS];
#pragma unroll
        for (int r = 0; r < NORM_ROWS; ++r) {
            const long long at = (row + r * step) * DIM + channel;
            const bool is_there = row + r * step < rows;
            own_rows[r] = load_raw(x + at, is_there), gates[r] = load_raw(z + at, is_there), d_rows[r] = load_raw(d_y + at, is_there);
        }
#pragma unroll
        for (int r = 0; r < NORM_ROWS; ++r) {
            const Wide own = widen(own_rows[r]), gate = widen(gates[r]), d = widen(d_rows[r]);
            const float factor = rsqrtf(team_sum(dot(own, own)) / DIM + eps);
            Wide normed, d_normed, d_gate, out;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                const float open = sigmoid(gate.at[c]), silu = gate.at[c] * open;
                normed.at[c] = own.at[c] * factor;
                d_gate.at[c] = d.at[c] * normed.at[c] * w.at[c] * open * (1.0f + gate.at[c] * (1.0f - open));
                of_w.at[c] += d.at[c] * silu * normed.at[c];
                d_normed.at[c] = d.at[c] * silu * w.at[c];
            }
            const float along = team_sum(dot(d_normed, normed)) / DIM;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) out.at[c] = (d_normed.at[c] - along * normed.at[c]) * factor;
            if (row + r * step >= rows) continue;
            store_wide(d_x + (row + r * step) * DIM + channel, out);
            store_wide(d_z + (row + r * step) * DIM + channel, d_gate);
        }
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) sums[team][channel + c] = of_w.at[c];
    __syncthreads();
    if (threadIdx.x < DIM) {
        float sum = 0.0f;
        for (int i = 0; i < TEAMS; ++i) sum += sums[i][threadIdx.x];
        d_weight[static_cast<long long>(blockIdx.x) * DIM + threadIdx.x] = sum;
    }
}
