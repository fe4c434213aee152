// Scalar types of the kernels: float, and bf16 as its bits, because CUDA's own bf16 header is not available everywhere.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define INT_MAX 0x7fffffff

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(bf16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

__device__ __forceinline__ void narrow(float value, float& to) { to = value; }
__device__ __forceinline__ void narrow(float value, bf16& to) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));  // to nearest, ties to even
}

// Converts two values in one instruction, because single conversions use a slower unit on sm_90 (F2F instead of F2FP).
__device__ __forceinline__ void narrow(float first, float second, float& to, float& next) { to = first, next = second; }
__device__ __forceinline__ void narrow(float first, float second, bf16& to, bf16& next) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    to.bits = static_cast<unsigned short>(both), next.bits = static_cast<unsigned short>(both >> 16);
}

// 2^x; 0 below the smallest normal number.
__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// N consecutive elements, moved as one access, or 16 bytes at a time: the host checks that addresses are multiples of 16, not of more.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T at[N];
};
static_assert(alignof(Pack<bf16, 2>) == 4 && alignof(Pack<bf16, 8>) == 16 && alignof(Pack<float, 8>) == 16, "");

// For kernels that are launched while the preceding one still runs: reads of that kernel's results, and all own writes, must come after this call.
// The next kernel may then be scheduled too. Does nothing in an ordinary launch, the only kind before sm_90.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Lets the next kernel be scheduled before this one's inputs are ready, which hides the launches of several small kernels in a row. What the next
// kernel reads before its own wait must then have been written before a kernel that has itself waited, not just before this one. Only GEMMs with
// few rows and small 8-bit kernels of a step use this, as no kernel of a step writes their weights. Does nothing where `wait_for_inputs` does nothing.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Stores a word that other blocks read or write concurrently; it does not order other accesses.
__device__ __forceinline__ void store_relaxed(int* to, int value) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ int load_relaxed(const int* from) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Converts all elements of a pack.
template <typename T, int N>
__device__ __forceinline__ void narrow(const float (&values)[N], Pack<T, N>& to) {
    if constexpr (N == 1) {
        narrow(values[0], to.at[0]);
    } else {
#pragma unroll
        for (int j = 0; j < N; j += 2) narrow(values[j], values[j + 1], to.at[j], to.at[j + 1]);
    }
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& values) {
    *reinterpret_cast<Pack<T, N>*>(to) = values;
}

// Maximum over the warp, equal in every lane.
__device__ __forceinline__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Maximum over the block, equal in every thread. Blocks must consist of whole warps.
__device__ __forceinline__ float block_max(float value) {
    __shared__ float warps[32];
    value = warp_max(value);
    __syncthreads();  // an earlier maximum has been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float peak = warps[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) peak = fmaxf(peak, warps[warp]);
    return peak;
}

// Sum over the block, equal in every thread. Blocks must consist of whole warps; the order is fixed, so the bits are reproducible.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float warps[32];
    value = warp_sum(value);
    __syncthreads();  // an earlier sum has been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warps[warp];
    return sum;
}

// `block_sum` with the same bits: sums of 16 warps are read at once, with zeros for absent warps, so that threads wait for shared memory once. For
// kernels with registers to spare.
__device__ __forceinline__ float block_sum_at_once(float value) {
    __shared__ alignas(16) float warps[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
    value = warp_sum(value);
    __syncthreads();  // an earlier sum has been read
    if (lane == 0) warps[warp] = value;
    if (warp == 0 && lane >= count) warps[lane] = 0.0f;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (unsigned first = 0; first < 32; first += 16) {
        if (first >= count) break;
        Pack<float, 4> fours[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) fours[i] = *reinterpret_cast<const Pack<float, 4>*>(&warps[first + 4 * i]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) sum += fours[i].at[k];
    }
    return sum;
}
