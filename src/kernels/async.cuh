// Asynchronous copies to shared memory, and loads from it in the layout of tensor cores. From sm_80 on.
#pragma once

// Copies 16 bytes, or writes zeros if `bytes` is 0. With a policy, weights that are not read again soon are evicted first from the L2.
__device__ __forceinline__ void copy_16(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_16_once(unsigned to, const void* from, int bytes, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
                 "l"(policy)
                 : "memory");
}

// The L2 policy for `copy_16_once`.
__device__ __forceinline__ unsigned long long read_once() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Closes the group of this thread's copies since the last call; the group may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the next of row l / 4 of each.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// Prefetches the 128 bytes at `at` into the L2.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
