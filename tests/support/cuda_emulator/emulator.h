// CUDA C++ on a CPU: what a kernel's source finds where the CUDA compiler's own words would be. Included before the source.
//
// A thread is a fiber. It runs until it meets others (a barrier, a shuffle, a product of the tensor cores) or reads or writes what
// other blocks see; then another one runs, in an order that a seed gives. So code that leans on an order which CUDA does not promise
// computes something else with some seed, and code that waits for what never happens is an error after a number of turns.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct uint3 { unsigned x, y, z; };
struct float2 { alignas(8) float x; float y; };
struct uint2 { alignas(8) unsigned x; unsigned y; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };
struct float4 { alignas(16) float x; float y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

// The results of a warp's lanes, made by the last one that comes. lanes: what each brought; null where the mask has none.
using Finish = void (*)(void* const* lanes, unsigned mask);
void meet_warp(unsigned mask, void* mine, Finish finish, const char* what);
// A barrier of the block: threads that come (0: all that have not returned). How many of them brought true.
unsigned meet_block(int identity, unsigned threads, bool mine);
void meet_at(int identity, unsigned threads);  // arrives and goes on
void pause();     // other threads run before what comes now; a kernel that waits must call it in its loop
void progress();  // something changed that a waiting thread may look for
[[noreturn]] void fail(const char* what);
unsigned lane();
unsigned long long turns();
char* dynamic_shared();
// Blocks of a cluster, neighbours along x, in launches that say how many they are.
char* shared_of(unsigned rank, unsigned bytes);  // the dynamic shared memory of one of them, of which so many bytes are needed
void arrive_in_cluster();
void wait_for_cluster();
// Global memory that blocks of one launch share. A store reaches other blocks at a later turn, in any order, but for one address, until
// a fence of the same thread, or of one that met it at a barrier since, sends all earlier ones; its own block sees it at once.
void load(void* to, const void* from, unsigned bytes);
void store(void* to, const void* from, unsigned bytes);
void fence();
void send(const void* at);  // what was stored there
// Asynchronous copies: done at once or when waited for; and those that arrive at a barrier, at some later turn.
void copy_later(void* to, const void* from, unsigned bytes);
void commit_copies();  // those since the last commit belong together
void finish_copies(int commits = -1);  // all, or those before the last so many commits
void copy_to_barrier(void* to, const void* from, unsigned bytes, void (*arrived)(void* barrier, unsigned bytes), void* barrier);

// Products of warpgroups: each warp does its 16 rows by itself, at some later turn, in the order of its calls, or when it waits for them.
struct Called {  // what the warps of a group must agree on
    unsigned long long a, b;
    int columns, add;
    bool operator==(const Called& o) const { return a == o.a && b == o.b && columns == o.columns && add == o.add; }
};
struct Part { Called called; unsigned thread; bool from_registers; unsigned a[32][4]; float* d[32]; };  // thread: the warp's first
using Multiply = void (*)(const Part&);
void begin_products();
void add_product(const Part& part, Multiply multiply, const Called& called);
void commit_products();
void finish_products(unsigned pending);
const void* seen_by_products(unsigned offset);  // 16 bytes of dynamic shared memory

inline void must(bool holds, const char* what) { if (!holds) fail(what); }
inline void must_align(const void* p, unsigned bytes) { must(reinterpret_cast<uintptr_t>(p) % bytes == 0, "an access that is not aligned"); }

template <typename T>
struct Exchange { T value; unsigned from; T result; };

template <typename T>
void move_between(void* const* lanes, unsigned) {
    for (int i = 0; i < 32; ++i) {
        auto* mine = static_cast<Exchange<T>*>(lanes[i]);
        if (mine == nullptr) continue;
        must(lanes[mine->from] != nullptr, "a shuffle that reads a lane outside its mask");
        mine->result = static_cast<Exchange<T>*>(lanes[mine->from])->value;
    }
}
template <typename T>
T shuffle(unsigned mask, T value, unsigned from) {
    Exchange<T> mine{value, from, value};
    meet_warp(mask, &mine, move_between<T>, "a shuffle");
    return mine.result;
}
template <typename T, T (*JOIN)(T, T)>
void join_all(void* const* lanes, unsigned) {
    T* first = nullptr;
    for (int i = 0; i < 32; ++i)
        if (T* mine = static_cast<T*>(lanes[i])) first == nullptr ? void(first = mine) : void(*first = JOIN(*first, *mine));
    for (int i = 0; i < 32; ++i)
        if (T* mine = static_cast<T*>(lanes[i])) *mine = *first;
}
template <typename T, T (*JOIN)(T, T)>
T reduce(unsigned mask, T value) {
    meet_warp(mask, &value, join_all<T, JOIN>, "a reduction");
    return value;
}
template <typename T> T added(T a, T b) { return a + b; }
template <typename T> T larger(T a, T b) { return a > b ? a : b; }
template <typename T> T smaller(T a, T b) { return a < b ? a : b; }
template <typename T> T either(T a, T b) { return a | b; }
template <typename T> T both(T a, T b) { return a & b; }

template <typename T>
T loaded(const void* from) {
    must_align(from, sizeof(T));
    T v;
    load(&v, from, sizeof(T));
    return v;
}
template <typename T, typename Change>
T atomic(T* at, Change change) {
    pause();
    send(at);
    const T old = *at, now = change(old);
    if (std::memcmp(&old, &now, sizeof(T)) != 0) *at = now, progress();
    return old;
}
template <typename T, typename U>
T bits_as(U v) {
    static_assert(sizeof(T) == sizeof(U), "the same size");
    T out;
    std::memcpy(&out, &v, sizeof(T));
    return out;
}

}  // namespace emulator

extern uint3 threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // all of it is exchanged when another block runs
#define __restrict__

inline void __syncthreads() { emulator::meet_block(0, 0, true); }
inline int __syncthreads_count(int v) { return emulator::meet_block(0, 0, v != 0); }
inline int __syncthreads_or(int v) { return emulator::meet_block(0, 0, v != 0) != 0; }
inline int __syncthreads_and(int v) { return emulator::meet_block(0, 0, v == 0) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { emulator::reduce<unsigned, emulator::either<unsigned>>(mask, 0); }
template <typename T> T __shfl_xor_sync(unsigned mask, T v, unsigned step) { return emulator::shuffle(mask, v, (emulator::lane() ^ step) % 32); }
template <typename T> T __shfl_sync(unsigned mask, T v, unsigned from, unsigned width = 32) {
    return emulator::shuffle(mask, v, emulator::lane() / width * width + from % width);
}
template <typename T> T __shfl_up_sync(unsigned mask, T v, unsigned step) {
    return emulator::shuffle(mask, v, emulator::lane() < step ? emulator::lane() : emulator::lane() - step);
}
template <typename T> T __shfl_down_sync(unsigned mask, T v, unsigned step) {
    return emulator::shuffle(mask, v, emulator::lane() + step > 31 ? emulator::lane() : emulator::lane() + step);
}
inline unsigned __ballot_sync(unsigned mask, bool v) {
    return emulator::reduce<unsigned, emulator::either<unsigned>>(mask, v ? 1u << emulator::lane() : 0);
}
inline bool __any_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) != 0; }
inline bool __all_sync(unsigned mask, bool v) { return __ballot_sync(mask, !v) == 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emulator::reduce<unsigned, emulator::added<unsigned>>(mask, v); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return emulator::reduce<unsigned, emulator::larger<unsigned>>(mask, v); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return emulator::reduce<unsigned, emulator::smaller<unsigned>>(mask, v); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return emulator::reduce<unsigned, emulator::either<unsigned>>(mask, v); }

template <typename T> T atomicAdd(T* at, T v) { return emulator::atomic(at, [=](T old) { return T(old + v); }); }
template <typename T> T atomicOr(T* at, T v) { return emulator::atomic(at, [=](T old) { return old | v; }); }
template <typename T> T atomicMax(T* at, T v) { return emulator::atomic(at, [=](T old) { return old > v ? old : v; }); }
template <typename T> T atomicMin(T* at, T v) { return emulator::atomic(at, [=](T old) { return old < v ? old : v; }); }
template <typename T> T atomicExch(T* at, T v) { return emulator::atomic(at, [=](T) { return v; }); }
template <typename T> T atomicCAS(T* at, T wanted, T v) { return emulator::atomic(at, [=](T old) { return old == wanted ? v : old; }); }
inline void __threadfence() { emulator::pause(), emulator::fence(); }
inline void __threadfence_block() { emulator::pause(); }
inline void __nanosleep(unsigned) { emulator::pause(); }
[[noreturn]] inline void __trap() { emulator::fail("the kernel gave up"); }
inline long long clock64() { return emulator::pause(), emulator::turns(); }
inline int clock() { return static_cast<int>(clock64()); }
template <typename T> T __ldcg(const T* from) { return emulator::loaded<T>(from); }
template <typename T> T __ldg(const T* from) { return emulator::must_align(from, sizeof(T)), *from; }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(v); }
inline float __uint_as_float(unsigned v) { return emulator::bits_as<float>(v); }
inline float __int_as_float(int v) { return emulator::bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return emulator::bits_as<unsigned>(v); }
inline int __float_as_int(float v) { return emulator::bits_as<int>(v); }
inline unsigned __float2uint_rn(float v) {  // to the nearest, ties to even; what does not fit is the nearest that does
    return !(v > 0.f) ? 0 : v >= 4294967296.f ? 0xffffffffu : static_cast<unsigned>(std::nearbyint(static_cast<double>(v)));
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v))); }
template <typename T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T> constexpr T max(T a, T b) { return a < b ? b : a; }
