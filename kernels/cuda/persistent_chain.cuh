// The parts that persistent kernels share: the stream of weights, exchanges between blocks, products of few rows, and a decoder layer.
//
// Every block owns some rows of every matrix. They are packed in the order of use, and a producer warp streams them through a ring in
// shared memory without ever waiting for another block. Blocks exchange data as packets {two bf16 or a float, epoch} in global memory. A
// reader polls until each packet has the expected epoch, so that no barrier of the grid is needed.
//
// A block overwrites a packet only after it has received, from every block, something that was published after that block had read the
// packet. So no reader misses one. For attention's packets this requires that all blocks own rows of the state or of the inner width
// (`Shape`). Epochs count exchanges over all launches, modulo 2^32. Each packet is written in each launch, so its epoch is never older
// than the previous launch.
//
// Every wait is bounded. A thread that tries too often without success reports a fault, stops waiting, and continues to the end with the
// data that it has; a thread that sees the report of another one does the same. So all blocks end, and the flags mark the frame as invalid.
// Waits are measured in tries or in clocks. A process that shares its GPU makes no tries while another one runs, but the clock continues.
// So only a limited number of clocks counts between two tries.
//
// A cooperative launch begins only when all of its blocks fit on the GPU at once. So two launches of two engines never each occupy a part
// of the GPU while they wait for the rest.
#pragma once
#include "persistent_shape.cuh"

namespace {

// How long a thread may wait in the ring during the whole launch. rest: the remaining tries or clocks; `REPORTED` after a wait has failed.
template <class Arguments>
struct Waits {
    const Arguments& p;
    int rest;

    __device__ __forceinline__ bool broken() const { return rest <= 0; }
    __device__ __forceinline__ bool ran_out() const { return rest <= 0 && rest != REPORTED; }
    __device__ __forceinline__ void look() {
        if (load4_relaxed(p.control + FAULT) != 0) rest = REPORTED;
    }
    // The first report is kept. It reaches memory before anything that this thread writes later.
    __device__ __forceinline__ void report(Wait wait, uint32_t number) {
        const uint32_t kind = 1u << 31 | Arguments::KERNEL << 30 | static_cast<uint32_t>(wait) << 28;
        atomicCAS(p.control + FAULT, 0u, kind | blockIdx.x << 20 | (number & 0xfffffu));
        __threadfence();
        rest = REPORTED;
    }
};

// The producer warp's stream of a block's chunks. It has the longest waits, because its consumers may wait for packets. Like them it sees
// the faults that others report. It looks at the fault word once in many tries, and its `rest` is the number of looks that remain.
template <class S, class Memory, class Arguments, bool TESTED>
struct Stream : Waits<Arguments> {
    using Base = Waits<Arguments>;
    using Base::p, Base::rest, Base::broken;
    Memory& s;
    int stage = 0, chunk = 0;
    uint32_t parity = 1;
    long long next = 0;

    __device__ Stream(const Arguments& arguments, Memory& memory) : Base{arguments, arguments.patience}, s(memory) {}

    __device__ __forceinline__ void send(const char* from, int chunks) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i, ++chunk) {
            for (int tries = 1; !broken() && !arrived(&s.empty[stage], parity); ++tries) {
                if (tries % TRIES_PER_LOOK != 0) continue;
                if (--rest <= 0) this->report(ROOM, chunk);
                else this->look();
            }
            if (broken()) return;
            if (p.gap > 0) {  // without gaps the stream takes all the bandwidth and delays packets
                keep_pace();
                next = clock64() + p.gap;
            }
            arrive_expecting(&s.full[stage], S::CHUNK);
            if (!TESTED || blockIdx.x != p.starved || chunk != STARVED_CHUNK)
                bulk_copy(s.ring + stage * S::CHUNK, from + static_cast<long long>(i) * S::CHUNK, S::CHUNK, &s.full[stage]);
            if (++stage == S::STAGES) stage = 0, parity ^= 1;
        }
    }
    // Waits until `next`, unless this block was moved to a multiprocessor whose clock differs a lot from the previous one's.
    __device__ __forceinline__ void keep_pace() const {
        for (long long left = next - clock64(); left > 0 && left <= p.gap; left = next - clock64()) {
        }
    }
    // Waits for the last copy into each stage, even after a fault, because the shared memory of an ended block may belong to another one.
    __device__ __forceinline__ void finish() {
#pragma unroll 1
        for (int i = 0; i < S::STAGES; ++i) {
            int tries = 0;
            while (!arrived(&s.full[stage], parity) && tries < LAST_TRIES) ++tries;
            if (tries == LAST_TRIES) this->report(LAST_COPY, stage);
            if (++stage == S::STAGES) stage = 0, parity ^= 1;
        }
    }
};

// The work of all warps but the producer. TESTED: blocks sleep at random, and one may send nothing or free nothing.
template <class S, class Memory, class Arguments, bool TESTED>
struct Chain : Waits<Arguments> {
    using Waiting = Waits<Arguments>;
    using Waiting::p, Waiting::rest, Waiting::broken;
    Memory& s;
    const int block = blockIdx.x, thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t epoch = 0, parity = 0, carried = 0;  // carried: the pair of the state's values that this thread keeps between layers
    int stage = 0, half = 0;

    __device__ Chain(const Arguments& arguments, Memory& memory) : Waiting{arguments, arguments.patience * CLOCKS_PER_TRY}, s(memory) {}

    __device__ __forceinline__ void sync() const { sync_some(1, S::THREADS); }

    __device__ __forceinline__ bool gives_up(int tries) {
        if (broken()) return true;
        if (tries >= p.patience) this->report(PACKETS, epoch);
        else if (tries % 64 == 63) this->look();
        return broken();
    }
    // While the weights of a block are late, other blocks wait for its packets. So `rest` allows a shorter wait here than the other blocks
    // may wait for packets. `multiply` reports a fault when `rest` is used up.
    __device__ __forceinline__ void wait_for_weights() {
        if (arrived(&s.full[stage], parity)) return;
        for (unsigned then = clock(); rest > 0 && !arrived(&s.full[stage], parity);) {
            const unsigned now = clock();
            rest -= min(now - then, LONGEST_TRY), then = now;
        }
    }
    // A thread whose wait has failed frees no stage, because copies into it may not have ended; therefore the producer stops.
    __device__ __forceinline__ bool frees() const { return lane == 0 && !broken() && (!TESTED || block != p.keeping); }

    // Receives two packets from each place `where(i)` that is not negative, and passes their values to `store`. All places are polled
    // together.
    template <int MANY, typename Where, typename Store>
    __device__ __forceinline__ void receive(Where where, Store store) {
        int from[MANY];
        uint4 v[MANY];
#pragma unroll
        for (int i = 0; i < MANY; ++i) from[i] = where(i);
        for (int tries = 0;; ++tries) {
            bool late = false;
#pragma unroll
            for (int i = 0; i < MANY; ++i)
                if (from[i] >= 0 && (tries == 0 || v[i].y != epoch || v[i].w != epoch)) v[i] = load16_relaxed(p.packets + from[i]);
#pragma unroll
            for (int i = 0; i < MANY; ++i) late = late || (from[i] >= 0 && (v[i].y != epoch || v[i].w != epoch));
            if (!late || gives_up(tries)) break;
        }
#pragma unroll
        for (int i = 0; i < MANY; ++i)
            if (from[i] >= 0) store(i, make_uint2(v[i].x, v[i].z));
    }

    // Begins the next exchange: everything that is published later has its epoch.
    __device__ __forceinline__ void next_epoch() {
        ++epoch;
        if constexpr (TESTED) {
            unsigned dice = (p.seed ^ epoch * 0x9E3779B9u ^ block * 0x85EBCA6Bu ^ warp * 0xC2B2AE35u) * 0x27D4EB2Fu;
            dice ^= dice >> 15;
            if (p.delay > 0 && dice % 8 == 0)
                for (unsigned i = 0; i <= dice / 8 % p.delay; ++i) __nanosleep(100);
        }
    }
    __device__ __forceinline__ void publish(int place, uint32_t pair) {
        if (TESTED && block == p.silent) return;
        store8_relaxed(p.packets + place, make_uint2(pair, epoch));
    }

    // Receives this warp's slice of vectors of INNER elements, for all tokens, into its part of shared memory.
    template <int INNER>
    __device__ __forceinline__ void receive_slice(int place, int tokens) {
        constexpr int UNITS = S::steps(INNER) * 8, MANY = larger(1, S::ROWS * UNITS / 32 < 8 ? parts(S::ROWS * UNITS, 32) : 8);
#pragma unroll 1
        for (int first = lane; first < tokens * UNITS; first += 32 * MANY)
            receive<MANY>(
                [&](int i) {
                    const int unit = first + 32 * i, token = unit / UNITS, at = (warp * UNITS + unit % UNITS) * 4;
                    return token < tokens && at < INNER ? place + (token * INNER + at) / 2 : -1;
                },
                [&](int i, uint2 v) {
                    const int unit = first + 32 * i;
                    *reinterpret_cast<uint2*>(&s.slices[warp][unit / UNITS][unit % UNITS * 4]) = v;
                });
        clear_rest<INNER>(tokens);
        __syncwarp();
    }
    // The same for vectors that are already in global memory and need no exchange.
    template <typename Row>
    __device__ __forceinline__ void read_slice(Row row, int tokens) {
        constexpr int UNITS = S::steps(S::WIDTH) * 8;
        for (int unit = lane; unit < tokens * UNITS; unit += 32) {
            const int token = unit / UNITS, at = (warp * UNITS + unit % UNITS) * 4;
            if (at < S::WIDTH)
                *reinterpret_cast<uint2*>(&s.slices[warp][token][unit % UNITS * 4]) = *reinterpret_cast<const uint2*>(row(token) + at);
        }
        clear_rest<S::WIDTH>(tokens);
        __syncwarp();
    }
    // Writes zeros after the end of the vectors.
    template <int INNER>
    __device__ __forceinline__ void clear_rest(int tokens) {
        constexpr int UNITS = S::steps(INNER) * 8;
        if constexpr (UNITS * S::WARPS * 4 != INNER)
            for (int unit = lane; unit < tokens * UNITS; unit += 32)
                if ((warp * UNITS + unit % UNITS) * 4 >= INNER)
                    *reinterpret_cast<uint2*>(&s.slices[warp][unit / UNITS][unit % UNITS * 4]) = make_uint2(0, 0);
    }

    // Multiplies this block's GROUPS * 8 rows with the vectors that `fetch` receives, or with their RMSNorm if NORMED, and writes the
    // partial sums of each warp.
    template <int INNER, int GROUPS, bool NORMED, typename Fetch>
    __device__ __forceinline__ void multiply(Fetch fetch, int tokens, const bf16* norm) {
        constexpr int STEPS = S::steps(INNER);
        uint4 scale[NORMED ? STEPS : 1], normed[NORMED ? STEPS : 1];
        const auto raw = [&](int i) {
            return g < tokens ? *reinterpret_cast<const uint4*>(&s.slices[warp][g][i * 32 + t * 8]) : make_uint4(0, 0, 0, 0);
        };
        if constexpr (NORMED) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i) scale[i] = *reinterpret_cast<const uint4*>(norm + (warp * STEPS + i) * 32 + t * 8);
        }
        fetch();
        if constexpr (NORMED) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                normed[i] = raw(i);
                const float2 v[4] = {widen(normed[i].x), widen(normed[i].y), widen(normed[i].z), widen(normed[i].w)};
#pragma unroll
                for (int j = 0; j < 4; ++j) sum = fmaf(v[j].x, v[j].x, fmaf(v[j].y, v[j].y, sum));
            }
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (t == 0 && g < tokens) s.squares[warp][g] = sum;
            sync();
            sum = 0.f;
            if (g < tokens) {
#pragma unroll
                for (int i = 0; i < S::WARPS; ++i) sum += s.squares[i][g];
            }
            const float rstd = rsqrtf(sum * (1.f / INNER) + p.eps);
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                uint4& v = normed[i];
                v.x = normalise(v.x, rstd, scale[i].x), v.y = normalise(v.y, rstd, scale[i].y);
                v.z = normalise(v.z, rstd, scale[i].z), v.w = normalise(v.w, rstd, scale[i].w);
            }
        }
        float sums[GROUPS][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const uint4 a = NORMED ? normed[NORMED ? i : 0] : raw(i);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const int tile = i * GROUPS + group;
                if (tile % S::TILES == 0) wait_for_weights();
                const char* chunk = s.ring + stage * S::CHUNK + (warp * S::TILES + tile % S::TILES) * 512;
                const uint4 w = *reinterpret_cast<const uint4*>(chunk + lane * 16);
                mma(sums[group], a.x, 0, a.y, 0, w.x, w.y);
                mma(sums[group], a.z, 0, a.w, 0, w.z, w.w);
                if (tile % S::TILES == S::TILES - 1 || tile == STEPS * GROUPS - 1) {
                    __syncwarp();
                    if (frees()) arrive(&s.empty[stage]);
                    if (++stage == S::STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        if (this->ran_out()) this->report(WEIGHTS, epoch);
        // Two buffers are used in turn, because threads that have not yet published may still read the other one.
        half ^= 1;
        if (g < tokens) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
                *reinterpret_cast<float2*>(&s.partial[half][warp][g][group * 8 + t * 2]) = make_float2(sums[group][0], sums[group][1]);
        }
        sync();
        next_epoch();
    }
    __device__ __forceinline__ float2 total(int token, int column) const {
        float2 sum = make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < S::WARPS; ++i) {
            const float2 v = *reinterpret_cast<const float2*>(&s.partial[half][i][token][column]);
            sum.x += v.x, sum.y += v.y;
        }
        return sum;
    }

    // Publishes the block's rows of a product of N rows; `value(token, column)` returns each pair.
    template <int N, typename Value>
    __device__ __forceinline__ void publish_rows(int place, int tokens, Value value) {
        constexpr int PAIRS = S::groups(N) * 4;
        for (int i = thread; i < tokens * PAIRS; i += S::THREADS) {
            const int token = i / PAIRS, column = i % PAIRS * 2, row = block * PAIRS * 2 + column;
            if (row < N) publish(place + (token * N + row) / 2, value(token, column));
        }
    }
    __device__ __forceinline__ uint32_t added(int token, int column) {
        const float2 sum = total(token, column), old = widen(carried);
        return carried = narrow(rounded(sum.x) + old.x, rounded(sum.y) + old.y);
    }
    __device__ __forceinline__ uint32_t gated(int token, int column) const {
        const float2 gate = total(token, column), up = total(token, S::groups(S::INNER) * 8 + column);
        const float x = rounded(gate.x), y = rounded(gate.y);
        return narrow(rounded(x / (1.f + __expf(-x))) * rounded(up.x), rounded(y / (1.f + __expf(-y))) * rounded(up.y));
    }

    // The norm's weights and the rotation of a head of HEAD elements, four per lane, for its position. They are read before the head
    // arrives.
    struct Turn {
        uint2 scale, cosine, sine;
    };
    __device__ __forceinline__ Turn turn_of(const bf16* norm, const bf16* angles) const {
        constexpr int UNITS = S::HEAD / 4;
        const auto read = [](const bf16* from) { return *reinterpret_cast<const uint2*>(from); };
        angles += lane % (UNITS / 2) * 4;
        return {lane < UNITS ? read(norm + lane * 4) : make_uint2(0, 0), read(angles), read(angles + S::HEAD / 2)};
    }
    __device__ __forceinline__ uint2 turned(uint2 v, const Turn& by) const {
        constexpr int UNITS = S::HEAD / 4;
        const float2 a = widen(v.x), b = widen(v.y);
        float sum = fmaf(a.x, a.x, fmaf(a.y, a.y, fmaf(b.x, b.x, b.y * b.y)));
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const float rstd = rsqrtf(sum * (1.f / S::HEAD) + p.eps);
        const uint2 h = make_uint2(normalise(v.x, rstd, by.scale.x), normalise(v.y, rstd, by.scale.y));
        const uint2 other = make_uint2(__shfl_xor_sync(0xffffffffu, h.x, UNITS / 2), __shfl_xor_sync(0xffffffffu, h.y, UNITS / 2));
        const float sign = lane < UNITS / 2 ? -1.f : 1.f;
        const auto mixed = [&](uint32_t mine, uint32_t theirs, uint32_t c, uint32_t n) {
            const float2 straight = widen(times(mine, c)), crossed = widen(times(theirs, n));
            return narrow(straight.x + sign * crossed.x, straight.y + sign * crossed.y);
        };
        return make_uint2(mixed(h.x, other.x, by.cosine.x, by.sine.x), mixed(h.y, other.y, by.cosine.y, by.sine.y));
    }

    // Calls `use(token, row)` in each thread that has a pair of the state's values; `row` is the first of the two.
    template <typename Use>
    __device__ __forceinline__ void with_pair(int tokens, Use use) {
        constexpr int PAIRS = S::groups(S::WIDTH) * 4;
        const int token = thread / PAIRS, row = block * PAIRS * 2 + thread % PAIRS * 2;
        if (token < tokens && row < S::WIDTH) use(token, row);
    }

    // Runs a layer over the state. `first` fetches the slices of its input; `attend` receives q, k and v, and publishes the result of
    // attention.
    template <typename First, typename Attend>
    __device__ __forceinline__ void run_layer(const bf16* norms, int tokens, First first, Attend attend) {
        constexpr int STATE = S::groups(S::WIDTH);
        multiply<S::WIDTH, S::groups(S::QKV), true>(first, tokens, norms);
        publish_rows<S::QKV>(S::QKV_AT, tokens, [&](int token, int column) {
            const float2 sum = total(token, column);
            return narrow(sum.x, sum.y);
        });
        attend();
        multiply<S::MIXED, STATE, false>([&] { receive_slice<S::MIXED>(S::MIXED_AT, tokens); }, tokens, nullptr);
        publish_rows<S::WIDTH>(S::MIDDLE_AT, tokens, [&](int token, int column) { return added(token, column); });
        multiply<S::WIDTH, 2 * S::groups(S::INNER), true>([&] { receive_slice<S::WIDTH>(S::MIDDLE_AT, tokens); }, tokens, norms + S::NORM);
        publish_rows<S::INNER>(S::INNER_AT, tokens, [&](int token, int column) { return gated(token, column); });
        multiply<S::INNER, STATE, false>([&] { receive_slice<S::INNER>(S::INNER_AT, tokens); }, tokens, nullptr);
        publish_rows<S::WIDTH>(S::STATE_AT, tokens, [&](int token, int column) { return added(token, column); });
    }
};

// Initializes the ring, then runs `consume` in all warps of the block but the last, and `produce` in one thread of the last.
template <class S, class Memory, typename Consume, typename Produce>
__device__ __forceinline__ void run_block(Memory& s, Consume consume, Produce produce) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) arrivals_init(&s.full[i], 1), arrivals_init(&s.empty[i], S::WARPS);
        arrivals_visible();
    }
    __syncthreads();
    if (threadIdx.x < S::THREADS) consume();
    else if (threadIdx.x == S::THREADS) produce();
}

}  // namespace
