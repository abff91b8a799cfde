// Products of decoding for 17 rows and more: y[rows, n] = epilogue(x[rows, K] @ W[n, K]^T), only for sm_90a. kernels/lm_products.py says
// how each is cut, and launches it.
//
// The weights are the rows of Hopper's products and the activations their columns, up to N rows of x at once. A block has a tile of 64 or
// 128 weight rows and a part of K; the blocks of a cluster have the other parts of the same tile and add them up in the order of
// their ranks, each for its share of the rows, in shared memory. The last four warps copy: first the block's weights, which depend on no
// kernel and so are there before the kernel ahead is over (programmatic dependent launch), then pieces of 64 values of x
// into a ring. Both lie in slabs of 8 values of k x rows, an odd number of rows apart, so that 8 lanes which copy 128 bytes of
// one row meet in no bank.
#include "common.cuh"
#include "cluster.cuh"
#include "wgmma.cuh"

namespace {

constexpr int PIECE = 64, SLABS = PIECE / 8, M = 64, WARPGROUP = 128, COPIED_AT_ONCE = WARPGROUP / SLABS, MOST_STAGES = 16;
constexpr int PATIENCE = 1 << 22;  // looks at a barrier before the launch is given up: seconds, where a piece takes a microsecond
enum Epilogue { PLAIN = 0, RESIDUAL = 1, SWIGLU = 2, BIAS = 3 };

struct Args {
    const bf16* x;      // [rows, inner], row stride x_stride
    const bf16* w;      // [n, inner]; SWIGLU: [2 * n, inner], gate rows then up rows
    const bf16* extra;  // RESIDUAL: [rows, n] added to the product, row stride y_stride; BIAS: [n]
    bf16* y;            // [rows, n], row stride y_stride
    const char* ahead;  // bytes that a later kernel will read, brought into the L2
    long long ahead_bytes;
    int rows, n, inner, x_stride, y_stride, epilogue, splits, stages, late;
};

// GROUPS: warpgroups that multiply, each 64 rows of the tile's weights. N: rows of x.
template <int GROUPS_, int N_>
struct Cut {
    static constexpr int GROUPS = GROUPS_, N = N_, TILE = M * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr int WEIGHT_SLAB = (TILE + 1) * 16, SLAB = (N + 1) * 16, STAGE = SLABS * SLAB;
    static constexpr int SUM = TILE + 4;  // floats from one row of sums to the next: a warp's stores meet in no bank
    static constexpr int SUMS_BYTES = N * SUM * 4, BARRIERS_BYTES = 2 * MOST_STAGES * 8;
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

template <class C>
struct Block {
    const Args& p;
    unsigned long long *full, *empty;
    float* sums;  // of each rank its part of this block's rows: [splits][rows of a share][TILE]
    char *ring, *weights;
    const int tile, rank, first, share, share_bits, pieces, k;  // first: row of x; share: rows that a rank finishes; k: its first value

    __device__ __forceinline__ explicit Block(const Args& args)
        : p(args), tile(blockIdx.x / args.splits), rank(blockIdx.x % args.splits), first(blockIdx.y * C::N), share(C::N / args.splits),
          share_bits(__ffs(share) - 1), pieces(args.inner / (args.splits * PIECE)), k(rank * pieces * PIECE) {
        char* memory = dynamic_shared();
        full = reinterpret_cast<unsigned long long*>(memory), empty = full + MOST_STAGES;
        sums = reinterpret_cast<float*>(memory + C::BARRIERS_BYTES);
        ring = memory + C::BARRIERS_BYTES + C::SUMS_BYTES;
        weights = ring + p.stages * C::STAGE;
    }

    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < p.stages; ++i) arrivals_init(full + i, WARPGROUP), arrivals_init(empty + i, C::GROUPS * 4);
            arrivals_visible();
        }
        if (p.splits > 1) arrive_in_cluster();
        __syncthreads();
    }

    // The weight row of a row of the tile; of SWIGLU the second half are rows of up.
    __device__ __forceinline__ long long weight_row(int row) const {
        if (p.epilogue != SWIGLU) return tile * C::TILE + row;
        const int half = C::TILE / 2;
        return tile * half + row + (row < half ? 0 : p.n - half);
    }

    __device__ __forceinline__ void copy_weights(int slab, int row) {
        const bf16* from[C::TILE / COPIED_AT_ONCE];
#pragma unroll
        for (int i = 0; i < C::TILE / COPIED_AT_ONCE; ++i)
            from[i] = p.w + weight_row(row + i * COPIED_AT_ONCE) * p.inner + k + slab * 8;
        char* to = weights + slab * C::WEIGHT_SLAB + row * 16;
#pragma unroll 2
        for (int piece = 0; piece < pieces; ++piece, to += SLABS * C::WEIGHT_SLAB)
#pragma unroll
            for (int i = 0; i < C::TILE / COPIED_AT_ONCE; ++i) copy16(to + i * COPIED_AT_ONCE * 16, from[i] + piece * PIECE);
    }

    __device__ __forceinline__ void copy_rows(int slab, int row) {
        const bf16* from = p.x + static_cast<long long>(first) * p.x_stride + k + slab * 8;
        for (int piece = 0; piece < pieces; ++piece) {
            const int stage = piece % p.stages;
            wait_for(empty + stage, (piece / p.stages & 1) ^ 1);
            char* to = ring + stage * C::STAGE + slab * C::SLAB;
#pragma unroll
            for (int i = 0; i < C::N; i += COPIED_AT_ONCE) {
                const bool inside = first + row + i < p.rows;
                copy16_or_zeros(to + (row + i) * 16, from + static_cast<long long>(inside ? row + i : 0) * p.x_stride + piece * PIECE, inside);
            }
            arrive_after_copies(full + stage);
        }
    }

    __device__ __forceinline__ void copy(int thread) {
        copy_weights(thread % SLABS, thread / SLABS);
        wait_for_previous();
        copy_rows(thread % SLABS, thread / SLABS);
        if (p.late) launch_dependents();
        if (p.ahead_bytes > 0 && thread == 0 && blockIdx.y == 0) {
            const long long part = (p.ahead_bytes / gridDim.x + 127) / 128 * 128, from = part * blockIdx.x;
            const long long size = min(part, p.ahead_bytes - from);
            if (size > 0) prefetch(p.ahead + from, static_cast<uint32_t>(size));
        }
    }

    __device__ __forceinline__ void multiply_all(float (&d)[C::N / 2], int group) {
        Matrix a = matrix_at(weights + group * M * 16, C::WEIGHT_SLAB, 128);
        const Matrix b = matrix_at(ring, C::SLAB, 128);
        int stage = 0;
        uint32_t parity = 0;
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece) {
            wait_for(full + stage, parity);
            writes_to_products();
            products_begin();
            const Matrix rows = moved(b, stage * C::STAGE);
#pragma unroll
            for (int i = 0; i < SLABS / 2; ++i)
                multiply(d, moved(a, i * 2 * C::WEIGHT_SLAB), moved(rows, i * 2 * C::SLAB), piece + i > 0);
            products_commit();
            products_wait<1>();  // of the piece before
            if (piece > 0 && threadIdx.x % 32 == 0) arrive(empty + (stage == 0 ? p.stages : stage) - 1);
            a = moved(a, SLABS * C::WEIGHT_SLAB);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
        if (p.late) launch_dependents();
        products_wait<0>();
    }

    // Of thread t of warp w, d[4 i + 2 r + j] is weight row 16 w + t / 4 + 8 r, row 8 i + 2 (t % 4) + j of x.
    __device__ __forceinline__ void send(const float (&d)[C::N / 2], int group) {
        const int column = group * M + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < C::N / 8; ++i) {
            if (first + i * 8 >= p.rows) break;
            const int to = i * 8 + row;  // two rows of one share
            float* here = sums + (rank * share + (to & share - 1)) * C::SUM + column;
            if (p.splits == 1) {
                here[0] = d[4 * i], here[C::SUM] = d[4 * i + 1], here[8] = d[4 * i + 2], here[C::SUM + 8] = d[4 * i + 3];
            } else {
                const uint32_t there = address_there(here, to >> share_bits);
                store4_there(there, d[4 * i]), store4_there(there + C::SUM * 4, d[4 * i + 1]);
                store4_there(there + 32, d[4 * i + 2]), store4_there(there + (C::SUM + 8) * 4, d[4 * i + 3]);
            }
        }
    }

    __device__ __forceinline__ float2 total(int row, int column) const {
        const float* from = sums + row * C::SUM + column;
        float2 sum = make_float2(0.f, 0.f);
        for (int i = 0; i < p.splits; ++i, from += share * C::SUM) {
            const float2 v = *reinterpret_cast<const float2*>(from);
            sum.x += v.x, sum.y += v.y;
        }
        return sum;
    }
};

// Pairs of outputs that a thread finishes, each at once: `row` of the block's share, `column` of its outputs.
template <class C>
struct Pairs {
    const Block<C>& block;
    const int width, bits, from;  // outputs of a tile; first row of the share

    __device__ __forceinline__ explicit Pairs(const Block<C>& mine)
        : block(mine), width(mine.p.epilogue == SWIGLU ? C::TILE / 2 : C::TILE), bits(__ffs(width) - 2),
          from(mine.first + mine.rank * mine.share) {}

    __device__ __forceinline__ int row(int i) const { return i >> bits; }
    __device__ __forceinline__ int column(int i) const { return (i & (1 << bits) - 1) * 2; }
    __device__ __forceinline__ bool there(int i) const { return row(i) < block.share && from + row(i) < block.p.rows; }
    __device__ __forceinline__ long long place(int i) const {  // in y
        return static_cast<long long>(from + row(i)) * block.p.y_stride + block.tile * width + column(i);
    }
    __device__ __forceinline__ uint32_t extra(int i) const {
        const Args& p = block.p;
        if (!there(i) || (p.epilogue != RESIDUAL && p.epilogue != BIAS)) return 0;
        return load4(p.epilogue == BIAS ? p.extra + block.tile * width + column(i) : p.extra + place(i));
    }
    __device__ __forceinline__ void finish(int i, uint32_t extra) const {
        const int epilogue = block.p.epilogue;
        float2 sum = block.total(row(i), column(i));
        if (epilogue == SWIGLU) {
            const float2 up = block.total(row(i), width + column(i));
            const float x = rounded(sum.x), y = rounded(sum.y);
            sum.x = rounded(x / (1.f + __expf(-x))) * rounded(up.x);
            sum.y = rounded(y / (1.f + __expf(-y))) * rounded(up.y);
        } else if (epilogue != PLAIN) {
            const float2 e = widen(extra);
            if (epilogue == RESIDUAL) sum.x = rounded(sum.x), sum.y = rounded(sum.y);
            sum.x += e.x, sum.y += e.y;
        }
        *reinterpret_cast<uint32_t*>(block.p.y + place(i)) = narrow(sum.x, sum.y);
    }
};

template <class C>
__device__ __forceinline__ void product(const Args& p) {
    Block<C> block(p);
    if (!p.late) launch_dependents();
    block.prepare();
    const int group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    const Pairs<C> pairs(block);
    uint32_t extra[2];
    const int mine = threadIdx.x;
    if (group == C::GROUPS) {
        block.copy(threadIdx.x % WARPGROUP);
        extra[0] = pairs.extra(mine), extra[1] = pairs.extra(mine + C::THREADS);
        if (p.splits > 1) wait_for_cluster();
    } else {
        wait_for_previous();
        extra[0] = pairs.extra(mine), extra[1] = pairs.extra(mine + C::THREADS);
        float d[C::N / 2];
        block.multiply_all(d, group);
        if (p.splits > 1) wait_for_cluster();
        block.send(d, group);
    }
    if (p.splits > 1) {
        arrive_in_cluster();
        wait_for_cluster();
    } else {
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (pairs.there(mine + i * C::THREADS)) pairs.finish(mine + i * C::THREADS, extra[i]);
    for (int i = mine + 2 * C::THREADS; pairs.there(i); i += C::THREADS) pairs.finish(i, pairs.extra(i));
}

}  // namespace

#define PRODUCT(groups, rows)                                                                                                             \
    extern "C" __global__ void __launch_bounds__((groups + 1) * WARPGROUP) product_##groups##_##rows(const Args p) { product<Cut<groups, rows>>(p); }

PRODUCT(1, 32)
PRODUCT(1, 64)
PRODUCT(1, 128)
PRODUCT(2, 32)
PRODUCT(2, 64)
PRODUCT(2, 128)
