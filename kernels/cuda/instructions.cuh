// Every machine instruction that the kernels name themselves, one function each: no other file but wgmma.cuh has inline assembly.
// tests/support/cuda_emulator/instructions.cuh has the same functions in plain C++, with which the kernels run on a CPU.
#pragma once

// The block's shared memory whose size the launch gives.
__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Those before the last commit have arrived.
__device__ __forceinline__ void copies_wait_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ uint4 load16(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store16(void* to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint32_t load4(const void* from) {
    uint32_t v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
// Bytes that a later kernel will read, brought into the L2.
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The next kernel may be scheduled; it waits by itself before it reads or writes anything that this one does.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// All earlier kernels are complete and their writes visible.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t narrow(float lo, float hi) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {  // of bf16 pairs, rounded
    uint32_t v;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
__device__ __forceinline__ uint32_t plus(uint32_t a, uint32_t b) {  // of bf16 pairs, rounded
    uint32_t v;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
__device__ __forceinline__ uint32_t at_least(uint32_t a, uint32_t b) {  // of bf16 pairs: 1 where a >= b, or else 0
    uint32_t v;
    asm("set.ge.bf16x2.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
__device__ __forceinline__ float rounded(float v) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return __uint_as_float(static_cast<uint32_t>(r) << 16);
}

// Words that blocks of one running kernel send each other, for which neither side uses plain accesses. Two stores are in order only with
// __threadfence() between them.
__device__ __forceinline__ uint32_t load4_relaxed(const void* from) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load8_relaxed(const void* from) {  // both words of one store
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load16_relaxed(const void* from) {  // the halves may be of different stores
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store4_relaxed(void* to, uint32_t v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store8_relaxed(void* to, uint2 v) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}

// Barriers in shared memory that count threads and bytes (mbarrier), and the copies that arrive at them.
__device__ __forceinline__ void arrivals_init(unsigned long long* barrier, uint32_t threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrivals_visible() {  // by the thread that made them, before the block's barrier
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(unsigned long long* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool arrived(unsigned long long* barrier, uint32_t parity) {  // whether the phase of this parity is over
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return done != 0;
}
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// A barrier of some of the block's warps; identity 1..15.
__device__ __forceinline__ void sync_some(int identity, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(identity), "r"(threads) : "memory");
}
