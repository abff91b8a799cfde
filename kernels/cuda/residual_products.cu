// wheel: sm_90a
// Products of decoding for many rows that are added to a residual: x[rows, n] += a[rows, inner] @ W[n, inner]^T, only for sm_90a.
// kernels/lm_products.py chooses their tiles and launches them.
//
// A tile is the product of 128 rows of a and 128 rows of the weights. The blocks of a cluster compute the same tile, each for a part of the
// inner size. Each of two warpgroups multiplies 64 of the rows. A thread of another warp starts the copies into a ring, one piece after the
// other: 64 inner values of the rows of a and of the weights. The first weights are copied while the previous kernel still runs
// (programmatic dependent launch). Each block then finishes a share of the rows, for which the others send it their sums, and adds all sums
// in the order of the ranks. A row has the same bits in every batch with the same tiles.
#include "common.cuh"
#include "cluster.cuh"
#include "wgmma.cuh"

namespace {

constexpr int PIECE = 64, LINE = PIECE * 2, WARPGROUP = 128, WORKERS = 2 * WARPGROUP;
constexpr int ROWS = 128, OUTPUTS = 128, A = ROWS * LINE, STAGE = A + OUTPUTS * LINE, STAGES = 5;
// BAND: rows of a warp's sums; QUADS: groups of four sums that a thread has in each of two rows.
constexpr int BAND = 16, QUADS = OUTPUTS / 16, BAND_BYTES = BAND * OUTPUTS * 4;
constexpr int SUMS_BYTES = ROWS / BAND * BAND_BYTES;
constexpr int PATIENCE = 1 << 22;  // tries at a barrier before the launch is aborted; they take seconds, a piece a microsecond

struct Args {
    TensorMap weights, a;          // of W [n, inner] and a [rows, inner], for boxes of 64 values x the rows of a tile
    bf16* x;                       // [rows, n]
    int rows, n, inner, x_stride;  // x_stride: values from one row of x to the next
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

// Where a band has four sums of thread `lane` of the warp that multiplied the band. Their row is lane / 4, or with `down` lane / 4 + 8; they
// are the output 16 quad + 2 (lane % 4), the next one, and the two that are 8 later. Neither writes nor reads have bank conflicts.
__device__ __forceinline__ int place_in_band(int down, int quad, int lane) {
    return ((down * QUADS + quad) * 32 + (lane ^ ((quad & 1) << 2 | (quad >> 1 & 1)))) * 16;
}

template <int SPLITS>
struct Block {
    static constexpr int SHARE = ROWS / SPLITS, BANDS = SHARE / BAND;  // rows that a rank finishes

    const Args& p;
    unsigned long long *full, *empty;
    char *ring, *sums;  // sums: those that each rank computed for this block's share of the rows, [SPLITS][BANDS] bands
    const int rank, first, column, pieces, k, warp, lane;  // first: first row of a; column: first output; k: first value of the inner size
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit Block(const Args& args)
        : p(args), rank(blockIdx.x % SPLITS), first(blockIdx.y * ROWS), column(blockIdx.x / SPLITS * OUTPUTS),
          pieces(args.inner / (SPLITS * PIECE)), k(rank * pieces * PIECE), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        ring = dynamic_shared();
        ring += -shared_address(ring) & 1023;
        sums = ring + STAGES * STAGE;
        full = reinterpret_cast<unsigned long long*>(sums + SUMS_BYTES), empty = full + STAGES;
    }

    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) arrivals_init(full + i, 1), arrivals_init(empty + i, WORKERS / 32);
            arrivals_visible();
        }
        arrive_in_cluster();
        __syncthreads();
    }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    __device__ __forceinline__ void copy_weights(int piece) {
        arrive_expecting(full + stage, STAGE);
        tensor_copy(ring + stage * STAGE + A, p.weights, k + piece * PIECE, column, 0, full + stage);
    }
    __device__ __forceinline__ void copy_a(int piece) {
        tensor_copy(ring + stage * STAGE, p.a, k + piece * PIECE, first, 0, full + stage);
    }
    __device__ __forceinline__ void copy() {
        const int early = min(STAGES, pieces);
        for (; stage < early; ++stage) copy_weights(stage);
        wait_for_previous();
        for (stage = 0; stage < early; ++stage) copy_a(stage);
        if (stage == STAGES) stage = 0, parity = 1;
#pragma unroll 1
        for (int piece = early; piece < pieces; ++piece, next()) {
            wait_for(empty + stage, parity ^ 1);
            copy_weights(piece);
            copy_a(piece);
        }
    }

    __device__ __forceinline__ void multiply_all(float (&d)[OUTPUTS / 2]) {
        const Matrix a = matrix_of_lines(ring + threadIdx.x / WARPGROUP * (A / 2)), b = matrix_of_lines(ring + A);
        int before = 0;
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece, next()) {
            wait_for(full + stage, parity);
            products_begin();
            const Matrix rows = moved(a, stage * STAGE), weights = moved(b, stage * STAGE);
#pragma unroll
            for (int i = 0; i < PIECE / 16; ++i) multiply(d, moved(rows, i * 32), moved(weights, i * 32), piece + i > 0);
            products_commit();
            products_wait<1>();  // for the products of the previous piece
            if (piece > 0 && lane == 0) arrive(empty + before);
            before = stage;
        }
        products_wait<0>();
    }

    // Sends this warp's sums, which are one band, to the rank that finishes the band.
    __device__ __forceinline__ void send(const float (&d)[OUTPUTS / 2]) const {
        if (first + warp * BAND >= p.rows) return;
        const int to = warp / BANDS;
        char* const here = sums + (rank * BANDS + warp % BANDS) * BAND_BYTES;
        const uint32_t there = address_there(here, to);
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad) {
                const int at = quad * 8 + down * 2, place = place_in_band(down, quad, lane);
                const float4 four = make_float4(d[at], d[at + 1], d[at + 4], d[at + 5]);
                if (to == rank) *reinterpret_cast<float4*>(here + place) = four;
                else store16_there(there + place, four);
            }
    }

    // Half a warp finishes one row in each band of the share; a thread has 8 outputs of it.
    __device__ __forceinline__ int row(int band) const { return first + rank * SHARE + band * BAND + warp * 2 + lane / 16; }
    __device__ __forceinline__ long long place(int band) const {  // in x
        return static_cast<long long>(row(band)) * p.x_stride + column + lane % 16 * 8;
    }
    __device__ __forceinline__ uint4 residual(int band) const {
        return row(band) < p.rows ? load16(p.x + place(band)) : make_uint4(0, 0, 0, 0);
    }

    // The product's 8 outputs of this thread. Of two neighbouring threads each adds four of its own outputs and four of the other's; then
    // they exchange the latter.
    __device__ __forceinline__ uint4 total(int band) const {
        const int in_band = warp * 2 + lane / 16, line = in_band % 8 * 4 + (lane & 1) * 2, quad = lane % 16 / 2;
        const char *one = sums + band * BAND_BYTES + place_in_band(in_band / 8, quad, line);
        const char *other = sums + band * BAND_BYTES + place_in_band(in_band / 8, quad, line + 1);
        float4 a = *reinterpret_cast<const float4*>(one), b = *reinterpret_cast<const float4*>(other);
#pragma unroll
        for (int i = 1; i < SPLITS; ++i) {
            const float4 c = *reinterpret_cast<const float4*>(one + i * BANDS * BAND_BYTES);
            const float4 d = *reinterpret_cast<const float4*>(other + i * BANDS * BAND_BYTES);
            a = make_float4(a.x + c.x, a.y + c.y, a.z + c.z, a.w + c.w);
            b = make_float4(b.x + d.x, b.y + d.y, b.z + d.z, b.w + d.w);
        }
        const bool odd = lane & 1;
        const uint2 even_eight = make_uint2(narrow(a.x, a.y), narrow(b.x, b.y)), odd_eight = make_uint2(narrow(a.z, a.w), narrow(b.z, b.w));
        const uint32_t x = __shfl_xor_sync(~0u, odd ? even_eight.x : odd_eight.x, 1);
        const uint32_t y = __shfl_xor_sync(~0u, odd ? even_eight.y : odd_eight.y, 1);
        return odd ? make_uint4(x, y, odd_eight.x, odd_eight.y) : make_uint4(even_eight.x, even_eight.y, x, y);
    }

    __device__ __forceinline__ void finish(int band, uint4 residual) const {
        const uint4 product = total(band);
        const uint32_t products[4] = {product.x, product.y, product.z, product.w};
        const uint32_t residuals[4] = {residual.x, residual.y, residual.z, residual.w};
        uint32_t done[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 v = widen(products[i]), e = widen(residuals[i]);
            done[i] = narrow(v.x + e.x, v.y + e.y);
        }
        if (row(band) < p.rows) store16(p.x + place(band), make_uint4(done[0], done[1], done[2], done[3]));
    }

    __device__ __forceinline__ void work() {
        uint4 residuals[BANDS];
        wait_for_previous();
#pragma unroll
        for (int band = 0; band < BANDS; ++band) residuals[band] = residual(band);
        {
            float d[OUTPUTS / 2];
            multiply_all(d);
            wait_for_cluster();
            send(d);
        }
        arrive_in_cluster();
        wait_for_cluster();
#pragma unroll
        for (int band = 0; band < BANDS; ++band)
            if (first + rank * SHARE + band * BAND < p.rows) finish(band, residuals[band]);
    }
};

template <int SPLITS>
__device__ __forceinline__ void product(const Args& p) {
    Block<SPLITS> block(p);
    launch_dependents();
    block.prepare();
    if (__shfl_sync(~0u, threadIdx.x / WORKERS, 0) == 0) return block.work();
    if (threadIdx.x == WORKERS) block.copy();
    wait_for_cluster();
    arrive_in_cluster();
    wait_for_cluster();
}

}  // namespace

#define PRODUCT(splits) \
    extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) residual_product_##splits(const __grid_constant__ Args p) { \
        product<splits>(p); \
    }

PRODUCT(4)
PRODUCT(8)
