// wheel: sm_90a
// Products of decoding for 17 to 64 rows: y[rows, n] = epilogue(x[rows, inner] @ W[n, inner]^T), only for sm_90a. kernels/lm_products.py
// chooses their tiles and launches them.
//
// In Hopper's products (wgmma) the weights are the rows, and up to N rows of x are the columns. A block has a tile of 64
// weight rows and a part of the inner size. The other blocks of its cluster have the other parts of the same tile. They add the parts in
// shared memory in the order of their ranks, each for its share of the rows. One thread requests all copies: first the block's weights,
// which depend on no earlier kernel and so are copied while the previous kernel still runs (programmatic dependent launch), then pieces of
// 64 values of x, into a ring.
//
// A norm between two products has no launch of its own. The first product (RESIDUAL) also writes its outputs times the norm's weights;
// they are the input of the second product. It also writes the sum of the squares of each row's outputs per tile. From these the second
// product computes the scale of each row, by which it multiplies its own sums.
#include "common.cuh"
#include "cluster.cuh"
#include "wgmma.cuh"

namespace {

constexpr int PIECE = 64, LINE = PIECE * 2, TILE = 64, WARPGROUP = 128, THREADS = 2 * WARPGROUP, MAX_STAGES = 16;
constexpr int WEIGHTS = TILE * LINE;  // bytes of a piece
constexpr int SUM = TILE + 4;         // floats from one row of sums to the next, such that a warp's stores have no bank conflicts
constexpr int PATIENCE = 1 << 22;     // tries at a barrier before the launch is aborted: seconds, while a piece takes a microsecond
enum Epilogue { PLAIN = 0, RESIDUAL = 1, SWIGLU = 2 };

struct Args {
    // Maps of W [n, inner] (with SWIGLU [2 * n, inner], gate rows, then up rows) for boxes of 64 values x half a tile, and of x for boxes of
    // 64 values x N rows.
    TensorMap weights, x;
    const bf16* extra;     // RESIDUAL: [rows, n], added to the product
    const bf16* norm;      // weights [n] of the norm after a RESIDUAL, or null
    const float* squares;  // sums of squares [rows, inner / TILE] of the input of a norm before this product, or null; 4 divides inner / TILE
    bf16 *y, *weighted;    // [rows, n]; weighted: y times `norm`, if there is one
    float* y_squares;      // [rows, n / TILE], if there is a `norm`
    int rows, n, inner, y_stride, epilogue, splits, stages;  // y_stride: values from one row of y, extra and weighted to the next
    float eps;
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

template <int N>
struct Block {
    static constexpr int STAGE = N * LINE, SUMS_BYTES = N * SUM * 4;

    const Args& p;
    unsigned long long *full, *empty, *landed;  // full, empty: one per stage; landed: the weights have arrived
    char *ring, *weights;                       // later this memory holds the block's own sums, [N][TILE]
    float *sums, *scales;                       // sums that each rank computed for this block's share: [splits][rows][TILE]; scales of the rows
    // first: first row of x; share: rows that each rank finishes; k: first value of the inner size
    const int tile, rank, first, share, share_bits, pieces, k;

    __device__ __forceinline__ explicit Block(const Args& args)
        : p(args), tile(blockIdx.x / args.splits), rank(blockIdx.x % args.splits), first(blockIdx.y * N), share(N / args.splits),
          share_bits(__ffs(share) - 1), pieces(args.inner / (args.splits * PIECE)), k(rank * pieces * PIECE) {
        ring = dynamic_shared();
        ring += -shared_address(ring) & 1023;
        weights = ring + p.stages * STAGE;
        sums = reinterpret_cast<float*>(ring + max(p.stages * STAGE + pieces * WEIGHTS, SUMS_BYTES));
        full = reinterpret_cast<unsigned long long*>(sums + N * SUM), empty = full + MAX_STAGES, landed = empty + MAX_STAGES;
        scales = reinterpret_cast<float*>(landed + 2);
    }

    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < p.stages; ++i) arrivals_init(full + i, 1), arrivals_init(empty + i, WARPGROUP / 32);
            arrivals_init(landed, 1);
            arrivals_visible();
        }
        if (p.splits > 1) arrive_in_cluster();
        __syncthreads();
    }

    // The weight row of a row of the tile. With SWIGLU the second half of a tile are rows of up.
    __device__ __forceinline__ int weight_row(int row) const {
        if (p.epilogue != SWIGLU) return tile * TILE + row;
        return tile * (TILE / 2) + row + (row < TILE / 2 ? 0 : p.n - TILE / 2);
    }

    __device__ __forceinline__ void copy() {
        arrive_expecting(landed, pieces * WEIGHTS);
        for (int piece = 0; piece < pieces; ++piece)
            for (int row = 0; row < TILE; row += TILE / 2)
                tensor_copy(weights + piece * WEIGHTS + row * LINE, p.weights, k + piece * PIECE, weight_row(row), 0, landed);
        wait_for_previous();
        for (int piece = 0; piece < pieces; ++piece) {
            const int stage = piece % p.stages;
            wait_for(empty + stage, (piece / p.stages & 1) ^ 1);
            arrive_expecting(full + stage, STAGE);
            tensor_copy(ring + stage * STAGE, p.x, k + piece * PIECE, first, 0, full + stage);
        }
    }

    // Computes the factors of the norm before this product for the rows of the share, one row per thread.
    __device__ __forceinline__ void scale_rows(int thread, int threads) {
        const int count = min(share, p.rows - first - rank * share), parts = p.inner / TILE;
        for (int row = thread; row < count; row += threads) {
            const float* from = p.squares + static_cast<long long>(first + rank * share + row) * parts;
            float sum = 0.f;
#pragma unroll 4
            for (int i = 0; i < parts; i += 4) {
                const uint4 v = load16(from + i);
                sum += (__uint_as_float(v.x) + __uint_as_float(v.y)) + (__uint_as_float(v.z) + __uint_as_float(v.w));
            }
            scales[row] = rsqrtf(sum / p.inner + p.eps);
        }
    }

    __device__ __forceinline__ void multiply_all(float (&d)[N / 2]) {
        Matrix a = matrix_of_lines(weights);
        const Matrix b = matrix_of_lines(ring);
        int stage = 0;
        uint32_t parity = 0;
        wait_for(landed, 0);
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece) {
            wait_for(full + stage, parity);
            products_begin();
            const Matrix rows = moved(b, stage * STAGE);
#pragma unroll
            for (int i = 0; i < PIECE / 16; ++i) multiply(d, moved(a, i * 32), moved(rows, i * 32), piece + i > 0);
            products_commit();
            products_wait<1>();  // for the products of the previous piece
            if (piece > 0 && threadIdx.x % 32 == 0) arrive(empty + (stage == 0 ? p.stages : stage) - 1);
            a = moved(a, WEIGHTS);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
        products_wait<0>();
    }

    // Stores this block's sums. In thread t of warp w, d[4 i + 2 r + j] belongs to weight row 16 w + t / 4 + 8 r and row 8 i + 2 (t % 4) +
    // j of x.
    __device__ __forceinline__ void keep(const float (&d)[N / 2], float* to) {
        to += threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + threadIdx.x % 4 * 2 * SUM;
#pragma unroll
        for (int i = 0; i < N / 8; ++i, to += 8 * SUM)
            to[0] = d[4 * i], to[SUM] = d[4 * i + 1], to[8] = d[4 * i + 2], to[SUM + 8] = d[4 * i + 3];
    }

    // Sends every rank the sums of its share of the rows.
    __device__ __forceinline__ void send(const float (&d)[N / 2]) {
        if (p.splits == 1) return keep(d, sums);
        auto* own = reinterpret_cast<float*>(ring);
        sync_some(1, WARPGROUP);  // all products are done
        keep(d, own);
        sync_some(1, WARPGROUP);
        wait_for_cluster();
        for (int i = threadIdx.x; i < min(N, p.rows - first) * (TILE / 4); i += WARPGROUP) {
            const int row = i / (TILE / 4), column = i % (TILE / 4) * 4;
            const uint32_t there = address_there(sums + (rank * share + (row & share - 1)) * SUM + column, row >> share_bits);
            store16_there(there, *reinterpret_cast<const float4*>(own + row * SUM + column));
        }
    }

    __device__ __forceinline__ float2 total(int row, int column) const {
        const float* from = sums + row * SUM + column;
        float2 sum = make_float2(0.f, 0.f);
        for (int i = 0; i < p.splits; ++i, from += share * SUM) {
            const float2 v = *reinterpret_cast<const float2*>(from);
            sum.x += v.x, sum.y += v.y;
        }
        return sum;
    }
};

// The pairs of outputs that a thread finishes. Pair i is in row `row(i)` of the block's share and begins at column `column(i)` of its tile.
template <int N>
struct Pairs {
    const Block<N>& block;
    const int width, bits, from;  // width: outputs of a tile; from: first row of the share
    uint32_t norm = 0;            // the norm's weights for the thread's column, which is the same in all its pairs

    __device__ __forceinline__ explicit Pairs(const Block<N>& mine)
        : block(mine), width(mine.p.epilogue == SWIGLU ? TILE / 2 : TILE), bits(__ffs(width) - 2), from(mine.first + mine.rank * mine.share) {
        if (mine.p.norm != nullptr) norm = load4(mine.p.norm + mine.tile * TILE + column(threadIdx.x));
    }

    __device__ __forceinline__ int row(int i) const { return i >> bits; }
    __device__ __forceinline__ int column(int i) const { return (i & (1 << bits) - 1) * 2; }
    __device__ __forceinline__ bool there(int i) const { return row(i) < block.share && from + row(i) < block.p.rows; }
    __device__ __forceinline__ long long place(int i) const {  // in y
        return static_cast<long long>(from + row(i)) * block.p.y_stride + block.tile * width + column(i);
    }
    __device__ __forceinline__ uint32_t extra(int i) const {
        return there(i) && block.p.epilogue == RESIDUAL ? load4(block.p.extra + place(i)) : 0;
    }
    __device__ __forceinline__ void finish(int i, uint32_t extra) const {
        float2 sum = block.total(row(i), column(i));
        const float scale = block.p.squares == nullptr ? 1.f : block.scales[row(i)];
        sum.x *= scale, sum.y *= scale;
        if (block.p.epilogue == SWIGLU) {
            const float2 up = block.total(row(i), width + column(i));
            const float x = rounded(sum.x), y = rounded(sum.y);
            sum.x = rounded(x / (1.f + __expf(-x))) * rounded(up.x * scale);
            sum.y = rounded(y / (1.f + __expf(-y))) * rounded(up.y * scale);
        } else if (block.p.epilogue == RESIDUAL) {
            const float2 e = widen(extra);
            sum.x = rounded(sum.x) + e.x, sum.y = rounded(sum.y) + e.y;
        }
        const uint32_t done = narrow(sum.x, sum.y);
        *reinterpret_cast<uint32_t*>(block.p.y + place(i)) = done;
        if (block.p.norm != nullptr) finish_for_norm(i, widen(done), widen(norm));
    }

    // The pairs of a warp are one row of the tile.
    __device__ __forceinline__ void finish_for_norm(int i, float2 v, float2 w) const {
        *reinterpret_cast<uint32_t*>(block.p.weighted + place(i)) = narrow(v.x * w.x, v.y * w.y);
        float squares = v.x * v.x + v.y * v.y;
        for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
        if (threadIdx.x % 32 == 0) block.p.y_squares[static_cast<long long>(from + row(i)) * (block.p.n / TILE) + block.tile] = squares;
    }
};

template <int N>
__device__ __forceinline__ void product(const Args& p) {
    Block<N> block(p);
    launch_dependents();
    block.prepare();
    const Pairs<N> pairs(block);
    uint32_t extra[2];
    const int mine = threadIdx.x;
    if (__shfl_sync(~0u, threadIdx.x / WARPGROUP, 0) == 1) {
        if (mine == WARPGROUP) block.copy();
        wait_for_previous();
        extra[0] = pairs.extra(mine), extra[1] = pairs.extra(mine + THREADS);
        if (p.squares != nullptr && mine >= WARPGROUP + 32) block.scale_rows(mine - WARPGROUP - 32, WARPGROUP - 32);
        if (p.splits > 1) wait_for_cluster();
    } else {
        wait_for_previous();
        extra[0] = pairs.extra(mine), extra[1] = pairs.extra(mine + THREADS);
        float d[N / 2];
        block.multiply_all(d);
        block.send(d);
    }
    if (p.splits > 1) {
        arrive_in_cluster();
        wait_for_cluster();
    } else {
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        if (pairs.there(mine + i * THREADS)) pairs.finish(mine + i * THREADS, extra[i]);
    for (int i = mine + 2 * THREADS; pairs.there(i); i += THREADS) pairs.finish(i, pairs.extra(i));
}

}  // namespace

#define PRODUCT(rows) \
    extern "C" __global__ void __launch_bounds__(THREADS) product_##rows(const __grid_constant__ Args p) { product<rows>(p); }

PRODUCT(32)
PRODUCT(64)
PRODUCT(128)
