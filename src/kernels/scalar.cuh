// Scalars of the kernels: float, and bf16 as its bits, since CUDA's own header for it is not at hand everywhere.
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

// Two by one instruction, as single values that are used at once go through a slower unit of sm_90 (F2F beside F2FP).
__device__ __forceinline__ void narrow(float first, float second, float& to, float& next) { to = first, next = second; }
__device__ __forceinline__ void narrow(float first, float second, bf16& to, bf16& next) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    to.bits = static_cast<unsigned short>(both), next.bits = static_cast<unsigned short>(both >> 16);
}

// 2^x; below the smallest normal number it is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// N neighbours, moved as one access, or 16 bytes at a time: the host looks for addresses that are multiples of 16, not of more.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T at[N];
};
static_assert(alignof(Pack<bf16, 2>) == 4 && alignof(Pack<bf16, 8>) == 16 && alignof(Pack<float, 8>) == 16, "");

// Of kernels that are launched while the one before still runs: what that one writes, and all that they write themselves, comes
// after this. The next one may then be brought to the processors, too. Both do nothing in an ordinary launch, which is the only kind
// before sm_90.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The next kernel may be brought to the processors before this one's inputs are there, which hides the launches of several small kernels in
// a row. Then what the next one reads before its own wait must have been written before a kernel that has waited first, not only before this
// one: of a step's kernels only those of FP8 do this, whose weights no kernel of a step writes. Does nothing where `wait_for_inputs` does not.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A word that other blocks read while they run, or write; by itself it says nothing of other words.
__device__ __forceinline__ void store_relaxed(int* to, int value) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ int load_relaxed(const int* from) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// All of a pack.
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

// Over the warp, the same in every lane.
__device__ __forceinline__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Maximum over the block, the same in every thread. Blocks of whole warps.
__device__ __forceinline__ float block_max(float value) {
    __shared__ float warps[32];
    value = warp_max(value);
    __syncthreads();  // readers of an earlier maximum are done
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float peak = warps[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) peak = fmaxf(peak, warps[warp]);
    return peak;
}

// Sum over the block, the same in every thread. Blocks of whole warps; a fixed order, so the same bits every time.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float warps[32];
    value = warp_sum(value);
    __syncthreads();  // readers of an earlier sum are done
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warps[warp];
    return sum;
}

// `block_sum`, the same bits: sums of 16 warps are read at once, zeros where there is no warp, so that threads wait for shared memory
// once. For kernels with registers to spare.
__device__ __forceinline__ float block_sum_at_once(float value) {
    __shared__ alignas(16) float warps[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
    value = warp_sum(value);
    __syncthreads();  // readers of an earlier sum are done
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
