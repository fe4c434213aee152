// The gate of attention's output, o = o sigmoid(gate): each head has a gate next to its query in the GEMM's output. The sigmoid is rounded to T, as
// in the trainer.
#include "scalar.cuh"

// A thread processes N consecutive elements.
template <typename T, int N>
__device__ __forceinline__ void gate(
    T* __restrict__ o,           // [T, Hkv, G, hd]
    const T* __restrict__ gate,  // [T, Hkv, G, hd], by strides
    long long row, long long group_stride, long long head, long long count, int kv_heads, int group, int dim
) {
    wait_for_inputs();
    const long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (at >= count) return;
    const int column = at % dim, place = at / dim % group, kv_head = at / dim / group % kv_heads;
    const long long token = at / dim / group / kv_heads;
    const auto gates = load<T, N>(gate + token * row + kv_head * group_stride + place * head + column);
    auto values = load<T, N>(o + at);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        T share;
        narrow(1.0f / (1.0f + expf(-widen(gates.at[j]))), share);
        narrow(widen(values.at[j]) * widen(share), values.at[j]);
    }
    store(o + at, values);
}

#define GATE(NAME, T, N)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME(T* o, const T* gates, long long row, long long group_stride,   \
                                                           long long head, long long count, long long kv_heads,           \
                                                           long long group, long long dim) {                              \
        gate<T, N>(o, gates, row, group_stride, head, count, static_cast<int>(kv_heads), static_cast<int>(group),         \
                   static_cast<int>(dim));                                                                                \
    }

GATE(gate_f32_x1, float, 1)
GATE(gate_f32_x4, float, 4)
GATE(gate_bf16_x1, bf16, 1)
GATE(gate_bf16_x8, bf16, 8)
