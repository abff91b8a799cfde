// The functions of kernels/cuda/cluster.cuh in plain C++, for the emulator.
#pragma once

namespace emulator {

constexpr unsigned RANK_BITS = 20;  // an address of another block: its rank above, an offset in its dynamic shared memory below

}  // namespace emulator

inline void arrive_in_cluster() { emulator::arrive_in_cluster(); }
inline void wait_for_cluster() { emulator::wait_for_cluster(); }
inline uint32_t address_there(const void* here, uint32_t rank) {
    const auto offset = static_cast<const char*>(here) - emulator::dynamic_shared();
    emulator::must(offset >= 0 && offset < (228 << 10), "an address outside of dynamic shared memory");
    return rank << emulator::RANK_BITS | static_cast<uint32_t>(offset);
}
inline void store16_there(uint32_t there, float4 v) {
    emulator::pause();
    char* memory = emulator::shared_of(there >> emulator::RANK_BITS, there % (1u << emulator::RANK_BITS) + 16);
    emulator::must_align(memory + there % (1u << emulator::RANK_BITS), 16);
    std::memcpy(memory + there % (1u << emulator::RANK_BITS), &v, sizeof(v));
}
