// Attention of one new token per sequence over its context in the paged cache, o = softmax(scale q k^T) v, in bf16 on tensor cores. Query heads of
// one key/value head share loads: up to 8 of them are half of the rows in the m16n8k16 multiplications that give scores, and the columns in those
// that give outputs, so that weights stay in their registers. A row's own keys and values are loaded from memory directly into registers, in the
// layout of the multiplications: the order of head columns within a multiplication and of outputs within a tile is free, so 16-byte loads fit.
//
// `plan_attention` divides all contexts of a step into items, once for all layers; blocks of four warps take items as they become free. The warps of
// an item either process every fourth unit of 16 tokens of one row (its own part), or two rows each of a group with a common prefix (the shared part,
// whose tokens pass once through shared memory for all of them). In plans with a fixed split, a shared part is a whole split of every row, and each
// row gets the same bits as from an own part. A row of several pieces has partial results; the last item to finish merges them in order. The cache is
// bf16, or e4m3 or int8 with one scale per token and head.
#include "attention_column.cuh"

template <int HD, typename E, bool SINKS, Split SPLIT_KIND>
__device__ __forceinline__ void attend_items(Column<HD, E, SINKS> column, Header* header, const Item* __restrict__ items) {
    __shared__ alignas(16) Pool<HD, E> pool;
    __shared__ int next;
    if constexpr (sizeof(E) == 1) let_next_begin();
    wait_for_inputs();
    int index = blockIdx.x;
    Item item = items[index / column.columns];  // every block can read one, even if it is not of this step
    const int total = header->num_items * column.columns;
    while (index < total) {
        if (threadIdx.x == 0) next = gridDim.x + atomicAdd(&header->next, 1);
        column.move_to(index % column.columns);
        Item upcoming = {};
        const auto look_ahead = [&] { if (next < total) upcoming = items[next / column.columns]; };
        bool is_done = false;
        if constexpr (!IS_WIDE<HD> && SPLIT_KIND != FIXED) {
            if (item.is_shared) {
                if constexpr (SPLIT_KIND == FIXED_SHARED) column.attend_split(item, pool.stages);
                else column.attend_shared(item, pool.stages);
                __syncthreads();
                look_ahead();
                is_done = true;
            }
        }
        if (!is_done) column.template attend_own<SPLIT_KIND>(item, pool.outs, Direct{}, look_ahead);
        index = next, item = upcoming;
        __syncthreads();  // all have read `next`, and shared memory is free
    }
    leave(header);
}

#define ATTEND(HD, E, SINKS, SPLIT_KIND, K_SCALES, V_SCALES, AT) \
    SHAPE;                                                       \
    attend_items<HD, E, SINKS, SPLIT_KIND>(COLUMN(HD, K_SCALES, V_SCALES, AT), header, items)

#define PAGED_ATTENTION(NAME, HD, SPLIT_KIND) \
    KERNEL NAME(STEP(bf16), SIZES) { ATTEND(HD, bf16, false, SPLIT_KIND, nullptr, nullptr, nullptr); }
#define PAGED_ATTENTION_SINKS(NAME, HD) \
    KERNEL NAME(STEP(bf16), SIZES, const bf16* sinks) { ATTEND(HD, bf16, true, CHOSEN, nullptr, nullptr, sinks); }
#define PAGED_ATTENTION_8(NAME, HD, E)                                                      \
    KERNEL NAME(STEP(E), const float* k_scales, const float* v_scales, SIZES) {            \
        ATTEND(HD, E, false, CHOSEN, k_scales, v_scales, nullptr);                         \
    }
#define PAGED_ATTENTION_8_SINKS(NAME, HD, E)                                                         \
    KERNEL NAME(STEP(E), const float* k_scales, const float* v_scales, SIZES, const bf16* sinks) {  \
        ATTEND(HD, E, true, CHOSEN, k_scales, v_scales, sinks);                                     \
    }

PAGED_ATTENTION(paged_attention_bf16_64, 64, CHOSEN)
PAGED_ATTENTION(paged_attention_bf16_128, 128, CHOSEN)
PAGED_ATTENTION(paged_attention_bf16_256, 256, CHOSEN)
PAGED_ATTENTION(paged_attention_bf16_64_fixed, 64, FIXED)
PAGED_ATTENTION(paged_attention_bf16_128_fixed, 128, FIXED)
PAGED_ATTENTION(paged_attention_bf16_64_fixed_shared, 64, FIXED_SHARED)
PAGED_ATTENTION(paged_attention_bf16_128_fixed_shared, 128, FIXED_SHARED)
PAGED_ATTENTION_8(paged_attention_bf16_64_fp8, 64, unsigned char)
PAGED_ATTENTION_8(paged_attention_bf16_128_fp8, 128, unsigned char)
PAGED_ATTENTION_8(paged_attention_bf16_64_int8, 64, signed char)
PAGED_ATTENTION_8(paged_attention_bf16_128_int8, 128, signed char)
PAGED_ATTENTION_SINKS(paged_attention_bf16_64_sinks, 64)
PAGED_ATTENTION_SINKS(paged_attention_bf16_128_sinks, 128)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_64_fp8_sinks, 64, unsigned char)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_128_fp8_sinks, 128, unsigned char)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_64_int8_sinks, 64, signed char)
PAGED_ATTENTION_8_SINKS(paged_attention_bf16_128_int8_sinks, 128, signed char)
