// Products of decoding for many rows: y[rows, n] = epilogue(x[rows, inner] @ W^T), only for sm_90a. kernels/lm_wide.py says how each is cut,
// and launches it.
//
// A tile is 128 rows of x times N rows of W; of SwiGLU, half of these are the gate's and half of them those of up for the same outputs, so
// that a thread has both sums in its registers. Two warpgroups multiply 64 rows of x each; a thread beside them asks for the pieces of 64
// values of both into a ring, and is ahead of them, also into the next tile. The blocks of a cluster have tiles of the same weights, of which
// each copies a part to all. The first weights depend on no kernel, so they come while the one ahead still runs (programmatic dependent
// launch). One chain of sums over the inner size gives a row the same bits in any company.
#include "common.cuh"
#include "cluster.cuh"
#include "wgmma.cuh"

namespace {

constexpr int PIECE = 64, LINE = PIECE * 2, ROWS = 128, WARPGROUP = 128, WORKERS = 2 * WARPGROUP, THREADS = WORKERS + 32;
constexpr int X = ROWS * LINE, RING = 204 << 10;  // bytes of a piece of x; that stages may have, so that the kernel ahead keeps some
constexpr int PATIENCE = 1 << 22;                 // looks at a barrier before the launch is given up: seconds, where a piece takes a microsecond

struct Args {
    TensorMap weights, x;  // boxes of 64 values x the rows of W that a copy takes ([n, inner]; of SwiGLU [2 * n, inner], gate first); x 128 rows
    bf16* y;               // [rows, n]
    int rows, n, inner, y_stride, cluster;  // y_stride: from one row of y to the next; cluster: 1, 2 or 4 blocks
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

__device__ __forceinline__ float silu(float v) { return rounded(__fdividef(v, 1.f + __expf(-v))); }

template <int N, bool SWIGLU>
struct Block {
    static constexpr int STAGE = X + N * LINE, STAGES = RING / STAGE, OUTPUTS = SWIGLU ? N / 2 : N;

    const Args& p;
    unsigned long long *full, *empty;
    char* ring;
    // A unit is a tile for each block of a cluster: neighbours have the same weights. groups: units with these.
    const int rank, first_unit, clusters, groups, units, pieces;
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit Block(const Args& args)
        : p(args), rank(blockIdx.x % args.cluster), first_unit(blockIdx.x / args.cluster), clusters(gridDim.x / args.cluster),
          groups((args.rows + ROWS * args.cluster - 1) / (ROWS * args.cluster)), units(groups * (args.n / OUTPUTS)), pieces(args.inner / PIECE) {
        ring = dynamic_shared();
        ring += -shared_address(ring) & 1023;
        full = reinterpret_cast<unsigned long long*>(ring + STAGES * STAGE), empty = full + STAGES;
    }

    __device__ __forceinline__ void prepare() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) arrivals_init(full + i, 1), arrivals_init(empty + i, WORKERS / 32 * p.cluster);
            arrivals_visible();
        }
        if (p.cluster == 1) return __syncthreads();
        arrive_in_cluster_relaxed();
        wait_for_cluster();
    }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ int row_of(int unit) const { return (unit % groups * p.cluster + rank) * ROWS; }
    __device__ __forceinline__ int column_of(int unit) const { return unit / groups * OUTPUTS; }

    // This block's part of a piece of the weights, to all blocks of the cluster.
    __device__ __forceinline__ void copy_weights(int unit, int piece) {
        const int boxes = p.cluster == 1 ? 2 : 1, height = N / (boxes * p.cluster);
        arrive_expecting(full + stage, STAGE);
        for (int i = 0; i < boxes; ++i) {
            const int row = (rank * boxes + i) * height;
            char* const to = ring + stage * STAGE + X + row * LINE;
            const int from = column_of(unit) + row + (SWIGLU && row >= OUTPUTS ? p.n - OUTPUTS : 0);
            if (p.cluster == 1) tensor_copy(to, p.weights, piece * PIECE, from, 0, full + stage);
            else tensor_copy_to_cluster(to, p.weights, piece * PIECE, from, 0, full + stage, (1 << p.cluster) - 1);
        }
    }
    __device__ __forceinline__ void copy_x(int unit, int piece) {
        tensor_copy(ring + stage * STAGE, p.x, piece * PIECE, row_of(unit), 0, full + stage);
    }

    __device__ __forceinline__ void copy() {
        const int early = min(STAGES, pieces);
        for (; stage < early; ++stage) copy_weights(first_unit, stage);
        wait_for_previous();
        for (stage = 0; stage < early; ++stage) copy_x(first_unit, stage);
        if (stage == STAGES) stage = 0, parity = 1;
        for (int unit = first_unit, piece = early; unit < units; unit += clusters, piece = 0)
#pragma unroll 1
            for (; piece < pieces; ++piece, next()) {
                wait_for(empty + stage, parity ^ 1);
                copy_weights(unit, piece);
                copy_x(unit, piece);
            }
        for (int i = 0; i < STAGES && p.cluster > 1; ++i, next()) wait_for(empty + stage, parity ^ 1);  // other blocks still arrive here
    }

    // A warp has read a stage: every block of the cluster may copy to it.
    __device__ __forceinline__ void release(int read) {
        const int lane = threadIdx.x % 32;
        if (p.cluster > 1 && lane < p.cluster) arrive_there(address_there(empty + read, lane));
        if (p.cluster == 1 && lane == 0) arrive(empty + read);
    }

    __device__ __forceinline__ void multiply_all(float (&d)[N / 2]) {
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
            products_wait<1>();  // of the piece before
            if (piece > 0) release(before);
            before = stage;
        }
        products_wait<0>();
        release(before);
    }

    // Outputs 8 chunk + 2 (t % 4) and the one behind it of a thread's row t / 4, or of 8 rows further down. d[4 i + 2 r + j] of thread t of a
    // warp is row t / 4 + 8 r, row 8 i + 2 (t % 4) + j of the tile's weights.
    __device__ __forceinline__ uint32_t finished(const float (&d)[N / 2], int chunk, int down) const {
        const int at = chunk * 4 + down * 2;
        if constexpr (!SWIGLU) return narrow(d[at], d[at + 1]);
        const float x = silu(rounded(d[at])), y = silu(rounded(d[at + 1]));
        return narrow(x * rounded(d[N / 4 + at]), y * rounded(d[N / 4 + at + 1]));
    }

    // Neighbours exchange outputs, so that a thread stores four of one chunk at once and 4 threads store 32 bytes of a row.
    __device__ __forceinline__ void deliver(const float (&d)[N / 2], int unit) const {
        const int lane = threadIdx.x % 32, odd = lane & 1, row = row_of(unit) + threadIdx.x / 32 * 16 + lane / 4;
        bf16* const to = p.y + static_cast<long long>(row) * p.y_stride + column_of(unit) + odd * 8 + (lane & 2) * 2;
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
};

template <int N, bool SWIGLU>
__device__ __forceinline__ void product(const Args& p) {
    Block<N, SWIGLU> block(p);
    launch_dependents();
    block.prepare();
    if (__shfl_sync(~0u, threadIdx.x / WORKERS, 0) == 1) {
        if (threadIdx.x == WORKERS) block.copy();
        return;
    }
    wait_for_previous();
    for (int unit = block.first_unit; unit < block.units; unit += block.clusters) {
        float d[N / 2];
        block.multiply_all(d);
        block.deliver(d, unit);
    }
}

}  // namespace

#define PRODUCT(name, rows, swiglu) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Args p) { product<rows, swiglu>(p); }

PRODUCT(wide_64, 64, false)
PRODUCT(wide_128, 128, false)
PRODUCT(wide_256, 256, false)
PRODUCT(wide_swiglu_96, 96, true)
PRODUCT(wide_swiglu_192, 192, true)
