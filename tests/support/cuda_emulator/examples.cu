// Small kernels that are right with fault 0, and wrong in one way each with another: what the emulator has to see.
#include "common.cuh"
#include "wgmma.cuh"

namespace {

struct Args {
    const uint32_t* in;
    uint32_t *out, *words;  // words: zero before the launch
    int n, fault;
};

enum Fault { RIGHT = 0, NO_BARRIER, NO_WAIT, NEVER_SENT, NO_ARRIVAL, APART, TOO_FAR, NOT_WRITTEN, NOT_FINISHED, NO_FENCE, NO_BEGIN };

}  // namespace

// A block turns its part of `in` around, through shared memory.
extern "C" __global__ void turned(const Args p) {
    __shared__ uint32_t part[64];
    uint32_t* kept = reinterpret_cast<uint32_t*>(dynamic_shared());
    const uint32_t* from = p.in + blockIdx.x * blockDim.x;
    if (p.fault != NOT_WRITTEN || threadIdx.x != 7) part[threadIdx.x] = from[threadIdx.x];
    if (p.fault != NO_BARRIER) __syncthreads();
    kept[threadIdx.x + (p.fault == TOO_FAR ? 1 : 0)] = part[blockDim.x - 1 - threadIdx.x];
    if (p.fault == APART && threadIdx.x % 2 == 0) __syncwarp();
    else kept[threadIdx.x] += __shfl_xor_sync(p.fault == APART ? ~0u : __ballot_sync(~0u, true), 0u, 1);
    if (p.fault == NOT_FINISHED) copy16(kept + threadIdx.x / 4 * 4, p.in);
    p.out[blockIdx.x * blockDim.x + threadIdx.x] = kept[threadIdx.x];
}

// All blocks at once: each adds its values to the sum of the block before it, and sends the sum on. Only thread 0 waits and sends.
extern "C" __global__ void relay(const Args p) {
    __shared__ uint32_t before;
    uint32_t *sums = p.out, *sent = p.words;
    const unsigned block = blockIdx.x;
    if (block > 0 && threadIdx.x == 0) {
        while (p.fault != NO_WAIT && load4_relaxed(sent + block - 1) == 0) {}
        __threadfence();
        before = load4_relaxed(sums + block - 1);
    }
    __syncthreads();
    const uint32_t mine = __reduce_add_sync(~0u, p.in[block * 32 + threadIdx.x]) + (block > 0 ? before : 0);
    __syncthreads();
    if (threadIdx.x == 17) store4_relaxed(sums + block, mine);
    if (p.fault != NO_BARRIER) __syncthreads();
    if (threadIdx.x == 0 && !(p.fault == NEVER_SENT && block == 2)) {
        if (p.fault != NO_FENCE) __threadfence();
        store4_relaxed(sent + block, 1);
    }
}

// Each thread reads what it stored in other pieces, and then its neighbour's, behind a barrier of the block alone.
extern "C" __global__ void read_back(const Args p) {
    const unsigned first = blockIdx.x * 32, value = p.in[first + threadIdx.x];
    uint32_t* mine = p.out + 2 * (first + threadIdx.x);
    uint2 seen;
    if (threadIdx.x % 2 == 0) {
        store4_relaxed(mine, value + 1), store4_relaxed(mine + 1, value + 2);
        seen = load8_relaxed(mine);
    } else {
        store8_relaxed(mine, make_uint2(value + 1, value + 2));
        seen = make_uint2(load4_relaxed(mine), load4_relaxed(mine + 1));
    }
    if (p.fault != NO_BARRIER) __syncthreads();
    const uint32_t other = load4_relaxed(p.out + 2 * (first + (threadIdx.x + 1) % 32) + 1);
    store4_relaxed(mine, seen.x + seen.y + other);
}

// Warp 0 brings n tiles of 32 words into a ring of two; warp 1 adds them up.
extern "C" __global__ void streamed(const Args p) {
    __shared__ unsigned long long full[2], empty[2];
    __shared__ __align__(16) uint32_t ring[2][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) arrivals_init(full + i, 1), arrivals_init(empty + i, 1);
        arrivals_visible();
    }
    __syncthreads();
    const uint32_t* from = p.in + blockIdx.x * p.n * 32;
    if (warp == 0 && lane == 0) {
        for (int i = 0; i < p.n; ++i) {
            while (!arrived(empty + i % 2, i / 2 % 2 ^ 1)) {}
            arrive_expecting(full + i % 2, 128);
            bulk_copy(ring[i % 2], from + i * 32, 128, full + i % 2);
        }
    } else if (warp == 1) {
        uint32_t sum = 0;
        for (int i = 0; i < p.n; ++i) {
            while (p.fault != NO_WAIT && !arrived(full + i % 2, i / 2 % 2)) {}
            sum += ring[i % 2][lane];
            __syncwarp();
            if (lane == 0 && p.fault != NO_ARRIVAL) arrive(empty + i % 2);
        }
        p.out[blockIdx.x * 32 + lane] = sum;
    }
    __syncthreads();
}

// Warp 4 brings two slabs of 70 rows x 8 values and three matrices [N, 16]; a warpgroup makes bf16(rows 0.. @ m0^T + rows 5.. @ m1^T) @ m2^T of
// its first columns.
template <int N>
__device__ void multiplied(const Args& p) {
    constexpr int SLAB = 71 * 16, PIECES = 140 + 3 * 2 * N;
    __shared__ unsigned long long full;
    char *slabs = dynamic_shared(), *matrices = slabs + 2 * SLAB;
    if (threadIdx.x == 0) arrivals_init(&full, 1), arrivals_visible();
    __syncthreads();
    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        if (p.fault == NO_FENCE) copy16(slabs, p.in), copies_wait();
        arrive_expecting(&full, PIECES * 16);
        for (int i = 0; i < PIECES; ++i)
            bulk_copy(i < 140 ? slabs + i / 70 * SLAB + i % 70 * 16 : matrices + (i - 140) * 16, p.in + i * 4, 16, &full);
        return;
    }
    while (p.fault != NO_WAIT && !arrived(&full, 0)) {}
    float d[N / 2], e[N / 2];
    const Matrix rows = matrix_at(slabs + (p.fault == APART && threadIdx.x >= 96 ? 16 : 0), SLAB, 128), m = matrix_at(matrices, N * 16, 128);
    if (p.fault != NO_BEGIN) products_begin();
    multiply(d, rows, m, false);
    multiply(d, moved(rows, 5 * 16), moved(m, N * 32), true);
    products_commit();
    if (p.fault != NOT_FINISHED) products_wait<0>();
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) a[i] = narrow(d[2 * i], d[2 * i + 1]);
    products_begin();
    multiply(e, a, moved(m, N * 64), false);
    products_commit();
    products_wait<0>();
    for (int i = 0; i < N / 2; ++i) p.out[i * 128 + threadIdx.x] = __float_as_uint(e[i]);
}
extern "C" __global__ void multiplied_96(const Args p) { multiplied<96>(p); }
extern "C" __global__ void multiplied_192(const Args p) { multiplied<192>(p); }
