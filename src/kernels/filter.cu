// min-p, top-k and top-p over whole rows of the vocabulary: the ids that may be sampled, as one cut (value, id) per draw. A block has one row and
// passes over it as often as necessary: exact, and without atomics.
#include "sample.cuh"

constexpr int THREADS = 1024;

// The ids that a filter keeps: a prefix of the ids sorted by descending value, ties by the lowest id.
struct Cut {
    unsigned key;  // smallest ordered value that is kept
    int id;        // the highest id kept among those with that value

    __device__ __forceinline__ bool keeps(unsigned other, int other_id) const {
        return other > key || (other == key && other_id <= id);
    }
};

// One row of the vocabulary, as values to which noise will be added. It is stored in shards of all ranks; shard k of n has the ids V k / n .. V (k +
// 1) / n.
struct Row {
    const float* logits;  // of the first shard
    long long to_next;    // elements between shards
    long long vocab, shards;
    float scale;
    Process process;

    // Calls visit(id, value) for all ids of this thread.
    template <typename Visit>
    __device__ __forceinline__ void each(const Visit& visit) const {
        for (long long shard = 0; shard < shards; ++shard) {
            const int first = vocab * shard / shards, end = vocab * (shard + 1) / shards;
            const float* part = logits + shard * to_next - first;
            for (int id = first + threadIdx.x; id < end; id += THREADS) visit(id, process(part[id], scale, id));
        }
    }
};

// Sums over the row what `visit(id, value, sums)` adds; N sums at once, equal in every thread.
template <int N, typename Visit>
__device__ __forceinline__ void sum_over(const Row& row, float (&sums)[N], const Visit& visit) {
    __shared__ float warps[THREADS / 32][N];
#pragma unroll
    for (int k = 0; k < N; ++k) sums[k] = 0.0f;
    row.each([&](int id, float v) { visit(id, v, sums); });
    __syncthreads();  // earlier sums have been read
#pragma unroll
    for (int k = 0; k < N; ++k) {
        for (int step = 16; step > 0; step /= 2) sums[k] += __shfl_xor_sync(~0u, sums[k], step);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32][k] = sums[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) {
        sums[k] = 0.0f;
        for (int warp = 0; warp < THREADS / 32; ++warp) sums[k] += warps[warp][k];
    }
}

// The largest key such that ids with that or a higher key have a total weight of at least `target`; it is found four bits per pass. `weigh(id, value,
// key)` returns an id's weight and key; ids that do not count have weight 0.
template <typename Weigh>
__device__ __forceinline__ unsigned descend(const Row& row, float target, const Weigh& weigh) {
    unsigned found = 0;
    for (int shift = 28; shift >= 0; shift -= 4) {
        float sums[15];  // for keys from found + 1, 2 .. 15 steps on
        sum_over(row, sums, [&](int id, float v, float (&sums)[15]) {
            unsigned key;
            const float weight = weigh(id, v, key);
            if (weight == 0.0f) return;
#pragma unroll
            for (unsigned digit = 1; digit < 16; ++digit)
                if (key >= (found | digit << shift)) sums[digit - 1] += weight;
        });
        unsigned digit = 0;
#pragma unroll
        for (unsigned next = 1; next < 16; ++next) digit += sums[next - 1] >= target;
        found |= digit << shift;
    }
    return found;
}

// The smallest prefix of the ids in `cut` with a total weight of at least `target`, where ids of equal value have equal weight.
template <typename Weight>
__device__ __forceinline__ Cut smallest_head(const Row& row, float target, const Cut& cut, const Weight& weight) {
    const unsigned key = descend(row, target, [&](int id, float v, unsigned& key) {
        key = ordered(v);
        return cut.keeps(key, id) ? weight(v) : 0.0f;
    });
    float sums[3];  // weight above the key; number and weight of the ids with the key
    sum_over(row, sums, [&](int id, float v, float (&sums)[3]) {
        if (!cut.keeps(ordered(v), id) || ordered(v) < key) return;
        if (ordered(v) > key) sums[0] += weight(v);
        else sums[1] += 1.0f, sums[2] += weight(v);
    });
    if (sums[1] == 0.0f) return cut;  // rounding: everything together weighs less than the target
    const float needed = ceilf((target - sums[0]) / (sums[2] / sums[1]));
    if (needed >= sums[1]) return {key, key == cut.key ? cut.id : INT_MAX};
    const unsigned last = descend(row, fmaxf(needed, 1.0f), [&](int id, float v, unsigned& reversed) {
        reversed = ~static_cast<unsigned>(id);
        return ordered(v) == key && cut.keeps(key, id) ? 1.0f : 0.0f;
    });
    return {key, static_cast<int>(~last)};
}

// min-p (p >= min_p max p), then top-k, then top-p (the fewest ids whose share of the remaining mass reaches it), as one cut per draw.
extern "C" __global__ void __launch_bounds__(THREADS) filter(
    const float* __restrict__ logits,        // [shards, rows, stride]: draws first .. first + rows
    const int* __restrict__ positions,       // [S] 0: no draw
    const float* __restrict__ temperatures,  // [S]
    const float* __restrict__ penalties,     // [S] or null
    const unsigned* __restrict__ seen,       // [S, words] or null
    const float* __restrict__ min_ps,        // [S] 0: off
    const int* __restrict__ top_ks,          // [S] 0: off
    const float* __restrict__ top_ps,        // [S] 1: off
    Cut* __restrict__ cuts,                  // [rows]
    long long first, long long rows, long long stride, long long vocab, long long shards, long long words
) {
    wait_for_inputs();
    const long long s = first + blockIdx.x;
    const int top_k = top_ks[s];
    const float temperature = temperatures[s], min_p = min_ps[s], top_p = top_ps[s];
    Cut cut = {0, INT_MAX};
    if (positions[s] > 0 && temperature > 0.0f && (min_p > 0.0f || top_k > 0 || top_p < 1.0f)) {
        Row row = {logits + blockIdx.x * stride, rows * stride, vocab, shards, __fdiv_rn(1.0f, temperature), {}};
        row.process.penalty = penalties ? penalties[s] : 1.0f;
        if (row.process.penalty != 1.0f) row.process.seen = seen + s * words;
        float top = -INFINITY;
        row.each([&](int, float v) { top = fmaxf(top, v); });
        top = block_max(top);
        if (min_p > 0.0f) cut.key = ordered(top + logf(min_p));
        if (top_k > 0) {
            float count[1];
            sum_over(row, count, [&](int id, float v, float (&count)[1]) {
                count[0] += cut.keeps(ordered(v), id) ? 1.0f : 0.0f;
            });
            if (count[0] > top_k) cut = smallest_head(row, top_k, cut, [](float) { return 1.0f; });
        }
        if (top_p < 1.0f) {
            const auto mass = [&](float v) { return expf(v - top); };
            float total[1];
            sum_over(row, total, [&](int id, float v, float (&total)[1]) {
                total[0] += cut.keeps(ordered(v), id) ? mass(v) : 0.0f;
            });
            cut = smallest_head(row, top_p * total[0], cut, mass);
        }
    }
    if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
}
