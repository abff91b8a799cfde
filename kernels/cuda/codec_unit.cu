// wheel: sm_90a
// The codec's residual unit with 96 channels and 7 taps: dilated convolution, snake, 1x1 convolution, residual, next snake. It computes
// `codec_active_unit` of kernels/codec_ops.py, only for sm_90a. kernels/codec_cuda.py packs the weights and launches it.
//
// A block keeps both weights in shared memory and computes one tile of 128 steps after the other. A thread of its last warp copies the
// activations of a tile, with the history that the taps read, as boxes of 32 channels x steps. In shared memory each tap reads the same
// matrix from a later step, so that each activation is copied once for all seven taps. Two warpgroups multiply 64 steps each, in turns, and
// finish them in registers.
#include "common.cuh"
#include "wgmma.cuh"
#include "codec_tiles.cuh"

namespace {

constexpr int C = 96, TAPS = 7, GROUPS_OF_8 = C / 8, STEPS_OF_16 = C / 16, MAX_DILATION = 9, M = 64, WARPGROUP = 128;
constexpr int TAP_BYTES = C * C * 2, WEIGHT_BYTES = (TAPS + 1) * TAP_BYTES;  // the taps, oldest first, then the second weight
constexpr int ALONG_K = C * 16;                                              // from 8 values of k to the next, in a weight
constexpr int WARPGROUPS = 2, STAGES = 2, TILE = M * WARPGROUPS, THREADS = WARPGROUPS * WARPGROUP + 32;
constexpr int BOXES = 3, STEP_BYTES = 64;  // STEP_BYTES: of one step in a box
constexpr int BOX = (TILE + (TAPS - 1) * MAX_DILATION + 7) / 8 * 8 * STEP_BYTES;

struct Barriers { unsigned long long weights, full[STAGES], empty[STAGES]; };

// Aligned to 1,024 bytes, as boxes require.
struct Shared {
    char weights[WEIGHT_BYTES];
    char stages[STAGES][BOXES][BOX];
    float parameters[PARAMETERS][C];
    Barriers barriers;
};
static_assert(WEIGHT_BYTES % 1024 == 0 && BOX % 512 == 0, "a box starts at the start of its swizzle pattern");
static_assert(sizeof(Shared) + 1024 <= 232448, "the shared memory of a block");

__device__ __forceinline__ void wait_for(unsigned long long* barrier, int parity) {
    while (!arrived(barrier, parity)) {}
}
using Tiles96 = Tiles<TILE>;
__device__ __forceinline__ int stage_of(const Tiles96& tiles) { return tiles.item % STAGES; }
__device__ __forceinline__ int parity_of(const Tiles96& tiles) { return tiles.item / STAGES & 1; }

// One thread copies all tiles.
__device__ void copy_boxes(const Args& p, const TensorMap& map, Shared& s) {
    const int reach = (TAPS - 1) * p.dilation;
    for (Tiles96 tiles(p); tiles.found(); tiles.next()) {
        const int stage = stage_of(tiles);
        wait_for(&s.barriers.empty[stage], parity_of(tiles) ^ 1);
        arrive_expecting(&s.barriers.full[stage], (TILE + reach) * C * 2);
        for (int box = 0; box < BOXES; ++box)
            tensor_copy(s.stages[stage][box], map, box * 32, p.lead + tiles.start - reach, tiles.row, &s.barriers.full[stage]);
    }
}

// A warpgroup that multiplies. A thread has two of its 64 steps, 8 apart, and in each of them three groups of 8 channels of the results.
struct Multiplier {
    const Args& p;
    Shared& s;
    const int warpgroup, thread, quad;
    uint4 before[2][3];  // the residual
    float2 first[GROUPS_OF_8][3];  // bias and snake parameters after the first product, by groups of 8 columns
    float4 second[3][3][2];        // bias and snake parameters after the second product, by groups of 8 channels

    __device__ Multiplier(const Args& arguments, Shared& shared, int number)
        : p(arguments), s(shared), warpgroup(number), thread(threadIdx.x % WARPGROUP), quad(threadIdx.x % 4) {}

    // The thread's first step, and the place of its first channels of that step in a [rows, steps, C] tensor. Its second step is 8 later.
    __device__ __forceinline__ int step_of(const Tiles96& tiles) const {
        return tiles.start + warpgroup * M + thread / 32 * 16 + thread % 32 / 4;
    }
    __device__ __forceinline__ long long place_of(const Tiles96& tiles) const {
        return (static_cast<long long>(tiles.row) * p.steps + step_of(tiles)) * C + quad * 8;
    }

    __device__ __forceinline__ void read_residual(const Tiles96& tiles) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // steps after the last one read its residual; their results are not stored
            const int step = min(step_of(tiles) + half * 8, p.steps - 1);
            const bf16* from = p.residual + (static_cast<long long>(tiles.row) * p.steps + step) * C + quad * 8;
#pragma unroll
            for (int part = 0; part < 3; ++part) before[half][part] = load16(from + part * 32);
        }
    }

    __device__ __forceinline__ void convolve(float (&d)[C / 2], int stage) {
        Matrix steps = swizzled_matrix_at(s.stages[stage][0] + warpgroup * M * STEP_BYTES);
        Matrix weights = matrix_at(s.weights, ALONG_K, 128);
        products_begin();
#pragma unroll 1
        for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
            for (int k = 0; k < STEPS_OF_16; ++k)
                multiply(d, moved(steps, k / 2 * BOX + k % 2 * 32), moved(weights, k * 2 * ALONG_K), tap + k > 0);
            steps = moved(steps, p.dilation * STEP_BYTES), weights = moved(weights, TAP_BYTES);
        }
        products_commit();
    }

    __device__ __forceinline__ void read_first() {
#pragma unroll
        for (int i = 0; i < GROUPS_OF_8; ++i)
#pragma unroll
            for (int j = 0; j < 3; ++j) first[i][j] = *reinterpret_cast<const float2*>(&s.parameters[BIAS1 + j][i * 8 + quad * 2]);
    }
    __device__ __forceinline__ void read_second() {
#pragma unroll
        for (int part = 0; part < 3; ++part)
#pragma unroll
            for (int j = 0; j < 3; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    second[part][j][i] = *reinterpret_cast<const float4*>(&s.parameters[BIAS2 + j][part * 32 + quad * 8 + i * 4]);
    }

    // Applies bias and snake to the sums and rounds to bf16. The results are already in the registers where the next product reads them.
    __device__ __forceinline__ void activate(const float (&d)[C / 2], uint32_t (&hidden)[STEPS_OF_16][4]) {
#pragma unroll
        for (int i = 0; i < GROUPS_OF_8; ++i) {
            const float2 bias = first[i][0], frequency = first[i][1], gain = first[i][2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                hidden[i / 2][i % 2 * 2 + half] = narrow(snake(d[4 * i + 2 * half] + bias.x, frequency.x, gain.x),
                                                         snake(d[4 * i + 2 * half + 1] + bias.y, frequency.y, gain.y));
        }
    }

    __device__ __forceinline__ void mix(float (&d)[C / 2], const uint32_t (&hidden)[STEPS_OF_16][4]) {
        const Matrix weights = matrix_at(s.weights, ALONG_K, 128);
        products_begin();
#pragma unroll
        for (int k = 0; k < STEPS_OF_16; ++k) multiply(d, hidden[k], moved(weights, TAPS * TAP_BYTES + k * 2 * ALONG_K), k > 0);
        products_commit();
    }

    // Finishes and stores the results. The second weight's columns are ordered so that a thread has 8 consecutive channels of each 32.
    __device__ __forceinline__ void write(const float (&d)[C / 2], const Tiles96& tiles) {
        bf16* const raw_at = p.raw + place_of(tiles);
        bf16* const active_at = p.active + tiles.row * p.active_stride + static_cast<long long>(step_of(tiles)) * C + quad * 8;
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            const auto& bias = reinterpret_cast<const float(&)[8]>(second[part][0]);
            const auto& frequency = reinterpret_cast<const float(&)[8]>(second[part][1]);
            const auto& gain = reinterpret_cast<const float(&)[8]>(second[part][2]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int step = step_of(tiles) + half * 8, there = half * 8 * C + part * 32;
                const uint32_t old[4] = {before[half][part].x, before[half][part].y, before[half][part].z, before[half][part].w};
                uint32_t raw[4], active[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 was = widen(old[i]);
                    const float x = d[(part * 4 + i) * 4 + half * 2] + bias[2 * i] + was.x;
                    const float y = d[(part * 4 + i) * 4 + half * 2 + 1] + bias[2 * i + 1] + was.y;
                    raw[i] = narrow(x, y);
                    active[i] = narrow(snake(x, frequency[2 * i], gain[2 * i]), snake(y, frequency[2 * i + 1], gain[2 * i + 1]));
                    if (step >= tiles.end) active[i] = 0;
                }
                store16_if(step < p.steps && p.raw != nullptr, raw_at + there, make_uint4(raw[0], raw[1], raw[2], raw[3]));
                store16_if(step < p.steps && p.active != nullptr, active_at + there, make_uint4(active[0], active[1], active[2], active[3]));
            }
        }
    }
    __device__ __forceinline__ void clear(const Tiles96& tiles) {  // a tile after the row's end
        const int steps = min(TILE, p.steps - tiles.start);
        bf16* to = p.active + tiles.row * p.active_stride + static_cast<long long>(tiles.start) * C;
#pragma unroll 1
        for (int i = warpgroup * WARPGROUP + thread; i < steps * GROUPS_OF_8; i += WARPGROUPS * WARPGROUP)
            store16(to + i * 8, make_uint4(0, 0, 0, 0));
    }

    // Turns: only one warpgroup at a time computes its long products; meanwhile the other one finishes its steps.
    __device__ __forceinline__ void await_turn() const { sync_some(1 + warpgroup, 2 * WARPGROUP); }
    __device__ __forceinline__ void pass_turn(int to) const { arrive_some(1 + to, 2 * WARPGROUP); }

    __device__ void run() {
        if (warpgroup == WARPGROUPS - 1) pass_turn(0);
        if (p.ends != nullptr && !p.open_ends && p.active != nullptr)
            for (Tiles96 tiles(p, 0, true); tiles.found(); tiles.next()) clear(tiles);
        wait_for(&s.barriers.weights, 0);
        for (Tiles96 tiles(p); tiles.found(); tiles.next()) finish(tiles);
    }

    __device__ __forceinline__ void finish(const Tiles96& tiles) {
        const int stage = stage_of(tiles);
        float d[C / 2];
        uint32_t hidden[STEPS_OF_16][4];
        wait_for(&s.barriers.full[stage], parity_of(tiles));
        read_residual(tiles);
        await_turn();
        convolve(d, stage);
        products_wait<0>();
        pass_turn((warpgroup + 1) % WARPGROUPS);
        if (thread % 32 == 0) arrive(&s.barriers.empty[stage]);
        read_first();
        activate(d, hidden);
        mix(d, hidden);
        products_wait<0>();
        read_second();
        write(d, tiles);
    }
};

__device__ void prepare(const Args& p, Shared& s) {
    static_assert(THREADS >= C, "a thread for each channel");
#pragma unroll
    for (int which = 0; which < PARAMETERS; ++which)
        if (threadIdx.x < C) s.parameters[which][threadIdx.x] = p.parameters[which] == nullptr ? 0.f : p.parameters[which][threadIdx.x];
    if (threadIdx.x == 0) {
        arrivals_init(&s.barriers.weights, 1);
        for (int i = 0; i < STAGES; ++i) arrivals_init(&s.barriers.full[i], 1), arrivals_init(&s.barriers.empty[i], 4 * WARPGROUPS);
        arrivals_visible();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_expecting(&s.barriers.weights, WEIGHT_BYTES);
        for (int i = 0; i <= TAPS; ++i) bulk_copy(s.weights + i * TAP_BYTES, p.weights + i * TAP_BYTES, TAP_BYTES, &s.barriers.weights);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) codec_unit_96(const __grid_constant__ TensorArgs arguments) {
    const Args& p = arguments.p;
    char* const memory = dynamic_shared();
    auto& s = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    prepare(p, s);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup < WARPGROUPS) {
        Multiplier(p, s, warpgroup).run();
    } else if (threadIdx.x % WARPGROUP == 0) {
        copy_boxes(p, arguments.map, s);
    }
}
