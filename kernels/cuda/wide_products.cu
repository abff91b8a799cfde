// wheel: sm_90a
// SwiGLU for many rows: y[rows, n] = silu(x @ gate^T) * (x @ up^T), only for sm_90a. kernels/lm_products.py chooses its tiles and launches
// it.
//
// A tile is the product of 128 rows of x with 96 rows of the gate's weights and the 96 rows of up's weights for the same outputs, so that a
// thread has both sums in its registers. Each of two warpgroups multiplies 64 of the rows. A thread of another warp requests copies of
// pieces of 64 values of x and the weights into a ring, ahead of the products and also across tiles. The first weights depend on no earlier
// kernel, so they are copied while the previous kernel still runs (programmatic dependent launch). The sums run over the inner size in one
// fixed order, so that a row has the same bits in every batch.
#include "common.cuh"
#include "wgmma.cuh"

namespace {

constexpr int PIECE = 64, LINE = PIECE * 2, WARPGROUP = 128, WORKERS = 2 * WARPGROUP;
constexpr int ROWS = 128, OUTPUTS = 96, X = ROWS * LINE, HALF = OUTPUTS * LINE, STAGE = X + 2 * HALF, STAGES = 5;
constexpr int PATIENCE = 1 << 22;  // tries at a barrier before the launch is aborted: seconds, while a piece takes a microsecond

struct Args {
    TensorMap weights, x;          // weights: [2 * n, inner], gate first, boxes of 64 values x 96 rows; x: [rows, inner], boxes of 64 x 128
    bf16* y;                       // [rows, n]
    int rows, n, inner, y_stride;  // y_stride: values from one row of y to the next
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

__device__ __forceinline__ float silu(float v) { return rounded(__fdividef(v, 1.f + __expf(-v))); }

struct Block {
    const Args& p;
    unsigned long long *full, *empty;
    char* ring;
    const int groups, tiles, pieces;  // groups: number of consecutive tiles that have the same weights
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit Block(const Args& args)
        : p(args), groups((args.rows + ROWS - 1) / ROWS), tiles(groups * (args.n / OUTPUTS)), pieces(args.inner / PIECE) {
        ring = dynamic_shared();
        ring += -shared_address(ring) & 1023;
        full = reinterpret_cast<unsigned long long*>(ring + STAGES * STAGE), empty = full + STAGES;
    }

    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) arrivals_init(full + i, 1), arrivals_init(empty + i, WORKERS / 32);
            arrivals_visible();
        }
        __syncthreads();
    }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ int row_of(int tile) const { return tile % groups * ROWS; }
    __device__ __forceinline__ int column_of(int tile) const { return tile / groups * OUTPUTS; }

    __device__ __forceinline__ void copy_weights(int tile, int piece) {
        char* const to = ring + stage * STAGE + X;
        arrive_expecting(full + stage, STAGE);
        tensor_copy(to, p.weights, piece * PIECE, column_of(tile), 0, full + stage);
        tensor_copy(to + HALF, p.weights, piece * PIECE, p.n + column_of(tile), 0, full + stage);
    }
    __device__ __forceinline__ void copy_x(int tile, int piece) {
        tensor_copy(ring + stage * STAGE, p.x, piece * PIECE, row_of(tile), 0, full + stage);
    }

    __device__ __forceinline__ void copy() {
        const int early = min(STAGES, pieces);
        for (; stage < early; ++stage) copy_weights(blockIdx.x, stage);
        wait_for_previous();
        for (stage = 0; stage < early; ++stage) copy_x(blockIdx.x, stage);
        if (stage == STAGES) stage = 0, parity = 1;
        for (int tile = blockIdx.x, piece = early; tile < tiles; tile += gridDim.x, piece = 0)
#pragma unroll 1
            for (; piece < pieces; ++piece, next()) {
                wait_for(empty + stage, parity ^ 1);
                copy_weights(tile, piece);
                copy_x(tile, piece);
            }
    }

    // Computes a thread's sums: first those of the gate, then those of up.
    __device__ __forceinline__ void multiply_all(float (&d)[OUTPUTS]) {
        const Matrix a = matrix_of_lines(ring + threadIdx.x / WARPGROUP * (X / 2)), b = matrix_of_lines(ring + X);
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
            if (piece > 0 && threadIdx.x % 32 == 0) arrive(empty + before);
            before = stage;
        }
        products_wait<0>();
        if (threadIdx.x % 32 == 0) arrive(empty + before);
    }

    // Two neighbouring outputs, of which the first is 8 chunk + 2 (t % 4). Their row is t / 4, or with `down` t / 4 + 8. In thread t of a
    // warp, d[4 i + 2 r + j] belongs to row t / 4 + 8 r of x and to row 8 i + 2 (t % 4) + j of the tile's weights.
    __device__ __forceinline__ uint32_t finished(const float (&d)[OUTPUTS], int chunk, int down) const {
        const int at = chunk * 4 + down * 2, up = OUTPUTS / 2 + at;
        return narrow(silu(rounded(d[at])) * rounded(d[up]), silu(rounded(d[at + 1])) * rounded(d[up + 1]));
    }

    // Stores the outputs. Neighbouring threads first exchange some, so that a thread stores four of one chunk at once, and 4 threads store
    // 32 bytes of a row.
    __device__ __forceinline__ void deliver(const float (&d)[OUTPUTS], int first_row, int tile) const {
        const int lane = threadIdx.x % 32, odd = lane & 1, row = first_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
        bf16* const to = p.y + static_cast<long long>(row) * p.y_stride + column_of(tile) + odd * 8 + (lane & 2) * 2;
#pragma unroll
        for (int chunk = 0; chunk < OUTPUTS / 8; chunk += 2)
#pragma unroll
            for (int down = 0; down < 2; ++down) {
                const uint32_t one = finished(d, chunk, down), other = finished(d, chunk + 1, down);
                const uint32_t got = __shfl_xor_sync(~0u, odd ? one : other, 1);
                const uint2 four = odd ? make_uint2(got, other) : make_uint2(one, got);
                if (row + down * 8 < p.rows) *reinterpret_cast<uint2*>(to + down * 8ll * p.y_stride + chunk * 8) = four;
            }
    }

    __device__ __forceinline__ void work() {
        wait_for_previous();
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            float d[OUTPUTS];
            multiply_all(d);
            deliver(d, row_of(tile) + threadIdx.x / WARPGROUP * (ROWS / 2), tile);
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) wide_swiglu(const __grid_constant__ Args p) {
    Block block(p);
    launch_dependents();
    block.prepare();
    if (__shfl_sync(~0u, threadIdx.x / WORKERS, 0) == 0) block.work();
    else if (threadIdx.x == WORKERS) block.copy();
}
