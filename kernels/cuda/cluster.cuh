// Blocks that reach each other's shared memory (clusters along x), one function for each machine instruction; from sm_90 on.
// tests/support/cuda_emulator/cluster.cuh has the same functions in plain C++. Include it after common.cuh.
#pragma once

// A barrier of all threads of all blocks of a cluster, in two steps: what a thread wrote before it arrives is seen by all who waited.
// Another block's shared memory may be written only after a wait, before which it may not be there yet.
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The address that the block of this rank has for the same place of its own shared memory, for `store16_there`.
__device__ __forceinline__ uint32_t address_there(const void* here, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    return there;
}
__device__ __forceinline__ void store16_there(uint32_t there, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
