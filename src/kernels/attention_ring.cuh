// A ring of units in shared memory for a warp's own parts, on Hopper: TMA copies the next keys and values while a unit is processed, across the items
// of a block. It changes only how data arrives, not what is computed. TMA needs no registers for data on its way, and hardly any instructions:
// asynchronous copies of 16 bytes a lane were slower than loads into registers (docs/benchmarks/fp8.md).
#pragma once
#include "attention_warp.cuh"
#include "hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A half is the keys or the values of a step: U units of HD columns, of which each warp has every fourth.
template <int HD, int U, int HALVES>
struct Ring {
    static constexpr int BOX_BYTES = UNIT * ROW_BYTES, BOXES = HD * 2 / ROW_BYTES, UNIT_BYTES = BOXES * BOX_BYTES;
    // An item of which units are copied: the block table of its row, and the blocks of the warp's first 32 units, one per lane.
    struct Source {
        const int* table;
        int kv_head, base, end, steps, blocks;
    };
    const Geometry& shape;
    const TensorMap *k_boxes, *v_boxes;
    unsigned char* units;  // of this warp
    unsigned full;         // barriers of the halves
    Source now = {}, next = {};
    int step = 0, to = 0, from = 0, ahead = 0, parity = 0;  // the next step to copy; the next halves to write and to read; the number of unread halves
    bool is_values = false, has_next = false;
    int rows[U];  // in the cache, of the units that are copied

    __device__ __forceinline__ Ring(
        unsigned char* memory, unsigned barriers, const Geometry& shape, const TensorMap* k_boxes, const TensorMap* v_boxes
    ) : shape(shape), k_boxes(k_boxes), v_boxes(v_boxes) {
        const int warp = threadIdx.x / 32;
        units = memory + warp * HALVES * U * UNIT_BYTES, full = barriers + warp * HALVES * 8;
        if (threadIdx.x % 32 == 0) {
            for (int half = 0; half < HALVES; ++half) init(full + 8 * half, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }

    __device__ __forceinline__ static int token(const Source& source, int n) {
        return source.base + (static_cast<int>(threadIdx.x / 32) + n * WARPS) * UNIT;
    }
    __device__ __forceinline__ int block_of(const Source& source, int n) const {
        const int mine = token(source, n + threadIdx.x % 32);
        return mine < source.end ? source.table[mine >> shape.block_shift] : 0;
    }

    // Announces the next item whose units are copied.
    __device__ __forceinline__ void follow(const int* table, int kv_head, int begin, int end) {
        const int base = begin / UNIT * UNIT;
        next = {table, kv_head, base, end, steps_of<U>(base, end, threadIdx.x / 32, WARPS), 0};
        next.blocks = block_of(next, 0), has_next = true;
    }

    // Queues copies until the ring is full or nothing is left.
    __device__ __forceinline__ void fill() {
        while (ahead < HALVES) {
            if (step == now.steps) {
                if (!has_next) return;
                now = next, step = 0, has_next = false;
                continue;
            }
            if (!is_values) {
                if (step * U % 32 == 0 && step > 0) now.blocks = block_of(now, step * U);
#pragma unroll
                for (int u = 0; u < U; ++u) {
                    const int head = __shfl_sync(~0u, now.blocks, (step * U + u) % 32) * shape.kv_heads + now.kv_head;
                    rows[u] = (head << shape.block_shift) + (token(now, step * U + u) & ((1 << shape.block_shift) - 1));
                }
            }
            if (threadIdx.x % 32 == 0) {
                int count = 0;  // units that exist
#pragma unroll
                for (int u = 0; u < U; ++u) count += token(now, step * U + u) < now.end;
                const unsigned barrier = full + 8 * to;
                const unsigned long long once = copied_once();
                expect(barrier, count * UNIT_BYTES);
#pragma unroll
                for (int u = 0; u < U; ++u) {
                    if (u >= count) break;
                    const unsigned at = shared_address(units) + (to * U + u) * UNIT_BYTES;
#pragma unroll
                    for (int box = 0; box < BOXES; ++box)
                        copy(at + box * BOX_BYTES, is_values ? v_boxes : k_boxes, box * ROW_BYTES / 2, rows[u], barrier, once);
                }
            }
            if (is_values) ++step;
            is_values = !is_values, ++ahead;
            if (++to == HALVES) to = 0;
        }
    }

    // Waits for the next half.
    __device__ __forceinline__ void take() const { wait(full + 8 * from, parity); }
    __device__ __forceinline__ const unsigned char* unit(int u) const { return units + (from * U + u) * UNIT_BYTES; }
    // The half has been read.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (++from == HALVES) from = 0, parity ^= 1;
        --ahead;
        fill();
    }
};

// `attend_units` with units from a ring, which must copy this item's. `early` is called once.
template <int U, class Work, class R, class Early>
__device__ __forceinline__ void attend_ring(Work& work, R& ring, const Geometry& shape, int begin, int end, const Early& early) {
    const int base = begin / UNIT * UNIT, warp = threadIdx.x / 32, steps = steps_of<U>(base, end, warp, WARPS);
    ring.fill();  // nothing was queued if the warp had no units of the item before
    if (steps == 0) early();
    for (int step = 0; step < steps; ++step) {
        const auto token = [&](int u) { return base + (warp + (U * step + u) * WARPS) * UNIT; };
        float s[1][U][4];
        unsigned weights[1][U][2];
        ring.take();
#pragma unroll
        for (int u = 0; u < U; ++u) work.take_keys(u, ring.unit(u));
        ring.release();
        work.score(s, shape.scale * LOG2E);
        if (step == 0) early();
#pragma unroll
        for (int u = 0; u < U; ++u) mask(s, work.lane, u, begin - token(u), end - token(u));
        ring.take();
#pragma unroll
        for (int u = 0; u < U; ++u) work.take_values(u, ring.unit(u), end - token(u));
        ring.release();
        work.weigh(s, weights);
        work.accumulate(weights);
    }
}

#endif
