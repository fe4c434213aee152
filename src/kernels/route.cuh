// The router's processing of logits and choices: parameters of route.cu, selection and sorting. Scores are the softmax of logits, which may have
// biases, or sigmoids. For sigmoids a correction is added when experts are selected; weights do not include it.
#pragma once
#include "scalar.cuh"
#include "tiles.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 16;      // tokens per cluster
constexpr int PARTS = 8;      // of D, one per block of the cluster
constexpr int COLUMNS = 256;  // of a part, in shared memory at once
constexpr int STEPS = COLUMNS / 32;
constexpr int X_PITCH = 2 * COLUMNS + 64;  // bytes between rows of x, such that lanes use different banks
constexpr unsigned ALL = 0xffffffffu;

struct Router {
    const short* recorded;  // row t starts at t * stride, -1: none; or null
    const int* slots;       // [T], -1: padding, which is not routed; or null
    float* logits;          // [PARTS, T, E], before sm_90
    int* experts;           // [T, k], -1: none
    float* weights;         // [T, k]
    short* record;          // row t starts at t * stride; or null
    int* order;             // [T k], choices (t * k + rank) sorted by expert
    Tile* tiles;            // the number of tiles (as the first one's expert), then the tiles
    int* counters;          // [T / 16 + T k], 0 before and after: arrived blocks, before sm_90; mailboxes of choices
    long long stride;
    int rows, dim, experts_of_all, choices, first_expert, own_experts, rows_of_tile;
    bool normalised;

    __device__ __forceinline__ int clusters() const { return (rows + ROWS - 1) / ROWS; }
    // A choice's mailbox: its expert + 2 when it has been made, else 0.
    __device__ __forceinline__ int* mailbox(int choice) const { return counters + clusters() + choice; }
    // Number of columns in a part; the last parts may have fewer or none.
    __device__ __forceinline__ int width() const { return (dim + PARTS * 32 - 1) / (PARTS * 32) * 32; }
};

enum Scores { SOFTMAX, BIASED, SIGMOID };

// Inputs of the scores in addition to logits.
template <typename T>
struct Scoring {
    const T* numbers;  // biases of logits [E]; or for sigmoids the corrections in three summands [3, E]
    int num_groups, groups_per_token;  // for sigmoids: groups of consecutive experts, and from how many a token may choose
    float scale;                       // for sigmoids: multiplier of all weights
};

// Maps finite numbers to integers in the same order; 0 means none.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}
__device__ __forceinline__ float of_ordered(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Shared memory for a block's sums, and later for its counts.
template <int J>
struct Room {
    static constexpr int PITCH = J * 32 + 8;  // floats between rows
    float sums[ROWS * PITCH];
};

// Computes probabilities of a token's logits, and integer keys in their order; key 0: not selectable.
template <int J>
__device__ __forceinline__ void probabilities(const Router& to, float (&p)[J], unsigned (&keys)[J]) {
    const int lane = threadIdx.x % 32;
    float highest = -INFINITY;
#pragma unroll
    for (int j = 0; j < J; ++j) highest = fmaxf(highest, p[j]);
    highest = warp_max(highest);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < J; ++j) {
        p[j] = expf(p[j] - highest);
        sum += p[j];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < J; ++j) {
        p[j] = p[j] / sum;
        keys[j] = j * 32 + lane < to.experts_of_all ? min(__float_as_uint(p[j]), 0xfffffffeu) + 1 : 0;
    }
}

// A warp's score of an expert.
template <int J>
__device__ __forceinline__ float score_of(const float (&p)[J], int chosen) {
    float own = 0.0f;
#pragma unroll
    for (int j = 0; j < J; ++j) {
        if (chosen / 32 == j) own = p[j];
    }
    return __shfl_sync(ALL, own, chosen & 31);
}

// Keeps only the keys of a token's best groups; a group is scored by the sum of its two best experts.
template <int J, typename T>
__device__ __forceinline__ void close_groups(unsigned (&keys)[J], const Scoring<T>& scoring, int experts) {
    const int lane = threadIdx.x % 32, size = experts / scoring.num_groups;
    unsigned own = 0;  // of the group with this lane's number
#pragma unroll 1
    for (int group = 0; group < scoring.num_groups; ++group) {
        unsigned best[2] = {};
#pragma unroll
        for (int j = 0; j < J; ++j) {
            const unsigned key = (j * 32 + lane) / size == group ? keys[j] : 0;
            if (key > best[0]) best[1] = best[0], best[0] = key;
            else if (key > best[1]) best[1] = key;
        }
        const unsigned first = __reduce_max_sync(ALL, best[0]);
        const bool has_first = lane == __ffs(__ballot_sync(ALL, best[0] == first)) - 1;
        const unsigned second = __reduce_max_sync(ALL, has_first ? best[1] : best[0]);
        const float sum = of_ordered(first) + (size > 1 ? of_ordered(second) : 0.0f);
        if (lane == group) own = ordered(sum);
    }
    unsigned open = 0;
#pragma unroll 1
    for (int choice = 0; choice < scoring.groups_per_token; ++choice) {
        const unsigned key = open >> lane & 1 ? 0 : own, top = __reduce_max_sync(ALL, key);
        open |= 1u << (__ffs(__ballot_sync(ALL, key == top)) - 1);
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
        const int group = (j * 32 + lane) / size;
        if (group >= scoring.num_groups || !(open >> group & 1)) keys[j] = 0;
    }
}

// Selects one token's experts and their weights, by a warp, from its logits: lane l has those of the experts l, l + 32, .. Afterwards lane l has
// choice l.
template <int J, Scores S, typename T>
__device__ __forceinline__ void choose(const Router& to, const Scoring<T>& scoring, float (&p)[J], int row) {
    const int lane = threadIdx.x % 32;
    unsigned keys[J];  // in the order of scores; 0: not selectable
    if constexpr (S == SIGMOID) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
            const int expert = j * 32 + lane, experts = to.experts_of_all;
            p[j] = 1.0f / (1.0f + expf(-p[j])), keys[j] = 0;
            if (expert >= experts) continue;
            const float correction = __fadd_rn(__fadd_rn(widen(scoring.numbers[expert]), widen(scoring.numbers[experts + expert])),
                                               widen(scoring.numbers[2 * experts + expert]));
            keys[j] = ordered(p[j] + correction);
        }
        if (scoring.groups_per_token < scoring.num_groups) close_groups<J>(keys, scoring, to.experts_of_all);
    } else {
        probabilities<J>(to, p, keys);
    }
    int expert = -1;
    float weight = 0.0f;
    const short* recorded = to.recorded ? to.recorded + row * to.stride : nullptr;
    const bool is_padding = to.slots && to.slots[row] < 0;
    if (!is_padding && recorded && recorded[0] >= 0) {
        if (lane < to.choices) expert = recorded[lane];
#pragma unroll 1
        for (int choice = 0; choice < to.choices; ++choice) {
            const int chosen = __shfl_sync(ALL, expert, choice);
            const float given = score_of<J>(p, chosen);
            if (lane == choice && chosen >= 0) weight = given;
        }
    } else if (!is_padding) {
#pragma unroll 1
        for (int choice = 0; choice < to.choices; ++choice) {
            unsigned best = 0;
            int at = INT_MAX;
#pragma unroll
            for (int j = 0; j < J; ++j) {
                if (keys[j] > best) best = keys[j], at = j * 32 + lane;
            }
            const unsigned top = __reduce_max_sync(ALL, best);
            const int chosen = __reduce_min_sync(ALL, best == top ? at : INT_MAX);  // ties go to the first
#pragma unroll
            for (int j = 0; j < J; ++j) {
                if (chosen == j * 32 + lane) keys[j] = 0;
            }
            if constexpr (S == SIGMOID) {
                const float score = score_of<J>(p, chosen);
                if (lane == choice) expert = chosen, weight = score;
            } else {
                if (lane == choice) expert = chosen, weight = __uint_as_float(top - 1);
            }
        }
    }
    if (lane < to.choices) store_relaxed(to.mailbox(row * to.choices + lane), expert + 2);
    const float of_chosen = warp_sum(weight);
    if (to.normalised && expert >= 0) weight /= of_chosen;
    if constexpr (S == SIGMOID) weight *= scoring.scale;
    if (lane < to.choices) {
        to.experts[row * to.choices + lane] = expert;
        to.weights[row * to.choices + lane] = weight;
        if (to.record) to.record[row * to.stride + lane] = static_cast<short>(expert);
    }
}

// Sorts choices by expert, and in their own order within an expert, and creates tiles; by one block, which empties the mailboxes.
template <int J>
__device__ __forceinline__ void sort(const Router& to, Room<J>& room) {
    constexpr int AT_ONCE = 8;                              // choices per thread
    constexpr int OWN = J * 32 > THREADS ? J * 32 / THREADS : 1;  // experts per thread
    static_assert(WARPS <= ROWS, "counts have the room of sums");
    __shared__ int before[2][WARPS];  // per warp: rows and tiles
    auto& counts = *reinterpret_cast<int (*)[WARPS][J * 32]>(room.sums);  // counts of a warp's share of the choices; then their positions
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all = to.rows * to.choices, share = (all + THREADS - 1) / THREADS * 32;
    const int begin = min(all, warp * share), end = min(all, begin + share);
    int own[AT_ONCE];  // this rank's experts among some of the warp's choices, -1: none
    const auto read = [&](int from) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int choice = from + i * 32 + lane;
            own[i] = choice < end ? load_relaxed(to.mailbox(choice)) : 1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            while (own[i] == 0) own[i] = load_relaxed(to.mailbox(from + i * 32 + lane));
            own[i] = own[i] - 2 - to.first_expert;
            own[i] = own[i] < to.own_experts ? max(own[i], -1) : -1;
        }
    };
    for (int i = lane; i < J * 32; i += 32) counts[warp][i] = 0;
    __syncwarp();
#pragma unroll 1
    for (int from = begin; from < end; from += AT_ONCE * 32) {
        read(from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (own[i] >= 0) atomicAdd(&counts[warp][own[i]], 1);
        }
    }
    __syncthreads();
    int rows[OWN] = {}, sums[2] = {};  // rows and tiles: up to this thread's experts
#pragma unroll
    for (int e = 0; e < OWN; ++e) {
        const int expert = threadIdx.x * OWN + e;
        if (expert < to.own_experts) {
#pragma unroll
            for (int i = 0; i < WARPS; ++i) rows[e] += counts[i][expert];
        }
        sums[0] += rows[e];
        sums[1] += (rows[e] + to.rows_of_tile - 1) / to.rows_of_tile;
    }
    int first[2] = {-sums[0], -sums[1]};
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int more = __shfl_up_sync(ALL, sums[i], step);
            if (lane >= step) sums[i] += more;
        }
    }
    if (lane == 31) before[0][warp] = sums[0], before[1][warp] = sums[1];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        first[i] += sums[i];
#pragma unroll
        for (int other = 0; other < WARPS; ++other) first[i] += other < warp ? before[i][other] : 0;
    }
#pragma unroll
    for (int e = 0; e < OWN; ++e) {
        const int expert = threadIdx.x * OWN + e;
        if (expert < to.own_experts) {
            int at = first[0];
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                const int count = counts[i][expert];
                counts[i][expert] = at;
                at += count;
            }
        }
        for (int done = 0; done < rows[e]; done += to.rows_of_tile)
            to.tiles[1 + first[1]++] = {expert, first[0] + done, min(rows[e] - done, to.rows_of_tile), 0};
        first[0] += rows[e];
    }
    if (threadIdx.x == THREADS - 1) to.tiles[0] = {first[1], 0, 0, 0};
    __syncthreads();
#pragma unroll 1
    for (int from = begin; from < end; from += AT_ONCE * 32) {
        if (end - begin > AT_ONCE * 32) read(from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int expert = own[i], choice = from + i * 32 + lane;
            const unsigned same = __match_any_sync(ALL, expert);
            const int rank = __popc(same & ((1u << lane) - 1));
            const int at = expert >= 0 ? counts[warp][expert] + rank : 0;
            __syncwarp();
            if (expert >= 0) {
                to.order[at] = choice;
                if (rank == 0) counts[warp][expert] = at + __popc(same);
            }
            if (choice < end) *to.mailbox(choice) = 0;
            __syncwarp();
        }
    }
}
