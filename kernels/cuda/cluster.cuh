// Pairs of blocks that reach each other's shared memory (clusters of two), one function for each machine instruction; from sm_90 on.
// tests/support/cuda_emulator/cluster.cuh has the same functions in plain C++. Include it behind common.cuh.
#pragma once

__device__ __forceinline__ uint32_t rank_in_pair() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of both blocks. Barriers made before, and `arrivals_visible`, are there for both afterwards.
__device__ __forceinline__ void sync_pair() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at the barrier that lies there in the shared memory of the block of this rank.
__device__ __forceinline__ void arrive_at(unsigned long long* barrier, uint32_t rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}"
                 ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}
// `bulk_copy` to the same place in both blocks; in each, the bytes arrive at the barrier that lies there.
__device__ __forceinline__ void bulk_copy_to_pair(void* to, const void* from, uint32_t bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<unsigned short>(3)) : "memory");
}
