// wheel: sm_90a compute_90
// Draws one code per row: logits processors, top-k, top-p, draw, and the next inputs from the drawn codes. kernels/sampler.py defines the
// results.
//
// A block computes one row, a thread 8 logits. Probabilities are whole multiples of 2^-30, so that sums are exact in any order. The top-k
// threshold is found by bisection over ordered integers, two bits and one barrier per round. The logits of the first codebook are float32
// after their processing; those of the others are bf16, and are compared in pairs.
#include "draws.cuh"

namespace {

enum Stage { FIRST = 0, MIDDLE = 1, LAST = 2 };
constexpr int EACH = 8;

struct Args {
    const bf16* logits;  // [rows, vocab]
    const long long* rows;        // [n] slots
    long long* codes;             // [n, codebooks]
    int* finite;                  // [n]
    unsigned char* flags;         // [n]
    const long long *seeds, *top_k, *min_new, *starts, *trailing;
    long long *frames, *positions;
    const float *temperature, *top_p, *penalty;
    const unsigned char* greedy;
    unsigned char* seen;  // [slots, vocab]
    const bf16 *hidden, *inputs, *table, *text;
    bf16 *x, *state_inputs;
    float* log_probabilities;  // [n], of the first codebook's codes
    long long end, suppress_from, dead;
    int n, vocab, codebook, codebooks, width, talker, trailing_width, copy_hidden;
};

using Block = Team<WHOLE_BLOCK, EACH>;

struct Scratch {
    Block::Board board;
    unsigned sums_of_round[8][2];
    long long places[32];
};

// The key, as `ordered` computes it, of the k-th largest of bf16 values. Each word of `pairs` has two of them. In each round all warps add to
// one pair of sums, which start at 0.
__device__ unsigned kth_largest_of_pairs(const uint32_t (&pairs)[EACH / 2], int k, Scratch& s) {
    unsigned threshold = 0;
#pragma unroll
    for (int bit = 14; bit >= 0; bit -= 2) {
        float found[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const unsigned tried = threshold + ((i + 1) << bit), bits = tried ^ (tried & 0x8000u ? 0x8000u : 0xffffu);
            uint32_t counts = 0;
#pragma unroll
            for (int j = 0; j < EACH / 2; ++j) counts = plus(counts, at_least(pairs[j], bits | bits << 16));
            found[i] = widen(counts).x + widen(counts).y;
        }
        const unsigned all = __reduce_add_sync(0xffffffffu, static_cast<unsigned>(fmaf(found[2], 1048576.f, fmaf(found[1], 1024.f, found[0]))));
        unsigned* board = s.sums_of_round[bit / 2];
        if (threadIdx.x % 32 == 0) atomicAdd(board, (all & 1023) | all >> 20 << 16), atomicAdd(board + 1, all >> 10 & 1023);
        __syncthreads();
        const int above_one = board[0] & 0xffff, above_two = board[1], above_three = board[0] >> 16;
        threshold += (above_three >= k ? 3 : above_two >= k ? 2 : above_one >= k ? 1 : 0) << bit;
    }
    return threshold << 16;
}

template <int STAGE>
__device__ __forceinline__ void draw(const Args& p) {
    __shared__ Scratch s;
    launch_dependents();
    const int row = blockIdx.x, base = threadIdx.x * EACH;
    const Block block{s.board, static_cast<int>(threadIdx.x), 0};
    // Settings, seeds and frame counts change only between frames, and a graph holds one frame: they may be read early.
    const long long slot = p.rows[row];
    const long long frame = p.frames[slot], start = p.starts[p.codebook];
    const bool greedy = p.greedy[slot] != 0;
    const float temperature = p.temperature[slot], top_p = p.top_p[slot];
    const int wanted = static_cast<int>(p.top_k[slot]);
    const unsigned word = philox_word(p.seeds[slot], static_cast<unsigned>(frame), p.codebook);
    const float penalty = STAGE == FIRST ? p.penalty[slot] : 1.f;
    const bool early = STAGE == FIRST && frame < p.min_new[slot];
    if (threadIdx.x == 0) s.board.code = p.vocab - 1;
    if (STAGE != FIRST && threadIdx.x < 16) s.sums_of_round[threadIdx.x / 2][threadIdx.x % 2] = 0;
    wait_for_previous();

    const uint4 raw = load16(p.logits + static_cast<long long>(row) * p.vocab + base);
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
    float value[EACH];
    bool fine = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 f = widen(pairs[i]);
        value[2 * i] = f.x, value[2 * i + 1] = f.y;
        fine = fine && fabsf(f.x) < INFINITE && fabsf(f.y) < INFINITE;
    }
    float log_total = 0.f;  // of the exponentials of the raw logits of all codes that can be drawn
    if constexpr (STAGE == FIRST) {
        const unsigned long long marks = *reinterpret_cast<const unsigned long long*>(p.seen + slot * p.vocab + base);
        // As int, since 64 bits need more registers than three blocks on a multiprocessor have.
        const int never = static_cast<int>(p.suppress_from), end = static_cast<int>(p.end);
        float peak = -INFINITE, total = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (base + i >= never && base + i != end) value[i] = -INFINITE;
            peak = fmaxf(peak, value[i]);
        }
        peak = block.together(peak, s.board.floats, Max());
#pragma unroll
        for (int i = 0; i < EACH; ++i) total += expf(value[i] - peak);
        log_total = peak + logf(block.together(total, s.board.floats, Add()));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (marks >> (8 * i) & 255) value[i] = value[i] > 0.f ? __fdiv_rn(value[i], penalty) : value[i] * penalty;
            if (base + i == end && early) value[i] = -INFINITE;
        }
    }
    fine = __syncthreads_and(fine);

    if (greedy) {
        const int best = block.likeliest(value);
        if (threadIdx.x == 0) s.board.code = best;
    } else {
        // Different float32 values may become equal by the division, so they are divided before top-k. Different bf16 values do not, so
        // only those that top-k keeps are divided.
        constexpr bool DIVIDED = STAGE == FIRST;
        float likely[EACH], top = -INFINITE, total = 0.f;
        unsigned key[EACH], weight[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (DIVIDED) value[i] = __fdiv_rn(value[i], temperature);
            key[i] = ordered(value[i]);
            top = fmaxf(top, value[i]);
        }
        top = block.together(top, s.board.floats, Max());
        if (!DIVIDED) top = __fdiv_rn(top, temperature);
        const int k = wanted > 0 ? min(wanted, p.vocab) : p.vocab;
        unsigned threshold = 0;
        if constexpr (STAGE == FIRST) threshold = k < p.vocab ? block.kth_largest<0>(key, k) : 0;
        else threshold = k < p.vocab ? kth_largest_of_pairs(pairs, k, s) : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            likely[i] = 0.f;
            if (key[i] >= threshold) likely[i] = expf((DIVIDED ? value[i] : __fdiv_rn(value[i], temperature)) - top);
            total += likely[i];
        }
        total = block.together(total, s.board.floats, Add());
#pragma unroll
        for (int i = 0; i < EACH; ++i) weight[i] = STAGE != FIRST && likely[i] == 0.f ? 0 : quantized(likely[i] / total);
        if (top_p < 1.f) block.keep_nucleus(likely, weight, top_p);
        block.choose(weight, word);
    }
    __syncthreads();
    const long long code = s.board.code;
    if (threadIdx.x == 0) {
        p.codes[static_cast<long long>(row) * p.codebooks + p.codebook] = code;
        if (STAGE == FIRST) p.log_probabilities[row] = widen(__ldcg(p.logits + static_cast<long long>(row) * p.vocab + code)).x - log_total;
    }

    if constexpr (STAGE != LAST) {
        const bf16* fed = p.inputs + (start + code) * p.width;
        bf16* target = p.x + static_cast<long long>(row + (STAGE == FIRST ? p.n : 0)) * p.width;
        for (int at = base; at < p.width; at += blockDim.x * EACH) {
            *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(fed + at);
            if (STAGE == FIRST && p.copy_hidden)
                *reinterpret_cast<uint4*>(p.x + static_cast<long long>(row) * p.width + at) =
                    load16(p.hidden + static_cast<long long>(row) * p.width + at);
        }
        if (threadIdx.x == 0) {
            if constexpr (STAGE == FIRST) p.seen[slot * p.vocab + code] = 1, p.finite[row] = fine;
            else if (!fine) p.finite[row] = 0;
        }
    } else {
        const long long* codes = p.codes + static_cast<long long>(row) * p.codebooks;
        if (threadIdx.x < p.codebooks)
            s.places[threadIdx.x] = p.starts[threadIdx.x] + (threadIdx.x == p.codebook ? code : __ldcg(codes + threadIdx.x));
        __syncthreads();
        const long long text = p.trailing[slot * p.trailing_width + min(frame, static_cast<long long>(p.trailing_width - 1))];
        for (int at = base; at < p.talker; at += blockDim.x * EACH) {
            write_next_input<16>(p.state_inputs + slot * p.talker, p.table, p.text + text * p.talker, p.talker, at, p.codebooks,
                                 [&](int book) { return s.places[book]; });
        }
        if (threadIdx.x == 0) {
            p.flags[row] = static_cast<unsigned char>((__ldcg(codes) == p.end ? 1 : 0) + (fine && __ldcg(p.finite + row) != 0 ? 0 : 2));
            if (slot != p.dead) p.positions[slot] += 1, p.frames[slot] = frame + 1;
        }
    }
}

}  // namespace

// vocab must be a multiple of 256 up to 4096, width and talker multiples of 8, and codebooks 32 or less. kernels/lm_cuda.py launches them.
extern "C" __global__ void __launch_bounds__(512) draw_first(const Args p) { draw<FIRST>(p); }
extern "C" __global__ void __launch_bounds__(512) draw_middle(const Args p) { draw<MIDDLE>(p); }
extern "C" __global__ void __launch_bounds__(512) draw_last(const Args p) { draw<LAST>(p); }
