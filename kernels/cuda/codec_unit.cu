// The codec's residual unit of 96 channels, 7 taps: dilated convolution, snake, 1x1 convolution, residual, next snake, as
// `codec_active_unit` of kernels/codec_ops.py. Only for sm_90a. kernels/codec_cuda.py packs the weights and launches it.
//
// A block keeps both weights in shared memory and takes one tile of steps after the other. Its last four warps copy the activations of a
// tile, with what the taps reach back for, into slabs of 8 channels x steps; there a tap is the same matrix some steps further on, so
// that each activation is read once for all seven. The other warpgroups each multiply 64 steps and finish them in registers.
#include "common.cuh"
#include "wgmma.cuh"

namespace {

constexpr int C = 96, TAPS = 7, GROUPS_OF_8 = C / 8, STEPS_OF_16 = C / 16, MAX_DILATION = 9, M = 64, WARPGROUP = 128;
constexpr int TAP_BYTES = C * C * 2, WEIGHT_BYTES = (TAPS + 1) * TAP_BYTES;  // the taps, oldest first, then the second weight
constexpr int ALONG_K = C * 16;                                              // from 8 values of k to the next, in a weight
enum Parameter { BIAS1, FREQUENCY1, GAIN1, BIAS2, FREQUENCY2, GAIN2, PARAMETERS };

struct Args {
    const bf16 *a, *residual;
    const char* weights;
    const float* parameters[PARAMETERS];  // [C]; the last two are null without `active`
    bf16 *raw, *active;                   // null where not wanted
    const int* ends;                      // null: all rows are whole
    long long active_stride;              // values from a row of `active` to the next
    int rows, steps, lead, dilation;
};

struct TensorArgs {
    Args p;
    TensorMap map;  // of `a`: boxes of 32 channels x the steps of a tile with what its taps reach back for
};

// A cut of the work: warpgroups that multiply, how many of them share a tile, tiles in shared memory, whether they multiply in turns, and
// how a tile is copied: by threads, a third of eight steps at a time or whole steps, or as boxes of a tensor.
enum Copying { THIRDS, WHOLE, BOXES };
template <int WARPGROUPS_, int SHARING_, int STAGES_, int TURNS_, int COPYING_>
struct Cut {
    static constexpr int WARPGROUPS = WARPGROUPS_, SHARING = SHARING_, STAGES = STAGES_, TEAMS = WARPGROUPS / SHARING;
    static constexpr bool LATE = WARPGROUPS > 3;  // the residual is asked for behind the long products, when there are registers for it
    static constexpr bool TURNS = TURNS_ > 0, DRAINS = TURNS_ > 1;  // the next one starts when the products are over, not when they are issued
    static constexpr int COPYING = COPYING_, COPIERS = COPYING == BOXES ? 32 : WARPGROUP;  // threads
    static constexpr int TILE = M * SHARING, THREADS = WARPGROUPS * WARPGROUP + COPIERS;
    // Slabs have one more than a multiple of 8: copies of eight slabs fall on all banks; two more: copies of two steps x four slabs.
    static constexpr int LENGTH = (TILE + (TAPS - 1) * MAX_DILATION + 5) / 8 * 8 + (COPYING == THIRDS ? 2 : COPYING == WHOLE ? 1 : 0);
    static constexpr int SLAB = LENGTH * 16, BOX = LENGTH * 64, STAGE = GROUPS_OF_8 * SLAB;  // a box has four slabs' bytes
    static_assert(LENGTH >= TILE + (TAPS - 1) * MAX_DILATION, "a tile with what its taps reach back for");
};

struct Barriers { unsigned long long weights, full[4], empty[4]; };

template <class K>
struct Shared {
    char weights[WEIGHT_BYTES];
    char stages[K::STAGES][K::STAGE];
    float parameters[PARAMETERS][C];
    Barriers barriers;
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, int parity) {
    while (!arrived(barrier, parity)) {}
}
__device__ __forceinline__ float snake(float x, float frequency, float gain) {
    const float sine = fast_sine(x * frequency);
    return x + gain * sine * sine;
}

// The tiles of a block, in order. One that lies behind its row's end needs no products.
template <class K>
struct Tiles {
    const Args& p;
    const int in_row, count;
    int tile, row = 0, start = 0, end = 0;
    int item = 0;  // tiles with products before this one

    __device__ explicit Tiles(const Args& arguments)
        : p(arguments), in_row((p.steps + K::TILE - 1) / K::TILE), count(p.rows * in_row), tile(static_cast<int>(blockIdx.x)) {}
    __device__ __forceinline__ bool found() {
        if (tile >= count) return false;
        row = tile / in_row, start = tile % in_row * K::TILE;
        end = p.ends == nullptr ? p.steps : p.ends[row];
        return true;
    }
    __device__ __forceinline__ bool multiplied() const { return start < end; }
    __device__ __forceinline__ void next() {
        item += multiplied();
        tile += static_cast<int>(gridDim.x);
    }
    __device__ __forceinline__ int stage() const { return item % K::STAGES; }
    __device__ __forceinline__ int parity() const { return item / K::STAGES & 1; }
};

template <class K>
__device__ __forceinline__ void copy_thirds(const Args& p, Shared<K>& s, const Tiles<K>& tiles, const bf16* row, int reach, int thread) {
    const int group = thread % 4;
    for (int i = thread / 4; i < K::TILE + reach; i += K::COPIERS / 4) {
        const int at = tiles.start - reach + i;
        const bool inside = at >= -p.lead && at < p.steps;
        const bf16* from = row + static_cast<long long>(inside ? p.lead + at : 0) * C + group * 8;
        char* to = s.stages[tiles.stage()] + group * K::SLAB + i * 16;
#pragma unroll
        for (int slab = 0; slab < GROUPS_OF_8; slab += 4) copy16_or_zeros(to + slab * K::SLAB, from + slab * 8, inside);
    }
}

template <class K>
__device__ __forceinline__ void copy_whole(const Args& p, Shared<K>& s, const Tiles<K>& tiles, const bf16* row, int reach, int thread) {
    const int count = (K::TILE + reach) * GROUPS_OF_8, first = tiles.start - reach;
    int i = thread / GROUPS_OF_8, slab = thread % GROUPS_OF_8;
#pragma unroll 2
    for (int part = thread; part < count; part += K::COPIERS) {
        const bool inside = first + i >= -p.lead && first + i < p.steps;
        const bf16* from = row + static_cast<long long>(inside ? p.lead + first + i : 0) * C + slab * 8;
        copy16_or_zeros(s.stages[tiles.stage()] + slab * K::SLAB + i * 16, from, inside);
        i += K::COPIERS / GROUPS_OF_8, slab += K::COPIERS % GROUPS_OF_8;
        if (slab >= GROUPS_OF_8) slab -= GROUPS_OF_8, i += 1;
    }
}

// One warp or four copy all tiles.
template <class K>
__device__ void copy_tiles(const Args& p, Shared<K>& s, int thread) {
    const int reach = (TAPS - 1) * p.dilation;
    for (Tiles<K> tiles(p); tiles.found(); tiles.next()) {
        if (!tiles.multiplied()) continue;
        const int stage = tiles.stage();
        wait_for(&s.barriers.empty[stage], tiles.parity() ^ 1);
        const bf16* row = p.a + static_cast<long long>(tiles.row) * (p.lead + p.steps) * C;
        if (K::COPYING == WHOLE) copy_whole<K>(p, s, tiles, row, reach, thread);
        else copy_thirds<K>(p, s, tiles, row, reach, thread);
        arrive_after_copies(&s.barriers.full[stage]);
    }
}

// One thread copies all tiles.
template <class K>
__device__ void copy_boxes(const Args& p, const TensorMap& map, Shared<K>& s) {
    const int reach = (TAPS - 1) * p.dilation;
    for (Tiles<K> tiles(p); tiles.found(); tiles.next()) {
        if (!tiles.multiplied()) continue;
        const int stage = tiles.stage();
        wait_for(&s.barriers.empty[stage], tiles.parity() ^ 1);
        arrive_expecting(&s.barriers.full[stage], (K::TILE + reach) * C * 2);
        for (int box = 0; box < 3; ++box)
            tensor_copy(s.stages[stage] + box * K::BOX, map, box * 32, p.lead + tiles.start - reach, tiles.row, &s.barriers.full[stage]);
    }
}

// A warpgroup that multiplies. Of its 64 steps a thread has two, `rows` of them apart, and of the results three times 8 channels in each.
template <class K>
struct Multiplier {
    const Args& p;
    Shared<K>& s;
    const int warpgroup, thread, quad;
    uint4 before[2][3];  // the residual

    __device__ Multiplier(const Args& arguments, Shared<K>& shared, int number)
        : p(arguments), s(shared), warpgroup(number), thread(threadIdx.x % WARPGROUP), quad(threadIdx.x % 4) {}

    // The thread's first step, and where its first channels of it are in a [rows, steps, C] tensor. The second step is 8 further on.
    __device__ __forceinline__ int step_of(const Tiles<K>& tiles) const {
        return tiles.start + warpgroup % K::SHARING * M + thread / 32 * 16 + thread % 32 / 4;
    }
    __device__ __forceinline__ long long place_of(const Tiles<K>& tiles) const {
        return (static_cast<long long>(tiles.row) * p.steps + step_of(tiles)) * C + quad * 8;
    }

    __device__ __forceinline__ void read_residual(const Tiles<K>& tiles, int first, int end) {
        const bf16* from = p.residual + place_of(tiles);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int part = first; part < end; ++part) {
                const bool inside = step_of(tiles) + half * 8 < p.steps;
                before[half][part] = inside ? load16(from + half * 8 * C + part * 32) : make_uint4(0, 0, 0, 0);
            }
    }

    __device__ __forceinline__ void convolve(float (&d)[C / 2], int stage) {
        constexpr bool BOXED = K::COPYING == BOXES;
        const char* tile = s.stages[stage] + warpgroup % K::SHARING * M * (BOXED ? 64 : 16);
        Matrix steps = BOXED ? swizzled_matrix_at(tile) : matrix_at(tile, K::SLAB, 128);
        Matrix weights = matrix_at(s.weights, ALONG_K, 128);
        products_begin();
#pragma unroll 1
        for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
            for (int k = 0; k < STEPS_OF_16; ++k)
                multiply(d, moved(steps, BOXED ? k / 2 * K::BOX + k % 2 * 32 : k * 2 * K::SLAB), moved(weights, k * 2 * ALONG_K), tap + k > 0);
            steps = moved(steps, p.dilation * (BOXED ? 64 : 16)), weights = moved(weights, TAP_BYTES);
        }
        products_commit();
    }

    // Bias and snake of the sums, rounded to bf16: as these lie in the registers they are what the next product takes.
    __device__ __forceinline__ void activate(const float (&d)[C / 2], uint32_t (&hidden)[STEPS_OF_16][4]) {
#pragma unroll
        for (int i = 0; i < GROUPS_OF_8; ++i) {
            float2 each[3];
#pragma unroll
            for (int j = 0; j < 3; ++j) each[j] = *reinterpret_cast<const float2*>(&s.parameters[BIAS1 + j][i * 8 + quad * 2]);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                hidden[i / 2][i % 2 * 2 + half] = narrow(snake(d[4 * i + 2 * half] + each[0].x, each[1].x, each[2].x),
                                                         snake(d[4 * i + 2 * half + 1] + each[0].y, each[1].y, each[2].y));
        }
    }

    __device__ __forceinline__ void mix(float (&d)[C / 2], const uint32_t (&hidden)[STEPS_OF_16][4]) {
        const Matrix weights = matrix_at(s.weights, ALONG_K, 128);
        products_begin();
#pragma unroll
        for (int k = 0; k < STEPS_OF_16; ++k) multiply(d, hidden[k], moved(weights, TAPS * TAP_BYTES + k * 2 * ALONG_K), k > 0);
        products_commit();
    }

    __device__ __forceinline__ void eight(float (&v)[8], Parameter which, int part) const {  // of the thread's channels
        const auto* from = reinterpret_cast<const float4*>(&s.parameters[which][part * 32 + quad * 8]);
        const float4 low = from[0], high = from[1];
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }

    // The second weight's columns lie so that of each 32 channels a thread has 8 that follow each other.
    __device__ __forceinline__ void write(const float (&d)[C / 2], const Tiles<K>& tiles) {
        bf16* const raw_at = p.raw + place_of(tiles);
        bf16* const active_at = p.active + tiles.row * p.active_stride + static_cast<long long>(step_of(tiles)) * C + quad * 8;
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            float bias[8], frequency[8], gain[8];
            eight(bias, BIAS2, part), eight(frequency, FREQUENCY2, part), eight(gain, GAIN2, part);
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
                if (step >= p.steps) continue;
                if (p.raw != nullptr) store16(raw_at + there, make_uint4(raw[0], raw[1], raw[2], raw[3]));
                if (p.active == nullptr) continue;
                store16(active_at + there, make_uint4(active[0], active[1], active[2], active[3]));
            }
            if (K::LATE && part == 0) read_residual(tiles, 2, 3);
        }
    }
    __device__ __forceinline__ void clear(const Tiles<K>& tiles) {  // a tile behind the row's end
        if (p.active == nullptr) return;
        const int steps = min(K::TILE, p.steps - tiles.start);
        bf16* to = p.active + tiles.row * p.active_stride + static_cast<long long>(tiles.start) * C;
#pragma unroll 1
        for (int i = warpgroup * WARPGROUP + thread; i < steps * GROUPS_OF_8; i += K::WARPGROUPS * WARPGROUP)
            store16(to + i * 8, make_uint4(0, 0, 0, 0));
    }

    // Turns: a warpgroup issues its long products behind those of the one before it, which finishes its tile meanwhile.
    __device__ __forceinline__ void await_turn() const {
        if (K::TURNS) sync_some(1 + warpgroup, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void pass_turn(int to) const {
        if (K::TURNS) arrive_some(1 + to, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void mark(int) const {}

    __device__ void run() {
        if (warpgroup == K::WARPGROUPS - 1) pass_turn(0);
        wait_for(&s.barriers.weights, 0);
        for (Tiles<K> tiles(p); tiles.found(); tiles.next()) {
            if (!tiles.multiplied()) clear(tiles);
            else if (tiles.item % K::TEAMS == warpgroup / K::SHARING) finish(tiles);
        }
    }

    __device__ __forceinline__ void finish(const Tiles<K>& tiles) {
        const int stage = tiles.stage();
        float d[C / 2];
        uint32_t hidden[STEPS_OF_16][4];
        mark(0);
        wait_for(&s.barriers.full[stage], tiles.parity());
        mark(1);
        if (K::COPYING != BOXES) writes_to_products();
        if (!K::LATE) read_residual(tiles, 0, 3);  // behind the fence, which waits for the thread's own accesses
        mark(2);
        await_turn();
        mark(3);
        convolve(d, stage);
        mark(4);
        if (!K::DRAINS) pass_turn((warpgroup + 1) % K::WARPGROUPS);
        products_wait<0>();
        if (K::DRAINS) pass_turn((warpgroup + 1) % K::WARPGROUPS);
        mark(5);
        if (thread % 32 == 0) arrive(&s.barriers.empty[stage]);
        if (K::LATE) read_residual(tiles, 0, 2);
        activate(d, hidden);
        mark(6);
        mix(d, hidden);
        products_wait<0>();
        mark(7);
        write(d, tiles);
        mark(8);
    }
};

template <class K>
__device__ void prepare(const Args& p, Shared<K>& s) {
    static_assert(K::THREADS >= C, "a thread for each channel");
#pragma unroll
    for (int which = 0; which < PARAMETERS; ++which)
        if (threadIdx.x < C) s.parameters[which][threadIdx.x] = p.parameters[which] == nullptr ? 0.f : p.parameters[which][threadIdx.x];
    if (threadIdx.x == 0) {
        arrivals_init(&s.barriers.weights, 1);
        for (int i = 0; i < K::STAGES; ++i) arrivals_init(&s.barriers.full[i], K::COPYING == BOXES ? 1 : K::COPIERS), arrivals_init(&s.barriers.empty[i], 4 * K::SHARING);
        arrivals_visible();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_expecting(&s.barriers.weights, WEIGHT_BYTES);
        for (int i = 0; i <= TAPS; ++i) bulk_copy(s.weights + i * TAP_BYTES, p.weights + i * TAP_BYTES, TAP_BYTES, &s.barriers.weights);
    }
}

template <class K>
__device__ __forceinline__ void unit(const Args& p, const TensorMap* map = nullptr) {
    // From a multiple of 1,024 bytes on, as boxes have to lie.
    char* const memory = dynamic_shared();
    auto& s = *reinterpret_cast<Shared<K>*>(memory + (K::COPYING == BOXES ? -shared_address(memory) & 1023 : 0));
    prepare<K>(p, s);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == K::WARPGROUPS) {
        if (K::WARPGROUPS > 3) give_registers<32>();
        if (K::COPYING != BOXES) copy_tiles<K>(p, s, threadIdx.x % WARPGROUP);
        else if (threadIdx.x % 32 == 0) copy_boxes<K>(p, *map, s);
    } else {
        if (K::WARPGROUPS > 3) take_registers<112>();
        Multiplier<K>(p, s, warpgroup).run();
    }
}

}  // namespace

#define UNIT(warpgroups, sharing, stages, turns, copying)                                                                          \
    extern "C" __global__ void __launch_bounds__(Cut<warpgroups, sharing, stages, turns, copying>::THREADS, 1)                    \
        codec_unit_96_##warpgroups##_##sharing##_##stages##_##turns##_##copying(const Args p) {                                   \
        static_assert(sizeof(Shared<Cut<warpgroups, sharing, stages, turns, copying>>) <= 232448, "the shared memory of a block"); \
        unit<Cut<warpgroups, sharing, stages, turns, copying>>(p);                                                                \
    }
#define BOXED(warpgroups, sharing, stages, turns, copying)                                                                         \
    extern "C" __global__ void __launch_bounds__(Cut<warpgroups, sharing, stages, turns, copying>::THREADS, 1)                    \
        codec_unit_96_##warpgroups##_##sharing##_##stages##_##turns##_##copying(const __grid_constant__ TensorArgs p) {           \
        static_assert(sizeof(Shared<Cut<warpgroups, sharing, stages, turns, copying>>) <= 231424, "the shared memory of a block"); \
        unit<Cut<warpgroups, sharing, stages, turns, copying>>(p.p, &p.map);                                                      \
    }

UNIT(2, 2, 2, 0, 0)
UNIT(2, 2, 2, 2, 0)
UNIT(2, 2, 2, 2, 1)
UNIT(2, 1, 3, 1, 0)
UNIT(2, 1, 3, 2, 0)
UNIT(2, 1, 3, 2, 1)
UNIT(4, 2, 2, 0, 1)
BOXED(2, 2, 2, 2, 2)
BOXED(2, 1, 3, 2, 2)
BOXED(3, 1, 3, 0, 2)
