// The gated delta net for a decode step with draft tokens. A sequence has several rows: its newest token, then draft tokens, which may be rejected. A
// state cannot be rolled back. So the kernel first updates the state with the accepted draft tokens of the previous step and the newest token, and
// writes it. It then updates the state with this step's draft tokens in registers only, for their outputs. For each draft token the kernel stores the
// row before the convolution and the gates, by position; the next step needs nothing else to process an accepted draft token. Each state is read once
// and written once, and has the same bits as after steps of one token.
//
// A block has one head of one sequence. The state is copied to shared memory while the preceding kernel ends. A page has slots for all positions from
// the oldest row that the first token's convolution reads to the newest draft token. So no block overwrites a row that the block of another head
// still reads.
#include "delta_step.cuh"

// The tokens of one head: `taken` accepted draft tokens of the previous step, then `count` rows of this step.
struct Drafted {
    int head, page, first, count, taken, start;  // `first` is the index of the first row of this step, `start` its position
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
    const Layer<T, S, DIM>& layer,    // its positions are those of the sequences' first rows: [B]
    const int* __restrict__ bounds,   // [B + 1], index of each sequence's first row, and the number of rows
    const int* __restrict__ stored,   // [B], number of accepted draft tokens of the previous step
    T* __restrict__ gates             // [pages, slots, 2, H]: a and b of the row of position p in slot p % slots
) {
    extern __shared__ float4 dynamic[];
    Quad<S>* ahead = reinterpret_cast<Quad<S>*>(dynamic);  // [QUADS, threads]: each thread's own part of the state
    __shared__ Shared<CHUNK> at;
    const Shape<DIM>& shape = layer.shape;
    const int heads = shape.value_heads, run = blockIdx.x / heads, begin = bounds[run];
    const Drafted part = {static_cast<int>(blockIdx.x % heads), layer.pages[run], begin, bounds[run + 1] - begin, stored[run],
                          layer.positions[run]};
    const int total = part.taken + part.count, base = part.start - part.taken;  // number of tokens, and the position of the first token
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
        const int tokens = min(CHUNK, total - from), drafts = max(part.taken - from, 0);  // `drafts`: index of this step's first row in the chunk
        __syncthreads();  // all threads have read the previous chunk
        for (int i = threadIdx.x; i < 2 * dk + dv; i += threads) {
            const int kind = i < dk ? 0 : i < 2 * dk ? 1 : 2, place = i - kind * dk, channel = shape.channel(kind, head) + place;
            const bool writes = kind == 2 || writes_keys;
            T weights[MOST_WIDTH], past[MOST_WIDTH];  // index d: the token d positions earlier
#pragma unroll
            for (int d = 0; d < MOST_WIDTH; ++d) {  // all loads are in flight at once
                const int earlier = min(d, width - 1);
                weights[d] = layer.conv[channel * width + width - 1 - earlier];
                past[d] = row_of_token(max(from - earlier, -base), channel);
            }
            Convolution convolution(weights, past, width, base + from);
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
                    to[first + t][place] = convolution.next(now[t]);
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
            wait_copies<0>();  // each thread reads only what it copied itself
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

// Arguments: name, dtype of the projections, dtype of the states, width of keys and values (0: any).
DELTA_DRAFTS(f32_f32_any, float, float, 0)
DELTA_DRAFTS(f32_bf16_any, float, bf16, 0)
DELTA_DRAFTS(bf16_f32_any, bf16, float, 0)
DELTA_DRAFTS(bf16_bf16_any, bf16, bf16, 0)
DELTA_DRAFTS(bf16_f32_128, bf16, float, 128)
DELTA_DRAFTS(bf16_bf16_128, bf16, bf16, 128)
