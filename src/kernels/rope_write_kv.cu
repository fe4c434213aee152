// From the QKV GEMM to attention: norm of every query and key head (optional), rotary embedding in the half-rotation convention (arXiv 2104.09864),
// and the write into the paged cache. Every step rounds to T, as in the trainer. A team of lanes has one head of one token; a lane moves N
// consecutive elements at once.
#include "fp8.cuh"
#include "int8.cuh"

// The cache's format: T, e4m3 or int8. For int8, keys and queries are first multiplied by a Hadamard matrix. That leaves their dot products unchanged
// and spreads columns that are larger than the others.
enum Code { PLAIN, FP8, INT8 };

// The scale of an 8-bit entry. `bits`: the largest absolute value as bf16 bits, with NaN above all.
template <Code CODE>
__device__ __forceinline__ auto scale_of(unsigned bits) {
    if constexpr (CODE == FP8) return RowScale(bits);
    else return WholeScale(__uint_as_float(bits << 16));
}

// Multiplies a lane's pack of a head by Hadamard matrices of `block` columns. All lanes of `members` together.
template <typename T, int N>
__device__ __forceinline__ void turn_by_hadamard(Pack<T, N>& pack, int block, unsigned members) {
    float x[N];
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = widen(pack.at[j]);
    hadamard(x, block, members);
    const float scale = rsqrtf(static_cast<float>(block));
#pragma unroll
    for (int j = 0; j < N; ++j) narrow(x[j] * scale, pack.at[j]);
}

// Strides in elements; query heads are [Hkv, G].
struct Layout {
    long long q_row, q_group, q_head, kv_row, kv_group;
};

// T tokens, H = Hkv G query heads of 2 * half columns. The first 2 * turned columns are rotated, in pairs (i, i + turned); the others follow, again
// in two halves.
template <typename T, int N, Code CODE = PLAIN>
__device__ __forceinline__ void rope_write_kv(
    const T* __restrict__ q,            // [T, Hkv, G, hd]
    T* k,                               // [T, Hkv, hd], rotated in place
    const T* __restrict__ v,            // [T, Hkv, hd]
    Layout stride,
    const T* __restrict__ q_norm,       // [hd] or null
    const T* __restrict__ k_norm,       // [hd] or null
    const float* __restrict__ table,    // [positions, 2 turned]: cosines, then sines
    const int* __restrict__ positions,  // [T]
    const int* __restrict__ slots,      // [T], -1: not written
    T* __restrict__ q_out,              // [T, H, hd]
    void* __restrict__ k_cache,         // [blocks, Hkv, block_size, hd], of T or 8-bit
    void* __restrict__ v_cache,         // like k_cache
    int tokens, int kv_heads, int group, int half, int turned, int block_size, int lanes, float eps, float centre,
    float* __restrict__ k_scales = nullptr,  // [blocks, Hkv, block_size], for an 8-bit cache
    float* __restrict__ v_scales = nullptr,  // like k_scales
    int block = 0                            // size of Hadamard matrices: a power of two that divides half and turned
) {
    constexpr bool CODED = CODE != PLAIN;
    constexpr int MOST = N == 1 ? 4 : 1;  // packs of a half per lane
    if constexpr (CODED) let_next_begin();
    const int team = (blockIdx.x * blockDim.x + threadIdx.x) / lanes, lane = threadIdx.x % lanes;
    const int heads = kv_heads * (group + 2), token = team / heads;
    // Data that no kernel of a step writes is loaded while the preceding kernel ends.
    const bool is_token = token < tokens;
    const int slot = is_token ? slots[token] : -1;
    const float* turn = table + (is_token ? static_cast<long long>(positions[token]) : 0) * 2 * turned;
    float cosines[CODED ? MOST : 1][N], sines[CODED ? MOST : 1][N];  // for 8-bit caches, whose steps are shorter
    if constexpr (CODED) {
#pragma unroll
        for (int m = 0; m < MOST; ++m) {
            const int at = (lane + m * lanes) * N;
            if (!is_token || at >= min(half, turned)) continue;
            const auto read = [&](const float* from, float (&to)[N]) {  // the table is aligned to packs
                constexpr int AT_ONCE = N % 4 == 0 ? 4 : 1;
#pragma unroll
                for (int j = 0; j < N; j += AT_ONCE) {
                    const auto some = load<float, AT_ONCE>(from + j);
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) to[j + i] = some.at[i];
                }
            };
            read(turn + at, cosines[m]);
            read(turn + turned + at, sines[m]);
        }
    }
    // Indices are computed before the wait for inputs, because divisions take time.
    const int kv_head = team % heads / (group + 2), place = team % (group + 2), dim = 2 * half;
    const bool is_query = place < group, is_value = place == group + 1;
    const long long entry = (static_cast<long long>(slot / block_size) * kv_heads + kv_head) * block_size + slot % block_size;
    const long long row = is_query ? token * stride.q_row + kv_head * stride.q_group + place * stride.q_head
                                   : token * stride.kv_row + kv_head * stride.kv_group;
    const T* from = (is_query ? q : is_value ? v : k) + row;
    wait_for_inputs();
    if (!is_token) return;  // whole teams

    // The column of pack `at` of a half: a rotated half is followed by its other half, and so are the remaining columns.
    const auto column = [&](int at, int side) {
        return at < turned ? at + side * turned : at + (side == 0 ? turned : half);
    };
    const T* norm = is_query ? q_norm : is_value ? nullptr : k_norm;

    Pack<T, N> head[MOST][2];
    float squares = 0.0f;
#pragma unroll
    for (int m = 0; m < MOST; ++m) {
        const int at = (lane + m * lanes) * N;
        if (at >= half) break;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            auto& pack = head[m][side];
            pack = *reinterpret_cast<const Pack<T, N>*>(from + column(at, side));
#pragma unroll
            for (int j = 0; j < N; ++j) squares += widen(pack.at[j]) * widen(pack.at[j]);
        }
    }
    const unsigned members = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
    if (norm) {  // equal for all lanes of a team
        for (int step = lanes / 2; step > 0; step /= 2) squares += __shfl_xor_sync(members, squares, step, lanes);
        const float scale = rsqrtf(squares / static_cast<float>(dim) + eps);
#pragma unroll
        for (int m = 0; m < MOST; ++m) {
            const int at = (lane + m * lanes) * N;
            if (at >= half) break;
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const auto factors = *reinterpret_cast<const Pack<T, N>*>(norm + column(at, side));
#pragma unroll
                for (int j = 0; j < N; ++j)
                    narrow(widen(head[m][side].at[j]) * scale * (centre + widen(factors.at[j])), head[m][side].at[j]);
            }
        }
    }

    unsigned bits = 0;  // of the largest absolute value, with NaN above all
#pragma unroll
    for (int m = 0; m < MOST; ++m) {
        const int at = (lane + m * lanes) * N;
        if (at >= half) break;
        auto &low = head[m][0], &high = head[m][1];
        if (!is_value && at < turned) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float cosine = CODED ? cosines[CODED ? m : 0][j] : turn[at + j];
                const float sine = CODED ? sines[CODED ? m : 0][j] : turn[turned + at + j];
                const float x = widen(low.at[j]), y = widen(high.at[j]);
                narrow(x * cosine - y * sine, low.at[j]);
                narrow(y * cosine + x * sine, high.at[j]);
            }
        }
    }
    if constexpr (CODE == INT8) {
        if (!is_value) {  // equal for all lanes of a team; lanes beyond the head process unused data
#pragma unroll
            for (int m = 0; m < MOST; ++m)
#pragma unroll
                for (int side = 0; side < 2; ++side) turn_by_hadamard(head[m][side], block, members);
        }
    }
#pragma unroll
    for (int m = 0; m < MOST; ++m) {
        const int at = (lane + m * lanes) * N;
        if (at >= half) break;
        auto &low = head[m][0], &high = head[m][1];
        const auto store = [&](T* to) {
            *reinterpret_cast<Pack<T, N>*>(to + column(at, 0)) = low;
            *reinterpret_cast<Pack<T, N>*>(to + column(at, 1)) = high;
        };
        if (is_query) {
            store(q_out + ((static_cast<long long>(token) * kv_heads + kv_head) * group + place) * dim);
        } else {
            if (!is_value) store(k + row);
            if constexpr (CODED) {
#pragma unroll
                for (int j = 0; j < N; ++j) bits = max(bits, max(low.at[j].bits & 0x7fffu, high.at[j].bits & 0x7fffu));
            } else {
                if (slot >= 0) store(static_cast<T*>(is_value ? v_cache : k_cache) + entry * dim);
            }
        }
    }
    if constexpr (CODED) {
        if (is_query) return;  // whole teams
        for (int step = lanes / 2; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(members, bits, step, lanes));
        if (slot < 0) return;
        auto* to = static_cast<unsigned char*>(is_value ? v_cache : k_cache) + entry * dim;
        const auto scale = scale_of<CODE>(bits);
        if (lane == 0) (is_value ? v_scales : k_scales)[entry] = scale.scale;
#pragma unroll
        for (int m = 0; m < MOST; ++m) {
            const int at = (lane + m * lanes) * N;
            if (at >= half) break;
#pragma unroll
            for (int side = 0; side < 2; ++side) scale.write(head[m][side], to + column(at, side));
        }
    }
}

#define ROPE_WRITE_KV(NAME, T, N)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                         \
        const T* q, T* k, const T* v, long long q_row, long long q_group, long long q_head, long long kv_row,       \
        long long kv_group, const T* q_norm, const T* k_norm, const float* table,                                   \
        const int* positions, const int* slots, T* q_out, T* k_cache, T* v_cache, long long tokens,                 \
        long long kv_heads, long long group, long long half, long long turned, long long block_size,                \
        long long lanes, float eps, float centre) {                                                                 \
        rope_write_kv<T, N>(q, k, v, {q_row, q_group, q_head, kv_row, kv_group}, q_norm, k_norm, table, positions,  \
                            slots, q_out, k_cache, v_cache, tokens, kv_heads, group, half, turned, block_size,      \
                            lanes, eps, centre);                                                                    \
    }

ROPE_WRITE_KV(rope_write_kv_f32_x1, float, 1)
ROPE_WRITE_KV(rope_write_kv_f32_x4, float, 4)
ROPE_WRITE_KV(rope_write_kv_bf16_x1, bf16, 1)
ROPE_WRITE_KV(rope_write_kv_bf16_x8, bf16, 8)

#define ROPE_WRITE_KV_CODED(NAME, N, CODE)                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                          \
        const bf16* q, bf16* k, const bf16* v, long long q_row, long long q_group, long long q_head,                 \
        long long kv_row, long long kv_group, const bf16* q_norm, const bf16* k_norm, const float* table,            \
        const int* positions, const int* slots, bf16* q_out, unsigned char* k_cache, unsigned char* v_cache,         \
        long long tokens, long long kv_heads, long long group, long long half, long long turned,                     \
        long long block_size, long long lanes, float eps, float centre, float* k_scales, float* v_scales,            \
        long long block) {                                                                                           \
        rope_write_kv<bf16, N, CODE>(q, k, v, {q_row, q_group, q_head, kv_row, kv_group}, q_norm, k_norm, table,     \
                                     positions, slots, q_out, k_cache, v_cache, tokens, kv_heads, group, half,       \
                                     turned, block_size, lanes, eps, centre, k_scales, v_scales, block);             \
    }

ROPE_WRITE_KV_CODED(rope_write_kv_fp8_x1, 1, FP8)
ROPE_WRITE_KV_CODED(rope_write_kv_fp8_x8, 8, FP8)
ROPE_WRITE_KV_CODED(rope_write_kv_int8_x1, 1, INT8)
ROPE_WRITE_KV_CODED(rope_write_kv_int8_x8, 8, INT8)
