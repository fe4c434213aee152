// Filters whole rows of logits by min-p, top-k and top-p. The result for each draw is one cut (value, id): the ids up to the cut may be sampled.
// `filter_heads` reads each row once, in parts, and stores the best ids of each part. `filter` merges the parts of a row. If the filters keep only
// ids among these, which is so for a top-k of at most MOST or a top-p within the MOST best ids, the merged list gives the cut. Other rows are read
// again, three times per filter, to find the cut digit by digit. The result is exact: ties go to the lowest id, and sums that decide are sums of
// integers or have a fixed order. Ids with a value of minus infinity or NaN are not counted and never sampled.
#include "sample.cuh"

constexpr int THREADS = 512;
constexpr int MOST = 256;       // maximum number of best ids that a part stores
constexpr int MOST_PARTS = 16;  // maximum number of parts of a row
constexpr int HEAD_WORDS = 258;  // words of a part's result: number of ids, (peak, sum of exp(value - peak)), ids with their values
constexpr int GROUP = 4;        // ids that a thread reads at once
constexpr int RUN = 8;          // ids that a thread processes at a time: two groups, THREADS groups apart
constexpr int ROOM = 4 * MOST + RUN * THREADS;  // size of a list: it is shortened when longer than 4 MOST, after all threads may have added a run
constexpr int BINS = 2048;
constexpr int UNIT_BITS = 44;  // bits of a probability mass as an integer: the sum over 2^19 ids fits in 64 bits
constexpr float LEAST = -3.402823466e38f;

using Word = unsigned long long;

// The ids that a filter keeps: the first of all ids when sorted by descending value, then by ascending id.
struct Cut {
    unsigned key;  // smallest value that is kept, as a key in the order of the values
    int id;        // highest id that is kept among the ids with that value

    __device__ __forceinline__ bool keeps(unsigned other, int other_id) const {
        return other > key || (other == key && other_id <= id);
    }
};

// Converts a key back to its value.
__device__ __forceinline__ float value_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Packs an id and its value into one number. Descending numbers have descending values; for equal values, ascending ids.
__device__ __forceinline__ Word entry_of(float value, int id) {
    return static_cast<Word>(ordered(value)) << 32 | ~static_cast<unsigned>(id);
}
__device__ __forceinline__ unsigned key_of(Word entry) { return entry >> 32; }
__device__ __forceinline__ Cut cut_at(Word entry) { return {key_of(entry), static_cast<int>(~static_cast<unsigned>(entry))}; }

// The filters of one draw.
struct Filters {
    float min_p;  // 0: off
    int top_k;    // 0: off
    float top_p;  // 1: off

    __device__ __forceinline__ bool are_on() const { return min_p > 0.0f || top_k > 0 || top_p < 1.0f; }

    // Number of best ids of a part that the filters may need; min-p alone needs only the best one.
    __device__ __forceinline__ int head() const {
        if (top_k > 0) return min(top_k, MOST);
        return top_p < 1.0f ? MOST : 1;
    }

    // Whether the filters need the probability mass of the whole row.
    __device__ __forceinline__ bool weigh_all() const { return top_p < 1.0f && top_k <= 0 && !(min_p > 0.0f); }
};

// One row of processed logits, to which the sampler adds noise. The row is split into the shards of all ranks; shard k of n has the ids
// V k / n .. V (k + 1) / n.
struct Row {
    const float* logits;  // of the first shard
    long long to_next;    // elements between shards
    long long vocab, shards;
    float scale;
    Process process;

    // Calls visit(values, first ids of both groups) in all threads together, until all ids of a part are visited. Values beyond the last id are minus
    // infinity. The next logits are loaded before each visit.
    template <typename Visit>
    __device__ __forceinline__ void each_run(int part, int parts, const Visit& visit) const {
        for (long long shard = 0; shard < shards; ++shard) {
            const int first = vocab * shard / shards, width = vocab * (shard + 1) / shards - first;
            const float* columns = logits + shard * to_next;
            const bool is_aligned = reinterpret_cast<unsigned long long>(columns) % 16 == 0;
            const long long groups = (width + GROUP - 1) / GROUP;
            const int to = groups * (part + 1) / parts;
            const auto load_run = [&](int at, float (&out)[RUN]) {
#pragma unroll
                for (int j = 0; j < RUN; j += GROUP, at += THREADS) {
                    if (is_aligned && at < to && (at + 1) * GROUP <= width) {
                        const auto four = load<float, GROUP>(columns + at * GROUP);
#pragma unroll
                        for (int k = 0; k < GROUP; ++k) out[j + k] = four.at[k];
                    } else {
#pragma unroll
                        for (int k = 0; k < GROUP; ++k)
                            out[j + k] = at < to && at * GROUP + k < width ? columns[at * GROUP + k] : -INFINITY;
                    }
                }
            };
            const int from = groups * part / parts;
            float next[RUN];
            load_run(from + threadIdx.x, next);
            for (int begin = from; begin < to; begin += 2 * THREADS) {
                const int at = begin + threadIdx.x;
                const int ids[2] = {first + at * GROUP, first + (at + THREADS) * GROUP};
                float values[RUN];
#pragma unroll
                for (int k = 0; k < RUN; ++k) {
                    const int id = min(ids[k / GROUP] + k % GROUP, static_cast<int>(vocab) - 1);  // within the words of `seen`
                    values[k] = process(next[k], scale, id);
                }
                if (begin + 2 * THREADS < to) load_run(at + 2 * THREADS, next);
                visit(values, ids);
            }
        }
    }
};

__device__ __forceinline__ int id_of(const int (&ids)[2], int k) { return ids[k / GROUP] + k % GROUP; }

// Sorts `count` entries of shared memory, the highest first; all threads come here together. Entries beyond are as if there were the
// least ones, which no comparison moves. What lies within the 64 entries of a warp's pairs needs no barrier of the block.
__device__ __forceinline__ void sort(Word* entries, int count) {
    const auto exchange = [&](int low, int high) {
        if (high >= count) return;
        const Word first = entries[low], second = entries[high];
        if (first < second) entries[low] = second, entries[high] = first;
    };
    __syncthreads();
    for (int size = 2; size < 2 * count; size *= 2) {
        if (size > 64) __syncthreads();
        for (int pair = threadIdx.x; 2 * pair < count + size; pair += THREADS) {
            const int within = pair & (size / 2 - 1), from = 2 * (pair - within);
            exchange(from + within, from + size - 1 - within);
        }
        for (int stride = size / 4; stride > 0; stride /= 2) {
            if (stride >= 32) __syncthreads();
            else __syncwarp();
            for (int pair = threadIdx.x; 2 * pair < count + size; pair += THREADS) {
                const int low = 2 * pair - (pair & (stride - 1));
                exchange(low, low + stride);
            }
        }
        __syncwarp();
    }
    __syncthreads();
}

// A value that at least `count` of the threads' own reach, rounded down to some bits; LEAST where there is none.
__device__ __forceinline__ float common_bar(float own, int count) {
    const unsigned key = own > -INFINITY ? ordered(own) : 0;
    unsigned found = 0;
    for (int bit = 31; bit >= 16; --bit) {
        const unsigned trial = found | 1u << bit;
        if (__syncthreads_count(key >= trial) >= count) found = trial;
    }
    return found > ordered(LEAST) ? value_of(found) : LEAST;
}

// The best ids of a part, and where a nucleus is asked for also its mass. A block has one part.
extern "C" __global__ void __launch_bounds__(THREADS, 2) filter_heads(
    const float* __restrict__ logits,        // [shards, rows, stride]: draws first .. first + rows
    const int* __restrict__ positions,       // [S] 0: no draw
    const float* __restrict__ temperatures,  // [S]
    const float* __restrict__ penalties,     // [S] or null
    const unsigned* __restrict__ seen,       // [S, words] or null
    const float* __restrict__ min_ps,        // [S] 0: off
    const int* __restrict__ top_ks,          // [S] 0: off
    const float* __restrict__ top_ps,        // [S] 1: off
    Word* __restrict__ heads,                // [rows, parts, HEAD_WORDS]
    long long parts, long long first, long long rows, long long stride, long long vocab, long long shards, long long words
) {
    __shared__ Word list[ROOM];
    __shared__ int length;
    wait_for_inputs();
    const long long r = blockIdx.x / parts, s = first + r;
    const float temperature = temperatures[s];
    const Filters filters = {min_ps[s], top_ks[s], top_ps[s]};
    if (positions[s] <= 0 || !(temperature > 0.0f) || !filters.are_on()) return;
    Row row = {logits + r * stride, rows * stride, vocab, shards, __fdiv_rn(1.0f, temperature), {}};
    row.process.penalty = penalties ? penalties[s] : 1.0f;
    if (row.process.penalty != 1.0f) row.process.seen = seen + s * words;

    const int head = filters.head(), full = max(4 * head, MOST);
    const bool weighs = filters.weigh_all();
    // What enters the list: the values that reach the bar, and of them the entries above the last one of a full head.
    float bar = LEAST, peak = LEAST, sum = 0.0f;
    Word last = 0;
    bool is_first = true;
    const auto shorten = [&] {
        __syncthreads();
        const int count = length;
        sort(list, count);
        if (count >= head) last = list[head - 1], bar = value_of(key_of(last));
        if (threadIdx.x == 0) length = min(count, head);
        __syncthreads();
    };
    if (threadIdx.x == 0) length = 0;
    __syncthreads();
    row.each_run(blockIdx.x % parts, parts, [&](const float (&values)[RUN], const int (&ids)[2]) {
        float top = values[0];
#pragma unroll
        for (int k = 1; k < RUN; ++k) top = fmaxf(top, values[k]);
        if (is_first) bar = common_bar(top, head), is_first = false;
        if (weighs) {
            if (top > peak) sum *= expf(peak - top), peak = top;
#pragma unroll
            for (int k = 0; k < RUN; ++k) sum += expf(values[k] - peak);
        }
        bool is_full = false;
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            if (!(values[k] >= bar)) continue;
            const Word entry = entry_of(values[k], id_of(ids, k));
            if (entry <= last) continue;
            const int at = atomicAdd(&length, 1);
            list[at] = entry;
            is_full |= at >= full;
        }
        if (__syncthreads_or(is_full)) shorten();
    });
    shorten();
    Word* out = heads + blockIdx.x * static_cast<long long>(HEAD_WORDS);
    for (int k = threadIdx.x; k < length; k += THREADS) out[2 + k] = list[k];
    if (weighs) {
        const float whole_peak = block_max(peak);
        sum = block_sum(sum * expf(peak - whole_peak)), peak = whole_peak;
    }
    if (threadIdx.x == 0) {
        out[0] = length;
        out[1] = static_cast<Word>(__float_as_uint(peak)) << 32 | __float_as_uint(sum);
    }
}

// Weights by digit of a key, in two halves: shared memory adds 32 bits at once.
struct Bins {
    unsigned low[BINS], high[BINS];

    __device__ __forceinline__ void add(unsigned bin, Word weight) {
        const unsigned added = static_cast<unsigned>(weight);
        const unsigned before = atomicAdd(&low[bin], added);
        const unsigned up = static_cast<unsigned>(weight >> 32) + (before + added < before);
        if (up) atomicAdd(&high[bin], up);
    }

    __device__ __forceinline__ Word at(unsigned bin) const { return static_cast<Word>(high[bin]) << 32 | low[bin]; }
};

// The largest key whose ids of that or a higher key weigh at least a target together.
struct Found {
    unsigned key;
    Word target, above, weight;  // the target, the weight of all higher keys and that of this one
};

// Finds it digit by digit, a pass over the row each: the topmost digit at bit FIRST (21: all keys; 10: keys of 21 bits). `weigh(id, value,
// key)` gives an id's weight and key, weight 0 for ids that do not count; `target(total)` is at least 1 and at most the total.
template <int FIRST, typename Weigh, typename Target>
__device__ __forceinline__ Found descend(const Row& row, Bins& bins, const Weigh& weigh, const Target& target) {
    constexpr int OWN = BINS / THREADS, WARPS = THREADS / 32;
    __shared__ Word warps[WARPS];
    __shared__ Found shared_found;
    Found found = {};
    for (int shift = FIRST, known = 32;; known = shift, shift = shift == 21 ? 10 : 0) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) bins.low[bin] = bins.high[bin] = 0;
        __syncthreads();
        const unsigned mask = shift == 0 ? 1023 : 2047;
        row.each_run(0, 1, [&](const float (&values)[RUN], const int (&ids)[2]) {
#pragma unroll
            for (int k = 0; k < RUN; ++k) {
                if (!(values[k] > -INFINITY)) continue;
                unsigned key;
                const Word weight = weigh(id_of(ids, k), values[k], key);
                if (weight == 0 || (known < 32 && key >> known != found.key >> known)) continue;
                bins.add(key >> shift & mask, weight);
            }
        });
        __syncthreads();
        // Sums from the highest bin down, OWN bins a thread.
        const int highest = BINS - 1 - OWN * threadIdx.x;
        Word own = 0;
        for (int k = 0; k < OWN; ++k) own += bins.at(highest - k);
        Word sum = own;
        for (int step = 1; step < 32; step *= 2) {
            const Word other = __shfl_up_sync(~0u, sum, step);
            if (threadIdx.x % 32 >= step) sum += other;
        }
        if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = sum;
        __syncthreads();
        Word total = 0, before = found.above + sum - own;
        for (int warp = 0; warp < WARPS; ++warp) {
            total += warps[warp];
            if (warp < threadIdx.x / 32) before += warps[warp];
        }
        if (known == 32) found.target = target(total);
        if (before < found.target && before + own >= found.target) {
            int bin = highest;
            while (before + bins.at(bin) < found.target) before += bins.at(bin), --bin;
            shared_found = {found.key | static_cast<unsigned>(bin) << shift, found.target, before, bins.at(bin)};
        }
        __syncthreads();
        found = shared_found;
        if (shift == 0) return found;
    }
}

// The smallest head of what `cut` keeps that weighs at least the target, where ids of one value weigh the same.
template <typename Weight, typename Target>
__device__ __forceinline__ Cut smallest_head(const Row& row, Bins& bins, const Cut& cut, const Weight& weight, const Target& target) {
    const auto weigh = [&](int id, float v, unsigned& key) {
        key = ordered(v);
        return cut.keeps(key, id) ? weight(v) : 0;
    };
    const Found found = descend<21>(row, bins, weigh, target);
    const Word one = weight(value_of(found.key)), ties = found.weight / one;
    const Word needed = (found.target - found.above + one - 1) / one;
    if (needed >= ties) return {found.key, found.key == cut.key ? cut.id : INT_MAX};
    constexpr unsigned HIGHEST = (1u << 21) - 1;
    const auto reversed = [&](int id, float v, unsigned& key) {
        key = HIGHEST - id;
        return static_cast<Word>(ordered(v) == found.key && cut.keeps(found.key, id));
    };
    const Found last = descend<10>(row, bins, reversed, [&](Word) { return needed; });
    return {found.key, static_cast<int>(HIGHEST - last.key)};
}

// How many of the first `count` entries it takes, in their order, to reach this part of `total`, or of their own sum if that is null. -1:
// all together do not reach it. 0: some value is not a number or infinite, and nothing will be drawn. By one warp.
__device__ __forceinline__ int nucleus(const Word* entries, int count, float top, double part, const double* total) {
    const auto mass = [&](int at) {
        return at < count ? exp(static_cast<double>(value_of(key_of(entries[at]))) - top) : 0.0;
    };
    const auto walk = [&](double target, double& sum) {
        sum = 0.0;
        for (int begin = 0; begin < count; begin += 32) {
            const double own = mass(begin + threadIdx.x % 32);
            for (int k = 0; k < 32 && begin + k < count; ++k) {
                if (!(sum < target)) return begin + k;
                sum += __shfl_sync(~0u, own, k);
            }
        }
        return count;
    };
    double whole, sum;
    if (total) whole = *total;
    else walk(INFINITY, whole);
    if (!(whole < INFINITY)) return 0;
    const int kept = walk(part * whole, sum);
    return kept == count && total && sum < part * whole ? -1 : max(kept, 1);
}

// min-p (p >= min_p max p), then top-k, then top-p (the fewest whose mass among what is left reaches it), as one cut a draw. A block
// has one row.
extern "C" __global__ void __launch_bounds__(THREADS, 2) filter(
    const float* __restrict__ logits,        // as above
    const int* __restrict__ positions,
    const float* __restrict__ temperatures,
    const float* __restrict__ penalties,
    const unsigned* __restrict__ seen,
    const float* __restrict__ min_ps,
    const int* __restrict__ top_ks,
    const float* __restrict__ top_ps,
    const Word* __restrict__ heads,
    Cut* __restrict__ cuts,  // [rows]
    long long parts, long long first, long long rows, long long stride, long long vocab, long long shards, long long words
) {
    __shared__ Word entries[MOST_PARTS * MOST];
    __shared__ int counts[MOST_PARTS];
    __shared__ int shared_kept;
    static_assert(sizeof(Bins) <= sizeof(entries), "");
    wait_for_inputs();
    const long long s = first + blockIdx.x;
    const float temperature = temperatures[s];
    const Filters filters = {min_ps[s], top_ks[s], top_ps[s]};
    Cut cut = {0, INT_MAX};
    if (positions[s] <= 0 || !(temperature > 0.0f) || !filters.are_on()) {
        if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
        return;
    }
    const Word* own = heads + blockIdx.x * parts * HEAD_WORDS;
    if (threadIdx.x < parts) counts[threadIdx.x] = own[threadIdx.x * HEAD_WORDS];
    __syncthreads();
    const int head = filters.head();
    int count = 0;
    bool is_whole = true;  // the entries are all ids of the row
    for (int part = 0; part < parts; ++part) count += counts[part], is_whole &= counts[part] < head;
#pragma unroll 4
    for (int slot = threadIdx.x; slot < parts * head; slot += THREADS) {
        const int part = slot / head, at = slot % head;
        int before = 0;
        for (int earlier = 0; earlier < part; ++earlier) before += counts[earlier];
        if (at < counts[part]) entries[before + at] = own[part * HEAD_WORDS + 2 + at];
    }
    __syncthreads();
    if (parts > 1) sort(entries, count);
    if (!is_whole) count = head;  // of those after it others may be better
    if (count > 0) {
        const float top = value_of(key_of(entries[0]));
        if (filters.min_p > 0.0f) {
            const float least = top + logf(filters.min_p);
            cut.key = ordered(least == 0.0f ? -0.0f : least);  // both zeros are as large
        }
        int kept = 0;  // entries that are kept so far: all ids that are, where `is_known`
        for (int step = MOST_PARTS * MOST; step > 0; step /= 2)
            if (kept + step <= count && key_of(entries[kept + step - 1]) >= cut.key) kept += step;
        bool is_known = is_whole || kept < count, is_read_again = false;
        Row row = {logits + blockIdx.x * stride, rows * stride, vocab, shards, __fdiv_rn(1.0f, temperature), {}};
        row.process.penalty = penalties ? penalties[s] : 1.0f;
        if (row.process.penalty != 1.0f) row.process.seen = seen + s * words;
        Bins& bins = *reinterpret_cast<Bins*>(entries);
        if (filters.top_k > 0 && kept >= filters.top_k + is_known) {
            kept = filters.top_k, is_known = true, cut = cut_at(entries[kept - 1]);
        } else if (filters.top_k > 0 && !is_known) {
            const Word most = filters.top_k;
            cut = smallest_head(row, bins, cut, [](float) { return Word(1); }, [&](Word total) { return min(most, total); });
            is_read_again = true;
        }
        if (filters.top_p < 1.0f && kept > 0) {
            int nucleus_kept = -1;
            if (!is_read_again && (is_known || filters.weigh_all())) {
                if (threadIdx.x < 32) {
                    double total = 0.0;
                    for (int part = 0; part < parts && !is_known; ++part) {
                        const Word mass = own[part * HEAD_WORDS + 1];
                        const float peak = __uint_as_float(mass >> 32), sum = __uint_as_float(mass & ~0u);
                        total += sum * exp(static_cast<double>(peak) - top);
                    }
                    const int decided = nucleus(entries, kept, top, filters.top_p, is_known ? nullptr : &total);
                    if (threadIdx.x == 0) shared_kept = decided;
                }
                __syncthreads();
                nucleus_kept = shared_kept;
            }
            if (nucleus_kept < 0) {
                const auto mass = [&](float v) {
                    const float share = v == top ? 1.0f : expf(__fsub_rn(v, top));
                    return __float2ull_rn(share * (1ull << UNIT_BITS));
                };
                const auto target = [&](Word total) {
                    const Word part = ceil(static_cast<double>(filters.top_p) * total);
                    return max(min(part, total), Word(1));
                };
                cut = smallest_head(row, bins, cut, mass, target);
            } else if (nucleus_kept > 0 && (nucleus_kept < kept || !is_known)) {
                cut = cut_at(entries[nucleus_kept - 1]);
            }
        }
    }
    if (threadIdx.x == 0) cuts[blockIdx.x] = cut;
}
