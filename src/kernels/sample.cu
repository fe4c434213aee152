// Exact sampling by Gumbel-max from a shard of the vocabulary: argmax over ids of (processed logit + noise), ties to the lowest id, with the
// log-sum-exp of the raw logits. Noise is as in src/ops/random.rs: a function of key, position and vocabulary id. A block has one part of one row;
// `combine` decides among the parts of all ranks.
#include "philox.cuh"
#include "sample.cuh"

constexpr int THREADS = 512;
constexpr int RUN = 8;  // ids per step: two blocks of random words
constexpr float LEAST = -1e30f;

// Parameters of one row's draw.
struct Draw {
    unsigned key[2];
    unsigned position;
    float scale;  // 1 / temperature; 1 when greedy
    bool is_greedy;
};

struct Best {
    double perturbed;
    float raw;
    int id;

    __device__ __forceinline__ bool yields_to(double value, int other) const {
        return value > perturbed || (value == perturbed && other < id);
    }
};

// u = (word + 1/2) / 2^32, kept below 1.
__device__ __forceinline__ float unit_of(unsigned word) {
    return fminf((__uint2float_rn(word) + 0.5f) * 2.3283064365386963e-10f, 1.0f - 5.9604644775390625e-8f);
}

// 1 + u rounded down.
__device__ __forceinline__ float unit_above_one(unsigned word) { return __uint_as_float(__funnelshift_r(word, 0x7f, 9)); }

// -ln(-ln(1 - u)), rounded to float as on the CPU.
__device__ __noinline__ float gumbel(unsigned word) {
    const float rate = -static_cast<float>(log1p(-static_cast<double>(unit_of(word))));
    return -static_cast<float>(log(static_cast<double>(rate)));
}

// Loads RUN logits of ids first .. first + RUN; -inf outside of the shard.
template <bool ALIGNED>
__device__ __forceinline__ void load(const float* __restrict__ logits, long long column, long long width, float out[RUN]) {
    if (ALIGNED) {
#pragma unroll
        for (int k = 0; k < RUN; k += 4) {
            const auto four = *reinterpret_cast<const Pack<float, 4>*>(logits + column + k);
#pragma unroll
            for (int j = 0; j < 4; ++j) out[k + j] = four.at[j];
        }
    } else {
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const long long at = column + k;
            out[k] = at >= 0 && at < width ? logits[at] : -INFINITY;
        }
    }
}

// A thread's running maximum, sum of exp(raw - peak) and best id.
struct State {
    float peak = LEAST, sum = 0.0f;
    Best best = {-INFINITY, 0.0f, INT_MAX};
};

// Masses below the smallest normal number become 0: they change no sum and cannot win.
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }

// The block's best perturbed value so far, rounded down.
__device__ __forceinline__ float standing_of(unsigned bar) {
    return bar ? __uint_as_float(bar & 0x80000000u ? bar & 0x7fffffffu : ~bar) : -INFINITY;
}

// Random words of ids first .. first + RUN.
__device__ __forceinline__ void random_words(const Draw& draw, int first, unsigned (&words)[RUN]) {
#pragma unroll
    for (int k = 0; k < RUN; k += 4) {
        unsigned four[4];
        philox(draw.key, (first + k) / 4, 0, draw.position, 0, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) words[k + j] = four[j];
    }
}

// A lower bound of the best perturbed value of a run, so that also the first run needs few logarithms: with noise g = -ln(-ln(1 - u)) and -ln(1 - u)
// <= u / (1 - u), g is at least ln((1 - u) / u). A margin covers rounding.
template <bool PROCESSED>
__device__ __forceinline__ float least_of(const float (&logits)[RUN], int first, const Draw& draw, const Process& process) {
    unsigned words[RUN];
    random_words(draw, first, words);
    float most = -INFINITY;
#pragma unroll
    for (int k = 0; k < RUN; ++k) {
        const float value = PROCESSED ? process(logits[k], draw.scale, first + k) : logits[k] * draw.scale;
        const float unit = unit_of(words[k]);
        most = fmaxf(most, value + __logf(__fdividef(1.0f - unit, unit)) - fmaf(fabsf(value), 1e-6f, 0.01f));
    }
    return most;
}

// Rounded explicitly: a fused multiplication would not be rounded, and a peak's distance to itself would not be 0.
__device__ __forceinline__ float scaled(float logit, const Draw& draw) { return __fmul_rn(logit, draw.scale); }

template <bool GREEDY, bool PROCESSED>
__device__ __forceinline__ void take(
    State& state, const float (&logits)[RUN], int first, const Draw& draw, const Process& process, volatile unsigned& bar
) {
    float top = LEAST;
#pragma unroll
    for (int k = 0; k < RUN; ++k) top = fmaxf(top, scaled(logits[k], draw));
    if (top > state.peak) state.sum *= __expf(state.peak - top), state.peak = top;
    const float standing = standing_of(bar);
    // Noise lifts a value v over s only if u < exp(v - s), so few values need the logarithms. A margin covers rounding.
    const float lift = 1.01f * __expf(fminf(state.peak - standing, 80.0f));
    unsigned words[RUN];
    if (!GREEDY) random_words(draw, first, words);
    bool may_win = false;
#pragma unroll
    for (int k = 0; k < RUN; ++k) {
        const float raw = scaled(logits[k], draw), mass = exp_fast(raw - state.peak);
        state.sum += mass;
        const float value = PROCESSED ? process(logits[k], draw.scale, first + k) : raw;
        if (GREEDY) {
            may_win |= value >= standing;
        } else {
            // A processed value may be farther below the raw peak than a float's exponent can represent.
            const float rise = PROCESSED ? 1.01f * exp_fast(fminf(value - standing, 80.0f)) : mass * lift;
            const float unit = unit_above_one(words[k]);
            may_win |= unit <= 1.0f + rise;
        }
    }
    if (!may_win) return;
#pragma unroll
    for (int k = 0; k < RUN; ++k) {
        const float raw = scaled(logits[k], draw);
        const float value = PROCESSED ? process(logits[k], draw.scale, first + k) : raw;
        if (!GREEDY) {
            const float unit = unit_above_one(words[k]);
            if (!(unit <= 1.0f + 1.01f * exp_fast(fminf(value - standing, 80.0f)))) continue;
        }
        if (GREEDY && !(value >= standing) || !(value > -INFINITY)) continue;
        const double perturbed = GREEDY ? value : static_cast<double>(value) + gumbel(words[k]);
        if (state.best.yields_to(perturbed, first + k)) {
            state.best = {perturbed, raw, first + k};
            atomicMax(const_cast<unsigned*>(&bar), ordered(__double2float_rd(perturbed)));
        }
    }
}

// Processes a thread's runs among from .. to, one of every THREADS. The next run's logits are in flight.
template <bool GREEDY, bool ALIGNED, bool PROCESSED>
__device__ __forceinline__ void take_all(
    State& state, const float* __restrict__ row, long long from, long long to, long long first_id, long long width,
    const Draw& draw, const Process& process, unsigned& bar
) {
    float upcoming[RUN];
    from += threadIdx.x;
    if (from < to) load<ALIGNED>(row, from * RUN - first_id, width, upcoming);
    if (!GREEDY) {
        const float least = from < to ? least_of<PROCESSED>(upcoming, static_cast<int>(from * RUN), draw, process) : -INFINITY;
        const float most = warp_max(least);
        if (threadIdx.x % 32 == 0 && most > -INFINITY) atomicMax(&bar, ordered(most));
        __syncthreads();
    }
    for (long long run = from; run < to; run += THREADS) {
        float values[RUN];
#pragma unroll
        for (int k = 0; k < RUN; ++k) values[k] = upcoming[k];
        if (run + THREADS < to) load<ALIGNED>(row, (run + THREADS) * RUN - first_id, width, upcoming);
        take<GREEDY, PROCESSED>(state, values, static_cast<int>(run * RUN), draw, process, bar);
    }
}

// Reduces to the block's (best, log-sum-exp), in thread 0.
__device__ __forceinline__ void reduce(State& state, double* out) {
    __shared__ Best winners[THREADS / 32];
    const float peak = block_max(state.peak);
    const float sum = block_sum(state.sum * expf(state.peak - peak));
    const auto merge = [&](int step) {
        const Best other = {__shfl_xor_sync(~0u, state.best.perturbed, step), __shfl_xor_sync(~0u, state.best.raw, step),
                            __shfl_xor_sync(~0u, state.best.id, step)};
        if (state.best.yields_to(other.perturbed, other.id)) state.best = other;
    };
    for (int step = 16; step > 0; step /= 2) merge(step);
    if (threadIdx.x % 32 == 0) winners[threadIdx.x / 32] = state.best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    state.best = winners[threadIdx.x % (THREADS / 32)];
    for (int step = THREADS / 64; step > 0; step /= 2) merge(step);
    if (threadIdx.x > 0) return;
    const bool is_found = state.best.id != INT_MAX;
    out[0] = state.best.perturbed, out[1] = state.best.raw;
    out[2] = static_cast<double>(peak) + log(static_cast<double>(sum)), out[3] = is_found ? state.best.id : -1;
}

template <bool ALIGNED, bool PROCESSED>
__device__ __forceinline__ void sample(
    const float* __restrict__ logits,        // [S, V of this rank], `stride` from row to row
    const unsigned* __restrict__ keys,       // [S, 2]
    const int* __restrict__ positions,       // [S] tokens so far; 0: no draw
    const float* __restrict__ temperatures,  // [S]
    const float* __restrict__ penalties,     // [S] or null
    const unsigned* __restrict__ seen,       // [S, words] or null
    const unsigned* __restrict__ cuts,       // [S, 2] or null
    double* __restrict__ candidates,         // [parts, S, 4]: perturbed, raw, log-sum-exp, id
    long long draws, long long width, long long stride, long long first_id, long long parts, long long words
) {
    __shared__ unsigned bar;
    wait_for_inputs();
    if (threadIdx.x == 0) bar = 0;
    __syncthreads();
    const long long s = blockIdx.x % draws, part = blockIdx.x / draws;
    double* out = candidates + blockIdx.x * 4;
    const int position = positions[s];
    if (position <= 0) {
        if (threadIdx.x == 0) out[0] = out[1] = out[2] = -INFINITY, out[3] = -1;
        return;
    }
    const float temperature = temperatures[s];
    Draw draw = {{keys[2 * s], keys[2 * s + 1]}, static_cast<unsigned>(position), 1.0f, temperature == 0.0f};
    if (!draw.is_greedy) draw.scale = __fdiv_rn(1.0f, temperature);
    Process process = {};
    if (PROCESSED) {
        process.penalty = penalties ? penalties[s] : 1.0f;
        process.seen = process.penalty == 1.0f ? nullptr : seen + s * words;
        process.cut = cuts && !draw.is_greedy ? cuts + 2 * s : nullptr;
    }
    const float* row = logits + s * stride;
    const long long begin = first_id / RUN, count = (first_id + width + RUN - 1) / RUN - begin;
    const long long from = begin + count * part / parts, to = begin + count * (part + 1) / parts;
    State state;
    if (draw.is_greedy) {
        take_all<true, ALIGNED, PROCESSED>(state, row, from, to, first_id, width, draw, process, bar);
    } else {
        take_all<false, ALIGNED, PROCESSED>(state, row, from, to, first_id, width, draw, process, bar);
    }
    reduce(state, out);
}

#define SAMPLE(NAME, ALIGNED, PROCESSED)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(                                                     \
        const float* logits, const unsigned* keys, const int* positions, const float* temperatures,                 \
        const float* penalties, const unsigned* seen, const unsigned* cuts, double* candidates, long long draws,    \
        long long width, long long stride, long long first_id, long long parts, long long words) {                  \
        sample<ALIGNED, PROCESSED>(logits, keys, positions, temperatures, penalties, seen, cuts, candidates, draws,  \
                                   width, stride, first_id, parts, words);                                          \
    }

SAMPLE(sample_x1, false, false)
SAMPLE(sample_x8, true, false)
SAMPLE(sample_processed_x1, false, true)
SAMPLE(sample_processed_x8, true, true)

// A warp decides one draw: the best of all parts, and ln softmax(logits / temperature) of its id. If the log-sum-exp is not finite or no id is left,
// the id is -1 and the log-probability NaN.
extern "C" __global__ void __launch_bounds__(32) combine(
    const double* __restrict__ candidates,  // [parts, S, 4]
    int* __restrict__ token_ids,            // [S]
    float* __restrict__ logprobs,           // [S]
    long long draws, long long parts
) {
    wait_for_inputs();
    const long long s = blockIdx.x;
    double peak = -INFINITY;
    Best best = {-INFINITY, 0.0f, INT_MAX};
    for (long long part = threadIdx.x; part < parts; part += 32) {
        const double* one = candidates + (part * draws + s) * 4;
        // A NaN log-sum-exp must not be hidden by a finite maximum.
        peak = isnan(one[2]) || one[2] > peak ? one[2] : peak;
        if (one[3] >= 0 && best.yields_to(one[0], static_cast<int>(one[3])))
            best = {one[0], static_cast<float>(one[1]), static_cast<int>(one[3])};
    }
    for (int step = 16; step > 0; step /= 2) {
        const double other = __shfl_xor_sync(~0u, peak, step);
        peak = isnan(other) || other > peak ? other : peak;
        const Best rival = {__shfl_xor_sync(~0u, best.perturbed, step), __shfl_xor_sync(~0u, best.raw, step),
                            __shfl_xor_sync(~0u, best.id, step)};
        if (best.yields_to(rival.perturbed, rival.id)) best = rival;
    }
    double sum = 0.0;
    for (long long part = threadIdx.x; part < parts; part += 32) sum += exp(candidates[(part * draws + s) * 4 + 2] - peak);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x > 0) return;
    const double log_sum_exp = peak + log(sum);
    const bool is_drawn = isfinite(log_sum_exp) && best.id != INT_MAX;
    token_ids[s] = is_drawn ? best.id : -1;
    logprobs[s] = is_drawn ? static_cast<float>(best.raw - log_sum_exp) : NAN;
}
