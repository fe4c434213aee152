// The gated delta net of a decode step in which a sequence has several rows: its newest token, then drafts, which may turn out not to
// follow. A state cannot forget a token. So it takes in the drafts of the step before that were drawn, then the newest token, and is written;
// it goes on through the drafts in registers alone, for their outputs. Of a draft its rows before the convolution and its gates are stored, by
// position: they are all that taking it in reads. A state is read once and written once, with the bits of steps of one token.
//
// A block has one head of one sequence. The state is on its way to shared memory while the work before this ends. A page has so many slots that no
// row is written which another head's block still reads: positions from the oldest row that the first token's convolution reads to the newest
// draft.
#include "delta_step.cuh"

// Tokens of one head: `taken` of the step before, then `count` rows of this step.
struct Drafted {
    int head, page, first, count, taken, start;  // the first row and its position
};

__device__ __forceinline__ void round_as(float4 (&)[QUADS], const float*) {}
__device__ __forceinline__ void round_as(float4 (&state)[QUADS], const bf16*) {
#pragma unroll
    for (int r = 0; r < QUADS; ++r) {
        float* row = &state[r].x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bf16 rounded;
            narrow(row[i], rounded);
            row[i] = widen(rounded);
        }
    }
}

template <typename T, typename S, int DIM>
__device__ __forceinline__ void delta_drafts(
    const Layer<T, S, DIM>& layer,    // whose positions are those of the first rows: [B]
    const int* __restrict__ bounds,   // [B + 1], of the sequences' rows
    const int* __restrict__ stored,   // [B], drafts of the step before that are taken in
    T* __restrict__ gates             // [pages, slots, 2, H]: a and b of the row of position p in slot p % slots
) {
    extern __shared__ float4 dynamic[];
    Quad<S>* ahead = reinterpret_cast<Quad<S>*>(dynamic);  // [QUADS, threads]: each thread's own part of the state
    __shared__ Shared<CHUNK> at;
    const Shape<DIM>& shape = layer.shape;
    const int heads = shape.value_heads, run = blockIdx.x / heads, begin = bounds[run];
    const Drafted part = {static_cast<int>(blockIdx.x % heads), layer.pages[run], begin, bounds[run + 1] - begin, stored[run],
                          layer.positions[run]};
    const int total = part.taken + part.count, base = part.start - part.taken;  // tokens, and the position of the first
    if (total == 0) return;
    const Part own = {part.head, part.page, part.first, part.count, base};
    if (part.page < 0) {
        wait_for_inputs();
        return write_zeros(layer, own);
    }
    if (base > 0) fetch_state(layer, own, ahead);
    commit_copies();
    wait_for_inputs();
    prepare(at, layer);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, threads = shape.threads(), warps = threads / 32;
    const int dk = shape.key_dim(), dv = shape.value_dim(), head = part.head, width = shape.width();
    const long long channels = shape.channels();
    const bool writes_keys = head % (heads / shape.key_heads) == 0;
    T* tail = tail_of(layer, part.page);
    T* of_page = gates + static_cast<long long>(part.page) * layer.slots * 2 * heads;
    const auto slot_of = [&](int token) { return (base + token) % layer.slots; };
    const auto row_of_token = [&](int token, int channel) -> const T& {
        return token >= part.taken ? layer.qkv[(part.first + token - part.taken) * layer.qkv_row + channel]
                                   : tail[slot_of(token) * channels + channel];
    };
    float4 state[QUADS];
    for (int from = 0; from < total; from += CHUNK) {
        const int tokens = min(CHUNK, total - from), drafts = max(part.taken - from, 0);  // the chunk's first row of this step
        __syncthreads();  // readers of what was here before are done
        for (int i = threadIdx.x; i < 2 * dk + dv; i += threads) {
            const int kind = i < dk ? 0 : i < 2 * dk ? 1 : 2, place = i - kind * dk, channel = shape.channel(kind, head) + place;
            const bool writes = kind == 2 || writes_keys;
            T weights[MOST_WIDTH], past[MOST_WIDTH];  // of a token so much earlier
#pragma unroll
            for (int d = 0; d < MOST_WIDTH; ++d) {  // all of them under way at once
                const int earlier = min(d, width - 1);
                weights[d] = layer.conv[channel * width + width - 1 - earlier];
                past[d] = row_of_token(max(from - earlier, -base), channel);
            }
            float w[MOST_WIDTH], x[MOST_WIDTH];
#pragma unroll
            for (int d = 0; d < MOST_WIDTH; ++d) {
                w[d] = d < width ? widen(weights[d]) : 0.0f;
                x[d] = d < width && base + from >= d ? widen(past[d]) : 0.0f;
            }
            float(*to)[MOST_DIM] = kind == 0 ? at.q : kind == 1 ? at.k : at.v;
#pragma unroll 1
            for (int first = 0; first < tokens; first += BATCH) {
                T now[BATCH];
#pragma unroll
                for (int t = 0; t < BATCH; ++t) now[t] = row_of_token(min(from + first + t, total - 1), channel);
#pragma unroll
                for (int t = 0; t < BATCH; ++t) {
                    const int token = from + first + t;
                    if (writes && token >= part.taken && token < total) tail[slot_of(token) * channels + channel] = now[t];
                    x[0] = widen(now[t]);
                    float y = x[0] * w[0];
#pragma unroll
                    for (int d = 1; d < MOST_WIDTH; ++d) y = fmaf(x[d], w[d], y);
#pragma unroll
                    for (int d = MOST_WIDTH - 1; d > 0; --d) x[d] = x[d - 1];
                    to[first + t][place] = y * sigmoid(y);
                }
            }
        }
        for (int t = drafts + warp; t < tokens; t += warps)
            for (int i = lane; i < dv; i += 32)
                at.gate[t][i] = widen(layer.z[(part.first + from + t - part.taken) * layer.z_row + head * dv + i]);
        for (int t = threadIdx.x; t < tokens; t += threads) {
            T* kept = of_page + slot_of(from + t) * 2 * heads + head;
            Scalars<T> scalars = {kept[0], kept[heads], layer.a_log[head], layer.dt_bias[head]};
            if (t >= drafts) {
                scalars = scalars_of(layer, head, part.first + from + t - part.taken);
                kept[0] = scalars.a, kept[heads] = scalars.b;
            }
            set_gates(at, t, scalars);
        }
        __syncthreads();
        set_lengths(at, tokens, dk, warps);
        __syncthreads();
        if (from == 0) {
            wait_copies<0>();  // of the thread's own
#pragma unroll
            for (int r = 0; r < QUADS; ++r) {
                state[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (base > 0 && row_of(r) < dk && first_column() < dv) state[r] = widen(ahead[r * threads + threadIdx.x]);
            }
        }
#pragma unroll 1
        for (int t = 0; t < tokens; ++t) {
            take_in(at, t, state);
            round_as(state, static_cast<const S*>(nullptr));
            if (from + t == min(part.taken, total - 1)) write_state(layer, own, state);
        }
        __syncthreads();
        write_outputs(at, layer, head, part.first + from - part.taken, min(drafts, tokens), tokens);
    }
}

#define DELTA_DRAFTS(NAME, T, S, DIM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_drafts_##NAME(LAYER(T, S), const int* bounds,         \
                                                                                 const int* stored, T* gates) {          \
        delta_drafts<T, S, DIM>(LAYER_OF(T, S, DIM), bounds, stored, gates);                                             \
    }

// Kinds of the projections and of the states.
DELTA_DRAFTS(f32_f32_any, float, float, 0)
DELTA_DRAFTS(f32_bf16_any, float, bf16, 0)
DELTA_DRAFTS(bf16_f32_any, bf16, float, 0)
DELTA_DRAFTS(bf16_bf16_any, bf16, bf16, 0)
DELTA_DRAFTS(bf16_f32_128, bf16, float, 128)
DELTA_DRAFTS(bf16_bf16_128, bf16, bf16, 128)
