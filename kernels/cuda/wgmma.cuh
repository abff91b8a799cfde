// Products of Hopper's warpgroups (wgmma) and related instructions, one function for each machine instruction; only for sm_90a.
// tests/support/cuda_emulator/wgmma.cuh has the same functions in plain C++. Include this file after common.cuh.
//
// A warpgroup is 4 consecutive warps, of which the first has a number that is a multiple of 4. All its threads must call `products_begin`,
// `multiply`, `products_commit` and `products_wait` together. Products are asynchronous: from `products_begin` to the wait a thread must
// neither access their registers nor write their shared memory.
#pragma once

// A descriptor, for `multiply`, of a matrix [rows, k] of bf16 in shared memory. The matrix consists of pieces of 8 rows x 8 values of k,
// each 128 consecutive bytes, row by row; `along_k` and `along_rows` are the bytes from one piece to the next. `start`: its first 16 bytes,
// at any multiple of 16. So if the pieces of the same 8 values of k follow each other for many rows, a matrix may start at any of the rows.
using Matrix = unsigned long long;
__device__ __forceinline__ Matrix matrix_at(const void* start, uint32_t along_k, uint32_t along_rows) {
    const Matrix distances = static_cast<Matrix>(along_k >> 4) << 16 | static_cast<Matrix>(along_rows >> 4) << 32;
    return distances | (shared_address(start) >> 4 & 0x3fff);
}
// A matrix of consecutive rows of 128 bytes (64 values of k) that starts at a multiple of 1024 bytes. Within row r, the i-th 16 bytes are
// at the place i ^ r % 8. `moved` by 32 bytes, the matrix starts 16 values of k later.
__device__ __forceinline__ Matrix matrix_of_lines(const void* start) { return matrix_at(start, 16, 1024) | 1ull << 62; }
__device__ __forceinline__ Matrix moved(Matrix matrix, int bytes) { return matrix + (bytes >> 4); }  // starts `bytes` later

// A matrix of rows of 64 bytes (32 values of k) as `tensor_copy` writes them: consecutive rows from a multiple of 512 bytes, and within a
// row the i-th 16 bytes at the place i ^ (row / 2 % 4). `start` may be the start of any row, or 32 bytes after it.
__device__ __forceinline__ Matrix swizzled_matrix_at(const void* start) { return matrix_at(start, 16, 512) | 2ull << 62; }

// Makes earlier writes to registers visible to the products that follow. Call it before the first product and after each wait.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>  // waits until at most PENDING commits are unfinished
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// d[64, n] = a[64, 16] @ b[n, 16]^T, plus the previous d if `add`; n = 32, 64, 96, 128 or 192, twice the number of registers of d. Warp w
// of the group has the 16 rows from 16 w, with the layout of mma.m16n8k16: in thread t, d[4 i + 2 r + j] is row t / 4 + 8 r, column 8 i + 2
// (t % 4) + j, and half j of a[2 i + r] is row t / 4 + 8 r, value 8 i + 2 (t % 4) + j of k.
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
__device__ __forceinline__ void multiply(float (&d)[48], Matrix a, Matrix b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
        "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
        "}, %48, %49, p, 1, 1, 0, 0;\n}"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void multiply(float (&d)[48], const uint32_t (&a)[4], Matrix b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
        "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
        "}, {%48,%49,%50,%51}, %52, p, 1, 1, 0;\n}"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void multiply(float (&d)[96], Matrix a, Matrix b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
        "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
        "}, %96, %97, p, 1, 1, 0, 0;\n}"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void multiply(float (&d)[96], const uint32_t (&a)[4], Matrix b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
        "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
        "}, {%96,%97,%98,%99}, %100, p, 1, 1, 0;\n}"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void multiply(float (&d)[16], Matrix a, Matrix b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, %16, %17, p, 1, 1, 0, 0;\n}"
        : EIGHT(0), EIGHT(8)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void multiply(float (&d)[32], Matrix a, Matrix b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void multiply(float (&d)[64], Matrix a, Matrix b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"
        "%61,%62,%63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
#undef EIGHT

// `store16` if `wanted`, without a branch, so that the computation of the value can overlap other work.
__device__ __forceinline__ void store16_if(bool wanted, void* to, uint4 v) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}"
                 ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(wanted)) : "memory");
}
// A descriptor of a tensor in global memory and of the size of the boxes that are copied, made by `kernels.cuda_driver.tensor_map`. It must
// be a parameter of the kernel.
struct alignas(64) TensorMap { char bytes[128]; };
// Copies the box whose first element is [row, step, channel]; elements outside the tensor are zeros. The copied bytes arrive at the
// barrier.
__device__ __forceinline__ void tensor_copy(void* to, const TensorMap& map, int channel, int step, int row, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(shared_address(to)), "l"(&map), "r"(channel), "r"(step), "r"(row), "r"(shared_address(barrier)) : "memory");
}
// Arrives at the barrier of `sync_some` and continues without waiting.
__device__ __forceinline__ void arrive_some(int identity, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(identity), "r"(threads) : "memory");
}
// Sets the number of registers per thread of a warpgroup, 24 to 240 in steps of 8: `give_registers` lowers it, `take_registers` raises it.
// All warps of the group must call it. The kernel needs __launch_bounds__(threads, 1).
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
__device__ __forceinline__ float fast_sine(float v) {  // absolute error 2^-20 near zero, 2^-15 at 300
    float r;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
