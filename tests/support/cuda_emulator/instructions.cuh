// The functions of kernels/cuda/instructions.cuh in plain C++, for the emulator.
#pragma once

namespace emulator {

inline bf16 nearest_bf16(float v) {  // to the nearest, ties to even
    const uint32_t bits = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float half_of(uint32_t pair, int which) { return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000u); }

struct Product { uint32_t a[4], b[2]; float* d; };

// d[16, 8] += a[16, 16] @ b[16, 8]: one addition in float32 after the other, k from 0 to 15; the hardware's own order is not documented.
inline void multiply(void* const* lanes, unsigned mask) {
    must(mask == ~0u, "a product of the tensor cores without all lanes");
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& one = *static_cast<const Product*>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i)
            for (int h = 0; h < 2; ++h) a[g + i % 2 * 8][t * 2 + h + i / 2 * 8] = half_of(one.a[i], h);
        for (int i = 0; i < 2; ++i)
            for (int h = 0; h < 2; ++h) b[t * 2 + h + i * 8][g] = half_of(one.b[i], h);
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            float& sum = static_cast<const Product*>(lanes[lane])->d[i];
            for (int k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        }
}

template <typename T>
T seen(const void* from) {
    pause();
    return loaded<T>(from);
}
template <typename T>
void shown(void* to, T v) {
    must_align(to, sizeof(T));
    pause();
    store(to, &v, sizeof(T));
}

// What a barrier in shared memory holds. It is over when neither threads nor bytes are missing, and starts again.
struct Arrivals { int bytes; unsigned missing : 11, threads : 11, parity : 1, made : 9; };
constexpr unsigned MADE = 0x155;

inline Arrivals& arrivals_of(void* barrier) {
    auto& one = *static_cast<Arrivals*>(barrier);
    must(one.made == MADE, "a barrier in shared memory that was never made");
    return one;
}
inline void settle(Arrivals& one) {
    progress();
    if (one.missing == 0 && one.bytes == 0) one.missing = one.threads, one.parity ^= 1;
}
inline void bytes_arrived(void* barrier, unsigned bytes) {
    Arrivals& one = arrivals_of(barrier);
    one.bytes -= static_cast<int>(bytes);
    settle(one);
}

}  // namespace emulator

inline char* dynamic_shared() { return emulator::dynamic_shared(); }

inline void copy16(void* to, const void* from) {
    emulator::must_align(to, 16), emulator::must_align(from, 16);
    emulator::copy_later(to, from, 16);
}
inline void copies_commit() { emulator::commit_copies(); }
inline void copies_wait_but_one() { emulator::finish_copies(1); }
inline void copies_wait() { emulator::finish_copies(); }
inline uint4 load16(const void* from) { return emulator::loaded<uint4>(from); }
inline void store16(void* to, uint4 v) {
    emulator::must_align(to, 16);
    std::memcpy(to, &v, 16);
}
inline uint32_t load4(const void* from) { return emulator::loaded<uint32_t>(from); }
inline void prefetch(const void* from, uint32_t bytes) {
    emulator::must(reinterpret_cast<uintptr_t>(from) % 16 == 0 && bytes % 16 == 0, "a prefetch that is not of whole 16 bytes");
    if (bytes > 0) static_cast<void>(*static_cast<const volatile char*>(from) + static_cast<const volatile char*>(from)[bytes - 1]);
}
inline void launch_dependents() {}
inline void wait_for_previous() {}  // launches come one after the other

inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    emulator::Product mine{{a0, a1, a2, a3}, {b0, b1}, d};
    emulator::meet_warp(~0u, &mine, emulator::multiply, "a product of the tensor cores");
}
inline uint32_t narrow(float lo, float hi) { return emulator::nearest_bf16(lo) | static_cast<uint32_t>(emulator::nearest_bf16(hi)) << 16; }
inline uint32_t times(uint32_t a, uint32_t b) {
    return narrow(emulator::half_of(a, 0) * emulator::half_of(b, 0), emulator::half_of(a, 1) * emulator::half_of(b, 1));
}
inline uint32_t plus(uint32_t a, uint32_t b) {
    return narrow(emulator::half_of(a, 0) + emulator::half_of(b, 0), emulator::half_of(a, 1) + emulator::half_of(b, 1));
}
inline uint32_t at_least(uint32_t a, uint32_t b) {
    return narrow(emulator::half_of(a, 0) >= emulator::half_of(b, 0), emulator::half_of(a, 1) >= emulator::half_of(b, 1));
}
inline float rounded(float v) { return __uint_as_float(static_cast<uint32_t>(emulator::nearest_bf16(v)) << 16); }

inline uint32_t load4_relaxed(const void* from) { return emulator::seen<uint32_t>(from); }
inline uint2 load8_relaxed(const void* from) { return emulator::seen<uint2>(from); }
inline uint4 load16_relaxed(const void* from) {
    emulator::must_align(from, 16);
    const uint2 a = emulator::seen<uint2>(from), b = emulator::seen<uint2>(static_cast<const uint2*>(from) + 1);
    return make_uint4(a.x, a.y, b.x, b.y);
}
inline void store4_relaxed(void* to, uint32_t v) { emulator::shown(to, v); }
inline void store8_relaxed(void* to, uint2 v) { emulator::shown(to, v); }

inline void arrivals_init(unsigned long long* barrier, uint32_t threads) {
    emulator::must_align(barrier, 8);
    const emulator::Arrivals fresh{0, threads, threads, 0, emulator::MADE};
    std::memcpy(static_cast<void*>(barrier), &fresh, sizeof(fresh));
}
inline void arrivals_visible() {}
inline void arrive_expecting(unsigned long long* barrier, uint32_t bytes) {
    emulator::pause();
    emulator::Arrivals& one = emulator::arrivals_of(barrier);
    emulator::must(one.missing > 0, "more threads arrive at a barrier in shared memory than it counts");
    one.bytes += static_cast<int>(bytes), one.missing -= 1;
    emulator::settle(one);
}
inline void arrive(unsigned long long* barrier) { arrive_expecting(barrier, 0); }
inline bool arrived(unsigned long long* barrier, uint32_t parity) {
    emulator::pause();
    return emulator::arrivals_of(barrier).parity != (parity & 1);
}
inline void bulk_copy(void* to, const void* from, uint32_t bytes, unsigned long long* barrier) {
    emulator::must_align(to, 16), emulator::must_align(from, 16);
    emulator::must(bytes % 16 == 0, "a bulk copy that is not of whole 16 bytes");
    emulator::copy_to_barrier(to, from, bytes, emulator::bytes_arrived, barrier);
}
inline void sync_some(int identity, int threads) { emulator::meet_block(identity, threads, true); }
