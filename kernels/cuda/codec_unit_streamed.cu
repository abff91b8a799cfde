// The codec's residual unit of 192 channels (`kernels.codec_ops.codec_active_unit`) for sm_90a: a dilated causal convolution of 7 taps,
// snake, a 1x1 convolution, the residual, and the next unit's snake.
//
// A block has three warpgroups that multiply, each 64 steps of one row of the batch at a time. Of the fourth, a warp for each of them brings
// the activations of its steps and of the 6 * dilation steps before them into shared memory once, in slabs of 8 channels, [slab][step][8
// channels], where the shift of a tap is an address; and a thread streams the weights, in chunks and in the order of use, through a ring
// that the three share. Who is done with its first product goes on to its snake while the others keep the tensor cores busy, but only as
// far as the ring lets them: so a warpgroup waits for nothing there, and multiplies a third of its result while it delivers the one before.
#include "common.cuh"
#include "wgmma.cuh"

namespace {

constexpr int CHANNELS = 192, TAPS = 7, GROUPS = 3, STEPS = 64, SLABS = CHANNELS / 8, THIRD = CHANNELS / 3;
constexpr int WORKERS = 128 * GROUPS, THREADS = WORKERS + 128;
// A chunk is 32 inputs of the first product by all its outputs, or 96 inputs of the second one by a third of its outputs.
constexpr int CHUNK = 32 * CHANNELS * 2, TAP_CHUNKS = CHANNELS / 32, FIRST_CHUNKS = TAPS * TAP_CHUNKS, THIRD_CHUNKS = 2;
constexpr int CHUNKS = FIRST_CHUNKS + 3 * THIRD_CHUNKS, MOST_STAGES = 12, SHARED_BYTES = 226 << 10;
constexpr int PATIENCE = 1 << 25;  // looks at a barrier before the launch is given up: seconds, where a chunk takes a microsecond

struct Args {
    const bf16 *a, *residual;
    const char* weights;  // chunks in the order of use, each as it lies in shared memory
    const float* parameters[6];  // by `Parameter`
    bf16 *raw, *active;  // null: not wanted
    const int* ends;     // null: every row has all steps
    long long active_stride;  // values from one row of `active` to the next
    int rows, steps, lead, dilation;
};
enum Parameter { BIAS1, FREQUENCY1, GAIN1, BIAS2, FREQUENCY2, GAIN2 };

// 64 steps of a row of the batch from `start` on; what is activated is zero from `end` on; `there`: the batch has that row.
struct Piece {
    long long row;
    int start, end;
    bool there;

    __device__ __forceinline__ bool works() const { return there && start < end; }  // or else there is nothing to multiply
};

struct alignas(16) Shared {
    float parameters[6][CHANNELS];
    int pieces, turns;  // of a row, of a launch
    unsigned long long full[MOST_STAGES], empty[MOST_STAGES], ready[GROUPS], used[GROUPS];  // the last two: the activations of a group

    __device__ __forceinline__ char* ring() { return reinterpret_cast<char*>(this + 1); }
    __device__ __forceinline__ char* activations(int stages, int slab, int group) {
        return ring() + stages * CHUNK + group * SLABS * slab * 16;
    }
};
static_assert(sizeof(Shared) % 16 == 0, "the ring is aligned");

// The work of a launch: in each turn every block takes a piece for each of its warpgroups.
struct Plan {
    const Args& p;
    const Shared& s;
    const int slab, stages;

    __device__ __forceinline__ Plan(const Args& args, const Shared& shared)
        : p(args), s(shared), slab((STEPS + reach()) | 1),  // odd: copies do not meet in a bank
          stages(min(MOST_STAGES, (SHARED_BYTES - static_cast<int>(sizeof(Shared)) - GROUPS * SLABS * slab * 16) / CHUNK)) {}

    __device__ __forceinline__ int reach() const { return (TAPS - 1) * p.dilation; }
    __device__ __forceinline__ int number(int turn, int group) const { return (turn * GROUPS + group) * gridDim.x + blockIdx.x; }
    __device__ __forceinline__ Piece piece(int turn, int group) const {
        const int at = number(turn, group), row = at / s.pieces;
        const bool there = row < p.rows;
        return {row, (at - row * s.pieces) * STEPS, p.ends != nullptr && there ? p.ends[row] : p.steps, there};
    }
    // Whether a turn has no work for this block.
    __device__ __forceinline__ bool idle(int turn) const {
        if (p.ends == nullptr) return number(turn, 0) >= p.rows * s.pieces;
        for (int group = 0; group < GROUPS; ++group)
            if (piece(turn, group).works()) return false;
        return true;
    }
    // The first turn with work, from `turn` on.
    __device__ __forceinline__ int working(int turn) const {
        while (turn < s.turns && idle(turn)) ++turn;
        return turn;
    }
};

__device__ __forceinline__ void wait_for(unsigned long long* barrier, uint32_t parity) {
    for (int tries = 0; !arrived(barrier, parity); ++tries)
        if (tries == PATIENCE) __trap();
}

// The way of one thread through the ring.
struct Place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void stream_weights(const Plan& plan, Shared& s) {
    Place place;
    for (int turn = plan.working(0); turn < s.turns; turn = plan.working(turn + 1))
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            unsigned long long* const full = &s.full[place.stage];
            wait_for(&s.empty[place.stage], place.parity ^ 1);
            arrive_expecting(full, CHUNK);
            bulk_copy(s.ring() + place.stage * CHUNK, plan.p.weights + chunk * CHUNK, CHUNK, full);
            place.next(plan.stages);
        }
}

// Brings steps of a piece into the L2: what its products will be added to, and what the next ones read.
__device__ __forceinline__ void ahead(const bf16* from, int left) { prefetch(from, min(STEPS, left) * CHANNELS * 2); }

// A warp brings the activations of a group's pieces; what lies outside of their rows is zero. 8 lanes read 128 bytes of a step.
__device__ __forceinline__ void carry(const Plan& plan, Shared& s, int group) {
    const Args& p = plan.p;
    const int lane = threadIdx.x % 32, count = STEPS + plan.reach(), extended = p.lead + p.steps, eight_slabs = 8 * plan.slab * 16;
    char* const mine = s.activations(plan.stages, plan.slab, group) + (lane % 8 * plan.slab + lane / 8) * 16;
    uint32_t parity = 1;
#pragma unroll 1
    for (int turn = plan.working(0); turn < s.turns; turn = plan.working(turn + 1)) {
        const Piece piece = plan.piece(turn, group);
        if (!piece.works()) continue;
        wait_for(&s.used[group], parity);
        __syncwarp();  // no lane is left behind when they are used again
        parity ^= 1;
        if (lane == 0) ahead(p.residual + (piece.row * p.steps + piece.start) * CHANNELS, p.steps - piece.start);
        int at = p.lead + piece.start - plan.reach() + lane / 8;
        const bf16* from = p.a + (piece.row * extended + at) * CHANNELS + lane % 8 * 8;
        char* to = mine;
#pragma unroll 2
        for (int step = lane / 8; step < count; step += 4, at += 4, from += 4 * CHANNELS, to += 64) {
            const bool inside = static_cast<unsigned>(at) < static_cast<unsigned>(extended);
            const bf16* const there = inside ? from : p.a;
            copy16_or_zeros(to, there, inside);
            copy16_or_zeros(to + eight_slabs, there + 64, inside);
            copy16_or_zeros(to + 2 * eight_slabs, there + 128, inside);
        }
        arrive_after_copies(&s.ready[group]);
        const Piece next = plan.piece(turn + 1, group);
        if (lane == 0 && next.there) ahead(p.a + (next.row * extended + p.lead + next.start) * CHANNELS, p.steps - next.start);
    }
}

// Where a thread's results go. It has two steps, 8 apart, and of each 32 channels 8, which are 16 bytes: those of the first step and channel
// are number `at` of `raw` and of the residual, and number `active` of `active`. From that step on, `left` are there and `kept` are kept.
struct Target {
    unsigned at, active;
    int left, kept;

    __device__ __forceinline__ bool there(int row) const { return row * 8 < left; }
    static __device__ __forceinline__ int further(int row, int third, int part) { return (row * 8 * CHANNELS + third * THIRD + part * 32) / 8; }
};

struct Worker {
    const Plan& plan;
    const Args& p;
    Shared& s;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    char* const mine;    // this warpgroup's activations
    Place place, freed;  // the stage that comes next, the first one that is not given back
    uint4 residual[2];   // of the 32 channels that come next, 8 for each of two steps

    __device__ Worker(const Plan& all, Shared& shared)
        : plan(all), p(all.p), s(shared), mine(s.activations(plan.stages, plan.slab, threadIdx.x / 128)) {}

    // A stage's weights are here.
    __device__ __forceinline__ Matrix receive(int slab_bytes) {
        wait_for(&s.full[place.stage], place.parity);
        const Matrix weights = matrix_at(s.ring() + place.stage * CHUNK, slab_bytes, 128);
        place.next(plan.stages);
        return weights;
    }
    __device__ __forceinline__ void give_back() {
        if (lane == 0) arrive(&s.empty[freed.stage]);
        freed.next(plan.stages);
    }

    __device__ __forceinline__ void first_product(float (&total)[96]) {
        bool more = false;
#pragma unroll 1
        for (int tap = 0; tap < TAPS; ++tap) {
            Matrix a = matrix_at(mine + tap * p.dilation * 16, plan.slab * 16, 128);
#pragma unroll 1
            for (int chunk = 0; chunk < TAP_CHUNKS; ++chunk) {
                const Matrix b = receive(CHANNELS * 16);
                products_begin();
                multiply(total, a, b, true);
                multiply(total, moved(a, 32 * plan.slab), moved(b, 32 * CHANNELS), true);
                products_commit();
                products_wait<1>();
                if (more) give_back();
                a = moved(a, 64 * plan.slab), more = true;
            }
        }
        products_wait<0>();
        give_back();
        if (lane == 0) arrive(&s.used[group]);
    }

    // The first snake of the sums: the left factor of the second product, as its instructions want it.
    __device__ __forceinline__ void activate(const float (&total)[96], uint32_t (&hidden)[12][4]) const {
#pragma unroll
        for (int n = 0; n < SLABS; ++n) {
            const float2 bias = pair(BIAS1, n), frequency = pair(FREQUENCY1, n), gain = pair(GAIN1, n);
#pragma unroll
            for (int row = 0; row < 2; ++row)
                hidden[n / 2][n % 2 * 2 + row] = narrow(snake(total[n * 4 + row * 2] + bias.x, frequency.x, gain.x),
                                                        snake(total[n * 4 + row * 2 + 1] + bias.y, frequency.y, gain.y));
        }
    }
    __device__ __forceinline__ float2 pair(Parameter which, int n) const {
        return *reinterpret_cast<const float2*>(&s.parameters[which][n * 8 + q * 2]);
    }
    __device__ __forceinline__ float snake(float v, float frequency, float gain) const {
        const float wave = fast_sine(v * frequency);
        return v + gain * wave * wave;
    }

    // Starts the products of a third; two stages are given back when they are over.
    __device__ __forceinline__ void second_product(float (&total)[32], const uint32_t (&hidden)[12][4]) {
#pragma unroll
        for (int chunk = 0; chunk < THIRD_CHUNKS; ++chunk) {
            const Matrix b = receive(THIRD * 16);
            products_begin();
#pragma unroll
            for (int i = 0; i < 6; ++i) multiply(total, hidden[chunk * 6 + i], moved(b, i * 32 * THIRD), chunk + i > 0);
            products_commit();
        }
    }

    // 32 channels of a third. The packed weights leave each thread 8 neighbours of them.
    __device__ __forceinline__ void deliver(float (&total)[32], const Target& target, int third, int part) {
        const int channel = third * THIRD + part * 32;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int further = Target::further(row, third, part);
            const uint4 pairs = residual[row];
            const float2 before[4] = {widen(pairs.x), widen(pairs.y), widen(pairs.z), widen(pairs.w)};
            float v[8], one[8], other[8];
            read(BIAS2, channel, one);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                v[i] = total[part * 16 + i / 2 * 4 + row * 2 + i % 2] + one[i] + (i % 2 == 0 ? before[i / 2].x : before[i / 2].y);
            if (third + part < 3) read_residual(target, third + part, 1 - part, row);
            if (p.raw != nullptr && target.there(row)) store16(p.raw + (target.at + further) * 8ull, narrowed(v));
            if (p.active == nullptr) continue;
            read(FREQUENCY2, channel, one), read(GAIN2, channel, other);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = snake(v[i], one[i], other[i]);
            const uint4 out = row * 8 < target.kept ? narrowed(v) : make_uint4(0, 0, 0, 0);
            if (target.there(row)) store16(p.active + (target.active + further) * 8ull, out);
        }
    }
    __device__ __forceinline__ void read(Parameter which, int channel, float (&eight)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(&s.parameters[which][channel + q * 8 + i * 4]);
            eight[i * 4] = four.x, eight[i * 4 + 1] = four.y, eight[i * 4 + 2] = four.z, eight[i * 4 + 3] = four.w;
        }
    }
    __device__ __forceinline__ Target target(const Piece& piece) const {
        const int first = piece.start + thread / 32 * 16 + g;
        return {static_cast<unsigned>((piece.row * p.steps + first) * SLABS + q),
                static_cast<unsigned>(piece.row * (p.active_stride / 8) + first * SLABS + q), p.steps - first, piece.end - first};
    }
    __device__ __forceinline__ uint4 narrowed(const float (&v)[8]) const {
        return make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
    }
    __device__ __forceinline__ void read_residual(const Target& target, int third, int part, int row) {
        residual[row] = make_uint4(0, 0, 0, 0);
        if (target.there(row)) residual[row] = load16(p.residual + (target.at + Target::further(row, third, part)) * 8ull);
    }

    __device__ __forceinline__ void finish(const uint32_t (&hidden)[12][4], const Target& target) {
        float total[2][32];
        second_product(total[0], hidden);
        read_residual(target, 0, 0, 0), read_residual(target, 0, 0, 1);
        second_product(total[1], hidden);
        products_wait<THIRD_CHUNKS>();
        give_back(), give_back();
        deliver(total[0], target, 0, 0);
        products_wait<0>();
        give_back(), give_back();
        deliver(total[0], target, 0, 1);
        second_product(total[0], hidden);
        deliver(total[1], target, 1, 0);
        products_wait<0>();
        give_back(), give_back();
        deliver(total[1], target, 1, 1);
        deliver(total[0], target, 2, 0);
        deliver(total[0], target, 2, 1);
    }

    // Zeros for the pieces that have no products.
    __device__ __forceinline__ void clear() const {
        if (p.ends == nullptr || p.active == nullptr) return;
        for (int turn = 0; turn < s.turns; ++turn) {
            const Piece piece = plan.piece(turn, group);
            if (piece.works() || !piece.there) continue;
            bf16* to = p.active + piece.row * p.active_stride + piece.start * CHANNELS;
            for (int i = thread; i < min(STEPS, p.steps - piece.start) * SLABS; i += 128) store16(to + i * 8, make_uint4(0, 0, 0, 0));
        }
    }
    // Lets the weights of a turn pass that is for others.
    __device__ __forceinline__ void skip() {
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            receive(0);
            __syncwarp();  // no lane is left behind when the stage is filled again
            give_back();
        }
    }

    __device__ __forceinline__ void run() {
        clear();
        uint32_t parity = 0;
#pragma unroll 1
        for (int turn = plan.working(0); turn < s.turns; turn = plan.working(turn + 1)) {
            const Piece piece = plan.piece(turn, group);
            if (!piece.works()) {
                skip();
                continue;
            }
            wait_for(&s.ready[group], parity);
            writes_to_products();
            parity ^= 1;
            float total[96] = {};
            uint32_t hidden[12][4];
            first_product(total);
            activate(total, hidden);
            finish(hidden, target(piece));
        }
    }
};

__device__ __forceinline__ void prepare(const Args& p, Shared& s) {
#pragma unroll
    for (int i = 0; i < 6; ++i)
        if (threadIdx.x < CHANNELS && p.parameters[i] != nullptr) s.parameters[i][threadIdx.x] = p.parameters[i][threadIdx.x];
    if (threadIdx.x == 0) {
        s.pieces = (p.steps + STEPS - 1) / STEPS;
        s.turns = (p.rows * s.pieces + GROUPS * gridDim.x - 1) / (GROUPS * gridDim.x);
        for (int i = 0; i < MOST_STAGES; ++i) arrivals_init(&s.full[i], 1), arrivals_init(&s.empty[i], WORKERS / 32);
        for (int i = 0; i < GROUPS; ++i) arrivals_init(&s.ready[i], 32), arrivals_init(&s.used[i], 4);
        arrivals_visible();
    }
    __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) codec_unit_streamed(const Args p) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared());
    prepare(p, s);
    const Plan plan(p, s);
    if (threadIdx.x >= WORKERS) {
        give_registers<32>();
        if (threadIdx.x >= WORKERS + 32) carry(plan, s, threadIdx.x / 32 - WORKERS / 32 - 1);
        else if (threadIdx.x == WORKERS) stream_weights(plan, s);
    } else {
        take_registers<160>();
        Worker(plan, s).run();
    }
}
