// Products of decoding for 17 rows and more: y[rows, n] = epilogue(x[rows, K] @ W[n, K]^T), only for sm_90a. kernels/lm_products.py says
// how each is cut, and launches it.
//
// The weights are the rows of Hopper's products and the activations their columns, up to N rows of x at once. A block has a tile of 64 or
// 128 weight rows and a part of K; the blocks of a cluster have the other parts of the same tile and add them up in the order of
// their ranks, each for its share of the rows, in shared memory. The last four warps copy: first the block's weights, which depend on no
// kernel and so are there before the kernel ahead is over (programmatic dependent launch), then pieces of 64 values of x
// into a ring. Both lie as 128 bytes of each row, whose 16 bytes change places by the row, as Hopper's products read them: what 8 lanes copy of
// one line of memory is one line of shared memory.
#include "common.cuh"
#include "cluster.cuh"
#include "wgmma.cuh"

namespace {

constexpr int PIECE = 64, LINE = PIECE * 2, SLABS = PIECE / 8, M = 64, WARPGROUP = 128, COPIED_AT_ONCE = WARPGROUP / SLABS, MOST_STAGES = 16;
constexpr int PATIENCE = 1 << 22;  // looks at a barrier before the launch is given up: seconds, where a piece takes a microsecond
enum Epilogue { PLAIN = 0, RESIDUAL = 1, SWIGLU = 2, BIAS = 3 };

struct Args {
    TensorMap weights_map, x_map;  // where `boxed`: boxes of 64 values x half a tile, and x all rows that there is room for
    const bf16* x;      // [rows, inner], row stride x_stride
    const bf16* w;      // [n, inner]; SWIGLU: [2 * n, inner], gate rows then up rows
    const bf16* extra;  // RESIDUAL: [rows, n] added to the product, row stride y_stride; BIAS: [n]
    bf16* y;            // [rows, n], row stride y_stride
    const char* ahead;  // bytes that a later kernel will read, brought into the L2
    const bf16* norm;   // [inner]: x is normed, in the order of the reference; or null
    const float* squares;  // [rows, inner / 64], with norm: sums of the squares of 64 values of x
    float* sums;           // [rows, n / 64] or null: the same of y, for RESIDUAL
    long long ahead_bytes;
    int rows, n, inner, x_stride, y_stride, epilogue, splits, stages, boxed;
    float eps;
};

// GROUPS: warpgroups that multiply, each 64 rows of the tile's weights. N: rows of x.
template <int GROUPS_, int N_>
struct Cut {
    static constexpr int GROUPS = GROUPS_, N = N_, TILE = M * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr int WEIGHTS = TILE * LINE, STAGE = N * LINE;  // bytes of a piece
    static constexpr int SUM = TILE + 4;  // floats from one row of sums to the next: a warp's stores meet in no bank
    // Pieces whose copies are under way while one is normed. Two stages more are needed: a piece is freed behind the products of the next.
    static constexpr int AHEAD = N == 32 ? 6 : N == 64 ? 3 : 1;
    static constexpr int SUMS_BYTES = N * SUM * 4;
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

// Where 16 bytes of a row lie in a piece.
__device__ __forceinline__ int place(int slab, int row) { return row * LINE + ((slab ^ row % 8) << 4); }

template <class C>
struct Block {
    const Args& p;
    unsigned long long *full, *empty, *landed;  // of a stage, and of the weights where they come in boxes
    char *ring, *weights;  // then the block's own sums are there: [N][TILE]
    float* sums;           // of each rank its part of this block's rows: [splits][rows of a share][TILE]
    const int tile, rank, first, share, share_bits, pieces, k;  // first: row of x; share: rows that a rank finishes; k: its first value

    __device__ __forceinline__ explicit Block(const Args& args)
        : p(args), tile(blockIdx.x / args.splits), rank(blockIdx.x % args.splits), first(blockIdx.y * C::N), share(C::N / args.splits),
          share_bits(__ffs(share) - 1), pieces(args.inner / (args.splits * PIECE)), k(rank * pieces * PIECE) {
        ring = dynamic_shared();
        ring += -shared_address(ring) & 1023;
        weights = ring + p.stages * C::STAGE;
        sums = reinterpret_cast<float*>(ring + max(p.stages * C::STAGE + pieces * C::WEIGHTS, C::SUMS_BYTES));
        full = reinterpret_cast<unsigned long long*>(sums + C::N * C::SUM), empty = full + MOST_STAGES, landed = empty + MOST_STAGES;
    }

    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < p.stages; ++i) arrivals_init(full + i, p.boxed ? 1 : WARPGROUP), arrivals_init(empty + i, C::GROUPS * 4);
            arrivals_init(landed, 1);
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
        char* to = weights + place(slab, row);
#pragma unroll 2
        for (int piece = 0; piece < pieces; ++piece, to += C::WEIGHTS)
#pragma unroll
            for (int i = 0; i < C::TILE / COPIED_AT_ONCE; ++i) copy16(to + i * COPIED_AT_ONCE * LINE, from[i] + piece * PIECE);
    }

    // Asks for a piece of x, once its stage is free.
    __device__ __forceinline__ void bring(int piece, int slab, int row) {
        const bf16* from = p.x + static_cast<long long>(first) * p.x_stride + k + slab * 8 + piece * PIECE;
        wait_for(empty + piece % p.stages, (piece / p.stages & 1) ^ 1);
        char* to = ring + piece % p.stages * C::STAGE + place(slab, row);
#pragma unroll
        for (int i = 0; i < C::N; i += COPIED_AT_ONCE) {
            const bool inside = first + row + i < p.rows;
            copy16_or_zeros(to + i * LINE, from + static_cast<long long>(inside ? row + i : 0) * p.x_stride, inside);
        }
    }

    __device__ __forceinline__ void copy_rows(int slab, int row) {
        for (int piece = 0; piece < pieces; ++piece) {
            bring(piece, slab, row);
            arrive_after_copies(full + piece % p.stages);
        }
    }

    // Of each of the thread's rows, 1 / sqrt(mean of squares + eps); 8 threads of a row add up.
    __device__ __forceinline__ void scales(float (&each)[C::N / COPIED_AT_ONCE], int slab, int row) const {
        const int parts = p.inner / PIECE;
#pragma unroll
        for (int i = 0; i < C::N / COPIED_AT_ONCE; ++i) {
            const int at = first + row + i * COPIED_AT_ONCE;
            const float* from = p.squares + static_cast<long long>(at) * parts;
            float sum = 0.f;
            for (int part = slab; part < parts; part += SLABS) sum += at < p.rows ? __uint_as_float(load4(from + part)) : 0.f;
#pragma unroll
            for (int step = 1; step < SLABS; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
            each[i] = rsqrtf(sum / p.inner + p.eps);
        }
    }

    // Each thread norms in shared memory what it copied itself.
    __device__ __forceinline__ void copy_normed_rows(int slab, int row) {
        const auto* weight = reinterpret_cast<const uint4*>(p.norm + k + slab * 8);
        for (int piece = 0; piece < C::AHEAD; ++piece) {
            if (piece < pieces) bring(piece, slab, row);
            copies_commit();
        }
        float scale[C::N / COPIED_AT_ONCE];
        scales(scale, slab, row);
        uint4 next = *weight;
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece) {
            const uint4 w = next;
            if (piece + 1 < pieces) next = weight[(piece + 1) * SLABS];
            if (piece + C::AHEAD < pieces) bring(piece + C::AHEAD, slab, row);
            copies_commit();
            copies_wait_but<C::AHEAD>();
            auto* at = reinterpret_cast<uint4*>(ring + piece % p.stages * C::STAGE + place(slab, row));
#pragma unroll
            for (int i = 0; i < C::N / COPIED_AT_ONCE; ++i) {
                const uint4 v = at[i * COPIED_AT_ONCE * SLABS];
                at[i * COPIED_AT_ONCE * SLABS] = make_uint4(normalise(v.x, scale[i], w.x), normalise(v.y, scale[i], w.y),
                                                    normalise(v.z, scale[i], w.z), normalise(v.w, scale[i], w.w));
            }
            writes_to_products();
            arrive(full + piece % p.stages);
        }
        copies_wait();
    }

    __device__ __forceinline__ void copy_boxes() {
        arrive_expecting(landed, pieces * C::WEIGHTS);
        for (int piece = 0; piece < pieces; ++piece)
            for (int half = 0; half < 2; ++half)
                tensor_copy(weights + piece * C::WEIGHTS + half * (C::WEIGHTS / 2), p.weights_map, k + piece * PIECE,
                            static_cast<int>(weight_row(half * (C::TILE / 2))), 0, landed);
        wait_for_previous();
        for (int piece = 0; piece < pieces; ++piece) {
            const int stage = piece % p.stages;
            wait_for(empty + stage, (piece / p.stages & 1) ^ 1);
            arrive_expecting(full + stage, C::STAGE);
            tensor_copy(ring + stage * C::STAGE, p.x_map, k + piece * PIECE, first, 0, full + stage);
        }
    }

    __device__ __forceinline__ void copy_all(int thread) {
        copy_weights(thread % SLABS, thread / SLABS);
        wait_for_previous();
        if (p.norm == nullptr) copy_rows(thread % SLABS, thread / SLABS);
        else copy_normed_rows(thread % SLABS, thread / SLABS);
    }

    __device__ __forceinline__ void copy(int thread) {
        if (!p.boxed) copy_all(thread);
        else if (thread == 0) copy_boxes();
        wait_for_previous();
        if (p.ahead_bytes > 0 && thread == 0 && blockIdx.y == 0) {
            const long long part = (p.ahead_bytes / gridDim.x + 127) / 128 * 128, from = part * blockIdx.x;
            const long long size = min(part, p.ahead_bytes - from);
            if (size > 0) prefetch(p.ahead + from, static_cast<uint32_t>(size));
        }
    }

    __device__ __forceinline__ void multiply_all(float (&d)[C::N / 2], int group) {
        Matrix a = matrix_of_lines(weights + group * M * LINE);
        const Matrix b = matrix_of_lines(ring);
        int stage = 0;
        uint32_t parity = 0;
        if (p.boxed) wait_for(landed, 0);
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece) {
            wait_for(full + stage, parity);
            if (!p.boxed) writes_to_products();
            products_begin();
            const Matrix rows = moved(b, stage * C::STAGE);
#pragma unroll
            for (int i = 0; i < SLABS / 2; ++i) multiply(d, moved(a, i * 32), moved(rows, i * 32), piece + i > 0);
            products_commit();
            products_wait<1>();  // of the piece before
            if (piece > 0 && threadIdx.x % 32 == 0) arrive(empty + (stage == 0 ? p.stages : stage) - 1);
            a = moved(a, C::WEIGHTS);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
        products_wait<0>();
    }

    // Of thread t of warp w, d[4 i + 2 r + j] is weight row 16 w + t / 4 + 8 r, row 8 i + 2 (t % 4) + j of x.
    __device__ __forceinline__ void keep(const float (&d)[C::N / 2], int group, float* to) {
        to += group * M + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4 + threadIdx.x % 4 * 2 * C::SUM;
#pragma unroll
        for (int i = 0; i < C::N / 8; ++i, to += 8 * C::SUM)
            to[0] = d[4 * i], to[C::SUM] = d[4 * i + 1], to[8] = d[4 * i + 2], to[C::SUM + 8] = d[4 * i + 3];
    }

    // Every rank gets its share of this block's sums.
    __device__ __forceinline__ void send(const float (&d)[C::N / 2], int group) {
        if (p.splits == 1) return keep(d, group, sums);
        auto* own = reinterpret_cast<float*>(ring);
        sync_some(1, C::GROUPS * WARPGROUP);  // nobody multiplies any more
        keep(d, group, own);
        sync_some(1, C::GROUPS * WARPGROUP);
        wait_for_cluster();
        for (int i = threadIdx.x; i < min(C::N, p.rows - first) * (C::TILE / 4); i += C::GROUPS * WARPGROUP) {
            const int row = i / (C::TILE / 4), column = i % (C::TILE / 4) * 4;
            const uint32_t there = address_there(sums + (rank * share + (row & share - 1)) * C::SUM + column, row >> share_bits);
            store16_there(there, *reinterpret_cast<const float4*>(own + row * C::SUM + column));
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
        const uint32_t both = narrow(sum.x, sum.y);
        *reinterpret_cast<uint32_t*>(block.p.y + place(i)) = both;
        if (block.p.sums == nullptr) return;
        const float2 made = widen(both);  // a warp has 64 outputs of one row
        float squares = fmaf(made.x, made.x, made.y * made.y);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
        if (threadIdx.x % 32 == 0)
            block.p.sums[static_cast<long long>(from + row(i)) * (block.p.n / M) + (block.tile * width + column(i)) / M] = squares;
    }
};

template <class C>
__device__ __forceinline__ void product(const Args& p) {
    Block<C> block(p);
    launch_dependents();
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
    extern "C" __global__ void __launch_bounds__((groups + 1) * WARPGROUP) product_##groups##_##rows(const __grid_constant__ Args p) { product<Cut<groups, rows>>(p); }

PRODUCT(1, 32)
PRODUCT(1, 64)
PRODUCT(1, 128)
PRODUCT(2, 32)
PRODUCT(2, 64)
PRODUCT(2, 128)
