// The gated delta net of a decode step, between its projections, on Hopper, for heads of width 128 in bfloat16. Computes the same bits as
// `delta_step` in `delta_step.cu`.
//
// Such a step is bound by reading and writing states. A head's state is contiguous in memory: one copy brings it to shared memory, where it is
// updated in place, and another writes it back. A block processes one head of one sequence at a time. One warp copies; four warps compute, with 32
// columns each, and 32 rows of 4 columns per lane. Other blocks on the multiprocessor hide a block's waits.
#include "hopper.cuh"
#include "scalar.cuh"

constexpr int DIM = 128;              // of keys and values
constexpr int WIDTH = 4;              // of the convolution
constexpr int COMPUTING = 128;        // threads
constexpr int THREADS = 160;          // with the warp that copies
constexpr int SMALL_BYTES = 3200;     // of shared memory, in addition to a state
constexpr int BLOCKS_F32 = 3;         // per multiprocessor, with float32 states
constexpr int BLOCKS_BF16 = 6;
constexpr float LENGTH_EPS = 1e-6f;
enum { COMPUTED = 1, TOGETHER = 2 };  // named barriers

template <typename S>
struct Layer {
    const bf16* __restrict__ qkv;       // [T, C], rows qkv_row apart
    const bf16* __restrict__ z;         // [T, H dv], rows z_row apart
    const bf16* __restrict__ b;         // [T, H], rows b_row apart
    const bf16* __restrict__ a;         // [T, H], rows a_row apart
    long long qkv_row, z_row, b_row, a_row;
    const bf16* __restrict__ conv;      // [C, width]
    const bf16* __restrict__ a_log;     // [H]
    const bf16* __restrict__ dt_bias;   // [H]
    const bf16* __restrict__ norm;      // [dv]
    bf16* tails;                        // [pages, slots, C]: the row of position p in slot p % slots
    S* states;                          // [pages, H, dk, dv]
    const int* __restrict__ pages;      // [T], -1: none, outputs are 0
    const int* __restrict__ positions;  // [T]
    bf16* __restrict__ out;             // [T, H dv]
    int key_heads, value_heads;
    float eps;
    int slots;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename S>
struct alignas(128) Shared {
    S state[DIM][DIM];
    float raw_q[DIM], raw_k[DIM], q[DIM], k[DIM], v[DIM], out[DIM];
    float decay, strength;
    alignas(8) unsigned long long arrived;
};
static_assert(sizeof(Shared<float>) == DIM * DIM * 4 + SMALL_BYTES && sizeof(Shared<bf16>) == DIM * DIM * 2 + SMALL_BYTES, "");

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float4 load_quad(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ float4 load_quad(const bf16* from) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
                       __uint_as_float(bits.y & 0xffff0000u));
}
__device__ __forceinline__ void store_quad(float* to, const float4& row) { *reinterpret_cast<float4*>(to) = row; }
__device__ __forceinline__ void store_quad(bf16* to, const float4& row) {
    bf16 at[4];
    narrow(row.x, at[0]), narrow(row.y, at[1]), narrow(row.z, at[2]), narrow(row.w, at[3]);
    *reinterpret_cast<uint2*>(to) =
        make_uint2(at[0].bits | static_cast<unsigned>(at[1].bits) << 16, at[2].bits | static_cast<unsigned>(at[3].bits) << 16);
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& row) {
    sum.x = fmaf(factor, row.x, sum.x), sum.y = fmaf(factor, row.y, sum.y);
    sum.z = fmaf(factor, row.z, sum.z), sum.w = fmaf(factor, row.w, sum.w);
}

// Sums over all lanes with the same columns, in the order of `delta_step.cu`.
__device__ __forceinline__ float4 sum_of_rows(const float4& a, const float4& b) {
    float4 sum = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
#pragma unroll
    for (int step = 8; step < 32; step *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, step), sum.y += __shfl_xor_sync(~0u, sum.y, step);
        sum.z += __shfl_xor_sync(~0u, sum.z, step), sum.w += __shfl_xor_sync(~0u, sum.w, step);
    }
    return sum;
}

__device__ __forceinline__ unsigned address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }
__device__ __forceinline__ void join(int barrier, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void copy_in(unsigned to, const void* from, int bytes, unsigned arrived) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(arrived)
                 : "memory");
}

// Writes shared memory back; returns once shared memory has been read.
__device__ __forceinline__ void copy_out(void* to, unsigned from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Copies the states of the block's items; one warp. Pages, positions and states were written before an earlier
// kernel that had waited for its inputs, so the first state is loaded while the kernels between end.
template <typename S>
__device__ __forceinline__ void carry(const Layer<S>& layer, Shared<S>& at, int items) {
    const bool leads = threadIdx.x % 32 == 0;
    const unsigned state = address(at.state), arrived = address(&at.arrived);
    bool has_waited = false;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int run = item / layer.value_heads, head = item % layer.value_heads;
        const int page = layer.pages[run], start = layer.positions[run];
        if (page < 0) continue;
        S* own = layer.states + (static_cast<long long>(page) * layer.value_heads + head) * DIM * DIM;
        if (leads && start > 0) {
            expect(arrived, sizeof(at.state));
            copy_in(state, own, sizeof(at.state), arrived);
        } else if (leads) {
            arrive(arrived);
        }
        if (!has_waited) wait_for_inputs();
        has_waited = true;
        join(COMPUTED, THREADS);
        if (leads) copy_out(own, state, sizeof(at.state));
        __syncwarp();
    }
    if (leads) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <typename S>
__device__ __forceinline__ void compute(const Layer<S>& layer, Shared<S>& at, int items) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = threadIdx.x;
    const int shared_by = layer.value_heads / layer.key_heads, channels = (2 * layer.key_heads + layer.value_heads) * DIM;
    const int column = warp * 32 + lane % 8 * 4, first_row = lane / 8 * 8;
    const unsigned arrived = address(&at.arrived);
    const float scale = rsqrtf(static_cast<float>(DIM)), norm = widen(layer.norm[place]);
    int parity = 0;
    wait_for_inputs();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int run = item / layer.value_heads, head = item % layer.value_heads, key_head = head / shared_by;
        const int page = layer.pages[run], start = layer.positions[run];
        bf16* out = layer.out + (static_cast<long long>(run) * layer.value_heads + head) * DIM;
        if (page < 0) {
            out[place] = bf16{0};
            continue;
        }
        bf16* tail = layer.tails + static_cast<long long>(page) * layer.slots * channels;
        const int slot = start % layer.slots;
        // The thread's channels: of queries, of keys and of values.
        const int own[3] = {key_head * DIM + place, (layer.key_heads + key_head) * DIM + place,
                            (2 * layer.key_heads + head) * DIM + place};
        Pack<bf16, WIDTH> weights[3];
        bf16 past[3][WIDTH];  // of a token that many positions earlier
#pragma unroll
        for (int kind = 0; kind < 3; ++kind) {
            weights[kind] = load<bf16, WIDTH>(layer.conv + own[kind] * WIDTH);
            past[kind][0] = layer.qkv[run * layer.qkv_row + own[kind]];
#pragma unroll
            for (int d = 1; d < WIDTH; ++d)
                past[kind][d] =
                    start >= d ? tail[(slot >= d ? slot - d : slot - d + layer.slots) * static_cast<long long>(channels) + own[kind]] : bf16{0};
        }
        const bf16 gate = layer.z[run * layer.z_row + head * DIM + place];
        if (place == 0) {
            const float sum = widen(layer.a[run * layer.a_row + head]) + widen(layer.dt_bias[head]);
            at.strength = sigmoid(widen(layer.b[run * layer.b_row + head]));
            at.decay = expf(-expf(widen(layer.a_log[head])) * (fmaxf(sum, 0.0f) + log1pf(expf(-fabsf(sum)))));
        }
        float mixed[3];
#pragma unroll
        for (int kind = 0; kind < 3; ++kind) {
            float y = widen(past[kind][0]) * widen(weights[kind].at[WIDTH - 1]);
#pragma unroll
            for (int d = 1; d < WIDTH; ++d) y = fmaf(widen(past[kind][d]), widen(weights[kind].at[WIDTH - 1 - d]), y);
            mixed[kind] = y * sigmoid(y);
            if (kind == 2 || head % shared_by == 0)
                tail[slot * static_cast<long long>(channels) + own[kind]] = past[kind][0];
        }
        at.raw_q[place] = mixed[0], at.raw_k[place] = mixed[1], at.v[place] = mixed[2];
        join(TOGETHER, COMPUTING);
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (int i = lane; i < DIM; i += 32) {
            const float query = at.raw_q[i], key = at.raw_k[i];
            qq = fmaf(query, query, qq), kk = fmaf(key, key, kk), qk = fmaf(query, key, qk);
        }
        qq = rsqrtf(warp_sum(qq) + LENGTH_EPS) * scale, kk = rsqrtf(warp_sum(kk) + LENGTH_EPS), qk = warp_sum(qk);
        at.q[place] = mixed[0] * qq, at.k[place] = mixed[1] * kk;
        const float along = qk * qq * kk;
        join(TOGETHER, COMPUTING);
        const float decay = at.decay, strength = at.strength;
        const float4 value = load_quad(&at.v[column]);
        wait(arrived, parity);
        parity ^= 1;
        if (start == 0)
#pragma unroll 8
            for (int r = 0; r < 32; ++r)
                store_quad(&at.state[r / 8 * 32 + first_row + r % 8][column], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        // Two groups of rows, each in the order of one lane of `delta_step.cu`.
        float4 of_k[2], of_q[2];
        of_k[0] = of_k[1] = of_q[0] = of_q[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = 32 * j + first_row + 4 * half;
                const float4 keys = load_quad(&at.k[first]), queries = load_quad(&at.q[first]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 row = load_quad(&at.state[first + i][column]);
                    add_scaled(of_k[half], (&keys.x)[i], row);
                    add_scaled(of_q[half], (&queries.x)[i], row);
                }
            }
        const float4 k_sum = sum_of_rows(of_k[0], of_k[1]), q_sum = sum_of_rows(of_q[0], of_q[1]);
        const float4 delta = make_float4(strength * fmaf(-decay, k_sum.x, value.x), strength * fmaf(-decay, k_sum.y, value.y),
                                         strength * fmaf(-decay, k_sum.z, value.z), strength * fmaf(-decay, k_sum.w, value.w));
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = 32 * j + first_row + 4 * half;
                const float4 keys = load_quad(&at.k[first]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float key = (&keys.x)[i];
                    float4 row = load_quad(&at.state[first + i][column]);
                    row.x = fmaf(decay, row.x, key * delta.x), row.y = fmaf(decay, row.y, key * delta.y);
                    row.z = fmaf(decay, row.z, key * delta.z), row.w = fmaf(decay, row.w, key * delta.w);
                    store_quad(&at.state[first + i][column], row);
                }
            }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("barrier.cta.arrive %0, %1;" ::"r"(COMPUTED), "r"(THREADS) : "memory");
        if (lane < 8)
            store_quad(&at.out[column], make_float4(fmaf(decay, q_sum.x, along * delta.x), fmaf(decay, q_sum.y, along * delta.y),
                                                    fmaf(decay, q_sum.z, along * delta.z), fmaf(decay, q_sum.w, along * delta.w)));
        join(TOGETHER, COMPUTING);
        float squares = 0.0f;
#pragma unroll
        for (int i = lane; i < DIM; i += 32) squares = fmaf(at.out[i], at.out[i], squares);
        const float rstd = rsqrtf(warp_sum(squares) / static_cast<float>(DIM) + layer.eps), x = widen(gate);
        narrow(x * sigmoid(x) * (at.out[place] * rstd * norm), out[place]);
    }
}

template <typename S>
__device__ __forceinline__ void delta_decode(const Layer<S>& layer, int tokens) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Shared<S>& at = *reinterpret_cast<Shared<S>*>(dynamic);
    if (threadIdx.x == 0) {
        init(address(&at.arrived), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int items = tokens * layer.value_heads;
    if (threadIdx.x < COMPUTING)
        compute(layer, at, items);
    else
        carry(layer, at, items);
}

#else

template <typename S>
__device__ __forceinline__ void delta_decode(const Layer<S>&, int) {}

#endif

// Same parameters as `delta_step`; the widths are compile-time constants.
#define DELTA_DECODE(NAME, S, BLOCKS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) delta_decode_##NAME(                                    \
        const bf16* qkv, const bf16* z, const bf16* b, const bf16* a, long long qkv_row, long long z_row,                 \
        long long b_row, long long a_row, const bf16* conv, const bf16* a_log, const bf16* dt_bias, const bf16* norm,     \
        bf16* tails, S* states, const int* pages, const int* positions, bf16* out, long long key_heads,                   \
        long long value_heads, long long, long long, long long, float eps, long long slots, long long tokens              \
    ) {                                                                                                                   \
        const Layer<S> layer = {                                                                                          \
            qkv, z, b, a, qkv_row, z_row, b_row, a_row, conv, a_log, dt_bias, norm, tails, states, pages, positions, out, \
            static_cast<int>(key_heads), static_cast<int>(value_heads), eps, static_cast<int>(slots)                      \
        };                                                                                                                \
        delta_decode(layer, static_cast<int>(tokens));                                                                    \
    }

DELTA_DECODE(f32, float, BLOCKS_F32)
DELTA_DECODE(bf16, bf16, BLOCKS_BF16)
