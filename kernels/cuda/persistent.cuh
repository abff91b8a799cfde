// The code predictor's part of a frame in one cooperative launch: all codebooks behind code 0, and the next input.
//
// Every block owns some rows of every matrix. They are packed in the order of use, and a producer warp streams them through a ring in
// shared memory without ever waiting for another block. What blocks tell each other travels as packets {two bf16, epoch} in global
// memory: a reader asks until each packet has the epoch that it wants, so there is no barrier of the grid. A layer has five exchanges:
// q, k and v; attention's result; the state behind o; the inner activations; the state behind down. Attention is shared by the blocks of
// a query head: each has the keys of its head and a slice of the values in its own shared memory. The logits of a codebook are one more
// exchange, and every block draws the code by itself.
//
// A packet's place is written again only by a block that has received something from every block since the place was read, so no reader
// can be overtaken; attention's places need blocks that all own rows of the state or of the inner width (`Shape`). Epochs count exchanges over all launches, modulo 2^32: each place is written in each launch, so what it holds is
// younger than one launch. A reader that asks `patience` times in vain reports a fault, stops waiting for anything, and goes on to the
// end with whatever is there: all blocks end, and the flags say that the frame is void.
#pragma once
#include "persistent_shape.cuh"

namespace {

template <class S>
__device__ void stream_weights(const Args& p, Shared<S>& s) {
    const char* mine = p.weights + static_cast<long long>(blockIdx.x) * S::BLOCK_CHUNKS * S::CHUNK;
    int stage = 0;
    uint32_t parity = 1;
    long long next = 0;
    for (int step = 0; step < S::BEHIND; ++step) {
        const char* head = mine + static_cast<long long>(S::LAYERS * S::LAYER_CHUNKS + step * S::HEAD_CHUNKS) * S::CHUNK;
#pragma unroll 1
        for (int i = 0; i < S::LAYERS * S::LAYER_CHUNKS + S::HEAD_CHUNKS; ++i) {
            const int of_head = i - S::LAYERS * S::LAYER_CHUNKS;
            while (!arrived(&s.empty[stage], parity)) {
            }
            if (p.gap > 0) {  // a stream that takes all bandwidth at once makes the packets late
                while (clock64() < next) {
                }
                next = clock64() + p.gap;
            }
            arrive_expecting(&s.full[stage], S::CHUNK);
            bulk_copy(s.ring + stage * S::CHUNK, of_head < 0 ? mine + static_cast<long long>(i) * S::CHUNK : head + of_head * S::CHUNK, S::CHUNK,
                      &s.full[stage]);
            if (++stage == S::STAGES) stage = 0, parity ^= 1;
        }
    }
}

// All warps but the producer. TESTED: blocks stumble at random, and one may fall silent.
template <class S, bool TESTED>
struct Consumer {
    const Args& p;
    Shared<S>& s;
    const int block = blockIdx.x, thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t epoch = 0, parity = 0, carried = 0;  // carried: this thread's pair of the state between the layers
    int stage = 0, half = 0;
    bool broken = false;

    __device__ __forceinline__ void sync() const { sync_some(1, S::THREADS); }

    __device__ __forceinline__ bool gives_up(int tries) {
        if (broken) return true;
        if (tries >= p.patience) {
            store4_relaxed(p.control + FAULT, 0x80000000u | static_cast<uint32_t>(block) << 20 | (epoch & 0xfffffu));
            broken = true;
        } else if (tries % 64 == 63) {
            broken = load4_relaxed(p.control + FAULT) != 0;
        }
        return broken;
    }

    // Two packets each from the place `where(i)`, if it is not below 0; all are asked for together.
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

    // The next exchange begins: everything that is published from here on has its epoch.
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

    // This warp's slice of vectors of INNER elements, for all tokens, into its part of shared memory.
    template <int INNER>
    __device__ __forceinline__ void receive_slice(int place, int tokens) {
        constexpr int UNITS = S::steps(INNER) * 8, MANY = most(1, S::ROWS * UNITS / 32 < 8 ? parts(S::ROWS * UNITS, 32) : 8);
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
    // The same of rows that are there already.
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
    // Beyond the vector's end: zeros.
    template <int INNER>
    __device__ __forceinline__ void clear_rest(int tokens) {
        constexpr int UNITS = S::steps(INNER) * 8;
        if constexpr (UNITS * S::WARPS * 4 != INNER)
            for (int unit = lane; unit < tokens * UNITS; unit += 32)
                if ((warp * UNITS + unit % UNITS) * 4 >= INNER)
                    *reinterpret_cast<uint2*>(&s.slices[warp][unit / UNITS][unit % UNITS * 4]) = make_uint2(0, 0);
    }

    // Products of this block's GROUPS * 8 rows with the vectors that `fetch` brings, as each warp's partial sums; with `norm`: of their RMSNorm.
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
                if (tile % S::TILES == 0)
                    while (!arrived(&s.full[stage], parity)) {
                    }
                const char* chunk = s.ring + stage * S::CHUNK + (warp * S::TILES + tile % S::TILES) * 512;
                const uint4 w = *reinterpret_cast<const uint4*>(chunk + lane * 16);
                mma(sums[group], a.x, 0, a.y, 0, w.x, w.y);
                mma(sums[group], a.z, 0, a.w, 0, w.z, w.w);
                if (tile % S::TILES == S::TILES - 1 || tile == STEPS * GROUPS - 1) {
                    __syncwarp();
                    if (lane == 0) arrive(&s.empty[stage]);
                    if (++stage == S::STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        // Two buffers in turn: the other one may still be read by threads that have not published yet.
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

    // Publishes the block's rows of a product of N rows, each pair as `value(token, column)` gives it.
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

    __device__ __forceinline__ int row_of(int token) const { return token % S::ROWS; }
    // The first pass has the talker's states, then the embeddings of code 0.
    __device__ __forceinline__ int position_of(int step, int token) const { return step == 0 ? token / S::ROWS : step + 1; }

    // A head of HEAD elements, four a lane: RMSNorm, then rope.
    __device__ __forceinline__ uint2 normed_rope(uint2 v, const bf16* norm, int position) const {
        constexpr int UNITS = S::HEAD / 4;
        const bool used = lane < UNITS;
        const float2 a = widen(v.x), b = widen(v.y);
        float sum = fmaf(a.x, a.x, fmaf(a.y, a.y, fmaf(b.x, b.x, b.y * b.y)));
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const float rstd = rsqrtf(sum * (1.f / S::HEAD) + p.eps);
        const uint2 scale = used ? *reinterpret_cast<const uint2*>(norm + lane * 4) : make_uint2(0, 0);
        const uint2 h = make_uint2(normalise(v.x, rstd, scale.x), normalise(v.y, rstd, scale.y));
        const uint2 other = make_uint2(__shfl_xor_sync(0xffffffffu, h.x, UNITS / 2), __shfl_xor_sync(0xffffffffu, h.y, UNITS / 2));
        const bf16* angles = p.rope + position * S::HEAD + lane % (UNITS / 2) * 4;
        const uint2 cosine = *reinterpret_cast<const uint2*>(angles), sine = *reinterpret_cast<const uint2*>(angles + S::HEAD / 2);
        const float sign = lane < UNITS / 2 ? -1.f : 1.f;
        const auto turned = [&](uint32_t mine, uint32_t theirs, uint32_t c, uint32_t n) {
            const float2 straight = widen(times(mine, c)), crossed = widen(times(theirs, n));
            return narrow(straight.x + sign * crossed.x, straight.y + sign * crossed.y);
        };
        return make_uint2(turned(h.x, other.x, cosine.x, sine.x), turned(h.y, other.y, cosine.y, sine.y));
    }

    // Receives a query head, its keys and a slice of its values, a warp for each of a token, and keeps them.
    __device__ __forceinline__ void receive_heads(int step, int layer, int tokens, const bf16* norms) {
        const int head = block / (S::BLOCKS / S::HEADS), part = block % (S::BLOCKS / S::HEADS), kv = head / (S::HEADS / S::KV);
        for (int item = warp; item < 3 * tokens; item += S::WARPS) {
            const int kind = item / tokens, token = item % tokens, row = row_of(token), position = position_of(step, token);
            const int first = token * S::QKV + (kind == 0 ? head : kind == 1 ? S::HEADS + kv : S::HEADS + S::KV + kv) * S::HEAD;
            if (kind == 2) {
                const int at = part * S::SLICE + lane * 2;
                if (lane < S::SLICE / 2)
                    *reinterpret_cast<uint32_t*>(&s.values[layer][row][position][lane * 2]) = receive_pair(S::QKV_AT + (first + at) / 2);
                continue;
            }
            uint2 v = make_uint2(0, 0);
            receive<1>([&](int) { return lane < S::HEAD / 4 ? S::QKV_AT + first / 2 + lane * 2 : -1; },
                       [&](int, uint2 got) { v = got; });
            __syncwarp();
            v = normed_rope(v, norms + kind * S::HEAD, position);
            if (lane < S::HEAD / 4)
                *reinterpret_cast<uint2*>(kind == 0 ? &s.queries[token][lane * 4] : &s.keys[layer][row][position][lane * 4]) = v;
        }
        sync();
    }
    __device__ __forceinline__ uint32_t receive_pair(int place) {
        uint2 v = load8_relaxed(p.packets + place);
        for (int tries = 0; v.y != epoch && !gives_up(tries); ++tries) v = load8_relaxed(p.packets + place);
        return v.x;
    }

    __device__ __forceinline__ void attend(int step, int layer, int tokens, const bf16* norms) {
        receive_heads(step, layer, tokens, norms);
        for (int item = warp; item < tokens * S::SPAN; item += S::WARPS) {
            const int token = item / S::SPAN, at = item % S::SPAN;
            if (at > position_of(step, token)) continue;
            float sum = 0.f;
            if (lane < S::HEAD / 4) {
                const uint2 q = *reinterpret_cast<const uint2*>(&s.queries[token][lane * 4]);
                const uint2 k = *reinterpret_cast<const uint2*>(&s.keys[layer][row_of(token)][at][lane * 4]);
                const float2 q0 = widen(q.x), q1 = widen(q.y), k0 = widen(k.x), k1 = widen(k.y);
                sum = fmaf(q0.x, k0.x, fmaf(q0.y, k0.y, fmaf(q1.x, k1.x, q1.y * k1.y)));
            }
#pragma unroll
            for (int half_of = 16; half_of > 0; half_of /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half_of);
            if (lane == 0) s.scores[token][at] = sum * p.scale;
        }
        sync();
        next_epoch();
        constexpr int PAIRS = S::SLICE / 2;
        for (int i = thread; i < tokens * PAIRS; i += S::THREADS) {
            const int token = i / PAIRS, pair = i % PAIRS, last = position_of(step, token);
            float top = -INFINITE, total = 0.f;
            float2 mixed = make_float2(0.f, 0.f);
#pragma unroll
            for (int at = 0; at < S::SPAN; ++at)
                if (at <= last) top = fmaxf(top, s.scores[token][at]);
#pragma unroll
            for (int at = 0; at < S::SPAN; ++at)
                if (at <= last) {
                    const float share = __expf(s.scores[token][at] - top);
                    const float2 v = widen(*reinterpret_cast<const uint32_t*>(&s.values[layer][row_of(token)][at][pair * 2]));
                    total += share, mixed.x = fmaf(share, v.x, mixed.x), mixed.y = fmaf(share, v.y, mixed.y);
                }
            const int head = block / (S::BLOCKS / S::HEADS), first = head * S::HEAD + block % (S::BLOCKS / S::HEADS) * S::SLICE;
            publish(S::MIXED_AT + (token * S::MIXED + first) / 2 + pair, narrow(mixed.x / total, mixed.y / total));
        }
    }

    // The input of a pass, for `token`: rows of the talker and of code 0, later the embedding of the code drawn last.
    __device__ __forceinline__ const bf16* input(int step, int token) const {
        if (step == 0) return p.x + token * S::WIDTH;
        return p.inputs + (p.starts[step] + s.codes[token][step]) * S::WIDTH;
    }
    __device__ __forceinline__ void start_pass(int step, int tokens) {
        constexpr int PAIRS = S::groups(S::WIDTH) * 4;
        const int token = thread / PAIRS, row = block * PAIRS * 2 + thread % PAIRS * 2;
        if (token < tokens && row < S::WIDTH) carried = *reinterpret_cast<const uint32_t*>(input(step, token) + row);
    }

    __device__ __forceinline__ void run_layer(int step, int layer, int tokens) {
        const bf16* norms = p.norms + layer * S::LAYER_NORMS;
        constexpr int STATE = S::groups(S::WIDTH);
        multiply<S::WIDTH, S::groups(S::QKV), true>(
            [&] {
                if (layer == 0) read_slice([&](int token) { return input(step, token); }, tokens);
                else receive_slice<S::WIDTH>(S::STATE_AT, tokens);
            },
            tokens, norms);
        publish_rows<S::QKV>(S::QKV_AT, tokens, [&](int token, int column) {
            const float2 sum = total(token, column);
            return narrow(sum.x, sum.y);
        });
        attend(step, layer, tokens, norms + 2 * S::NORM);
        multiply<S::MIXED, STATE, false>([&] { receive_slice<S::MIXED>(S::MIXED_AT, tokens); }, tokens, nullptr);
        publish_rows<S::WIDTH>(S::MIDDLE_AT, tokens, [&](int token, int column) { return added(token, column); });
        multiply<S::WIDTH, 2 * S::groups(S::INNER), true>([&] { receive_slice<S::WIDTH>(S::MIDDLE_AT, tokens); }, tokens, norms + S::NORM);
        publish_rows<S::INNER>(S::INNER_AT, tokens, [&](int token, int column) { return gated(token, column); });
        multiply<S::INNER, STATE, false>([&] { receive_slice<S::INNER>(S::INNER_AT, tokens); }, tokens, nullptr);
        publish_rows<S::WIDTH>(S::STATE_AT, tokens, [&](int token, int column) { return added(token, column); });
    }

    // Logits of the tokens that are drawn from: the last ROWS ones.
    __device__ __forceinline__ void run_head(int tokens) {
        multiply<S::WIDTH, S::groups(S::CODES), true>([&] { receive_slice<S::WIDTH>(S::STATE_AT, tokens); }, tokens,
                                                      p.norms + S::LAYERS * S::LAYER_NORMS);
        publish_rows<S::CODES>(S::LOGITS_AT, S::ROWS, [&](int row, int column) {
            const float2 sum = total(tokens - S::ROWS + row, column);
            return narrow(sum.x, sum.y);
        });
    }

    __device__ __forceinline__ void run() {
        using Drawer = typename S::Drawer;
        constexpr int TEAM = S::THREADS / S::ROWS, EACH = 4 * parts(S::CODES, 4 * TEAM);
        const int row = thread / TEAM;
        const Drawer team{s.boards[row], thread % TEAM, 2 + row};
        bool fine = true;
        epoch = p.control[EPOCH];
        broken = load4_relaxed(p.control + FAULT) != 0;
        if (team.thread == 0) {  // block 0 changes the slots when all others may still be reading
            const long long slot = p.rows[row], frame = p.frames[slot], last = p.trailing_width - 1;
            s.requests[row] = {slot, frame, p.trailing[slot * p.trailing_width + (frame < last ? frame : last)],
                               static_cast<unsigned long long>(p.seeds[slot]),
                               {p.temperature[slot], p.top_p[slot], static_cast<int>(p.top_k[slot]), p.greedy[slot] != 0}};
            s.codes[row][0] = static_cast<int>(p.codes[row * (S::BEHIND + 1)]), s.fine[row] = p.finite[row] != 0;
        }
        sync();
        const Request& request = s.requests[row];
#pragma unroll 1
        for (int step = 0; step < S::BEHIND; ++step) {
            const int tokens = step == 0 ? S::TOKENS : S::ROWS;
            start_pass(step, tokens);
#pragma unroll 1
            for (int layer = 0; layer < S::LAYERS; ++layer) run_layer(step, layer, tokens);
            run_head(tokens);
            const unsigned word = philox(request.seed, static_cast<unsigned>(request.frame), step + 1);
            float logit[EACH];
            receive<EACH / 4>(
                [&](int i) { return team.code(4 * i) < S::CODES ? S::LOGITS_AT + (row * S::CODES + team.code(4 * i)) / 2 : -1; },
                [&](int i, uint2 v) {
                    const float2 a = widen(v.x), b = widen(v.y);
                    logit[4 * i] = a.x, logit[4 * i + 1] = a.y, logit[4 * i + 2] = b.x, logit[4 * i + 3] = b.y;
                });
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (team.code(i) >= S::CODES) logit[i] = -INFINITE;
                else fine = fine && fabsf(logit[i]) < INFINITE;
            }
            const int code = team.draw(logit, request.settings, word, S::CODES);
            if (team.thread == 0) {
                s.codes[row][step + 1] = code;
                if (block == 0) p.codes[row * (S::BEHIND + 1) + step + 1] = code;
            }
            sync();
        }
        if (!fine) s.fine[row] = 0;
        sync();
        next_input();
        if (block == 0 && team.thread == 0) {
            const bool fault = load4_relaxed(p.control + FAULT) != 0;
            p.flags[row] = (s.codes[row][0] == p.end ? ENDED : 0) + (s.fine[row] ? 0 : NOT_FINITE) + (fault ? FAILED : 0);
            if (request.slot != p.dead) p.positions[request.slot] += 1, p.frames[request.slot] = request.frame + 1;
            p.control[EPOCH] = epoch;
        }
    }

    // The talker's next input, eight elements a thread.
    __device__ __forceinline__ void next_input() const {
        for (int i = thread; i < S::ROWS * parts(p.talker / 8, S::BLOCKS); i += S::THREADS) {
            const int row = i % S::ROWS, at = (block + S::BLOCKS * (i / S::ROWS)) * 8;
            if (at >= p.talker) continue;
            float sum[8] = {};
#pragma unroll
            for (int book = 0; book <= S::BEHIND; ++book) {
                const uint4 v = *reinterpret_cast<const uint4*>(p.table + (p.starts[book] + s.codes[row][book]) * p.talker + at);
                const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[2 * j] += widen(four[j]).x, sum[2 * j + 1] += widen(four[j]).y;
            }
            const uint4 v = *reinterpret_cast<const uint4*>(p.text + s.requests[row].text * p.talker + at);
            const uint32_t four[4] = {v.x, v.y, v.z, v.w};
            uint32_t out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) out[j] = narrow(rounded(sum[2 * j]) + widen(four[j]).x, rounded(sum[2 * j + 1]) + widen(four[j]).y);
            *reinterpret_cast<uint4*>(p.state_inputs + s.requests[row].slot * p.talker + at) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
};

template <class S, bool TESTED>
__device__ __forceinline__ void predict(const Args& p) {
    auto& s = *reinterpret_cast<Shared<S>*>(dynamic_shared());
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) arrivals_init(&s.full[i], 1), arrivals_init(&s.empty[i], S::WARPS);
        arrivals_visible();
    }
    __syncthreads();
    if (threadIdx.x < S::THREADS) Consumer<S, TESTED>{p, s}.run();
    else if (threadIdx.x == S::THREADS) stream_weights<S>(p, s);
}

}  // namespace
