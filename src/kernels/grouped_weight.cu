// Computes dw = dy^T x, or dw += dy^T x, for every expert's matrix, from the rows of its group, on Hopper's tensor cores with TMA and wgmma. Sums are in
// float32.
//
// The grid has as many blocks as run at once. They take the tiles of all matrices in turn, so that neighbouring blocks read the rows of one group
// from the L2 cache. In a block one warp copies 64 rows at once, and two warpgroups multiply, each 64 features by all columns. A group may end inside a
// stage; the stage's rows of the next group are then set to zero in one operand. Each sum is written once, or added once by an atomic operation of the
// L2 cache, which treats subnormal numbers as zeros.
#include "hopper.cuh"
#include "scalar.cuh"

constexpr int FEATURES = 128;   // of dy per tile
constexpr int COLUMNS = 256;    // of x per tile
constexpr int STEP = 64;        // rows of a stage
constexpr int STAGES = 4;
constexpr int CONSUMERS = 256;  // threads that multiply

struct Gradient {
    const int* ends;        // [E] ends of the groups
    float* dw;              // [E, features, columns]
    long long expert, row;  // strides between experts and between rows
    int experts, features, columns;
    bool adds;  // whether sums are added to dw; otherwise they overwrite it
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int BOX = 64;                      // columns per box
constexpr int BOX_BYTES = STEP * ROW_BYTES;  // 64 rows of 64 columns
constexpr int DY_BYTES = FEATURES / BOX * BOX_BYTES, STAGE_BYTES = DY_BYTES + COLUMNS / BOX * BOX_BYTES;

// Rows per instruction, and the distance to the next instruction's operands.
constexpr int DEEP = 16, ADVANCE = DEEP * ROW_BYTES / 16;

// Describes consecutive boxes of 64 columns each, in which groups of eight rows are 1024 bytes apart.
__device__ __forceinline__ unsigned long long describe(unsigned at) {
    return descriptor(at) & ~(0x3fffull << 16) | static_cast<unsigned long long>(BOX_BYTES / 16) << 16;
}

template <int BOXES>
__device__ __forceinline__ void copy_boxes(
    unsigned at, const TensorMap* map, int column, int row, unsigned barrier, unsigned long long policy
) {
#pragma unroll
    for (int box = 0; box < BOXES; ++box) copy(at + box * BOX_BYTES, map, column + box * BOX, row, barrier, policy);
}

struct Rows {};  // both operands are stored row by row, and the GEMM sums over rows
MULTIPLY_KIND(Rows, "k16.f32.bf16.bf16", ", 1, 1", 256, 128, 128, 129, 130)

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

// Copies the rows of all tiles with TMA; a single thread calls it.
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
            copy_boxes<FEATURES / BOX>(at, &dy, item.feature, row, barrier, often);
            copy_boxes<COLUMNS / BOX>(at + DY_BYTES, &x, item.column, row, barrier, often);
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
__device__ __forceinline__ void write_sums(const float (&d)[128], const Gradient& to, const Item& item, int group) {
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
            const float4 sums = odd ? make_float4(x, y, own[4], own[5]) : make_float4(own[0], own[1], x, y);
            if (to.adds) add_4(place, sums.x, sums.y, sums.z, sums.w);
            else __stcs(reinterpret_cast<float4*>(place), sums);
        }
    }
}

// Writes the tile of a group without rows.
__device__ __forceinline__ void write_zeros(const Gradient& to, const Item& item) {
    for (int at = threadIdx.x; at < FEATURES * COLUMNS / 4; at += CONSUMERS) {
        const int row = item.feature + at / (COLUMNS / 4), column = item.column + at % (COLUMNS / 4) * 4;
        if (row < to.features && column < to.columns)
            *reinterpret_cast<float4*>(to.dw + item.expert * to.expert + row * to.row + column) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Computes a warpgroup's half of all tiles.
__device__ __forceinline__ void consume(const Gradient& to, Pipe pipe, int group) {
    const int items = Item::count(to);
    float d[128];
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const Item item(to, i);
        if (item.first == item.last) {
            if (!to.adds) write_zeros(to, item);
            continue;
        }
        int before = 0;
        for (int row = item.first; row < item.last; row += STEP) {
            const unsigned at = pipe.stages + pipe.stage * STAGE_BYTES, own = at + group * BOX_BYTES;
            wait(pipe.full + 8 * pipe.stage, pipe.parity);
            if (item.last - row < STEP) clear_rows(own, item.last - row, group);
            const unsigned long long a = describe(own), b = describe(at + DY_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < STEP / DEEP; ++k)
                multiply(Rows{}, d, a + k * ADVANCE, b + k * ADVANCE, row > item.first || k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            wait_products<1>();
            if (row > item.first && threadIdx.x % GROUP == 0) arrive(pipe.empty + 8 * before);
            before = pipe.stage;
            pipe.next();
        }
        wait_products<0>();
        if (threadIdx.x % GROUP == 0) arrive(pipe.empty + 8 * before);
        write_sums(d, to, item, group);
    }
}

__device__ __forceinline__ void write_gradients(const TensorMap& dy, const TensorMap& x, const Gradient& to) {
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

__device__ __forceinline__ void write_gradients(const TensorMap&, const TensorMap&, const Gradient&) {}

#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + GROUP, 1) grouped_weight(
    const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap x, const int* ends, float* dw, long long expert,
    long long row, long long experts, long long features, long long columns, long long adds
) {
    const Gradient to = {
        ends, dw, expert, row, static_cast<int>(experts), static_cast<int>(features), static_cast<int>(columns), adds != 0};
    write_gradients(dy, x, to);
}
