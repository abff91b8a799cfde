// The functions of kernels/cuda/cluster.cuh in plain C++, for the emulator.
#pragma once

namespace emulator {

inline void* of_pair(void* here, unsigned rank) {
    const auto offset = static_cast<char*>(here) - dynamic_shared();
    must(offset >= 0 && offset < (228 << 10), "an address outside of dynamic shared memory");
    return shared_of_pair(rank) + offset;
}

}  // namespace emulator

inline uint32_t rank_in_pair() { return blockIdx.x % 2; }
inline void sync_pair() { emulator::meet_pair(); }
inline void arrive_at(unsigned long long* barrier, uint32_t rank) {
    arrive(static_cast<unsigned long long*>(emulator::of_pair(barrier, rank)));
}
inline void bulk_copy_to_pair(void* to, const void* from, uint32_t bytes, unsigned long long* barrier) {
    for (unsigned rank = 0; rank < 2; ++rank)
        bulk_copy(emulator::of_pair(to, rank), from, bytes, static_cast<unsigned long long*>(emulator::of_pair(barrier, rank)));
}
