// wheel: sm_90a
// The codec's residual unit of 192 channels (`kernels.codec_ops.codec_active_unit`) for sm_90a: a dilated causal convolution of 7 taps,
// snake, a 1x1 convolution, the residual, and the next unit's snake.
//
// A block has three warpgroups that multiply, and a warp that streams the weights. Each warpgroup computes 64 steps of one row of the batch
// at a time. The activations of these steps and of the 6 * dilation steps before them are copied into shared memory once, where the shift
// of a tap only changes the address. One thread for each warpgroup copies them as boxes of 32 channels, [box][step][32 channels]. The
// weights are copied in chunks, in the order of use, through a ring that the three warpgroups share. A warpgroup whose products are
// complete computes its snake while the others keep the tensor cores busy.
#include "common.cuh"
#include "wgmma.cuh"
#include "codec_tiles.cuh"

namespace {

constexpr int CHANNELS = 192, TAPS = 7, GROUPS = 3, STEPS = 64, SLABS = CHANNELS / 8, HALF = CHANNELS / 2;
constexpr int WORKERS = 128 * GROUPS, THREADS = WORKERS + 128;
// A chunk is 32 inputs x all outputs of the first product, or 64 inputs x half of the outputs of the second one.
constexpr int CHUNK = 32 * CHANNELS * 2, TAP_CHUNKS = CHANNELS / 32, FIRST_CHUNKS = TAPS * TAP_CHUNKS, HALF_CHUNKS = CHANNELS / 64;
constexpr int CHUNKS = FIRST_CHUNKS + 2 * HALF_CHUNKS, MAX_STAGES = 12, SHARED_BYTES = 226 << 10;
constexpr int PATIENCE = 1 << 25;  // tries at a barrier before the launch is aborted; they take seconds, a chunk a microsecond

// 64 steps of a row of the batch from `start`. Activations are zero from step `end`.
struct Piece {
    long long row;
    int start, end;
};

// The pieces of a warpgroup.
using Pieces = Tiles<STEPS, GROUPS>;
__device__ __forceinline__ Piece piece_of(const Pieces& pieces) { return {pieces.row, pieces.start, pieces.end}; }

struct alignas(16) Shared {
    float parameters[PARAMETERS][CHANNELS];
    unsigned long long full[MAX_STAGES], empty[MAX_STAGES];
    unsigned long long copied[GROUPS], free[GROUPS];  // the boxes of each warpgroup
    char padding[272];

    __device__ __forceinline__ char* ring() { return reinterpret_cast<char*>(this + 1); }
};
static_assert(sizeof(Shared) % 512 == 0 && CHUNK % 512 == 0, "boxes, which follow this struct and the ring, are aligned to 512 bytes if it is");

// The layout of shared memory.
struct Plan {
    const Args& p;
    const int reach, lines, stages;  // lines: lines of a box, one for each step

    __device__ __forceinline__ Plan(const Args& args)
        : p(args), reach((TAPS - 1) * args.dilation), lines((STEPS + reach + 7) / 8 * 8),
          stages(min(MAX_STAGES, (SHARED_BYTES - static_cast<int>(sizeof(Shared)) - GROUPS * activations()) / CHUNK)) {}

    __device__ __forceinline__ int activations() const { return SLABS * lines * 16; }  // bytes per warpgroup
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

// The current place of one thread in the ring.
struct Place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void stream_weights(const Plan& plan, Shared& s) {
    Place place;
    for (Pieces first(plan.p, 0); first.found(); first.next())
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            unsigned long long* const full = &s.full[place.stage];
            wait_for(&s.empty[place.stage], place.parity ^ 1);
            arrive_expecting(full, CHUNK);
            bulk_copy(s.ring() + place.stage * CHUNK, plan.p.weights + chunk * CHUNK, CHUNK, full);
            place.next(plan.stages);
        }
}

// Runs in one thread for each warpgroup: copies the boxes of all its pieces, and prefetches the residual into the L2 cache.
__device__ __forceinline__ void copy_boxes(const Plan& plan, const TensorMap& map, Shared& s, int group) {
    const Args& p = plan.p;
    char* const to = s.ring() + plan.stages * CHUNK + group * plan.activations();
    uint32_t parity = 0;
    for (Pieces pieces(p, group); pieces.found(); pieces.next()) {
        const Piece piece = piece_of(pieces);
        wait_for(&s.free[group], parity ^ 1);
        arrive_expecting(&s.copied[group], (STEPS + plan.reach) * CHANNELS * 2);
        for (int box = 0; box < TAP_CHUNKS; ++box)
            tensor_copy(to + box * plan.lines * 64, map, box * 32, p.lead + piece.start - plan.reach, piece.row, &s.copied[group]);
        prefetch(p.residual + (piece.row * p.steps + piece.start) * CHANNELS, min(STEPS, p.steps - piece.start) * CHANNELS * 2);
        parity ^= 1;
    }
}

struct Worker {
    const Plan& plan;
    const Args& p;
    Shared& s;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    char* const mine;  // this warpgroup's activations
    Place place;
    int held = -1;  // the stage whose products may still run
    uint32_t boxes_parity = 0;

    __device__ Worker(const Plan& all, Shared& shared)
        : plan(all), p(all.p), s(shared), mine(s.ring() + plan.stages * CHUNK + group * plan.activations()) {}

    // Waits until the activations have been copied.
    __device__ __forceinline__ void await_activations() {
        wait_for(&s.copied[group], boxes_parity);
        boxes_parity ^= 1;
    }
    // Frees the memory of the activations, after the products that read them are complete.
    __device__ __forceinline__ void leave_activations() {
        if (lane == 0) arrive(&s.free[group]);
    }

    // Waits for the weights of the current stage, and returns their matrix.
    __device__ __forceinline__ Matrix receive(int slab_bytes) {
        wait_for(&s.full[place.stage], place.parity);
        return matrix_at(s.ring() + place.stage * CHUNK, slab_bytes, 128);
    }
    // Commits the products of this stage, waits for those of the previous stage and frees it, then moves to the next stage.
    __device__ __forceinline__ void pass() {
        products_commit();
        products_wait<1>();
        release();
        held = place.stage;
        place.next(plan.stages);
    }
    __device__ __forceinline__ void release() {
        if (held >= 0 && lane == 0) arrive(&s.empty[held]);
        held = -1;
    }

    __device__ __forceinline__ void first_product(float (&total)[96]) {
#pragma unroll 1
        for (int tap = 0; tap < TAPS; ++tap) {
            Matrix a = swizzled_matrix_at(mine + tap * p.dilation * 64);
#pragma unroll 1
            for (int chunk = 0; chunk < TAP_CHUNKS; ++chunk) {
                const Matrix b = receive(CHANNELS * 16);
                products_begin();
                multiply(total, a, b, true);
                multiply(total, moved(a, 32), moved(b, 32 * CHANNELS), true);
                pass();
                a = moved(a, 64 * plan.lines);
            }
        }
        products_wait<0>();
        release();
    }

    // Applies bias and the first snake to the sums. The results have the layout that the second product needs for its left factor.
    __device__ __forceinline__ void activate(const float (&total)[96], uint32_t (&hidden)[48]) const {
#pragma unroll
        for (int n = 0; n < SLABS; ++n) {
            const float2 bias = pair(BIAS1, n), frequency = pair(FREQUENCY1, n), gain = pair(GAIN1, n);
#pragma unroll
            for (int row = 0; row < 2; ++row)
                hidden[n * 2 + row] = narrow(snake(total[n * 4 + row * 2] + bias.x, frequency.x, gain.x),
                                             snake(total[n * 4 + row * 2 + 1] + bias.y, frequency.y, gain.y));
        }
    }
    __device__ __forceinline__ float2 pair(Parameter which, int n) const {
        return *reinterpret_cast<const float2*>(&s.parameters[which][n * 8 + q * 2]);
    }
    __device__ __forceinline__ void second_product(
        float (&total)[48], const uint32_t (&hidden)[48], uint4 (&residual)[6], const Piece& piece, int half) {
#pragma unroll
        for (int chunk = 0; chunk < HALF_CHUNKS; ++chunk) {
            const Matrix b = receive(HALF * 16);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = (chunk * 4 + i) * 4;
                multiply(total, reinterpret_cast<const uint32_t(&)[4]>(hidden[at]), moved(b, i * 32 * HALF), chunk + i > 0);
            }
            pass();
            if (chunk == 0) read_residual(residual, piece, half);
        }
    }

    // Finishes and stores half of the channels. The packed weights give each thread 8 consecutive channels of every 32; `at` is their
    // first.
    __device__ __forceinline__ void deliver(float (&total)[48], const uint4 (&residual)[6], const Piece& piece, int half) const {
        const bool kept[2] = {step_of(piece, 0) < piece.end, step_of(piece, 1) < piece.end};
        bf16* const raw_at = p.raw + (piece.row * p.steps + step_of(piece, 0)) * CHANNELS + half * HALF + q * 8;
        bf16* const active_at = p.active + piece.row * p.active_stride + step_of(piece, 0) * CHANNELS + half * HALF + q * 8;
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            const int at = half * HALF + part * 32 + q * 8;
            float parameters[8], v[2][8];
            read(BIAS2, at, parameters);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const uint4 pairs = residual[part * 2 + row];
                const float2 before[4] = {widen(pairs.x), widen(pairs.y), widen(pairs.z), widen(pairs.w)};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    v[row][i] = total[part * 16 + i / 2 * 4 + row * 2 + i % 2] + parameters[i] + (i % 2 == 0 ? before[i / 2].x : before[i / 2].y);
                store16_if(p.raw != nullptr && there(piece, row), raw_at + row * 8 * CHANNELS + part * 32, narrowed(v[row]));
            }
            float gains[8];
            read(FREQUENCY2, at, parameters), read(GAIN2, at, gains);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
#pragma unroll
                for (int i = 0; i < 8; ++i) v[row][i] = snake(v[row][i], parameters[i], gains[i]);
                const uint4 out = kept[row] ? narrowed(v[row]) : make_uint4(0, 0, 0, 0);
                store16_if(p.active != nullptr && there(piece, row), active_at + row * 8 * CHANNELS + part * 32, out);
            }
        }
    }
    __device__ __forceinline__ void read(Parameter which, int at, float (&eight)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(&s.parameters[which][at + i * 4]);
            eight[i * 4] = four.x, eight[i * 4 + 1] = four.y, eight[i * 4 + 2] = four.z, eight[i * 4 + 3] = four.w;
        }
    }
    __device__ __forceinline__ bool there(const Piece& piece, int row) const { return step_of(piece, row) < p.steps; }
    __device__ __forceinline__ int step_of(const Piece& piece, int row) const { return piece.start + thread / 32 * 16 + row * 8 + g; }
    __device__ __forceinline__ uint4 narrowed(const float (&v)[8]) const {
        return make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
    }
    __device__ __forceinline__ void read_residual(uint4 (&residual)[6], const Piece& piece, int half) const {
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            const long long step = piece.row * p.steps + step_of(piece, i % 2);
            residual[i] = make_uint4(0, 0, 0, 0);
            if (there(piece, i % 2)) residual[i] = load16(p.residual + step * CHANNELS + half * HALF + i / 2 * 32 + q * 8);
        }
    }

    __device__ __forceinline__ void finish(const uint32_t (&hidden)[48], const Piece& piece) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total[48];
            uint4 residual[6];
            second_product(total, hidden, residual, piece, half);
            products_wait<0>();
            release();
            deliver(total, residual, piece, half);
        }
    }

    // Writes zeros into the pieces after the rows' ends.
    __device__ __forceinline__ void clear() const {
        if (p.ends == nullptr || p.open_ends || p.active == nullptr) return;
        for (Pieces pieces(p, group, true); pieces.found(); pieces.next()) {
            const Piece piece = piece_of(pieces);
            bf16* to = p.active + piece.row * p.active_stride + piece.start * CHANNELS;
            for (int i = thread; i < min(STEPS, p.steps - piece.start) * SLABS; i += 128)
                *reinterpret_cast<uint4*>(to + i * 8) = make_uint4(0, 0, 0, 0);
        }
    }
    // Frees the weights of a turn in which this warpgroup has no piece.
    __device__ __forceinline__ void skip() {
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            wait_for(&s.full[place.stage], place.parity);
            __syncwarp();  // so that the stage is not filled again before all lanes have seen the barrier
            held = place.stage;
            release();
            place.next(plan.stages);
        }
    }

    __device__ __forceinline__ void run() {
        clear();
        Pieces pieces(p, group);
        for (Pieces first(p, 0); first.found(); first.next(), pieces.next()) {
            if (!pieces.found()) {
                skip();
                continue;
            }
            const Piece piece = piece_of(pieces);
            await_activations();
            float total[96] = {};
            uint32_t hidden[48];
            first_product(total);
            leave_activations();
            activate(total, hidden);
            finish(hidden, piece);
        }
    }
};

__device__ __forceinline__ void prepare(const Args& p, Shared& s) {
#pragma unroll
    for (int i = 0; i < PARAMETERS; ++i)
        if (threadIdx.x < CHANNELS && p.parameters[i] != nullptr) s.parameters[i][threadIdx.x] = p.parameters[i][threadIdx.x];
    if (threadIdx.x == 0) {
        for (int i = 0; i < MAX_STAGES; ++i) arrivals_init(&s.full[i], 1), arrivals_init(&s.empty[i], WORKERS / 32);
        for (int i = 0; i < GROUPS; ++i) arrivals_init(&s.copied[i], 1), arrivals_init(&s.free[i], 4);
        arrivals_visible();
    }
    __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) codec_unit_wide(const __grid_constant__ TensorArgs arguments) {
    const Args& p = arguments.p;
    char* const memory = dynamic_shared();
    auto& s = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 511));
    const Plan plan(p);
    prepare(p, s);
    if (threadIdx.x >= WORKERS) {
        give_registers<32>();
        const int warp = static_cast<int>(threadIdx.x - WORKERS) / 32;
        if (threadIdx.x == WORKERS) stream_weights(plan, s);
        else if (warp > 0 && threadIdx.x % 32 == 0) copy_boxes(plan, arguments.map, s, warp - 1);
    } else {
        take_registers<160>();
        Worker(plan, s).run();
    }
}
