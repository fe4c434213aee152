// dw += dy^T x for every matrix with the rows of its group, on Hopper's tensor cores: TMA and wgmma, float32 sums that are added to float32 memory in
// place.
//
// As many blocks as run at once process tiles of all matrices in turn, so that neighbouring blocks read one group's rows from the L2. In a block one
// warp copies 64 rows at once, and two warpgroups multiply, each 64 features with all columns. The sum is over rows, so both operands are read as
// stored. A group may start at any row: in its last rows, those of the next group are zeroed in one operand. Each sum is added once, in the L2, which
// flushes denormal numbers to zero.
#include "hopper.cuh"
#include "scalar.cuh"

constexpr int FEATURES = 128;   // of dy per tile
constexpr int COLUMNS = 256;    // of x per tile
constexpr int STEP = 64;        // rows per stage
constexpr int STAGES = 4;
constexpr int CONSUMERS = 256;  // threads that multiply

struct Gradient {
    const int* ends;  // of the groups
    float* dw;        // [E, features, columns]
    long long expert, row;  // strides between experts and between rows
    int experts, features, columns;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int BOX = 64;                      // columns per box
constexpr int BOX_BYTES = STEP * ROW_BYTES;  // 64 rows of 64 columns
constexpr int DY_BYTES = FEATURES / BOX * BOX_BYTES, STAGE_BYTES = DY_BYTES + COLUMNS / BOX * BOX_BYTES;

struct Rows {};  // layout of both operands: a row contains what is summed over in a column

MULTIPLY_KIND(Rows, "k16.f32.bf16.bf16", ", 1, 1", 256, 128, 128, 129, 130)

// Descriptor of consecutive boxes, each of 64 columns, eight rows 1024 bytes apart.
__device__ __forceinline__ unsigned long long boxes_descriptor(unsigned at) {
    return descriptor(at) & ~(0x3fffull << 16) | static_cast<unsigned long long>(BOX_BYTES / 16) << 16;
}

// A tile of one matrix.
struct Item {
    int expert, first, last, feature, column;

    __device__ __forceinline__ Item(const Gradient& to, int item) {
        const int down = (to.features + FEATURES - 1) / FEATURES, across = (to.columns + COLUMNS - 1) / COLUMNS;
        expert = item / (down * across);
        feature = item % down * FEATURES;
        column = item / down % across * COLUMNS;
        first = expert > 0 ? to.ends[expert - 1] : 0;
        last = to.ends[expert];
    }
    __device__ __forceinline__ static int count(const Gradient& to) {
        return to.experts * ((to.features + FEATURES - 1) / FEATURES) * ((to.columns + COLUMNS - 1) / COLUMNS);
    }
};

// The stages, and which of them is next.
struct Pipe {
    unsigned stages, full, empty;
    int stage = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Copies all tiles' rows; one thread.
__device__ __forceinline__ void produce(const TensorMap& dy, const TensorMap& x, const Gradient& to, Pipe pipe) {
    unsigned long long often;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
    const int items = Item::count(to);
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const Item item(to, i);
        for (int row = item.first; row < item.last; row += STEP) {
            const unsigned at = pipe.stages + pipe.stage * STAGE_BYTES, barrier = pipe.full + 8 * pipe.stage;
            wait(pipe.empty + 8 * pipe.stage, pipe.parity ^ 1);
            expect(barrier, STAGE_BYTES);
#pragma unroll
            for (int box = 0; box < FEATURES / BOX; ++box) copy(at + box * BOX_BYTES, &dy, item.feature + box * BOX, row, barrier, often);
#pragma unroll
            for (int box = 0; box < COLUMNS / BOX; ++box)
                copy(at + DY_BYTES + box * BOX_BYTES, &x, item.column + box * BOX, row, barrier, often);
            pipe.next();
        }
    }
}

// Zeroes the rows of a warpgroup's box from `count` on.
__device__ __forceinline__ void clear_rows(unsigned box, int count, int group) {
    for (int at = count * ROW_BYTES + threadIdx.x % GROUP * 16; at < BOX_BYTES; at += GROUP * 16)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(box + at), "r"(0) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

__device__ __forceinline__ void add_4(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// Two neighbouring lanes exchange halves of two blocks of eight columns, so that each has four consecutive columns of one of them.
__device__ __forceinline__ void add_sums(const float (&d)[128], const Gradient& to, const Item& item, int group) {
    const int lane = threadIdx.x % 32, odd = lane % 2;
    const int row = item.feature + group * 64 + threadIdx.x % GROUP / 32 * 16 + lane / 4;
    const int column = item.column + odd * 8 + lane % 4 / 2 * 4;
    float* at = to.dw + item.expert * to.expert + row * to.row + column;
#pragma unroll
    for (int i = 0; i < 128; i += 8) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* own = d + i + 2 * half;  // of the first block; those of the second are 4 further
            const float x = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[4], 1);
            const float y = __shfl_xor_sync(0xffffffffu, odd ? own[1] : own[5], 1);
            if (row + half * 8 >= to.features || column + i * 2 >= to.columns) continue;
            float* place = at + half * 8 * to.row + i * 2;
            if (odd) {
                add_4(place, x, y, own[4], own[5]);
            } else {
                add_4(place, own[0], own[1], x, y);
            }
        }
    }
}

// Computes a warpgroup's half of all tiles.
__device__ __forceinline__ void consume(const Gradient& to, Pipe pipe, int group) {
    const int items = Item::count(to);
    float d[128];
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const Item item(to, i);
        if (item.first == item.last) continue;
        int before = 0;
        for (int row = item.first; row < item.last; row += STEP) {
            const unsigned at = pipe.stages + pipe.stage * STAGE_BYTES, own = at + group * BOX_BYTES;
            wait(pipe.full + 8 * pipe.stage, pipe.parity);
            if (item.last - row < STEP) clear_rows(own, item.last - row, group);
            const unsigned long long a = boxes_descriptor(own), b = boxes_descriptor(at + DY_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < STEP; k += 16)
                multiply(Rows{}, d, a + k * ROW_BYTES / 16, b + k * ROW_BYTES / 16, row > item.first || k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            wait_products<1>();
            if (row > item.first && threadIdx.x % GROUP == 0) arrive(pipe.empty + 8 * before);
            before = pipe.stage;
            pipe.next();
        }
        wait_products<0>();
        if (threadIdx.x % GROUP == 0) arrive(pipe.empty + 8 * before);
        add_sums(d, to, item, group);
    }
}

__device__ __forceinline__ void accumulate(const TensorMap& dy, const TensorMap& x, const Gradient& to) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
    Pipe pipe;
    pipe.stages = (shared_address(memory) + 1023) / 1024 * 1024;
    pipe.full = shared_address(barriers), pipe.empty = pipe.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(pipe.full + 8 * stage, 1);
            init(pipe.empty + 8 * stage, CONSUMERS / GROUP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) produce(dy, x, to, pipe);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(to, pipe, threadIdx.x / GROUP);
    }
}

#else  // other GPUs: never launched there

__device__ __forceinline__ void accumulate(const TensorMap&, const TensorMap&, const Gradient&) {}

#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + GROUP, 1) grouped_weight(
    const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap x, const int* ends, float* dw, long long expert,
    long long row, long long experts, long long features, long long columns
) {
    accumulate(dy, x, {ends, dw, expert, row, static_cast<int>(experts), static_cast<int>(features), static_cast<int>(columns)});
}
