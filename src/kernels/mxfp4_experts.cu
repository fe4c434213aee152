// GEMMs with experts' weights in MXFP4 on Hopper, for rows that route.cu has sorted into tiles of up to 64 or 128: gate and up with SwiGLU of a token's
// row, in sorted order; down of a sorted row, to the position of its choice.
//
// As many blocks as run at once divide the units (64 features) of all tiles evenly, in order. A block multiplies up to four units of a tile at a time,
// one in each of four warpgroups, over all of K; a fifth warpgroup copies.
//
// The path of a weight: a thread (`feed_weights`) copies codes to a stage in shared memory, up to SUB steps of 64 columns at once. The barrier `full`
// counts their bytes. A thread of a multiplying warpgroup reads its 16 bytes of a step, converts them to bfloat16 in registers (mxfp4.cuh), and these
// registers are the left operand of wgmma: weights are never written back to shared memory. The path of a row: two warps (`feed_rows`) gather the
// tile's rows to the same stage, swizzled, and arrive at `copied`; a thread (`publish_rows`) then shows them to wgmma, which reads its right operand
// from shared memory through another proxy, and arrives at `full`. When all products that read a stage are complete, the warps arrive at `empty`.
// Sums stay in registers until K is done, in one order, whatever the tile and the other rows; `write` stores them.
//
// A block's most likely first weights are copied before the preceding kernel has ended, on the assumption that every expert has one tile, and
// dropped if that is wrong.
//
// Weights are read before the preceding kernel has ended; it must not write them, and must itself have waited for any kernel that does.
#include "async.cuh"
#include "hopper.cuh"
#include "mxfp4.cuh"

constexpr int GROUPS = 4;  // warpgroups that multiply
constexpr int CONSUMERS = GROUP * GROUPS, THREADS = CONSUMERS + GROUP;
constexpr int COPIERS = 64;  // threads that copy rows
// Registers of threads that multiply and of others. Together they are those that all threads have at first.
constexpr int MOST_REGISTERS = 104, FEW_REGISTERS = 64;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define R8 QUAD(0, 1, 2, 3) ", " QUAD(4, 5, 6, 7)
#define D8(C) OWN(C, 0), OWN(C, 4)
#define R48 R32 ", " QUAD(32, 33, 34, 35) ", " QUAD(36, 37, 38, 39) ", " QUAD(40, 41, 42, 43) ", " QUAD(44, 45, 46, 47)
#define D48(C) D32(C), OWN(C, 32), OWN(C, 36), OWN(C, 40), OWN(C, 44)

// d += a b^T: 64 rows of a from registers, N rows of b, 16 columns.
#define MULTIPLY_WEIGHTS(N, SUMS, A0, A1, A2, A3, B)                                                      \
    __device__ __forceinline__ void multiply(float (&d)[SUMS], const unsigned* a, unsigned long long b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" R##SUMS "}, {%" #A0     \
                     ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                              \
                     : D##SUMS("+f")                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
    }
MULTIPLY_WEIGHTS(16, 8, 8, 9, 10, 11, 12)
MULTIPLY_WEIGHTS(32, 16, 16, 17, 18, 19, 20)
MULTIPLY_WEIGHTS(48, 24, 24, 25, 26, 27, 28)
MULTIPLY_WEIGHTS(64, 32, 32, 33, 34, 35, 36)
MULTIPLY_WEIGHTS(96, 48, 48, 49, 50, 51, 52)
MULTIPLY_WEIGHTS(128, 64, 64, 65, 66, 67, 68)

// The rest of a block's share of the units in all tiles. It takes up to GROUPS units of one tile at a time.
struct Share {
    int units, unit, end;

    __device__ __forceinline__ Share(const Product& of, int tiles) : units(of.units()) {
        const long long all = static_cast<long long>(tiles) * units;
        unit = static_cast<int>(blockIdx.x * all / gridDim.x), end = static_cast<int>((blockIdx.x + 1) * all / gridDim.x);
    }
    __device__ __forceinline__ bool has() const { return unit < end; }
    __device__ __forceinline__ int tile() const { return unit / units; }
    __device__ __forceinline__ int column() const { return unit % units; }
    // Times whose numbers of units differ by one at most.
    __device__ __forceinline__ int width() const {
        const int left = min(units - column(), end - unit), times = (left + GROUPS - 1) / GROUPS;
        return (left + times - 1) / times;
    }
    __device__ __forceinline__ void next() { unit += width(); }
};

// The stages, each of up to SUB steps, and which of them is next.
template <int ROWS_, int SUB_, int STAGES_>
struct Pipe {
    static constexpr int ROWS = ROWS_, SUB = SUB_, STAGES = STAGES_;
    static constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = GROUPS * SUB * UNIT_BYTES;
    unsigned x, w, full, empty, copied;
    int stage = 0, parity = 0;

    __device__ __forceinline__ unsigned x_at() const { return x + stage * SUB * X_BYTES; }
    __device__ __forceinline__ unsigned w_at() const { return w + stage * W_BYTES; }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    // The number of stages for all steps of a unit, and the steps of one.
    __device__ __forceinline__ static int parts(const Product& of) { return (of.steps() + SUB - 1) / SUB; }
    __device__ __forceinline__ static int width(const Product& of, int part) { return min(SUB, of.steps() - part * SUB); }
};

__device__ __forceinline__ void copy_once(unsigned to, const void* from, int bytes, unsigned barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Copies the weights of a stage; one thread.
template <typename P>
__device__ __forceinline__ void copy_weights(
    const Product& of, const P& pipe, int expert, const Share& share, int part, unsigned long long once
) {
    const int width = share.width(), steps = of.steps(), bytes = P::width(of, part) * UNIT_BYTES;
    const unsigned barrier = pipe.full + 8 * pipe.stage;
    expect(barrier, width * bytes);
    const unsigned char* from =
        of.w + ((static_cast<long long>(expert) * of.units() + share.column()) * steps + part * P::SUB) * UNIT_BYTES;
    for (int unit = 0; unit < width; ++unit)
        copy_once(pipe.w_at() + unit * P::SUB * UNIT_BYTES, from + static_cast<long long>(unit) * steps * UNIT_BYTES, bytes, barrier, once);
}

// The number of a share's first stages that fit in memory at once.
template <typename P>
__device__ __forceinline__ int first_parts(const Product& of, Share share) {
    int number = 0;
    for (const int parts = P::parts(of); share.has() && number < P::STAGES; share.next()) number += parts;
    return min(number, P::STAGES);
}

// Whether the first `early` stages of a share were guessed right, given the actual tiles.
template <typename P>
__device__ __forceinline__ bool were_right(const Product& of, Share guess, int early) {
    if (early == 0) return true;
    bool right = of.tiles[0].expert == of.sure;
    for (int parts = P::parts(of); early > 0; early -= parts, guess.next())
        right = right && of.tiles[1 + guess.tile()].expert == guess.tile();
    return right;
}

// Arrives when this thread's copies so far are complete.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies weights; one thread. The most likely first ones are copied before the preceding kernel has ended.
template <typename P>
__device__ __forceinline__ void feed_weights(const Product& of, P pipe) {
    const int parts = P::parts(of);
    const unsigned long long once = copied_once();
    const Share guess(of, of.sure);
    const int early = first_parts<P>(of, guess);
    Share share = guess;
    for (int number = 0, part = 0; number < early; ++number, pipe.next()) {
        copy_weights(of, pipe, share.tile(), share, part, once);
        if (++part == parts) part = 0, share.next();
    }
    wait_for_inputs();
    int skipped = were_right<P>(of, guess, early) ? early : 0;
    for (Share share(of, of.tiles[0].expert); share.has(); share.next()) {
        const int expert = of.tiles[1 + share.tile()].expert;
        for (int part = 0; part < parts; ++part) {
            if (skipped > 0) {
                --skipped;
                continue;
            }
            wait(pipe.empty + 8 * pipe.stage, pipe.parity ^ 1);
            copy_weights(of, pipe, expert, share, part, once);
            pipe.next();
        }
    }
}

// Copies a tile's rows of each step, by COPIERS threads.
template <bool DOWN, typename P>
__device__ __forceinline__ void feed_rows(const Product& of, P pipe, int thread) {
    constexpr int LINES = COPIERS / 8, OWN = P::ROWS / LINES;
    const int line = thread / 8, chunk = thread % 8, parts = P::parts(of);
    wait_for_inputs();
    const Share guess(of, of.sure);
    const int early = first_parts<P>(of, guess);
    if (!were_right<P>(of, guess, early)) {
        for (int number = 0; number < early; ++number, pipe.next()) arrive(pipe.copied + 8 * pipe.stage);
    }
    const auto* x = reinterpret_cast<const unsigned char*>(of.x) + chunk * 16;
    const unsigned row_chunks = of.k / 8, place = line * ROW_BYTES + ((chunk ^ (line % 8)) * 16);
    for (Share share(of, of.tiles[0].expert); share.has(); share.next()) {
        const Tile tile = of.tiles[1 + share.tile()];
        unsigned rows[OWN];  // in 16 bytes
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int sorted = tile.first + min(line + i * LINES, tile.count - 1);
            rows[i] = (DOWN ? sorted : of.order[sorted] / of.choices) * row_chunks;
        }
        for (int part = 0; part < parts; ++part, pipe.next()) {
            wait(pipe.empty + 8 * pipe.stage, pipe.parity ^ 1);
            const int width = P::width(of, part);
            for (int sub = 0; sub < width; ++sub) {
                const int at = (part * P::SUB + sub) * ROW_BYTES;
                const bool has = at + chunk * 16 < of.k * 2;
                const unsigned char* from = has ? x + at : x;
                const unsigned to = pipe.x_at() + sub * P::X_BYTES + place;
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    if (i * LINES < tile.count) copy_16(to + i * LINES * ROW_BYTES, from + rows[i] * 16ull, has ? 16 : 0);
                }
            }
            arrive_after_copies(pipe.copied + 8 * pipe.stage);
        }
    }
}

// Makes copied rows visible to wgmma, which reads shared memory through the async proxy; one thread. The copying threads themselves would wait for
// their later copies, too.
template <typename P>
__device__ __forceinline__ void publish_rows(const Product& of, P pipe) {
    wait_for_inputs();
    const Share guess(of, of.sure);
    const int early = first_parts<P>(of, guess), parts = P::parts(of);
    int number = were_right<P>(of, guess, early) ? 0 : early;
    for (Share share(of, of.tiles[0].expert); share.has(); share.next()) number += parts;
    for (; number > 0; --number, pipe.next()) {
        wait(pipe.copied + 8 * pipe.stage, pipe.parity);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        arrive(pipe.full + 8 * pipe.stage);
    }
}

// This thread's codes of a step, and its exponents.
struct Codes {
    unsigned w[4], exponents;

    // `at`: this thread's codes; `exponents_at`: the exponents of its features.
    __device__ __forceinline__ void load(unsigned at, unsigned exponents_at) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(exponents) : "r"(exponents_at) : "memory");
    }
    template <int HALF>
    __device__ __forceinline__ void weights(unsigned (&a)[8]) const {
        const Factors factors(exponents);
        weights_of<HALF>(w[HALF * 2], factors, a);
        weights_of<HALF>(w[HALF * 2 + 1], factors, a + 4);
    }
};

// The descriptor with this lower half.
__device__ __forceinline__ unsigned long long described(unsigned low) {
    return static_cast<unsigned long long>(descriptor(0) >> 32) << 32 | low;
}

template <int SUMS>
__device__ __forceinline__ void queue(float (&d)[SUMS], unsigned b, const unsigned (&a)[8]) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(d, a, described(b));
    multiply(d, a + 4, described(b + 2));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The multiplication of one unit of features with N rows of a tile. While one half of a step is multiplied, the other half's codes are converted.
template <int N, typename P>
struct Multiplication {
    float d[N / 2] = {};
    Codes codes;
    unsigned at, exponents_at, rows;  // of the next step in shared memory; rows as the lower half of a descriptor
    unsigned read = 0;                // the barrier of a stage that the products under way are the last to read; or 0
    int left, sub;                    // steps of the unit and of the stage from the next one on

    __device__ __forceinline__ explicit Multiplication(int steps) : left(steps) {}

    // Waits for the next stage.
    __device__ __forceinline__ void enter(const P& pipe, int group) {
        const unsigned thread = threadIdx.x % GROUP;
        wait(pipe.full + 8 * pipe.stage, pipe.parity);
        at = pipe.w_at() + group * P::SUB * UNIT_BYTES + thread * 16;
        exponents_at = at - thread * 16 + UNIT_CODES + thread / 4 * 4;
        rows = __shfl_sync(0xffffffffu, static_cast<unsigned>(descriptor(pipe.x)) + pipe.stage * (P::SUB * P::X_BYTES / 16), 0);
        sub = min(P::SUB, left);
        codes.load(at, exponents_at);
    }
    // Loads the codes of the step after, if there is one.
    __device__ __forceinline__ void advance(P& pipe, int group) {
        --left;
        if (--sub == 0) {
            read = pipe.empty + 8 * pipe.stage;
            pipe.next();
            if (left > 0) enter(pipe, group);
        } else {
            at += UNIT_BYTES, exponents_at += UNIT_BYTES, rows += P::X_BYTES / 16;
            codes.load(at, exponents_at);
        }
    }
    __device__ __forceinline__ void release() {
        if (threadIdx.x % 32 == 0 && read != 0) arrive(read);
        read = 0;
    }
    __device__ __forceinline__ void run(P& pipe, int group) {
        unsigned first[8], second[8];
        enter(pipe, group);
#pragma unroll 1
        while (left > 0) {
            const unsigned b = rows;
            codes.template weights<0>(first);
            queue(d, b, first);
            wait_products<1>();
            release();
            codes.template weights<1>(second);
            queue(d, b + 4, second);
            advance(pipe, group);
            wait_products<1>();
        }
        wait_products<0>();
        release();
    }
};

template <bool DOWN, bool BIASED, int N, typename P>
__device__ __forceinline__ void multiply_unit(const Product& of, P& pipe, Tile tile, int feature, int group) {
    asm volatile("" : "+r"(tile.first), "+r"(tile.count), "+r"(feature));  // keeps what writing needs out of the registers of other forms
    Multiplication<N, P> product(of.steps());
    product.run(pipe, group);
    write<DOWN, BIASED>(product.d, of, tile, feature, biases_of<BIASED>(of, tile, feature));
}

template <bool DOWN, bool BIASED, typename P>
__device__ __forceinline__ void consume(const Product& of, P pipe) {
    const int group = threadIdx.x / GROUP, lane = threadIdx.x % 32, own = threadIdx.x % GROUP / 32 * 16 + lane / 4 * 2;
    for (Share share(of, of.tiles[0].expert); share.has(); share.next()) {
        const Tile tile = of.tiles[1 + share.tile()];
        if (group >= share.width()) {
            for (int part = P::parts(of); part > 0; --part, pipe.next()) {
                wait(pipe.full + 8 * pipe.stage, pipe.parity);
                if (lane == 0) arrive(pipe.empty + 8 * pipe.stage);
            }
            continue;
        }
        const int feature = (share.column() + group) * UNIT + own;
        // No more forms, as all have registers of their own.
        constexpr int QUARTER = P::ROWS / 4;
        if (tile.count <= QUARTER) multiply_unit<DOWN, BIASED, QUARTER>(of, pipe, tile, feature, group);
        else if (tile.count <= 2 * QUARTER) multiply_unit<DOWN, BIASED, 2 * QUARTER>(of, pipe, tile, feature, group);
        else if (tile.count <= 3 * QUARTER) multiply_unit<DOWN, BIASED, 3 * QUARTER>(of, pipe, tile, feature, group);
        else multiply_unit<DOWN, BIASED, P::ROWS>(of, pipe, tile, feature, group);
    }
}

template <bool DOWN, bool BIASED, typename P>
__device__ __forceinline__ void product(const Product& of) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[3 * P::STAGES];
    P pipe;
    pipe.x = (shared_address(memory) + 1023) / 1024 * 1024;
    pipe.w = pipe.x + P::STAGES * P::SUB * P::X_BYTES;
    pipe.full = shared_address(barriers), pipe.empty = pipe.full + 8 * P::STAGES, pipe.copied = pipe.empty + 8 * P::STAGES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < P::STAGES; ++stage) {
            init(pipe.full + 8 * stage, 2), init(pipe.empty + 8 * stage, CONSUMERS / 32);
            init(pipe.copied + 8 * stage, COPIERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW_REGISTERS));
        const int thread = threadIdx.x - CONSUMERS;
        if (thread == 0) feed_weights(of, pipe);
        else if (thread == 32) publish_rows(of, pipe);
        else if (thread >= GROUP - COPIERS) feed_rows<DOWN>(of, pipe, thread - (GROUP - COPIERS));
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST_REGISTERS));
        const Share guess(of, of.sure);
        const int early = first_parts<P>(of, guess);
        wait_for_inputs();
        if (!were_right<P>(of, guess, early)) {
            for (int part = 0; part < early; ++part, pipe.next()) {
                wait(pipe.full + 8 * pipe.stage, pipe.parity);
                if (threadIdx.x % 32 == 0) arrive(pipe.empty + 8 * pipe.stage);
            }
        }
        consume<DOWN, BIASED>(of, pipe);
    }
}

#else  // other GPUs: never launched there

template <int, int, int>
struct Pipe {};
template <bool, bool, typename>
__device__ __forceinline__ void product(const Product&) {}

#endif

#define PRODUCTS(NAME, ROWS, SUB, STAGES)                                                              \
    PRODUCT(mxfp4_gate_up_##NAME, THREADS, 1, (product<false, false, Pipe<ROWS, SUB, STAGES>>))        \
    PRODUCT(mxfp4_down_##NAME, THREADS, 1, (product<true, false, Pipe<ROWS, SUB, STAGES>>))            \
    PRODUCT(mxfp4_gate_up_clamped_##NAME, THREADS, 1, (product<false, true, Pipe<ROWS, SUB, STAGES>>)) \
    PRODUCT(mxfp4_down_biased_##NAME, THREADS, 1, (product<true, true, Pipe<ROWS, SUB, STAGES>>))

PRODUCTS(few, 64, 3, 4)
PRODUCTS(many, 128, 2, 4)
