// The gated delta net of an engine step, between its projections: causal convolution with SiLU, normalized queries and keys, the gated delta rule
// (arXiv 2412.06464) and the gated norm. A run is some consecutive tokens of one sequence. The sequence has a page with the state of every head, and
// with the rows that the convolution reads again. All sums are in float32.
//
// A block has one head of one run. The state is in registers from the run's first token to its last. Tokens pass through shared memory, some at
// once.
//
// If runs have one token, a block processes one head after the other, and loads everything for the next one to shared memory while it computes,
// because such a step is bound by reading and writing states.
#include "delta_step.cuh"

// What a token needs in addition to its state, in the format of memory.
template <typename T, int DIM>
struct alignas(16) Staged {
    T rows[MOST_WIDTH][3][DIM];        // of the tokens that many positions earlier: queries, keys and values
    T z[DIM];
    T conv[3][DIM][MOST_WIDTH];
};
template <typename T>
struct Staged<T, 0> {};

// A lane's number, in all of the warp.
__device__ __forceinline__ float of_lane(float value, int lane) { return __shfl_sync(~0u, value, lane); }
__device__ __forceinline__ bf16 of_lane(bf16 value, int lane) {
    return {static_cast<unsigned short>(__shfl_sync(~0u, static_cast<int>(value.bits), lane))};
}

// Outputs of a part's tokens; the state, which `take` puts into registers, moves on there and in its page. Of a run of one token the convolution's row, too: of
// others `delta_tails` writes them, as other heads may still read the old ones.
template <int TOKENS, typename T, typename S, int DIM, typename Take>
__device__ __forceinline__ void compute(const Layer<T, S, DIM>& layer, Shared<TOKENS>& at, const Staged<T, DIM>& staged,
                                        const Scalars<T>& scalars, const Part& part, const Take& take) {
    constexpr bool IS_STAGED = TOKENS == 1 && DIM > 0;
    float4 state[QUADS];
    const Shape<DIM>& shape = layer.shape;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = layer.shape.threads() / 32;
    const int dk = shape.key_dim(), dv = shape.value_dim(), head = part.head, width = shape.width(), channels = shape.channels();
    const int shared_by = shape.value_heads / shape.key_heads;
    const T* rows = layer.qkv + part.first * layer.qkv_row;
    T* tail = tail_of(layer, part.page);
    for (int from = 0; from < part.count; from += TOKENS) {
        const int tokens = min(TOKENS, part.count - from);
        __syncthreads();  // earlier contents have been read
        for (int i = threadIdx.x; i < 2 * dk + dv; i += layer.shape.threads()) {
            const int kind = i < dk ? 0 : i < 2 * dk ? 1 : 2, place = i - kind * dk, channel = shape.channel(kind, head) + place;
            T weights[MOST_WIDTH], past[MOST_WIDTH];  // of a token that many positions earlier
            if constexpr (IS_STAGED) {
#pragma unroll
                for (int d = 0; d < MOST_WIDTH; ++d)
                    weights[d] = staged.conv[kind][place][MOST_WIDTH - 1 - d], past[d] = staged.rows[d][kind][place];
            } else {
#pragma unroll
                for (int d = 0; d < MOST_WIDTH; ++d) {  // all loads are in flight at once
                    const int earlier = min(d, width - 1), position = max(part.start + from - earlier, 0);
                    weights[d] = layer.conv[channel * width + width - 1 - earlier];
                    past[d] = from >= earlier ? rows[(from - earlier) * layer.qkv_row + channel]
                                              : tail[position % layer.slots * static_cast<long long>(channels) + channel];
                }
            }
            Convolution convolution(weights, past, width, part.start + from);
            float(*to)[MOST_DIM] = kind == 0 ? at.q : kind == 1 ? at.k : at.v;
            constexpr int AT_ONCE = TOKENS < BATCH ? TOKENS : BATCH;
#pragma unroll 1
            for (int first = 0; first < tokens; first += AT_ONCE) {
                T now[AT_ONCE];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t)
                    now[t] = TOKENS == 1 ? past[0] : rows[min(from + first + t, part.count - 1) * layer.qkv_row + channel];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) to[first + t][place] = convolution.next(now[t]);
            }
            if (TOKENS == 1 && (kind == 2 || head % shared_by == 0))
                tail[part.start % layer.slots * static_cast<long long>(channels) + channel] = past[0];
        }
        for (int t = warp; t < tokens; t += warps)
            for (int i = lane; i < dv; i += 32) {
                if constexpr (IS_STAGED)
                    at.gate[t][i] = widen(staged.z[i]);
                else
                    at.gate[t][i] = widen(layer.z[(part.first + from + t) * layer.z_row + head * dv + i]);
            }
        for (int t = threadIdx.x; t < tokens; t += layer.shape.threads())
            set_gates(at, t, IS_STAGED ? scalars : scalars_of(layer, head, part.first + from + t));
        __syncthreads();
        set_lengths(at, tokens, dk, warps);
        __syncthreads();
        if (from == 0) take(state);
#pragma unroll 1
        for (int t = 0; t < tokens; ++t) take_in(at, t, state);
        if (from + TOKENS >= part.count) write_state(layer, part, state);
        __syncthreads();
        write_outputs(at, layer, head, part.first + from, 0, tokens);
    }
}

// Runs of any number of tokens, one block for each head of each run.
template <typename T, typename S, int DIM>
__device__ __forceinline__ void delta_runs(const Layer<T, S, DIM>& layer, const int* __restrict__ bounds /* [B + 1] */) {
    __shared__ Shared<CHUNK> at;
    wait_for_inputs();
    const int run = blockIdx.x / layer.shape.value_heads, first = bounds[run], count = bounds[run + 1] - first;
    if (count == 0) return;
    const Part part = {static_cast<int>(blockIdx.x % layer.shape.value_heads), layer.pages[run], first, count, layer.positions[first]};
    if (part.page < 0) return write_zeros(layer, part);
    prepare(at, layer);
    compute<CHUNK>(layer, at, Staged<T, DIM>{}, Scalars<T>{}, part, [&](float4(&state)[QUADS]) {
        const S* own = state_of(layer, part);
#pragma unroll
        for (int r = 0; r < QUADS; ++r) {
            state[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (part.start > 0 && row_of(r) < layer.shape.key_dim() && first_column() < layer.shape.value_dim())
                state[r] = load_quad(own + row_of(r) * layer.shape.value_dim());
        }
    });
}

// Runs of one token each. Pages, positions and states are older than the preceding kernel, so the first state is loaded while that kernel ends.
template <typename T, typename S, int DIM>
__device__ __forceinline__ void delta_step(const Layer<T, S, DIM>& given, int runs) {
    extern __shared__ float4 dynamic[];
    Quad<S>* ahead = reinterpret_cast<Quad<S>*>(dynamic);  // [QUADS, threads]: each thread's own part of the next state
    __shared__ Shared<1> at;
    __shared__ Layer<T, S, DIM> layer;  // in shared memory, because the state uses up the registers
    if (threadIdx.x == 0) layer = given;
    __syncthreads();
    __shared__ Staged<T, DIM> stages[2];  // for items in turn
    const int heads = layer.shape.value_heads, dk = layer.shape.key_dim(), dv = layer.shape.value_dim(), items = runs * heads;
    const auto place_of = [&](int item) {  // the page, and the token's position
        return item < items ? make_int2(layer.pages[item / heads], layer.positions[item / heads]) : make_int2(-1, 0);
    };
    const auto part_of = [&](int item, int2 place) { return Part{item % heads, place.x, item / heads, 1, place.y}; };
    const auto fetch = [&](const Part& part) {
        if (part.page >= 0 && part.start > 0) fetch_state(layer, part, ahead);
        commit_copies();
    };
    const auto stage = [&](const Part& part, Staged<T, DIM>& staged) {
        if constexpr (DIM > 0) {
            if (part.page >= 0) {
                constexpr int PACK = 16 / sizeof(T), CHUNKS = DIM / PACK, ROWS = 3 * MOST_WIDTH * CHUNKS;
                const int channels = layer.shape.channels();
                const T* tail = tail_of(layer, part.page);
                for (int i = threadIdx.x; i < ROWS + CHUNKS + 3 * MOST_WIDTH * CHUNKS; i += layer.shape.threads()) {
                    const T* from;
                    T* to;
                    int bytes = 16;
                    if (i < ROWS) {
                        const int d = i / (3 * CHUNKS), kind = i / CHUNKS % 3, at = i % CHUNKS * PACK;
                        const int channel = layer.shape.channel(kind, part.head) + at;
                        from = d == 0 ? layer.qkv + part.first * layer.qkv_row + channel
                                      : tail + max(part.start - d, 0) % layer.slots * static_cast<long long>(channels) + channel;
                        to = &staged.rows[d][kind][at];
                        if (part.start < d) bytes = 0;
                    } else if (i < ROWS + CHUNKS) {
                        const int at = (i - ROWS) * PACK;
                        from = layer.z + part.first * layer.z_row + part.head * DIM + at;
                        to = &staged.z[at];
                    } else {
                        const int rest = i - ROWS - CHUNKS, kind = rest / (MOST_WIDTH * CHUNKS), at = rest % (MOST_WIDTH * CHUNKS) * PACK;
                        from = layer.conv + layer.shape.channel(kind, part.head) * MOST_WIDTH + at;
                        to = &staged.conv[kind][0][0] + at;
                    }
                    copy_16(static_cast<unsigned>(__cvta_generic_to_shared(to)), from, bytes);
                }
            }
        }
        commit_copies();
    };
    // Scalars, in the first lanes of every warp.
    const auto scalar_of = [&](const Part& part) {
        const int lane = threadIdx.x % 32;
        if (DIM == 0 || part.page < 0 || lane > 3) return T{};
        const long long row = part.first;
        return lane == 0   ? layer.a[row * layer.a_row + part.head]
               : lane == 1 ? layer.b[row * layer.b_row + part.head]
               : lane == 2 ? layer.a_log[part.head]
                           : layer.dt_bias[part.head];
    };
    // While a block's item k is computed, the rows of item k + 2 and the state of item k + 1 are loaded.
    const int step = gridDim.x;
    int item = blockIdx.x;
    int2 place = place_of(item), next = place_of(item + step), second = place_of(item + 2 * step);
    fetch(part_of(item, place));
    wait_for_inputs();
    prepare(at, layer);
    stage(part_of(item, place), stages[0]);
    stage(part_of(item + step, next), stages[1]);
    T scalar = scalar_of(part_of(item, place)), next_scalar = scalar_of(part_of(item + step, next));
    wait_copies<0>();
#pragma unroll 1
    for (int turn = 0; item < items; item += step, turn ^= 1) {
        const int2 third = place_of(item + 3 * step);
        const Part part = part_of(item, place);
        const Scalars<T> scalars = {of_lane(scalar, 0), of_lane(scalar, 1), of_lane(scalar, 2), of_lane(scalar, 3)};
        scalar = next_scalar;
        const auto stage_second = [&] {  // in the place of this item's rows, which have been read
            const Part coming = part_of(item + 2 * step, second);
            stage(coming, stages[turn]);
            next_scalar = scalar_of(coming);
        };
        if (part.page < 0) {
            __syncthreads();
            write_zeros(layer, part);
            stage_second();
            wait_copies<1>();
            fetch(part_of(item + step, next));
        } else {
            compute<1>(layer, at, stages[turn], scalars, part, [&](float4(&state)[QUADS]) {
                stage_second();
                wait_copies<1>();  // waits for the state and the next item's rows
#pragma unroll
                for (int r = 0; r < QUADS; ++r) {
                    state[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (part.start > 0 && row_of(r) < dk && first_column() < dv)
                        state[r] = widen(ahead[r * layer.shape.threads() + threadIdx.x]);
                }
                fetch(part_of(item + step, next));
            });
        }
        place = next, next = second, second = third;
    }
}

// Writes the last rows of runs of several tokens, for later steps. A block has 256 channels of one run.
template <typename T>
__device__ __forceinline__ void delta_tails(
    const T* __restrict__ qkv,          // [T, C], rows qkv_row apart
    long long qkv_row,
    T* __restrict__ tails,              // [pages, slots, C]
    const int* __restrict__ pages,      // [B]
    const int* __restrict__ bounds,     // [B + 1]
    const int* __restrict__ positions,  // [T]
    int channels, int width, int slots
) {
    wait_for_inputs();
    const int parts = (channels + blockDim.x - 1) / blockDim.x, run = blockIdx.x / parts;
    const int channel = blockIdx.x % parts * blockDim.x + threadIdx.x, page = pages[run];
    const int first = bounds[run], end = bounds[run + 1];
    if (page < 0 || channel >= channels) return;
    for (int token = max(first, end - width + 1); token < end; ++token)
        tails[(static_cast<long long>(page) * slots + positions[token] % slots) * channels + channel] =
            qkv[token * qkv_row + channel];
}

#define DELTA_STEP(NAME, T, S, DIM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_runs_##NAME(LAYER(T, S), const int* bounds) {        \
        delta_runs<T, S, DIM>(LAYER_OF(T, S, DIM), bounds);                                                             \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_step_##NAME(LAYER(T, S), long long runs) {           \
        delta_step<T, S, DIM>(LAYER_OF(T, S, DIM), static_cast<int>(runs));                                             \
    }
#define DELTA_TAILS(KIND, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) delta_tails_##KIND(                                           \
        const T* qkv, long long qkv_row, T* tails, const int* pages, const int* bounds, const int* positions,           \
        long long channels, long long width, long long slots) {                                                         \
        delta_tails<T>(qkv, qkv_row, tails, pages, bounds, positions, static_cast<int>(channels),                       \
                       static_cast<int>(width), static_cast<int>(slots));                                               \
    }

// Types of the projections and of the states.
DELTA_STEP(f32_f32_any, float, float, 0)
DELTA_STEP(f32_bf16_any, float, bf16, 0)
DELTA_STEP(bf16_f32_any, bf16, float, 0)
DELTA_STEP(bf16_bf16_any, bf16, bf16, 0)
DELTA_STEP(bf16_f32_128, bf16, float, 128)
DELTA_STEP(bf16_bf16_128, bf16, bf16, 128)
DELTA_TAILS(f32, float)
DELTA_TAILS(bf16, bf16)
