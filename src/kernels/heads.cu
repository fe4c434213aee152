// From the fused projection to queries, keys and values, and back: norm of every query and key head (if the model has one), then the rotary embedding
// (arXiv 2104.09864) of pairs (x[i], x[i + turned]) for i < turned: hd/2, or less if heads are rotated in part. Norms multiply by centre + weight.
// Slots of a token's row, hd wide each: [G query heads of group g, k_g, v_g] for g = 0, 1, ..; S = Hkv (G + 2) of them. A team of 1 to 32 lanes has
// one head.
#include "scalar.cuh"

struct Slot {
    int group, member;  // member: G is k, G + 1 is v
    bool is_v;
    long long head;  // row of [T, H, hd] or [T, Hkv, hd]
};

__device__ __forceinline__ Slot slot_of(long long token, int slot, int groups, int queries) {
    const int group = slot / (queries + 2), member = slot % (queries + 2);
    const long long head = member < queries ? (token * groups + group) * queries + member : token * groups + group;
    return {group, member, member == queries + 1, head};
}

// The columns of pair i < half: rotated pairs first, then those that are not rotated.
struct Pair {
    int at[2];
    bool is_turned;
    __device__ __forceinline__ Pair(int i, int half, int turned)
        : at{i < turned ? i : turned + i, i < turned ? turned + i : half + i}, is_turned(i < turned) {}
};

template <typename T>
__device__ __forceinline__ T* pick(const Slot& slot, int queries, T* q, T* k, T* v) {
    return slot.is_v ? v : slot.member == queries ? k : q;
}

__device__ __forceinline__ float team_sum(float value, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// 1 / sqrt(mean(x^2) + eps) of a head.
template <typename T, int N>
__device__ __forceinline__ float head_rstd(const T* x, int half, int lane, int lanes, float eps) {
    float squares = 0.0f;
    for (int i = lane * N; i < half; i += lanes * N) {
        const auto first = load<T, N>(x + i), second = load<T, N>(x + half + i);
#pragma unroll
        for (int k = 0; k < N; ++k)
            squares += widen(first.at[k]) * widen(first.at[k]) + widen(second.at[k]) * widen(second.at[k]);
    }
    return rsqrtf(team_sum(squares, lanes) / static_cast<float>(2 * half) + eps);
}

// Loads a norm's weights at both columns of a pair and of the N - 1 following pairs; they may be misaligned.
template <typename T, int N>
__device__ __forceinline__ void load_weights(Pack<T, N> (&to)[2], const T* weight, const Pair& pair) {
    const bool is_aligned = reinterpret_cast<unsigned long long>(weight) % sizeof(Pack<T, N>) == 0;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        if (is_aligned) {
            to[side] = load<T, N>(weight + pair.at[side]);
        } else {
#pragma unroll
            for (int n = 0; n < N; ++n) to[side].at[n] = weight[pair.at[side] + n];
        }
    }
}

template <typename T, int N>
__device__ __forceinline__ void forward(
    const T* __restrict__ qkv,       // [T, S, hd]
    const T* __restrict__ q_weight,  // [hd], or null: no norms
    const T* __restrict__ k_weight,  // [hd], or null
    const float* __restrict__ cos,   // [T, 2 turned]
    const float* __restrict__ sin,   // [T, 2 turned]: -sin, then sin
    T* __restrict__ q,               // [T, H, hd]
    T* __restrict__ k,               // [T, Hkv, hd]
    T* __restrict__ v,               // [T, Hkv, hd]
    long long tokens, int groups, int queries, int half, int turned, int lanes, float eps, float centre
) {
    const int slots = groups * (queries + 2), lane = threadIdx.x % lanes;
    const long long index = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / lanes;
    const bool is_active = index < tokens * slots;
    const long long row = is_active ? index : 0;  // surplus teams take part in the sums of their warp
    const long long token = row / slots;
    const Slot slot = slot_of(token, static_cast<int>(row % slots), groups, queries);
    const T* x = qkv + row * 2 * half;
    T* y = pick(slot, queries, q, k, v) + slot.head * 2 * half;
    const T* weight = slot.member < queries ? q_weight : k_weight;
    const float scale = q_weight ? head_rstd<T, N>(x, half, lane, lanes, eps) : 1.0f;
    if (!is_active) return;
    for (int i = lane * N; i < half; i += lanes * N) {
        const Pair pair(i, half, turned);
        auto first = load<T, N>(x + pair.at[0]), second = load<T, N>(x + pair.at[1]);
        if (!slot.is_v) {
            Pack<float, N> c, s;
            if (pair.is_turned) c = load<float, N>(cos + token * 2 * turned + i), s = load<float, N>(sin + (token * 2 + 1) * turned + i);
            Pack<T, N> weights[2];
            if (q_weight) load_weights(weights, weight, pair);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float a = widen(first.at[n]) * scale, b = widen(second.at[n]) * scale;
                if (q_weight) a *= centre + widen(weights[0].at[n]), b *= centre + widen(weights[1].at[n]);
                narrow(pair.is_turned ? a * c.at[n] - b * s.at[n] : a, first.at[n]);
                narrow(pair.is_turned ? b * c.at[n] + a * s.at[n] : b, second.at[n]);
            }
        }
        store(y + pair.at[0], first), store(y + pair.at[1], second);
    }
}

// A team keeps its slot and strides over tokens; its lanes sum their own columns.
template <typename T, int N, int ITEMS>
__device__ __forceinline__ void backward(
    const T* __restrict__ dq,          // [T, H, hd]
    const T* __restrict__ dk,          // [T, Hkv, hd]
    const T* __restrict__ dv,          // [T, Hkv, hd]
    const T* __restrict__ qkv,         // [T, S, hd], read only for norms
    const T* __restrict__ q_weight,    // [hd], or null: no norms
    const T* __restrict__ k_weight,    // [hd], or null
    const float* __restrict__ cos,     // [T, 2 turned]
    const float* __restrict__ sin,     // [T, 2 turned]
    T* __restrict__ d_qkv,             // [T, S, hd]
    float* __restrict__ d_bias,        // [stripes, S, hd], or null
    float* __restrict__ d_norm,        // [stripes, S, hd], or null: no norms
    long long tokens, int groups, int queries, int half, int turned, int lanes, int stripes, float eps, float centre
) {
    const int slots = groups * (queries + 2), lane = threadIdx.x % lanes, teams = blockDim.x / lanes;
    const int slot_blocks = gridDim.x / stripes, stripe = blockIdx.x / slot_blocks;
    const int index = blockIdx.x % slot_blocks * teams + threadIdx.x / lanes;
    const bool is_active = index < slots;
    const int own = is_active ? index : 0;
    const Slot kept_slot = slot_of(0, own, groups, queries);
    const bool has_norm = q_weight && !kept_slot.is_v;
    Pack<T, N> weights[ITEMS][2];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int i = (item * lanes + lane) * N;
        if (has_norm && i < half) load_weights(weights[item], kept_slot.member < queries ? q_weight : k_weight, Pair(i, half, turned));
    }
    float bias[2][ITEMS][N] = {}, norm[2][ITEMS][N] = {};
    for (long long token = stripe; token < tokens; token += stripes) {
        const Slot slot = slot_of(token, own, groups, queries);
        const T* dy = pick(slot, queries, dq, dk, dv) + slot.head * 2 * half;
        const long long row = (token * slots + own) * 2 * half;
        float d[2][ITEMS][N] = {}, projection = 0.0f, scale = 1.0f;
        Pack<T, N> from[ITEMS][2];  // the head, if there are norms
        if (q_weight) scale = head_rstd<T, N>(qkv + row, half, lane, lanes, eps);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int i = (item * lanes + lane) * N;
            if (i >= half) break;
            const Pair pair(i, half, turned);
            const bool is_turned = pair.is_turned && !slot.is_v;
            const auto first = load<T, N>(dy + pair.at[0]), second = load<T, N>(dy + pair.at[1]);
            Pack<float, N> c, s;
            if (is_turned) c = load<float, N>(cos + token * 2 * turned + i), s = load<float, N>(sin + (token * 2 + 1) * turned + i);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float a = widen(first.at[n]), b = widen(second.at[n]);
                d[0][item][n] = is_turned ? a * c.at[n] + b * s.at[n] : a;
                d[1][item][n] = is_turned ? b * c.at[n] - a * s.at[n] : b;
            }
            if (!has_norm) continue;
#pragma unroll
            for (int side = 0; side < 2; ++side) from[item][side] = load<T, N>(qkv + row + pair.at[side]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const float x = widen(from[item][side].at[n]);
                    norm[side][item][n] += d[side][item][n] * x * scale;
                    d[side][item][n] *= centre + widen(weights[item][side].at[n]);
                    projection += d[side][item][n] * x;
                }
            }
        }
        if (q_weight) {  // every lane of the warp takes part in the sum
            const float coefficient = -scale * scale * scale * team_sum(projection, lanes) / static_cast<float>(2 * half);
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                const int i = (item * lanes + lane) * N;
                if (i >= half || slot.is_v) break;
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int side = 0; side < 2; ++side)
                        d[side][item][n] = d[side][item][n] * scale + widen(from[item][side].at[n]) * coefficient;
            }
        }
        if (!is_active) continue;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int i = (item * lanes + lane) * N;
            if (i >= half) break;
            const Pair pair(i, half, turned);
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                Pack<T, N> out;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    narrow(d[side][item][n], out.at[n]);
                    bias[side][item][n] += widen(out.at[n]);
                }
                store(d_qkv + row + pair.at[side], out);
            }
        }
    }
    if (!is_active) return;
    const long long sums = (static_cast<long long>(stripe) * slots + own) * 2 * half;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int i = (item * lanes + lane) * N;
        if (i >= half) break;
        const Pair pair(i, half, turned);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            for (int side = 0; side < 2; ++side) {
                if (d_bias) d_bias[sums + pair.at[side] + n] = bias[side][item][n];
                if (d_norm) d_norm[sums + pair.at[side] + n] = norm[side][item][n];
            }
        }
    }
}

#define HEADS(SUFFIX, T, N, ITEMS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) heads_forward_##SUFFIX(                                       \
        const T* qkv, const T* q_weight, const T* k_weight, const float* cos, const float* sin, T* q, T* k, T* v,   \
        long long tokens, long long groups, long long queries, long long half, long long turned, long long lanes,   \
        float eps, float centre) {                                                                                  \
        forward<T, N>(qkv, q_weight, k_weight, cos, sin, q, k, v, tokens, groups, queries, half, turned, lanes,     \
                      eps, centre);                                                                                 \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) heads_backward_##SUFFIX(                                      \
        const T* dq, const T* dk, const T* dv, const T* qkv, const T* q_weight, const T* k_weight, const float* cos, \
        const float* sin, T* d_qkv, float* d_bias, float* d_norm, long long tokens, long long groups,               \
        long long queries, long long half, long long turned, long long lanes, long long stripes, float eps,         \
        float centre) {                                                                                             \
        backward<T, N, ITEMS>(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, d_qkv, d_bias, d_norm, tokens, groups, \
                              queries, half, turned, lanes, stripes, eps, centre);                                  \
    }

HEADS(f32_x1, float, 1, 8)
HEADS(f32_x4, float, 4, 1)
HEADS(bf16_x1, bf16, 1, 8)
HEADS(bf16_x8, bf16, 8, 1)
