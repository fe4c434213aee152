// The sum over a tensor-parallel group of what its ranks' row-parallel products gave, the residual sum and the RMSNorm behind
// it, in one launch: x += the ranks' parts, added in rank order in float32, rounded once; y = x / sqrt(mean(x^2) + eps) *
// weight. N ranks, T rows of D = 8 packs-of-bf16 elements; one thread has one pack of a row.
//
// Every rank maps every other's memory, which begins with `Control` and is laid out alike on all. Three ways, the same bits:
//   boxes    Each rank sends its part to all, every word beside the number of the call, and sums all rows: one trip.
//   read     Ranks meet, then each reads all parts and sums all rows.
//   share    Ranks meet, then each sums and norms every N-th row, whose x it alone keeps from then on, and writes y to all.
//
// Calls are counted on the device, so that a recorded launch can be replayed. Two calls in a row must have their parts in
// different places: a rank that has finished the later one knows that all have read the earlier one's, not that all have read
// the later one's. A rank that waits for peers looks at `abort`, too; then it goes on with whatever is there.
#include "scalar.cuh"

constexpr int MOST_RANKS = 8;
constexpr int MOST_BLOCKS = 512;
constexpr int SPINS = 1024;  // looks at a flag between two at `abort`, which lies on the host

struct Ranks {
    char* at[MOST_RANKS];  // the memory of every rank, as this one sees it
};

struct Control {
    unsigned calls[MOST_BLOCKS];                  // of each block so far
    unsigned met[2][MOST_BLOCKS][MOST_RANKS];     // the call that a rank's block has come to: before and after the sums
};

using Row = Pack<bf16, 8>;

__device__ __forceinline__ bool is_aborted(const unsigned* abort) {
    unsigned word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(abort) : "memory");
    return word != 0;
}

// Tells all ranks that this block has come to `call`, before the sums or `AFTER` them, and waits until theirs have. What the
// kernels before wrote is seen by all then; after the sums, what the blocks wrote, too.
template <int N, bool AFTER>
__device__ __forceinline__ void meet(const Ranks& ranks, int rank, unsigned call, const unsigned* abort) {
    __syncthreads();
    if (threadIdx.x < N) {
        const auto flags = [&](int of) { return reinterpret_cast<Control*>(ranks.at[of])->met[AFTER][blockIdx.x]; };
        unsigned* flag = &flags(threadIdx.x)[rank];
        // The kernels before have ended: their writes are in memory, and wait for no fence.
        if (AFTER) asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
        else asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
        unsigned come, spins = 0;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(come) : "l"(&flags(rank)[threadIdx.x]) : "memory");
        } while (static_cast<int>(come - call) < 0 && !(++spins % SPINS == 0 && is_aborted(abort)));
    }
    __syncthreads();
}

__device__ __forceinline__ void add(const Row& part, float (&sum)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += widen(part.at[j]);
}

// x of a row with its sum, and its norm; a thread behind the row's end takes part with zeros.
__device__ __forceinline__ Row norm(Row& kept, const float (&sum)[8], const Row& weight, long long dim, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        narrow(widen(kept.at[j]) + sum[j], kept.at[j]);
        squares += widen(kept.at[j]) * widen(kept.at[j]);
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
    Row y;
#pragma unroll
    for (int j = 0; j < 8; ++j) narrow(widen(kept.at[j]) * scale * widen(weight.at[j]), y.at[j]);
    return y;
}

template <int N, bool SHARE>
__device__ __forceinline__ void sum_rows(
    const Ranks& ranks,
    int rank,
    long long parts,   // where a rank's part is in its memory, [T, D]
    long long normed,  // where y is, [T, D]
    const unsigned* abort,
    bf16* x,             // [T, D]; what is not this rank's to keep is neither read nor written
    const bf16* weight,  // [D]
    int rows,
    int packs,
    float eps
) {
    wait_for_inputs();
    auto* control = reinterpret_cast<Control*>(ranks.at[rank]);
    const unsigned call = control->calls[blockIdx.x] + 1;
    const int first = SHARE ? static_cast<int>(blockIdx.x) * N + rank : blockIdx.x;
    const int step = SHARE ? gridDim.x * N : gridDim.x;
    const bool is_in = threadIdx.x < packs;
    auto* kept_rows = reinterpret_cast<Row*>(x);
    Row kept{}, scale{};
    if (is_in) {
        scale = reinterpret_cast<const Row*>(weight)[threadIdx.x];
        if (first < rows) kept = kept_rows[static_cast<long long>(first) * packs + threadIdx.x];
    }
    meet<N, false>(ranks, rank, call, abort);
    for (int row = first; row < rows; row += step) {
        const long long at = static_cast<long long>(row) * packs + threadIdx.x;
        float sum[8] = {};
        if (is_in) {
            Row part[N];
#pragma unroll
            for (int r = 0; r < N; ++r) part[r] = reinterpret_cast<const Row*>(ranks.at[r] + parts)[at];
            if (row != first) kept = kept_rows[at];
#pragma unroll
            for (int r = 0; r < N; ++r) add(part[r], sum);
        }
        const Row y = norm(kept, sum, scale, 8ll * packs, eps);
        if (!is_in) continue;
        kept_rows[at] = kept;
#pragma unroll
        for (int r = 0; r < N; ++r) {
            if (SHARE || r == rank) reinterpret_cast<Row*>(ranks.at[r] + normed)[at] = y;
        }
    }
    if (SHARE) meet<N, true>(ranks, rank, call, abort);
    if (threadIdx.x == 0) control->calls[blockIdx.x] = call;
}

// Two words, each with its call, moved as one.
__device__ __forceinline__ void send(char* to, unsigned first, unsigned second, unsigned call) {
    asm volatile(
        "{.reg .b64 a, b;\n"
        "mov.b64 a, {%1, %3};\n"
        "mov.b64 b, {%2, %3};\n"
        "st.relaxed.sys.global.v2.b64 [%0], {a, b};}" ::"l"(to), "r"(first), "r"(second), "r"(call)
        : "memory");
}
__device__ __forceinline__ void receive(const char* from, unsigned (&words)[2], unsigned (&calls)[2]) {
    asm volatile(
        "{.reg .b64 a, b;\n"
        "ld.relaxed.sys.global.v2.b64 {a, b}, [%4];\n"
        "mov.b64 {%0, %1}, a;\n"
        "mov.b64 {%2, %3}, b;}"
        : "=r"(words[0]), "=r"(calls[0]), "=r"(words[1]), "=r"(calls[1])
        : "l"(from)
        : "memory");
}

template <int N>
__device__ __forceinline__ void sum_boxes(
    const Ranks& ranks,
    int rank,
    long long parts,
    long long normed,
    long long boxes,  // where they are: [2, N, T, 2, packs] of 16 bytes, the calls of a block taking turns
    long long box_rows,
    const unsigned* abort,
    bf16* x,             // [T, D]
    const bf16* weight,  // [D]
    int packs,
    float eps
) {
    constexpr int TOGETHER = N < 4 ? N : 4;  // ranks whose boxes are looked at at once
    union Words {
        Row row;
        unsigned of_half[2][2];
    };
    wait_for_inputs();
    auto* control = reinterpret_cast<Control*>(ranks.at[rank]);
    const unsigned call = control->calls[blockIdx.x] + 1;
    const bool is_in = threadIdx.x < packs;
    const long long at = static_cast<long long>(blockIdx.x) * packs + threadIdx.x;
    const auto box = [&](int of, int from, int half) {
        const long long row = ((call % 2) * N + from) * box_rows + blockIdx.x;
        return ranks.at[of] + boxes + ((2 * row + half) * packs + threadIdx.x) * 16;
    };
    Row kept{}, scale{};
    float sum[8] = {};
    if (is_in) {
        const Words own = {reinterpret_cast<const Row*>(ranks.at[rank] + parts)[at]};
#pragma unroll
        for (int r = 0; r < 2 * N; ++r) send(box(r / 2, rank, r % 2), own.of_half[r % 2][0], own.of_half[r % 2][1], call);
        kept = reinterpret_cast<const Row*>(x)[at];
        scale = reinterpret_cast<const Row*>(weight)[threadIdx.x];
#pragma unroll
        for (int first = 0; first < N; first += TOGETHER) {
            Words part[TOGETHER];
            unsigned calls[TOGETHER][2][2], differ, spins = 0;
            do {
#pragma unroll
                for (int k = 0; k < 2 * TOGETHER; ++k)
                    receive(box(rank, first + k / 2, k % 2), part[k / 2].of_half[k % 2], calls[k / 2][k % 2]);
                differ = 0;
#pragma unroll
                for (int k = 0; k < 4 * TOGETHER; ++k) differ |= calls[k / 4][k / 2 % 2][k % 2] ^ call;
            } while (differ && !(++spins % SPINS == 0 && is_aborted(abort)));
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) add(part[k].row, sum);
        }
    }
    const Row y = norm(kept, sum, scale, 8ll * packs, eps);
    if (is_in) {
        reinterpret_cast<Row*>(x)[at] = kept;
        reinterpret_cast<Row*>(ranks.at[rank] + normed)[at] = y;
    }
    if (threadIdx.x == 0) control->calls[blockIdx.x] = call;
}

#define KERNEL(NAME, SUM)                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024) NAME(                                                            \
        const __grid_constant__ Ranks ranks, long long rank, long long parts, long long normed, const unsigned* abort,  \
        bf16* x, const bf16* weight, long long rows, long long packs, float eps, long long boxes, long long box_rows) { \
        SUM;                                                                                                            \
    }

#define ALL_REDUCE(N)                                                                                                   \
    KERNEL(all_reduce_boxes_##N, sum_boxes<N>(ranks, rank, parts, normed, boxes, box_rows, abort, x, weight, packs, eps)) \
    KERNEL(all_reduce_read_##N, (sum_rows<N, false>(ranks, rank, parts, normed, abort, x, weight, rows, packs, eps)))   \
    KERNEL(all_reduce_share_##N, (sum_rows<N, true>(ranks, rank, parts, normed, abort, x, weight, rows, packs, eps)))

ALL_REDUCE(2)
ALL_REDUCE(4)
ALL_REDUCE(8)
