// Instructions for clusters along x, whose blocks can access each other's shared memory; one function for each machine instruction, for
// sm_90 and newer. tests/support/cuda_emulator/cluster.cuh has the same functions in plain C++. Include this file after common.cuh.
#pragma once

// A barrier of all threads of all blocks of a cluster, in two steps. After the wait a thread sees everything that the others wrote before
// they arrived. Another block's shared memory may be written only after a wait, because until then that block may not have started.
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The address, for `store16_there`, of the same place in the shared memory of the block with this rank.
__device__ __forceinline__ uint32_t address_there(const void* here, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    return there;
}
__device__ __forceinline__ void store16_there(uint32_t there, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
