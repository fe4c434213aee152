// Divides all contexts of a step into items for paged_attention.cu, once for all layers.
#include "attention.cuh"
#include "scalar.cuh"

constexpr int PLANNERS = 256;  // threads of plan_attention
constexpr int CLASSES = 16;    // classes of items by length
constexpr int STEP = WARPS * UNITS * UNIT;  // tokens of an own part that a block processes at once

// Exclusive prefix sum of `value` over the block, and the total.
__device__ __forceinline__ int scan(int value, int& total) {
    __shared__ int warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // an earlier scan has been read
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < PLANNERS / 32; ++i) {
        if (i < warp) before += warps[i];
        total += warps[i];
    }
    return before + sum - value;
}

constexpr int MOST_STEPS = 8;          // per item of an own part, unless contexts are very long
constexpr int MANY_STEPS = 36;         // if blocks have more steps than this, items of twice the length still end together
constexpr int MOST_PIECES = 32;        // of a row, which one block merges, unless the split is fixed
constexpr int LEAST_SHARED_UNITS = 4;  // fewest units of an item's shared part; then the most:
constexpr int MOST_SHARED_UNITS = 32;

__device__ __forceinline__ int pieces_of(int tokens, int split) { return (tokens + split - 1) / split; }

// Creates the items of a step. One block; a thread has consecutive rows, and the groups with the same numbers.
extern "C" __global__ void __launch_bounds__(PLANNERS) plan_attention(
    const int* __restrict__ context_lens,   // [S]
    const int* __restrict__ groups,         // [S] or null
    const int* __restrict__ shared_blocks,  // [S] or null
    Header* header, Item* items, Pieces* pieces,
    int* scratch,                           // [4, S]
    long long num_rows, long long block_size,
    long long window,                       // of tokens; below 0: so many at the beginning are not seen
    long long columns,                      // per item: key/value heads times chunks of query heads
    long long num_blocks,                   // thread blocks that take items
    long long fixed_split,                  // tokens per piece; 0: chosen here
    long long joins,                        // whether an item may be several pieces, with a fixed split
    long long capacity                      // partial results per column
) {
    wait_for_inputs();
    const int rows = static_cast<int>(num_rows), per_thread = (rows + PLANNERS - 1) / PLANNERS;
    const int first_row = threadIdx.x * per_thread, end_row = min(rows, first_row + per_thread);
    int *members = scratch, *prefix = scratch + rows, *rank = scratch + 2 * rows, *first_item = scratch + 3 * rows;
    __shared__ int longest;  // steps of the longest own part
    if (threadIdx.x == 0) longest = 1;
    for (int g = first_row; g < end_row; ++g) members[g] = 0, prefix[g] = INT_MAX;
    __syncthreads();
    for (int s = first_row; s < end_row; ++s) {
        const int len = context_lens[s], group = groups && window == 0 && len > 0 ? groups[s] : -1;
        rank[s] = group < 0 ? -1 : atomicAdd(&members[group], 1);
        const int block = static_cast<int>(block_size);
        if (group >= 0) atomicMin(&prefix[group], min(shared_blocks[s] * block, (len - 1) / block * block));
    }
    __syncthreads();
    const int whole = fixed_split > 0 ? static_cast<int>(fixed_split) : 1;  // with a fixed split, only whole splits are shared
    const auto shared_by = [&](int group) { return members[group] > 1 ? prefix[group] / whole * whole : 0; };
    const auto shared_of = [&](int s) { return rank[s] < 0 ? 0 : shared_by(groups[s]); };
    const auto begin_of = [&](int s) {
        if (window < 0) return min(context_lens[s], -static_cast<int>(window));
        return window > 0 ? max(0, context_lens[s] - static_cast<int>(window)) : shared_of(s);
    };
    const auto parties_of = [&](int group) { return (members[group] + PARTY - 1) / PARTY; };

    // Steps of all own parts; units of the shared parts, counted once per read, and counted once per row that uses them.
    int own_steps = 0, read_units = 0, seen_units = 0, total_steps, total_read, total_seen;
    for (int s = first_row; s < end_row; ++s) {
        const int own = pieces_of(context_lens[s] - begin_of(s), STEP);
        atomicMax(&longest, own);
        own_steps += own, seen_units += shared_of(s) / UNIT;
    }
    for (int g = first_row; g < end_row; ++g)
        if (shared_by(g) > 0) read_units += shared_by(g) / UNIT * parties_of(g);
    scan(own_steps, total_steps), scan(read_units, total_read), scan(seen_units, total_seen);
    // One item per block if that keeps items short; shared parts, which come first, for about half of the blocks.
    const int blocks = static_cast<int>(num_blocks), per_block = pieces_of(total_steps * static_cast<int>(columns), blocks);
    const int most = per_block < MANY_STEPS ? MOST_STEPS : 2 * MOST_STEPS;
    int per_item = max(max(1, min(most, per_block)), pieces_of(longest, MOST_PIECES));
    const int wanted = pieces_of(2 * total_read * static_cast<int>(columns), blocks);
    int shared_units = LEAST_SHARED_UNITS;
    while (shared_units < min(wanted, MOST_SHARED_UNITS)) shared_units *= 2;
    if (fixed_split == 0)  // the capacity for a fixed split may be below 2 per row, which no split here could satisfy
        while (2 * rows + total_steps / per_item + total_seen / shared_units > capacity) per_item *= 2, shared_units *= 2;
    const int split = fixed_split > 0 ? static_cast<int>(fixed_split) : per_item * STEP;
    const int shared_split = fixed_split > 0 ? split : shared_units * UNIT;

    const auto prefix_pieces = [&](int group) { return pieces_of(shared_by(group), shared_split); };
    const auto own_pieces = [&](int s) { return max(1, pieces_of(context_lens[s] - begin_of(s) / UNIT * UNIT, split)); };
    // An item may be as many neighbouring pieces of a fixed split as it would be long otherwise.
    const int together = joins ? max(1, per_item * STEP / split) : 1, most_tokens = together * split;
    // Own parts are sorted by descending length, so that the blocks end together.
    const auto length_class = [&](int tokens) { return min(CLASSES - 1, (most_tokens - tokens) * CLASSES / most_tokens); };
    const auto last_class = [&](int s, int count) {
        return length_class(context_lens[s] - begin_of(s) / UNIT * UNIT - (count - 1) * most_tokens);
    };
    __shared__ int classes[CLASSES];
    if (threadIdx.x < CLASSES) classes[threadIdx.x] = 0;
    __syncthreads();
    int group_items = 0, slots = 0, num_shared;
    for (int g = first_row; g < end_row; ++g)
        if (shared_by(g) > 0) group_items += prefix_pieces(g) * parties_of(g);
    for (int s = first_row; s < end_row; ++s) {
        const int own = own_pieces(s), all = own + (shared_of(s) > 0 ? prefix_pieces(groups[s]) : 0);
        const int count = pieces_of(own, together);
        slots += all > 1 ? all : 0;
        if (count > 1) atomicAdd(&classes[0], count - 1);
        atomicAdd(&classes[last_class(s, count)], 1);
    }
    int unused, group_item = scan(group_items, num_shared), slot = scan(slots, unused);
    if (threadIdx.x == 0) {
        int before = num_shared;
        for (int k = 0; k < CLASSES; ++k) {
            const int count = classes[k];
            classes[k] = before, before += count;
        }
        *header = {before, 0, 0, 0};
    }
    for (int g = first_row; g < end_row; ++g) {
        first_item[g] = group_item;
        if (shared_by(g) > 0) group_item += prefix_pieces(g) * parties_of(g);
    }
    __syncthreads();
    for (int s = first_row; s < end_row; ++s) {
        const int ahead = shared_of(s) > 0 ? prefix_pieces(groups[s]) : 0, own = own_pieces(s), count = pieces_of(own, together);
        pieces[s] = {slot, own + ahead};
        slot += own + ahead > 1 ? own + ahead : 0;
        const int begin = begin_of(s), base = begin / UNIT * UNIT, end = context_lens[s];
        for (int k = 0; k < count; ++k) {
            Item& item = items[atomicAdd(&classes[k < count - 1 ? 0 : last_class(s, count)], 1)];
            item.rows[0] = s, item.rows[1] = pieces[s].first, item.rows[2] = pieces[s].count;
            item.rows[3] = min(together, own - k * together);
            item.begin = max(begin, base + k * most_tokens), item.end = min(end, base + (k + 1) * most_tokens);
            item.piece = ahead + k * together, item.is_shared = 0;
        }
        for (int k = 0; k < ahead; ++k) {
            Item& item = items[first_item[groups[s]] + rank[s] / PARTY * ahead + k];
            item.rows[rank[s] % PARTY] = s;
            if (rank[s] == members[groups[s]] - 1)
                for (int none = rank[s] % PARTY + 1; none < PARTY; ++none) item.rows[none] = -1;
            if (rank[s] % PARTY > 0) continue;
            item.begin = k * shared_split, item.end = min(shared_of(s), (k + 1) * shared_split);
            item.piece = k, item.is_shared = 1;
        }
    }
}
