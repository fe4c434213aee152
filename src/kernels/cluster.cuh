// Access to the shared memory of other blocks in a cluster.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ unsigned cluster_size() {
    unsigned size;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return size;
}

// Barrier of all threads of all blocks in the cluster; afterwards all may read what blocks wrote before.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `sync_cluster` in two steps: what blocks wrote or read before they arrived is complete for those that have waited.
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in the shared memory of the cluster's block `rank` that corresponds to `at`.
__device__ __forceinline__ unsigned peer_address(unsigned at, int rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// Reads a number from the cluster's block `rank`.
__device__ __forceinline__ float load_one(unsigned at, int rank) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(peer_address(at, rank)) : "memory");
    return value;
}

// Reads four numbers from the cluster's block `rank`.
__device__ __forceinline__ float4 load_shared(unsigned at, int rank) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(peer_address(at, rank)));
    return value;
}

// Writes four numbers to this block's own shared memory.
__device__ __forceinline__ void store_shared(unsigned at, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
