// The code predictor's part of a frame in one cooperative launch: all codebooks after code 0, and the next input.
//
// A layer has five exchanges: q, k and v; attention's result; the state after o; the inner activations; the state after down. Several
// blocks share the attention of a query head: each has the keys of the head and a slice of the values in its shared memory. The logits of a
// codebook are one more exchange, after which every block draws the code itself.
#pragma once
#include "persistent_chain.cuh"

namespace {

template <class S, bool TESTED>
__device__ void stream_weights(const Args& p, Shared<S>& s) {
    const char* mine = p.weights + static_cast<long long>(blockIdx.x) * S::BLOCK_CHUNKS * S::CHUNK;
    const char* heads = mine + static_cast<long long>(S::LAYERS * S::LAYER_CHUNKS) * S::CHUNK;
    Stream<S, Shared<S>, Args, TESTED> stream(p, s);
    for (int step = 0; step < S::LATER; ++step) {
        stream.send(mine, S::LAYERS * S::LAYER_CHUNKS);
        stream.send(heads + static_cast<long long>(step * S::HEAD_CHUNKS) * S::CHUNK, S::HEAD_CHUNKS);
    }
    stream.finish();
}

template <class S, bool TESTED>
struct Consumer : Chain<S, Shared<S>, Args, TESTED> {
    using Base = Chain<S, Shared<S>, Args, TESTED>;
    using Base::p, Base::s, Base::block, Base::thread, Base::warp, Base::lane, Base::epoch, Base::carried;
    using Base::sync, Base::publish, Base::next_epoch, Base::gives_up, Base::total;

    __device__ Consumer(const Args& arguments, Shared<S>& memory) : Base(arguments, memory) {}

    __device__ __forceinline__ int row_of(int token) const { return token % S::ROWS; }
    // The tokens of the first pass are the talker's states, then the embeddings of code 0.
    __device__ __forceinline__ int position_of(int step, int token) const { return step == 0 ? token / S::ROWS : step + 1; }

    // Receives and keeps, for each token, a query head, its key and a slice of its value; each of the three is received by a separate warp.
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
            const auto turn = this->turn_of(norms + kind * S::HEAD, p.rope + position * S::HEAD);
            uint2 v = make_uint2(0, 0);
            this->template receive<1>([&](int) { return lane < S::HEAD / 4 ? S::QKV_AT + first / 2 + lane * 2 : -1; },
                       [&](int, uint2 got) { v = got; });
            __syncwarp();
            v = this->turned(v, turn);
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

    // The input of a pass for `token`: in the first pass a row of `x`, later the embedding of the code that was drawn last.
    __device__ __forceinline__ const bf16* input(int step, int token) const {
        if (step == 0) return p.x + token * S::WIDTH;
        return p.inputs + (p.starts[step] + s.codes[token][step]) * S::WIDTH;
    }
    __device__ __forceinline__ void run_layer(int step, int layer, int tokens) {
        const bf16* norms = p.norms + layer * S::LAYER_NORMS;
        Base::run_layer(
            norms, tokens,
            [&] {
                if (layer == 0) this->read_slice([&](int token) { return input(step, token); }, tokens);
                else this->template receive_slice<S::WIDTH>(S::STATE_AT, tokens);
            },
            [&] { attend(step, layer, tokens, norms + 2 * S::NORM); });
    }

    // Publishes the logits of the last ROWS tokens, from which codes are drawn.
    __device__ __forceinline__ void run_head(int tokens) {
        this->template multiply<S::WIDTH, S::groups(S::CODES), true>([&] { this->template receive_slice<S::WIDTH>(S::STATE_AT, tokens); }, tokens,
                                                      p.norms + S::LAYERS * S::LAYER_NORMS);
        this->template publish_rows<S::CODES>(S::LOGITS_AT, S::ROWS, [&](int row, int column) {
            const float2 sum = total(tokens - S::ROWS + row, column);
            return narrow(sum.x, sum.y);
        });
    }

    // Draws a code from these logits (bfloat16 values) with 32 random bits. Logits after the last code are -infinity.
    template <class Drawer, int EACH>
    __device__ int draw(const Drawer& team, const float (&logit)[EACH], const DrawSettings& settings, unsigned word) const {
        if (settings.greedy) return team.likeliest(logit);
        float scaled[EACH], likely[EACH], top = -INFINITE, total = 0.f;
        unsigned key[EACH], weight[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            scaled[i] = __fdiv_rn(logit[i], settings.temperature);
            key[i] = ordered(logit[i]);
            top = fmaxf(top, scaled[i]);
        }
        if (team.thread == 0) team.board.code = S::CODES - 1;
        top = team.together(top, team.board.floats, Max());
        const int k = settings.top_k > 0 ? min(settings.top_k, S::CODES) : S::CODES;
        const unsigned threshold = k < S::CODES ? team.template kth_largest<16>(key, k) : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) likely[i] = key[i] >= threshold ? expf(scaled[i] - top) : 0.f, total += likely[i];
        total = team.together(total, team.board.floats, Add());
#pragma unroll
        for (int i = 0; i < EACH; ++i) weight[i] = quantized(likely[i] / total);
        if (settings.top_p < 1.f) team.keep_nucleus(likely, weight, settings.top_p);
        team.choose(weight, word);
        team.sync();
        return team.board.code;
    }

    __device__ __forceinline__ void run() {
        using Drawer = typename S::Drawer;
        constexpr int TEAM = S::THREADS / S::ROWS, EACH = 4 * parts(S::CODES, 4 * TEAM);
        const int row = thread / TEAM;
        const Drawer team{s.boards[row], thread % TEAM, 2 + row};
        bool fine = true;
        epoch = p.control[EPOCH];
        this->look();
        if (team.thread == 0) {  // read only here, because block 0 changes the slots later, while others could still read them
            const long long slot = p.rows[row], frame = p.frames[slot], last = p.trailing_width - 1;
            s.requests[row] = {slot, frame, p.trailing[slot * p.trailing_width + (frame < last ? frame : last)],
                               static_cast<unsigned long long>(p.seeds[slot]),
                               {p.temperature[slot], p.top_p[slot], static_cast<int>(p.top_k[slot]), p.greedy[slot] != 0}};
            s.codes[row][0] = static_cast<int>(p.codes[row * (S::LATER + 1)]), s.fine[row] = p.finite[row] != 0;
        }
        sync();
        const Request& request = s.requests[row];
#pragma unroll 1
        for (int step = 0; step < S::LATER; ++step) {
            const int tokens = step == 0 ? S::TOKENS : S::ROWS;
            this->with_pair(tokens, [&](int token, int row) { carried = *reinterpret_cast<const uint32_t*>(input(step, token) + row); });
#pragma unroll 1
            for (int layer = 0; layer < S::LAYERS; ++layer) run_layer(step, layer, tokens);
            run_head(tokens);
            const unsigned word = philox_word(request.seed, static_cast<unsigned>(request.frame), step + 1);
            float logit[EACH];
            this->template receive<EACH / 4>(
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
            const int code = draw(team, logit, request.settings, word);
            if (team.thread == 0) {
                s.codes[row][step + 1] = code;
                if (block == 0) p.codes[row * (S::LATER + 1) + step + 1] = code;
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

    // Writes the talker's next input, eight elements per thread.
    __device__ __forceinline__ void next_input() const {
        for (int i = thread; i < S::ROWS * parts(p.talker / 8, S::BLOCKS); i += S::THREADS) {
            const int row = i % S::ROWS, at = (block + S::BLOCKS * (i / S::ROWS)) * 8;
            if (at >= p.talker) continue;
            write_next_input<S::LATER + 1>(p.state_inputs + s.requests[row].slot * p.talker, p.table, p.text + s.requests[row].text * p.talker,
                                            p.talker, at, S::LATER + 1, [&](int book) { return p.starts[book] + s.codes[row][book]; });
        }
    }
};

template <class S, bool TESTED>
__device__ __forceinline__ void predict(const Args& p) {
    auto& s = *reinterpret_cast<Shared<S>*>(dynamic_shared());
    run_block<S>(s, [&] { Consumer<S, TESTED>(p, s).run(); }, [&] { stream_weights<S, TESTED>(p, s); });
}

}  // namespace

// Defines a kernel: its name, its shared memory in bytes, whether it is for tests; then the arguments of `Shape`, with the number of rows.
#define PREDICTOR(NAME, BYTES, TESTED, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(Shape<__VA_ARGS__>::THREADS + 32, 1) NAME(const Args p) {     \
        static_assert(sizeof(Shared<Shape<__VA_ARGS__>>) <= BYTES, "more shared memory than the launch asks for"); \
        predict<Shape<__VA_ARGS__>, TESTED>(p);                                                                \
    }
// width, inner, heads, kv heads, head, codes, layers, codebooks after code 0; blocks, warps, tiles per chunk, stages of the ring.
#define PUBLISHED_PREDICTOR 1024, 3072, 16, 8, 128, 2048, 5, 15, 128, 8, 4, 8
