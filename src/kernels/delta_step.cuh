// The gated delta rule, token by token, on the state of one head in registers, for the kernels of an engine's steps. A warp has 16 columns of the
// state. Its lanes split them: a lane has 4 columns of every eighth group of 4 rows. With S the state before a token, the kernels compute
//   delta = beta (v - exp(g) k S),   o = exp(g) q S + (q k) delta,   S <- exp(g) S + k delta,
// so that one pass over the rows gives both k S and q S. The order of all sums is fixed, whether a token is computed alone or with others.
#pragma once
#include "async.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256;   // maximum number of threads per block
constexpr int CHUNK = 16;      // tokens that are in shared memory at once
constexpr int BATCH = 8;       // tokens of a chunk that a thread reads at once
constexpr int MOST_DIM = 128;  // maximum width of a key or a value
constexpr int COLUMNS = 16;    // columns of the state per warp
constexpr int MOST_WIDTH = 4;  // maximum width of the convolution
constexpr int QUADS = MOST_DIM / 8;  // quads of four state elements per lane
constexpr float LENGTH_EPS = 1e-6f;

// The sizes of a layer. DIM is the width of keys and values if it is known at compile time, which also fixes the convolution's width; else DIM is 0.
template <int DIM>
struct Shape {
    int key_heads, value_heads, any_key_dim, any_value_dim, any_width;

    __device__ __forceinline__ int key_dim() const { return DIM > 0 ? DIM : any_key_dim; }
    __device__ __forceinline__ int value_dim() const { return DIM > 0 ? DIM : any_value_dim; }
    __device__ __forceinline__ int width() const { return DIM > 0 ? MOST_WIDTH : any_width; }
    __device__ __forceinline__ int channels() const { return 2 * key_heads * key_dim() + value_heads * value_dim(); }
    // The first channel of a value head's queries, keys or values: kind 0, 1 or 2.
    __device__ __forceinline__ int channel(int kind, int head) const {
        const int key_head = head / (value_heads / key_heads);
        return kind == 2 ? 2 * key_heads * key_dim() + head * value_dim() : (kind * key_heads + key_head) * key_dim();
    }
    __device__ __forceinline__ int threads() const { return DIM > 0 ? DIM / COLUMNS * 32 : blockDim.x; }
};

// Inputs, weights, states and outputs of one layer in a step.
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
    T* tails;                           // [pages, slots, C]: the row of position p in slot p % slots
    S* states;                          // [pages, H, dk, dv]
    const int* __restrict__ pages;      // [B], -1: none, whose outputs are 0
    const int* __restrict__ positions;  // [T]
    T* __restrict__ out;                // [T, H dv]
    Shape<DIM> shape;
    float eps;
    int slots;
};

// One head's part of a sequence's tokens in a step.
struct Part {
    int head, page, first, count, start;  // index of the first of `count` tokens, and its position
};

template <int TOKENS>
struct alignas(16) Shared {
    float q[TOKENS][MOST_DIM], k[TOKENS][MOST_DIM], v[TOKENS][MOST_DIM], gate[TOKENS][MOST_DIM];
    float decays[TOKENS], strengths[TOKENS], alongs[TOKENS], norm[MOST_DIM];
};

// Numbers of one token and head.
template <typename T>
struct Scalars {
    T a, b, a_log, dt_bias;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Rows of the state that a lane has: quad r is columns .. + 4 of this row.
__device__ __forceinline__ int row_of(int r) { return r / 4 * 32 + threadIdx.x % 32 / 4 * 4 + r % 4; }
__device__ __forceinline__ int first_column() { return threadIdx.x / 32 * COLUMNS + threadIdx.x % 4 * 4; }

template <typename T, typename S, int DIM>
__device__ __forceinline__ S* state_of(const Layer<T, S, DIM>& layer, const Part& part) {
    const Shape<DIM>& shape = layer.shape;
    return layer.states + (static_cast<long long>(part.page) * shape.value_heads + part.head) * shape.key_dim() * shape.value_dim() +
           first_column();
}

// Rows before the convolution of a page.
template <typename T, typename S, int DIM>
__device__ __forceinline__ T* tail_of(const Layer<T, S, DIM>& layer, int page) {
    return layer.tails + static_cast<long long>(page) * layer.slots * layer.shape.channels();
}

// Four columns of a row of a state, as they lie in memory. A state that is stored in bf16 is rounded to nearest when it is written.
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

// The causal convolution of one channel with SiLU, one token after the other. Index d of the inputs is the token d positions earlier.
struct Convolution {
    float w[MOST_WIDTH], x[MOST_WIDTH];

    // Begins with the token at `position`; positions before the first have zeros.
    template <typename T>
    __device__ __forceinline__ Convolution(const T (&weights)[MOST_WIDTH], const T (&past)[MOST_WIDTH], int width, int position) {
#pragma unroll
        for (int d = 0; d < MOST_WIDTH; ++d) {
            w[d] = d < width ? widen(weights[d]) : 0.0f;
            x[d] = d < width && position >= d ? widen(past[d]) : 0.0f;
        }
    }

    // The output of the next token.
    template <typename T>
    __device__ __forceinline__ float next(const T& now) {
        x[0] = widen(now);
        float y = x[0] * w[0];
#pragma unroll
        for (int d = 1; d < MOST_WIDTH; ++d) y = fmaf(x[d], w[d], y);
#pragma unroll
        for (int d = MOST_WIDTH - 1; d > 0; --d) x[d] = x[d - 1];
        return y * sigmoid(y);
    }
};

// Copies a part's state to shared memory in the background: each thread its own quads, `threads` apart. Closes the group of copies.
template <typename T, typename S, int DIM>
__device__ __forceinline__ void fetch_state(const Layer<T, S, DIM>& layer, const Part& part, Quad<S>* to) {
    if (first_column() < layer.shape.value_dim()) {
        const S* own = state_of(layer, part);
#pragma unroll
        for (int r = 0; r < QUADS; ++r)
            if (row_of(r) < layer.shape.key_dim())
                copy_quad(static_cast<unsigned>(__cvta_generic_to_shared(&to[r * layer.shape.threads() + threadIdx.x])),
                          own + row_of(r) * layer.shape.value_dim());
    }
}

template <typename T, typename S, int DIM>
__device__ __forceinline__ void write_state(const Layer<T, S, DIM>& layer, const Part& part, const float4 (&state)[QUADS]) {
    if (first_column() >= layer.shape.value_dim()) return;
    S* own = state_of(layer, part);
#pragma unroll
    for (int r = 0; r < QUADS; ++r)
        if (row_of(r) < layer.shape.key_dim()) store_quad(own + row_of(r) * layer.shape.value_dim(), state[r]);
}

// Loads the weights of the norm, and sets the padding columns of keys and queries to zero.
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

template <typename T, typename S, int DIM>
__device__ __forceinline__ Scalars<T> scalars_of(const Layer<T, S, DIM>& layer, int head, long long row) {
    return {layer.a[row * layer.a_row + head], layer.b[row * layer.b_row + head], layer.a_log[head], layer.dt_bias[head]};
}

// Computes the decay and the write strength of token t.
template <int TOKENS, typename T>
__device__ __forceinline__ void set_gates(Shared<TOKENS>& at, int t, const Scalars<T>& own) {
    const float sum = widen(own.a) + widen(own.dt_bias);
    at.decays[t] = expf(-expf(widen(own.a_log)) * (fmaxf(sum, 0.0f) + log1pf(expf(-fabsf(sum)))));
    at.strengths[t] = sigmoid(widen(own.b));
}

// Normalizes queries to length 1 / sqrt(dk) and keys to length 1.
template <int TOKENS>
__device__ __forceinline__ void set_lengths(Shared<TOKENS>& at, int tokens, int dk, int warps) {
    const int lane = threadIdx.x % 32;
    const float scale = rsqrtf(static_cast<float>(dk));
    for (int t = threadIdx.x / 32; t < tokens; t += warps) {
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
        for (int i = lane; i < dk; i += 32) {
            const float query = at.q[t][i], key = at.k[t][i];
            qq = fmaf(query, query, qq), kk = fmaf(key, key, kk), qk = fmaf(query, key, qk);
        }
        qq = rsqrtf(warp_sum(qq) + LENGTH_EPS) * scale, kk = rsqrtf(warp_sum(kk) + LENGTH_EPS), qk = warp_sum(qk);
        for (int i = lane; i < dk; i += 32) at.q[t][i] *= qq, at.k[t][i] *= kk;
        if (lane == 0) at.alongs[t] = qk * qq * kk;
    }
}

// Updates the state with token t. The output of the token replaces its value in shared memory.
template <int TOKENS>
__device__ __forceinline__ void take_in(Shared<TOKENS>& at, int t, float4 (&state)[QUADS]) {
    const int group = threadIdx.x % 32 / 4, column = first_column();
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
    if (group == 0)
        *reinterpret_cast<float4*>(&at.v[t][column]) =
            make_float4(fmaf(decay, of_q.x, along * delta.x), fmaf(decay, of_q.y, along * delta.y),
                        fmaf(decay, of_q.z, along * delta.z), fmaf(decay, of_q.w, along * delta.w));
}

// The gated norm of tokens begin .. end, of which token t is row first + t of the step.
template <int TOKENS, typename T, typename S, int DIM>
__device__ __forceinline__ void write_outputs(const Shared<TOKENS>& at, const Layer<T, S, DIM>& layer, int head, long long first, int begin, int end) {
    const int lane = threadIdx.x % 32, dv = layer.shape.value_dim();
    const long long out_row = static_cast<long long>(layer.shape.value_heads) * dv;
    for (int t = begin + threadIdx.x / 32; t < end; t += layer.shape.threads() / 32) {
        float squares = 0.0f;
        for (int i = lane; i < dv; i += 32) squares = fmaf(at.v[t][i], at.v[t][i], squares);
        const float rstd = rsqrtf(warp_sum(squares) / static_cast<float>(dv) + layer.eps);
        for (int i = lane; i < dv; i += 32) {
            const float x = at.gate[t][i];
            narrow(x * sigmoid(x) * (at.v[t][i] * rstd * at.norm[i]), layer.out[(first + t) * out_row + head * dv + i]);
        }
    }
}

#define LAYER(T, S)                                                                                                     \
    const T *qkv, const T *z, const T *b, const T *a, long long qkv_row, long long z_row, long long b_row,              \
        long long a_row, const T *conv, const T *a_log, const T *dt_bias, const T *norm, T *tails, S *states,           \
        const int *pages, const int *positions, T *out, long long key_heads, long long value_heads, long long key_dim,  \
        long long value_dim, long long width, float eps, long long slots
#define LAYER_OF(T, S, DIM)                                                                                             \
    Layer<T, S, DIM> {                                                                                                  \
        qkv, z, b, a, qkv_row, z_row, b_row, a_row, conv, a_log, dt_bias, norm, tails, states, pages, positions, out,   \
            {static_cast<int>(key_heads), static_cast<int>(value_heads), static_cast<int>(key_dim),                     \
             static_cast<int>(value_dim), static_cast<int>(width)},                                                     \
            eps, static_cast<int>(slots)                                                                                \
    }
