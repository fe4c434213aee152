// A GPU's blocks on a CPU, for kernels that are translated to C++ (scripts/emulate_delta.py): threads are fibers that are scheduled at random,
// operations of a warp are carried out when all its lanes have come, copies and products of warpgroups when they are waited for. Reads and
// writes of tiles in shared memory that no barrier orders are counted as races, and so are accesses to what a bulk copy moves, and bulk copies of
// what was written without a fence since.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
using std::max;
using std::min;

struct int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct bf16 { unsigned short bits; };
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T at[N]; };

inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float widen(float value) { return value; }
inline float widen(bf16 value) { return __uint_as_float(unsigned(value.bits) << 16); }
template <typename T> inline T __ldcs(const T* from) { return *from; }
template <typename T> inline void __stcs(T* to, const T& value) { *to = value; }
inline void wait_for_inputs() {}
inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, bf16& to) {
    unsigned bits; memcpy(&bits, &value, 4);
    to.bits = std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned pack(float low, float high) { bf16 a, b; narrow(low, a), narrow(high, b); return a.bits | unsigned(b.bits) << 16; }
inline float element(unsigned both, int which) { return __uint_as_float(which ? both & 0xffff0000u : both << 16); }

struct Copy { unsigned to; const void* from; int bytes, whole = 16; };  // with zeros to `whole`
struct Product { float* sums; int count; unsigned a[4]; unsigned long long b; bool by_rows; };
struct Thread {
    ucontext_t context;
    bool is_done = false;
    unsigned index = 0;
    unsigned long long barriers = 0, operations[33] = {};
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> copy_groups;
    std::vector<Product> products;
    std::deque<std::vector<Product>> product_groups;
};
struct Operation { unsigned long long arrived[2]; unsigned words[2][32][8]; };  // by turns
struct Word { int writer = -1, reader = -1, copier = -1; unsigned long long written = 0, read = 0; };  // between which barriers
struct Index { unsigned x; };

constexpr unsigned SHARED_BYTES = 256 * 1024;
alignas(SHARED_BYTES) static unsigned char shared_memory[SHARED_BYTES];
static std::vector<Word> words(SHARED_BYTES / 4);
static unsigned long long races = 0, arrivals = 0, schedule = 1;
static bool copies_are_early = false;
static std::vector<Thread> threads;
static std::vector<Operation> operations;  // of each warp, by the first lane of a mask, or 32 for all
static Thread* current = nullptr;
static ucontext_t scheduler;
static Index threadIdx, blockIdx, blockDim, gridDim;

inline void yield() { swapcontext(&current->context, &scheduler); }
inline void __syncthreads() {
    const auto own = ++current->barriers;
    for (++arrivals; arrivals < own * blockDim.x;) yield();
}

// What the lanes of a mask give, once all have given it.
inline unsigned (*gather(unsigned mask, const unsigned* given, int count))[8] {
    const int group = mask == 0xffffffffu ? 32 : __builtin_ctz(mask), lanes = __builtin_popcount(mask);
    Operation& operation = operations[threadIdx.x / 32 * 33 + group];
    const auto own = current->operations[group]++;
    const int turn = own & 1;
    std::copy(given, given + count, operation.words[turn][threadIdx.x % 32]);
    for (++operation.arrived[turn]; operation.arrived[turn] < (own / 2 + 1) * lanes;) yield();
    return operation.words[turn];
}
inline void __syncwarp() { const unsigned nothing = 0; gather(0xffffffffu, &nothing, 1); }
template <typename T>
inline T from_lane(unsigned mask, T value, int lane) {
    unsigned given[2] = {};
    memcpy(given, &value, sizeof(T));
    const auto all = gather(mask, given, 2);
    if (lane >= 0 && lane < 32) memcpy(&value, all[lane], sizeof(T));
    return value;
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int step) { return from_lane(mask, value, int(threadIdx.x % 32) ^ step); }
template <typename T> inline T __shfl_sync(unsigned mask, T value, int lane) { return from_lane(mask, value, lane); }
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, int step) { return from_lane(mask, value, int(threadIdx.x % 32) - step); }
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, int step) { return from_lane(mask, value, int(threadIdx.x % 32) + step); }
inline float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Addresses are those of the process, which lies below 4 GiB.
inline unsigned shared_address(const void* at) { return unsigned(uintptr_t(at)); }
inline uintptr_t __cvta_generic_to_shared(const void* at) { return uintptr_t(at); }
template <typename T> inline T& at_address(unsigned at) { return *reinterpret_cast<T*>(uintptr_t(at)); }
inline void race(const char* what, unsigned at) {
    if (races++ < 5) printf("race: %s at byte %u, thread %u\n", what, at - shared_address(shared_memory), threadIdx.x);
}
inline void access(unsigned at, int bytes, bool is_write, bool is_own_copy = false) {
    const int warp = threadIdx.x / 32;
    const auto now = current->barriers + 1;
    if (at < shared_address(shared_memory) || at >= shared_address(shared_memory) + SHARED_BYTES) return;
    for (unsigned place = at; place < at + bytes; place += 4) {
        Word& word = words[(place - shared_address(shared_memory)) / 4];
        if (word.copier >= 0 && !(is_own_copy && word.copier == int(threadIdx.x))) race("a copy is under way", place);
        if (word.written == now && word.writer != warp) race("another warp has written", place);
        if (is_write && word.read == now && word.reader != warp) race("another warp has read", place);
        if (is_write) word.written = now, word.writer = warp;
        else word.reader = word.read == now && word.reader != warp ? -2 : warp, word.read = now;
    }
}
inline unsigned read_shared(unsigned at) { access(at, 4, false); return at_address<unsigned>(at); }
inline void write_shared(unsigned at, unsigned value) { access(at, 4, true); at_address<unsigned>(at) = value; }
inline uint4 read_shared_16(unsigned at) { access(at, 16, false); return at_address<uint4>(at); }

inline void set_copier(unsigned at, int thread, int bytes = 16) {
    if (at < shared_address(shared_memory) || at >= shared_address(shared_memory) + SHARED_BYTES) return;
    for (int i = 0; i < bytes / 4; ++i) words[(at - shared_address(shared_memory)) / 4 + i].copier = thread;
}
inline void arrive(const Copy& copy) {
    memset(&at_address<char>(copy.to), 0, copy.whole);
    memcpy(&at_address<char>(copy.to), copy.from, copy.bytes);
}
inline void start(const Copy& copy) {
    if (copy.to % copy.whole || uintptr_t(copy.from) % copy.whole) abort();
    access(copy.to, copy.whole, true, true), set_copier(copy.to, threadIdx.x, copy.whole);
    current->copies.push_back(copy);
    if (copies_are_early) arrive(copy);
}
inline void copy_16(unsigned to, const void* from, int bytes) { start({to, from, bytes}); }
inline void copy_8(unsigned to, const void* from) { start({to, from, 8, 8}); }
inline void commit_copies() { current->copy_groups.push_back(std::move(current->copies)), current->copies.clear(); }
template <int PENDING>
inline void wait_copies() {
    for (auto& groups = current->copy_groups; groups.size() > PENDING; groups.pop_front())
        for (const Copy& copy : groups.front()) set_copier(copy.to, -1, copy.whole), access(copy.to, copy.whole, true), arrive(copy);
}

// Hopper's barriers in shared memory, which count arrivals and the bytes of bulk copies, and named barriers of some of a block's threads.
struct Barrier { int expected, missing; long long bytes = 0; unsigned phase = 0; };
struct NamedBarrier { unsigned arrived = 0; unsigned long long turn = 0; };
struct BulkCopy { unsigned to; const void* from; int bytes; unsigned barrier; };
static std::map<unsigned, Barrier> barriers;
static NamedBarrier named_barriers[16];
static std::deque<BulkCopy> bulk_copies;
static std::vector<std::vector<unsigned>> unpublished;  // words that a thread has written without a fence since

inline void init(unsigned barrier, int arrivals) { barriers[barrier] = {arrivals, arrivals}; }
inline void advance(Barrier& barrier) {
    if (barrier.missing == 0 && barrier.bytes == 0) ++barrier.phase, barrier.missing = barrier.expected;
}
inline void arrive(unsigned barrier) {
    Barrier& own = barriers.at(barrier);
    if (--own.missing < 0) abort();
    advance(own);
}
inline void expect(unsigned barrier, int bytes) { barriers.at(barrier).bytes += bytes, arrive(barrier); }
inline void complete(const BulkCopy& copy) {
    memcpy(&at_address<char>(copy.to), copy.from, copy.bytes);
    for (int i = 0; i < copy.bytes; i += 4) words[(copy.to + i - shared_address(shared_memory)) / 4].copier = -1;
    Barrier& own = barriers.at(copy.barrier);
    own.bytes -= copy.bytes;
    advance(own);
}
inline void wait(unsigned barrier, int parity) {
    const Barrier& own = barriers.at(barrier);
    for (int turns = 0; int(own.phase & 1) == parity; ++turns) {
        if (turns > 100 && !bulk_copies.empty()) complete(bulk_copies.front()), bulk_copies.pop_front();
        else yield();
    }
}
// A bulk copy reads or writes shared memory beside the threads.
inline void begin_bulk(unsigned at, const void* global, int bytes) {
    if (at % 16 || uintptr_t(global) % 16 || bytes % 16) abort();
    for (int i = 0; i < bytes; i += 4) {
        Word& word = words[(at + i - shared_address(shared_memory)) / 4];
        if (word.copier >= 0) race("another copy is under way", at + i);
        word.copier = threadIdx.x;
    }
    for (const auto& of_thread : unpublished)
        for (unsigned place : of_thread)
            if (place >= at && place < at + bytes) race("written without a fence", place);
}
inline void copy_in(unsigned to, const void* from, int bytes, unsigned barrier) {
    begin_bulk(to, from, bytes);
    bulk_copies.push_back({to, from, bytes, barrier});
    if (copies_are_early) complete(bulk_copies.back()), bulk_copies.pop_back();
}
inline void copy_out(void* to, unsigned from, int bytes) {
    begin_bulk(from, to, bytes);
    if (copies_are_early) memcpy(to, &at_address<char>(from), bytes);
    for (int turn = 0; turn < 100; ++turn) yield();
    if (!copies_are_early) memcpy(to, &at_address<char>(from), bytes);
    for (int i = 0; i < bytes; i += 4) words[(from + i - shared_address(shared_memory)) / 4].copier = -1;
}
inline void publish() { unpublished[threadIdx.x].clear(); }
inline void arrive_named(int barrier, unsigned threads) {
    NamedBarrier& own = named_barriers[barrier];
    if (++own.arrived == threads) own.arrived = 0, ++own.turn;
}
inline void join(int barrier, int threads) {
    const auto turn = named_barriers[barrier].turn;
    arrive_named(barrier, threads);
    while (named_barriers[barrier].turn == turn) yield();
}
// What a thread reads and writes of that which bulk copies move.
inline void touch(const void* at, int bytes, bool is_write) {
    const auto begin = uintptr_t(shared_memory);
    if (uintptr_t(at) < begin || uintptr_t(at) >= begin + SHARED_BYTES) return;
    for (int i = 0; i < bytes; i += 4) {
        const unsigned place = shared_address(at) + i;
        if (words[(place - shared_address(shared_memory)) / 4].copier >= 0) race("a bulk copy is under way", place);
        if (is_write) unpublished[threadIdx.x].push_back(place);
    }
}

// a [16, 16] in the registers of a warp: element (row, k).
inline float factor(unsigned (*all)[8], int row, int k) { return element(all[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], k & 1); }
inline void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned given[6] = {a0, a1, a2, a3, b0, b1};
    const auto all = gather(0xffffffffu, given, 6);
    for (int e = 0; e < 4; ++e) {
        const int row = threadIdx.x % 32 / 4 + (e >> 1) * 8, column = threadIdx.x % 4 * 2 + (e & 1);
        float value = 0.0f;
        for (int k = 0; k < 16; ++k) value += factor(all, row, k) * element(all[column * 4 + k % 8 / 2][4 + k / 8], k & 1);
        sum[e] += value;
    }
}
inline void load_tiles(unsigned (&to)[4], unsigned row, bool is_transposed) {
    const auto all = gather(0xffffffffu, &row, 1);
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    for (int tile = 0; tile < 4; ++tile) {
        access(all[8 * tile + threadIdx.x % 8][0], 16, false);
        const auto at = [&](int r, int c) { return unsigned(at_address<unsigned short>(all[8 * tile + r][0] + c * 2)); };
        to[tile] = is_transposed ? at(pair, group) | at(pair + 1, group) << 16 : at(group, pair) | at(group, pair + 1) << 16;
    }
    __syncwarp();
}
inline void load_matrices(unsigned (&to)[4], unsigned row) { load_tiles(to, row, false); }
inline void load_transposed(unsigned (&to)[4], unsigned row) { load_tiles(to, row, true); }
inline unsigned transposed(unsigned matrix) {
    const auto all = gather(0xffffffffu, &matrix, 1);
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    return pack(element(all[column * 4 + row / 2][0], row & 1), element(all[(column + 1) * 4 + row / 2][0], row & 1));
}

// Products of warpgroups, whose second factor lies in rows of 128 bytes that are swizzled.
inline void add_product(float* sums, int count, const unsigned* a, unsigned long long b, bool by_rows) {
    current->products.push_back({sums, count, {a[0], a[1], a[2], a[3]}, b, by_rows});
}
inline void commit_products() { current->product_groups.push_back(std::move(current->products)), current->products.clear(); }
inline void carry_out(const Product& product) {
    const auto all = gather(0xffffffffu, product.a, 4);
    const auto bytes = [&](int shift) { return unsigned(product.b >> shift & 0x3fff) << 4; };
    const unsigned start = shared_address(shared_memory) + bytes(0), leading = bytes(16), stride = bytes(32);
    for (int i = 0; i < product.count; ++i) {
        const int row = threadIdx.x % 32 / 4 + (i >> 1 & 1) * 8, column = i / 4 * 8 + threadIdx.x % 4 * 2 + (i & 1);
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) {
            unsigned at = product.by_rows ? start + column / 64 * leading + column % 64 * 2 + k / 8 * stride + k % 8 * 128
                                          : start + column / 8 * stride + column % 8 * 128 + k * 2;
            at ^= (at >> 7 & 7) << 4;
            access(at & ~3u, 4, false);
            sum += factor(all, row, k) * widen(at_address<bf16>(at));
        }
        product.sums[i] += sum;
    }
    __syncwarp();
}
inline void wait_products(unsigned pending) {
    for (auto& groups = current->product_groups; groups.size() > pending; groups.pop_front())
        for (const Product& product : groups.front()) carry_out(product);
}

template <typename T, int N>
inline Pack<T, N> load(const T* from) {
    if (uintptr_t(from) % alignof(Pack<T, N>)) abort();
    return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <typename T, int N>
inline void store(T* to, const Pack<T, N>& values) {
    if (uintptr_t(to) % alignof(Pack<T, N>)) abort();
    *reinterpret_cast<Pack<T, N>*>(to) = values;
}

static std::function<void()> kernel;
static void run_thread() {
    kernel();
    current->is_done = true;
    yield();
}

// One block after the other; warps get turns of random lengths in random order.
inline void launch(int grid, int block, std::function<void()> work) {
    constexpr int STACK_BYTES = 128 * 1024, MOST_ROUNDS = 10'000;
    static std::vector<char> stacks;
    std::mt19937 random(schedule++);
    kernel = work, gridDim.x = grid, blockDim.x = block;
    stacks.resize(max(stacks.size(), size_t(block) * STACK_BYTES));
    for (blockIdx.x = 0; blockIdx.x < unsigned(grid); ++blockIdx.x) {
        memset(shared_memory, 0xff, SHARED_BYTES);
        std::fill(words.begin(), words.end(), Word());
        threads = std::vector<Thread>(block), operations.assign(block / 32 * 33, Operation()), arrivals = 0;
        barriers.clear(), bulk_copies.clear(), unpublished.assign(block, {});
        for (NamedBarrier& barrier : named_barriers) barrier = {};
        for (int i = 0; i < block; ++i) {
            getcontext(&threads[i].context);
            threads[i].context.uc_stack.ss_sp = &stacks[size_t(i) * STACK_BYTES], threads[i].context.uc_stack.ss_size = STACK_BYTES;
            threads[i].index = i;
            makecontext(&threads[i].context, run_thread, 0);
        }
        std::vector<int> warps(block / 32);
        for (size_t i = 0; i < warps.size(); ++i) warps[i] = int(i);
        int rounds = 0;
        for (int left = block; left > 0; ++rounds) {
            if (rounds == MOST_ROUNDS) {
                printf("  %d threads of block %u wait for ever\n", left, blockIdx.x);
                exit(1);
            }
            std::shuffle(warps.begin(), warps.end(), random);
            for (int warp : warps)
                for (int turn = random() % 50; turn >= 0; --turn)
                    for (int lane = 0; lane < 32; ++lane) {
                        current = &threads[warp * 32 + lane], threadIdx.x = current->index;
                        if (current->is_done) continue;
                        swapcontext(&scheduler, &current->context);
                        left -= current->is_done;
                    }
        }
    }
}
