// The gated delta net of an engine step, between its projections: causal convolution with SiLU, normalized queries and keys, the gated delta rule
// (arXiv 2412.06464) and the gated norm. A run is some consecutive tokens of one sequence. The sequence has a page with the state of every head, and
// with the rows that the convolution reads again. All sums are in float32.
//
// A block has one head of one run. The state is in registers from the run's first token to its last: a warp has 16 columns, a lane every eighth quad
// of rows and 4 columns of them. Tokens pass through shared memory, several at once. With S the state before a token,
//   delta = beta (v - exp(g) k S),   o = exp(g) q S + (q k) delta,   S <- exp(g) S + k delta,
//
// so that one sum over the rows serves both. All sums have one order, whether a token comes alone or with others.
//
// If runs have one token, a block processes one head after the other, and loads everything for the next one to shared memory while it computes,
// because such a step is bound by reading and writing states.
#include "async.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256;   // at most
constexpr int CHUNK = 16;      // tokens in shared memory
constexpr int BATCH = 8;       // of these, loaded by a thread at once
constexpr int MOST_DIM = 128;  // columns of a key or a value
constexpr int COLUMNS = 16;    // per warp
constexpr int MOST_WIDTH = 4;  // of the convolution
constexpr int QUADS = MOST_DIM / 8;  // of the state, per lane
constexpr float LENGTH_EPS = 1e-6f;

// DIM: the width of keys and values if it is a compile-time constant, and then the convolution's width is one too; else 0.
template <int DIM>
struct Shape {
    int key_heads, value_heads, any_key_dim, any_value_dim, any_width;

    __device__ __forceinline__ int key_dim() const { return DIM > 0 ? DIM : any_key_dim; }
    __device__ __forceinline__ int value_dim() const { return DIM > 0 ? DIM : any_value_dim; }
    __device__ __forceinline__ int width() const { return DIM > 0 ? MOST_WIDTH : any_width; }
    __device__ __forceinline__ int channels() const { return 2 * key_heads * key_dim() + value_heads * value_dim(); }
    // The first channel of a value head's queries, keys or values (kind 0, 1 or 2).
    __device__ __forceinline__ int channel(int kind, int head) const {
        const int key_head = head / (value_heads / key_heads);
        return kind == 2 ? 2 * key_heads * key_dim() + head * value_dim() : (kind * key_heads + key_head) * key_dim();
    }
    __device__ __forceinline__ int threads() const { return DIM > 0 ? DIM / COLUMNS * 32 : blockDim.x; }
};

// A layer's inputs and outputs in a step.
template <typename T, typename S, int DIM>
struct Layer {
    const T* __restrict__ qkv;          // [T, C], rows qkv_row apart
    const T* __restrict__ z;            // [T, H dv], rows z_row apart
    const T* __restrict__ b;            // [T, H], rows b_row apart
    const T* __restrict__ a;            // [T, H], rows a_row apart
    long long qkv_row, z_row, b_row, a_row;
    const T* __restrict__ conv;         // [C, width]
    const T* __restrict__ a_log;        // [H]
    const T* __restrict__ dt_bias;      // [H]
    const T* __restrict__ norm;         // [dv]
    T* tails;                           // [pages, width, C]: the row of position p in slot p % width
    S* states;                          // [pages, H, dk, dv]
    const int* __restrict__ pages;      // [B], -1: none, outputs are 0
    const int* __restrict__ positions;  // [T]
    T* __restrict__ out;                // [T, H dv]
    Shape<DIM> shape;
    float eps;
};

// One head's tokens of a run.
struct Part {
    int head, page, first, count, start;  // first token, number of tokens, position of the first
};

template <int TOKENS>
struct alignas(16) Shared {
    float q[TOKENS][MOST_DIM], k[TOKENS][MOST_DIM], v[TOKENS][MOST_DIM], gate[TOKENS][MOST_DIM];
    float decays[TOKENS], strengths[TOKENS], alongs[TOKENS], norm[MOST_DIM];
};

// What a token needs in addition to its state, in the format of memory.
template <typename T, int DIM>
struct alignas(16) Staged {
    T rows[MOST_WIDTH][3][DIM];        // of the tokens that many positions earlier: queries, keys and values
    T z[DIM];
    T conv[3][DIM][MOST_WIDTH];
};
template <typename T>
struct Staged<T, 0> {};

// Numbers of one token and head.
template <typename T>
struct Scalars {
    T a, b, a_log, dt_bias;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// A lane's rows of the state: quad r has four columns of this row.
__device__ __forceinline__ int row_of(int r) { return r / 4 * 32 + threadIdx.x % 32 / 4 * 4 + r % 4; }
__device__ __forceinline__ int first_column() { return threadIdx.x / 32 * COLUMNS + threadIdx.x % 4 * 4; }

template <typename T, typename S, int DIM>
__device__ __forceinline__ S* state_of(const Layer<T, S, DIM>& layer, const Part& part) {
    const Shape<DIM>& shape = layer.shape;
    return layer.states + (static_cast<long long>(part.page) * shape.value_heads + part.head) * shape.key_dim() * shape.value_dim() +
           first_column();
}

// Four columns of a row of a state, in the format of memory. A state stored in bf16 is rounded to nearest when it is written.
template <typename S>
struct alignas(4 * sizeof(S)) Quad {
    S at[4];
};

template <typename S>
__device__ __forceinline__ float4 widen(const Quad<S>& quad) {
    return make_float4(widen(quad.at[0]), widen(quad.at[1]), widen(quad.at[2]), widen(quad.at[3]));
}

__device__ __forceinline__ void copy_quad(unsigned to, const float* from) { copy_16(to, from, 16); }
__device__ __forceinline__ void copy_quad(unsigned to, const bf16* from) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ float4 load_quad(const float* from) { return __ldcs(reinterpret_cast<const float4*>(from)); }
__device__ __forceinline__ float4 load_quad(const bf16* from) {
    const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(from));
    return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
                       __uint_as_float(bits.y & 0xffff0000u));
}

__device__ __forceinline__ void store_quad(float* to, const float4& row) { __stcs(reinterpret_cast<float4*>(to), row); }
__device__ __forceinline__ void store_quad(bf16* to, const float4& row) {
    bf16 at[4];
    narrow(row.x, at[0]), narrow(row.y, at[1]), narrow(row.z, at[2]), narrow(row.w, at[3]);
    const uint2 bits = make_uint2(at[0].bits | static_cast<unsigned>(at[1].bits) << 16, at[2].bits | static_cast<unsigned>(at[3].bits) << 16);
    __stcs(reinterpret_cast<uint2*>(to), bits);
}

// Loads weights of the norm, and zeroes keys and queries beyond their last column.
template <int TOKENS, typename T, typename S, int DIM>
__device__ __forceinline__ void prepare(Shared<TOKENS>& at, const Layer<T, S, DIM>& layer) {
    for (int i = threadIdx.x; i < layer.shape.value_dim(); i += blockDim.x) at.norm[i] = widen(layer.norm[i]);
    if (layer.shape.key_dim() == MOST_DIM) return;
    for (int i = threadIdx.x; i < TOKENS * MOST_DIM; i += blockDim.x) at.q[0][i] = 0.0f, at.k[0][i] = 0.0f;
}

template <typename T, typename S, int DIM>
__device__ __forceinline__ void write_zeros(const Layer<T, S, DIM>& layer, const Part& part) {
    const long long row = static_cast<long long>(layer.shape.value_heads) * layer.shape.value_dim();
    for (int t = 0; t < part.count; ++t)
        for (int i = threadIdx.x; i < layer.shape.value_dim(); i += blockDim.x)
            narrow(0.0f, layer.out[(part.first + t) * row + part.head * layer.shape.value_dim() + i]);
}

// Broadcasts a lane's number to the warp.
__device__ __forceinline__ float of_lane(float value, int lane) { return __shfl_sync(~0u, value, lane); }
__device__ __forceinline__ bf16 of_lane(bf16 value, int lane) {
    return {static_cast<unsigned short>(__shfl_sync(~0u, static_cast<int>(value.bits), lane))};
}

template <typename T, typename S, int DIM>
__device__ __forceinline__ Scalars<T> scalars_of(const Layer<T, S, DIM>& layer, const Part& part, int token) {
    const long long row = part.first + token;
    return {layer.a[row * layer.a_row + part.head], layer.b[row * layer.b_row + part.head], layer.a_log[part.head],
            layer.dt_bias[part.head]};
}

// Computes outputs of a part's tokens. The state, which `take` loads into registers, is updated there and in its page. For a run of one token this
// also writes the convolution's row; for other runs `delta_tails` writes them, because other heads may still read the old rows.
template <int TOKENS, typename T, typename S, int DIM, typename Take>
__device__ __forceinline__ void compute(const Layer<T, S, DIM>& layer, Shared<TOKENS>& at, const Staged<T, DIM>& staged,
                                        const Scalars<T>& scalars, const Part& part, const Take& take) {
    constexpr bool IS_STAGED = TOKENS == 1 && DIM > 0;
    float4 state[QUADS];
    const Shape<DIM>& shape = layer.shape;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = layer.shape.threads() / 32, group = lane / 4, column = first_column();
    const int dk = shape.key_dim(), dv = shape.value_dim(), head = part.head, width = shape.width(), channels = shape.channels();
    const int shared_by = shape.value_heads / shape.key_heads;
    const T* rows = layer.qkv + part.first * layer.qkv_row;
    T* tail = layer.tails + static_cast<long long>(part.page) * width * channels;
    const float scale = rsqrtf(static_cast<float>(dk));
    const long long out_row = static_cast<long long>(shape.value_heads) * dv;
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
                                              : tail[position % width * static_cast<long long>(channels) + channel];
                }
            }
            float w[MOST_WIDTH], x[MOST_WIDTH];
#pragma unroll
            for (int d = 0; d < MOST_WIDTH; ++d) {
                w[d] = d < width ? widen(weights[d]) : 0.0f;
                x[d] = d < width && part.start + from >= d ? widen(past[d]) : 0.0f;
            }
            float(*to)[MOST_DIM] = kind == 0 ? at.q : kind == 1 ? at.k : at.v;
            constexpr int AT_ONCE = TOKENS < BATCH ? TOKENS : BATCH;
#pragma unroll 1
            for (int first = 0; first < tokens; first += AT_ONCE) {
                T now[AT_ONCE];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t)
                    now[t] = TOKENS == 1 ? past[0] : rows[min(from + first + t, part.count - 1) * layer.qkv_row + channel];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) {
                    x[0] = widen(now[t]);
                    float y = x[0] * w[0];
#pragma unroll
                    for (int d = 1; d < MOST_WIDTH; ++d) y = fmaf(x[d], w[d], y);
#pragma unroll
                    for (int d = MOST_WIDTH - 1; d > 0; --d) x[d] = x[d - 1];
                    to[first + t][place] = y * sigmoid(y);
                }
            }
            if (TOKENS == 1 && (kind == 2 || head % shared_by == 0))
                tail[part.start % width * static_cast<long long>(channels) + channel] = past[0];
        }
        for (int t = warp; t < tokens; t += warps)
            for (int i = lane; i < dv; i += 32) {
                if constexpr (IS_STAGED)
                    at.gate[t][i] = widen(staged.z[i]);
                else
                    at.gate[t][i] = widen(layer.z[(part.first + from + t) * layer.z_row + head * dv + i]);
            }
        for (int t = threadIdx.x; t < tokens; t += layer.shape.threads()) {
            const Scalars<T> own = IS_STAGED ? scalars : scalars_of(layer, part, from + t);
            const float sum = widen(own.a) + widen(own.dt_bias);
            at.decays[t] = expf(-expf(widen(own.a_log)) * (fmaxf(sum, 0.0f) + log1pf(expf(-fabsf(sum)))));
            at.strengths[t] = sigmoid(widen(own.b));
        }
        __syncthreads();
        for (int t = warp; t < tokens; t += warps) {
            float qq = 0.0f, kk = 0.0f, qk = 0.0f;
            for (int i = lane; i < dk; i += 32) {
                const float query = at.q[t][i], key = at.k[t][i];
                qq = fmaf(query, query, qq), kk = fmaf(key, key, kk), qk = fmaf(query, key, qk);
            }
            qq = rsqrtf(warp_sum(qq) + LENGTH_EPS) * scale, kk = rsqrtf(warp_sum(kk) + LENGTH_EPS), qk = warp_sum(qk);
            for (int i = lane; i < dk; i += 32) at.q[t][i] *= qq, at.k[t][i] *= kk;
            if (lane == 0) at.alongs[t] = qk * qq * kk;
        }
        __syncthreads();
        if (from == 0) take(state);
#pragma unroll 1
        for (int t = 0; t < tokens; ++t) {
            float4 of_k = make_float4(0.0f, 0.0f, 0.0f, 0.0f), of_q = of_k, keys[QUADS / 4];
            const float4 value = *reinterpret_cast<const float4*>(&at.v[t][column]);
#pragma unroll
            for (int j = 0; j < QUADS / 4; ++j) {
                keys[j] = *reinterpret_cast<const float4*>(&at.k[t][32 * j + 4 * group]);
                const float4 query = *reinterpret_cast<const float4*>(&at.q[t][32 * j + 4 * group]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float key_i = (&keys[j].x)[i], query_i = (&query.x)[i];
                    const float4 row = state[4 * j + i];
                    of_k.x = fmaf(key_i, row.x, of_k.x), of_k.y = fmaf(key_i, row.y, of_k.y);
                    of_k.z = fmaf(key_i, row.z, of_k.z), of_k.w = fmaf(key_i, row.w, of_k.w);
                    of_q.x = fmaf(query_i, row.x, of_q.x), of_q.y = fmaf(query_i, row.y, of_q.y);
                    of_q.z = fmaf(query_i, row.z, of_q.z), of_q.w = fmaf(query_i, row.w, of_q.w);
                }
            }
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                of_k.x += __shfl_xor_sync(~0u, of_k.x, step), of_k.y += __shfl_xor_sync(~0u, of_k.y, step);
                of_k.z += __shfl_xor_sync(~0u, of_k.z, step), of_k.w += __shfl_xor_sync(~0u, of_k.w, step);
                of_q.x += __shfl_xor_sync(~0u, of_q.x, step), of_q.y += __shfl_xor_sync(~0u, of_q.y, step);
                of_q.z += __shfl_xor_sync(~0u, of_q.z, step), of_q.w += __shfl_xor_sync(~0u, of_q.w, step);
            }
            __syncwarp();  // all lanes have read the value
            const float decay = at.decays[t], strength = at.strengths[t], along = at.alongs[t];
            const float4 delta = make_float4(strength * fmaf(-decay, of_k.x, value.x), strength * fmaf(-decay, of_k.y, value.y),
                                             strength * fmaf(-decay, of_k.z, value.z), strength * fmaf(-decay, of_k.w, value.w));
#pragma unroll
            for (int r = 0; r < QUADS; ++r) {
                const float key = (&keys[r / 4].x)[r % 4];
                float4& row = state[r];
                row.x = fmaf(decay, row.x, key * delta.x), row.y = fmaf(decay, row.y, key * delta.y);
                row.z = fmaf(decay, row.z, key * delta.z), row.w = fmaf(decay, row.w, key * delta.w);
            }
            if (group == 0)  // overwrites the value
                *reinterpret_cast<float4*>(&at.v[t][column]) =
                    make_float4(fmaf(decay, of_q.x, along * delta.x), fmaf(decay, of_q.y, along * delta.y),
                                fmaf(decay, of_q.z, along * delta.z), fmaf(decay, of_q.w, along * delta.w));
        }
        if (from + TOKENS >= part.count && column < dv) {
            S* own = state_of(layer, part);
#pragma unroll
            for (int r = 0; r < QUADS; ++r)
                if (row_of(r) < dk) store_quad(own + row_of(r) * dv, state[r]);
        }
        __syncthreads();
        for (int t = warp; t < tokens; t += warps) {
            float squares = 0.0f;
            for (int i = lane; i < dv; i += 32) squares = fmaf(at.v[t][i], at.v[t][i], squares);
            const float rstd = rsqrtf(warp_sum(squares) / static_cast<float>(dv) + layer.eps);
            for (int i = lane; i < dv; i += 32) {
                const float x = at.gate[t][i];
                narrow(x * sigmoid(x) * (at.v[t][i] * rstd * at.norm[i]),
                       layer.out[(part.first + from + t) * out_row + head * dv + i]);
            }
        }
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
        if (part.page >= 0 && part.start > 0 && first_column() < dv) {
            const S* own = state_of(layer, part);
#pragma unroll
            for (int r = 0; r < QUADS; ++r)
                if (row_of(r) < dk)
                    copy_quad(static_cast<unsigned>(__cvta_generic_to_shared(&ahead[r * layer.shape.threads() + threadIdx.x])),
                              own + row_of(r) * dv);
        }
        commit_copies();
    };
    const auto stage = [&](const Part& part, Staged<T, DIM>& staged) {
        if constexpr (DIM > 0) {
            if (part.page >= 0) {
                constexpr int PACK = 16 / sizeof(T), CHUNKS = DIM / PACK, ROWS = 3 * MOST_WIDTH * CHUNKS;
                const int channels = layer.shape.channels();
                const T* slots = layer.tails + static_cast<long long>(part.page) * MOST_WIDTH * channels;
                for (int i = threadIdx.x; i < ROWS + CHUNKS + 3 * MOST_WIDTH * CHUNKS; i += layer.shape.threads()) {
                    const T* from;
                    T* to;
                    int bytes = 16;
                    if (i < ROWS) {
                        const int d = i / (3 * CHUNKS), kind = i / CHUNKS % 3, at = i % CHUNKS * PACK;
                        const int channel = layer.shape.channel(kind, part.head) + at;
                        from = d == 0 ? layer.qkv + part.first * layer.qkv_row + channel
                                      : slots + (part.start - d & MOST_WIDTH - 1) * static_cast<long long>(channels) + channel;
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
    T* __restrict__ tails,              // [pages, width, C]
    const int* __restrict__ pages,      // [B]
    const int* __restrict__ bounds,     // [B + 1]
    const int* __restrict__ positions,  // [T]
    int channels, int width
) {
    wait_for_inputs();
    const int parts = (channels + blockDim.x - 1) / blockDim.x, run = blockIdx.x / parts;
    const int channel = blockIdx.x % parts * blockDim.x + threadIdx.x, page = pages[run];
    const int first = bounds[run], end = bounds[run + 1];
    if (page < 0 || channel >= channels) return;
    for (int token = max(first, end - width + 1); token < end; ++token)
        tails[(static_cast<long long>(page) * width + positions[token] % width) * channels + channel] =
            qkv[token * qkv_row + channel];
}

#define LAYER(T, S)                                                                                                     \
    const T *qkv, const T *z, const T *b, const T *a, long long qkv_row, long long z_row, long long b_row,              \
        long long a_row, const T *conv, const T *a_log, const T *dt_bias, const T *norm, T *tails, S *states,           \
        const int *pages, const int *positions, T *out, long long key_heads, long long value_heads, long long key_dim,  \
        long long value_dim, long long width, float eps
#define LAYER_OF(T, S, DIM)                                                                                             \
    Layer<T, S, DIM> {                                                                                                  \
        qkv, z, b, a, qkv_row, z_row, b_row, a_row, conv, a_log, dt_bias, norm, tails, states, pages, positions, out,   \
            {static_cast<int>(key_heads), static_cast<int>(value_heads), static_cast<int>(key_dim),                     \
             static_cast<int>(value_dim), static_cast<int>(width)},                                                     \
            eps                                                                                                         \
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
        long long channels, long long width) {                                                                          \
        delta_tails<T>(qkv, qkv_row, tails, pages, bounds, positions, static_cast<int>(channels),                       \
                       static_cast<int>(width));                                                                        \
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
