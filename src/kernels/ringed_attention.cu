// Decode attention like paged_attention.cu, with the same bits, on Hopper: TMA brings a row's own keys and values through rings in shared memory, where
// paged_attention.cu loads them into registers. Those loads need the L1 cache, of which GEMMs of the same layer leave little. For a bf16 cache and heads
// of at most 128 columns, with the split that the plan chose.
#include "attention_column.cuh"
#include "attention_ring.cuh"

// Shared memory of a block: before the results, the rings of own parts or the stages of a shared part. More is slower (docs/benchmarks/fp8.md).
constexpr int SHARED_BYTES = 81920;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int HD>
struct RingedPool {
    static constexpr int OUTS = SHARED_BYTES - static_cast<int>(sizeof(Outs<HD>)), STEP_BYTES = WARPS * UNITS * UNIT * HD * 2;
    static constexpr int HALVES = OUTS / STEP_BYTES;
    static_assert(HALVES >= 2 && sizeof(Stages<HD, bf16>) <= OUTS, "");
};

// A block's warps read own parts through rings; `early` is called early, once.
template <typename R, typename Early>
struct ThroughRings {
    static constexpr bool RINGED = true;
    R& ring;
    const Early& early;

    template <typename Work>
    __device__ __forceinline__ void attend(Work& work, const Geometry& shape, int begin, int end) const {
        attend_ring<UNITS>(work, ring, shape, begin, end, early);
    }
};

// Like `attend_items`, with own parts through rings, which copy the next own part while one ends. Own parts follow the shared parts.
template <int HD, bool SINKS>
__device__ __forceinline__ void attend_items(
    Column<HD, bf16, SINKS> column, Header* header, const Item* __restrict__ items, const TensorMap* k_boxes, const TensorMap* v_boxes
) {
    using Sizes = RingedPool<HD>;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[WARPS * Sizes::HALVES];
    __shared__ int next;
    auto& outs = *reinterpret_cast<Outs<HD>*>(memory + Sizes::OUTS);
    Ring<HD, UNITS, Sizes::HALVES> ring(memory, shared_address(barriers), column.shape, k_boxes, v_boxes);
    wait_for_inputs();
    int index = blockIdx.x;
    Item item = items[index / column.columns];  // every block can read one, even if it is not of this step
    const int total = header->num_items * column.columns;
    const auto take_number = [&] { return static_cast<int>(gridDim.x) + atomicAdd(&header->next, 1); };
    const auto follow = [&](const Item& own, int number) {
        ring.follow(column.table_of(own.rows[0]), number % column.columns / column.shape.chunks(), own.begin, own.end);
    };
    bool is_started = false;  // whether the rings copy this item and all that follow
    const auto start = [&] {
        if (is_started || index >= total || item.is_shared) return;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // shared parts have used the memory
        follow(item, index);
        ring.fill();
        is_started = true;
    };
    if (threadIdx.x == 0 && index < total) next = take_number();
    start();
    __syncthreads();
    while (index < total) {
        const int following = next;
        int number = 0;
        if (threadIdx.x == 0) number = take_number();  // needed later
        column.move_to(index % column.columns);
        Item upcoming = {};
        const auto look_ahead = [&] {
            if (following < total) upcoming = items[following / column.columns];
            if (threadIdx.x == 0) next = number;
        };
        const auto early = [&] { if (following < total) follow(items[following / column.columns], following); };
        if (item.is_shared) {
            column.attend_shared(item, *reinterpret_cast<Stages<HD, bf16>*>(memory));
            __syncthreads();
            look_ahead();
        } else {
            column.template attend_own<CHOSEN>(item, outs, ThroughRings<decltype(ring), decltype(early)>{ring, early}, look_ahead);
        }
        index = following, item = upcoming;
        __syncthreads();  // all have read `next`, and shared memory is free
        start();
    }
    leave(header);
}

#else  // other GPUs: never launched there

template <int HD, bool SINKS>
__device__ __forceinline__ void attend_items(Column<HD, bf16, SINKS>, Header*, const Item*, const TensorMap*, const TensorMap*) {}

#endif

// The maps are for boxes of a unit's rows in the caches [blocks Hkv block_size, hd].
#define BOXES const __grid_constant__ TensorMap k_boxes, const __grid_constant__ TensorMap v_boxes
#define ATTEND(HD, SINKS, AT) \
    SHAPE;                    \
    attend_items<HD, SINKS>(COLUMN(HD, nullptr, nullptr, AT), header, items, &k_boxes, &v_boxes)
#define RINGED_ATTENTION(NAME, HD)                                                    \
    KERNEL NAME(BOXES, STEP(bf16), SIZES) { ATTEND(HD, false, nullptr); }             \
    KERNEL NAME##_sinks(BOXES, STEP(bf16), SIZES, const bf16* sinks) { ATTEND(HD, true, sinks); }

RINGED_ATTENTION(ringed_attention_bf16_64, 64)
RINGED_ATTENTION(ringed_attention_bf16_128, 128)
