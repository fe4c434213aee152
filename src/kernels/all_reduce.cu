// All-reduce of a tensor-parallel group's row-parallel GEMM outputs, fused with the residual sum and the RMSNorm that follow, in one launch: x += the
// ranks' parts, added in rank order in float32 and rounded once to the type X of x; y = x / sqrt(mean(x^2) + eps) * (centre + weight). N ranks, T
// rows of D = 8 * packs bf16 elements; one thread has one pack of a row.
//
// If the next GEMM is in FP8 or int8, y is quantized with one scale per row, and y itself is only written if requested.
//
// Every rank maps every other rank's memory, which starts with `Control` and has the same layout on all ranks. There are two methods, with the same
// bits:
//   read     After a barrier each rank reads all parts and sums all rows.
//   share    After a barrier each rank sums and normalizes every N-th row, whose x only this rank keeps from then on, and writes y
//            to all ranks; then comes a second barrier.
//
// Sending parts without a barrier, with each word next to its call's number, would double the bytes: on four GPUs it was no faster for any number of
// rows.
//
// Calls are counted on the device, so that a captured launch can be replayed. Consecutive calls must have their parts in different places: when a
// rank has finished the later call, all ranks have read the parts of the earlier call, but perhaps not those of the later one. A rank that waits for
// peers also polls `abort`, and then continues with arbitrary data.
#include "rounded_rows.cuh"

constexpr int MOST_RANKS = 8;
constexpr int MOST_BLOCKS = 512;
constexpr int SPINS = 1024;  // polls of a flag between two polls of `abort`, which is in host memory

struct Ranks {
    char* at[MOST_RANKS];  // every rank's memory, at this rank's addresses
};

// Offsets in every rank's memory of the outputs made from y; -1 for those that are not written.
struct Outputs {
    long long normed;          // [T, D] bf16
    long long values, scales;  // [T, D] e4m3 or int8, [T] f32
    int block;                 // for int8: columns of a Hadamard matrix; 0 for e4m3
};

struct Control {
    unsigned calls[MOST_BLOCKS];                  // calls so far, per block
    unsigned met[2][MOST_BLOCKS][MOST_RANKS];     // the call that each rank's block has reached: before and after the sums
};
constexpr int CONTROL_BYTES = 4 * MOST_BLOCKS * (1 + 2 * MOST_RANKS);
static_assert(sizeof(Control) == CONTROL_BYTES, "the host puts the parts behind it");

using Row = Pack<bf16, 8>;

__device__ __forceinline__ bool is_aborted(const unsigned* abort) {
    unsigned word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(abort) : "memory");
    return word != 0;
}

// Barrier with the same block of all ranks: signals that this block has reached `call`, before the sums or `AFTER` them, and waits for the others.
// Then all see the writes of preceding kernels and, after the sums, the writes of these blocks.
template <int N, bool AFTER>
__device__ __forceinline__ void meet(const Ranks& ranks, int rank, unsigned call, const unsigned* abort) {
    __syncthreads();
    if (threadIdx.x < N) {
        const auto flags = [&](int of) { return reinterpret_cast<Control*>(ranks.at[of])->met[AFTER][blockIdx.x]; };
        unsigned* flag = &flags(threadIdx.x)[rank];
        // Preceding kernels have ended: their writes are in memory, so no fence is needed.
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

// Adds the parts to a row of x and computes its norm; threads beyond the row's end contribute zeros.
template <typename X>
__device__ __forceinline__ Row norm(
    Pack<X, 8>& kept, const float (&sum)[8], const Row& weight, long long dim, float eps, float centre
) {
    float values[8], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = widen(kept.at[j]) + sum[j];
    narrow(values, kept);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += widen(kept.at[j]) * widen(kept.at[j]);
    const float scale = rsqrtf(block_sum_at_once(squares) / static_cast<float>(dim) + eps);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = widen(kept.at[j]) * scale * (centre + widen(weight.at[j]));
    Row y;
    narrow(values, y);
    return y;
}

// Rounds a thread's pack of a row of y and writes it to the memory of one rank or of all ranks.
template <int N, bool ALL, typename Form>
__device__ __forceinline__ void write_rounded(
    const Form& form, const Ranks& ranks, int rank, const Outputs& to, const Row& y, bool is_in, long long row, long long at
) {
    const auto kept = form.keep(y, is_in);
    const auto scale = form.scale(block_max_bits(is_in ? form.most(kept, 0) : 0));
#pragma unroll
    for (int r = 0; r < N; ++r) {
        if (!ALL && r != rank) continue;
        if (is_in) scale.write(kept, reinterpret_cast<unsigned char*>(ranks.at[r] + to.values) + 8 * at);
        if (threadIdx.x == 0) reinterpret_cast<float*>(ranks.at[r] + to.scales)[row] = scale.scale;
    }
}

// Writes a thread's pack of a row of y to the memory of one rank or of all ranks. `row` counts rows, `at` counts packs from the first row on.
template <int N, bool ALL>
__device__ __forceinline__ void write(
    const Ranks& ranks, int rank, const Outputs& to, const Row& y, bool is_in, long long row, long long at
) {
    if (to.values >= 0 && to.block) write_rounded<N, ALL>(Int8Form(to.block), ranks, rank, to, y, is_in, row, at);
    else if (to.values >= 0) write_rounded<N, ALL>(E4m3Form(0), ranks, rank, to, y, is_in, row, at);
    if (!is_in || to.normed < 0) return;
#pragma unroll
    for (int r = 0; r < N; ++r) {
        if (ALL || r == rank) reinterpret_cast<Row*>(ranks.at[r] + to.normed)[at] = y;
    }
}

template <typename X, int N, bool SHARE>
__device__ __forceinline__ void sum_rows(
    const Ranks& ranks,
    int rank,
    long long parts,  // offset of a rank's part in its memory, [T, D]
    const Outputs& to,
    const unsigned* abort,
    X* x,                // [T, D]; rows that another rank keeps are neither read nor written
    const bf16* weight,  // [D]
    int rows,
    int packs,
    float eps,
    float centre  // 1 if weights are centred around 0, else 0
) {
    wait_for_inputs();
    auto* control = reinterpret_cast<Control*>(ranks.at[rank]);
    const unsigned call = control->calls[blockIdx.x] + 1;
    const int first = SHARE ? static_cast<int>(blockIdx.x) * N + rank : blockIdx.x;
    const int step = SHARE ? gridDim.x * N : gridDim.x;
    const bool is_in = threadIdx.x < packs;
    auto* kept_rows = reinterpret_cast<Pack<X, 8>*>(x);
    Pack<X, 8> kept{};
    Row scale{};
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
        const Row y = norm(kept, sum, scale, 8ll * packs, eps, centre);
        if (is_in) kept_rows[at] = kept;
        write<N, SHARE>(ranks, rank, to, y, is_in, row, at);
    }
    if (SHARE) meet<N, true>(ranks, rank, call, abort);
    if (threadIdx.x == 0) control->calls[blockIdx.x] = call;
}

#define ALL_REDUCE(NAME, X, N, SHARE)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024) NAME##_##N(                                                \
        const __grid_constant__ Ranks ranks, long long rank, long long parts, long long normed, long long values, \
        long long scales, const unsigned* abort, X* x, const bf16* weight, long long rows, long long packs, float eps, \
        float centre, long long block) {                                                                          \
        const Outputs to = {normed, values, scales, static_cast<int>(block)};                                     \
        sum_rows<X, N, SHARE>(ranks, rank, parts, to, abort, x, weight, rows, packs, eps, centre);                \
    }
#define ALL_REDUCES(NAME, X, SHARE) \
    ALL_REDUCE(NAME, X, 2, SHARE) ALL_REDUCE(NAME, X, 4, SHARE) ALL_REDUCE(NAME, X, 8, SHARE)

ALL_REDUCES(all_reduce_read_bf16, bf16, false)
ALL_REDUCES(all_reduce_read_f32, float, false)
ALL_REDUCES(all_reduce_share_bf16, bf16, true)
ALL_REDUCES(all_reduce_share_f32, float, true)
