// One draw a row: processors, top-k, top-p, draw, and the gather of what the drawn code feeds. The meaning is kernels/sampler.py's.
//
// One block a row, 8 logits a thread. Probabilities are whole multiples of 2^-30, so sums are exact in any order. The top-k
// threshold is found by bisection over ordered integers, two bits a round, with one barrier a round. The first codebook's logits are float32
// once they are processed; the others' are bf16, of which pairs are compared at once.
#include "common.cuh"

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
    long long end, suppress_from, dead;
    int n, vocab, codebook, codebooks, width, talker, trailing_width, copy_hidden;
};

struct Scratch {
    unsigned counts[2][32], sums_of_round[8][2];
    float floats[32];
    unsigned sums[32];
    unsigned long long longs[32];
    int token;
    long long places[32];
};

__device__ __forceinline__ unsigned philox_word(unsigned long long seed, unsigned frame, unsigned codebook) {
    unsigned c0 = frame, c1 = codebook, c2 = 0, c3 = 0, k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0, high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

__device__ __forceinline__ unsigned ordered(float v) {  // greater float, greater integer; -0 as 0
    const unsigned bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <typename T, typename Join>
__device__ __forceinline__ T across_block(T v, T* scratch, Join join) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = join(v, __shfl_xor_sync(0xffffffffu, v, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    v = scratch[0];
    for (int i = 1; i < blockDim.x / 32; ++i) v = join(v, scratch[i]);
    return v;
}

struct Add {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
};
struct Most {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};

// The k-th largest of all threads' keys.
__device__ unsigned kth_largest(const unsigned (&key)[EACH], int k, Scratch& s) {
    unsigned threshold = 0;
#pragma unroll 1
    for (int bit = 30; bit >= 0; bit -= 2) {
        const unsigned step = 1u << bit, one = threshold + step, two = one + step, three = two + step;
        unsigned counts = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) counts += (key[i] >= one) + ((key[i] >= two) << 10) + ((key[i] >= three) << 20);
        counts = __reduce_add_sync(0xffffffffu, counts);
        unsigned* board = s.counts[(bit / 2) & 1];
        if (threadIdx.x % 32 == 0) board[threadIdx.x / 32] = counts;
        __syncthreads();
        int above_one = 0, above_two = 0, above_three = 0;
        for (int i = 0; i < blockDim.x / 32; ++i) {
            const unsigned c = board[i];
            above_one += c & 1023, above_two += (c >> 10) & 1023, above_three += c >> 20;
        }
        threshold = above_three >= k ? three : above_two >= k ? two : above_one >= k ? one : threshold;
    }
    return threshold;
}

// The same of values that are bf16, a pair a word, as the key that is `ordered`. All warps add to one board a round, whose sums were 0.
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

__device__ __forceinline__ unsigned quantized(float share) { return __float2uint_rn(share * 1073741824.f); }

// Weights of the tokens that top-p keeps: a token goes when it and all less likely ones have at most 1 - p; never the likeliest.
__device__ void apply_top_p(float (&likely)[EACH], unsigned (&weight)[EACH], float top_p, Scratch& s) {
    unsigned long long local = 0;
    for (int i = 0; i < EACH; ++i) local += weight[i];
    const double limit = (1.0 - static_cast<double>(top_p)) * static_cast<double>(across_block(local, s.longs, Add()));
    long long below = -1;
    for (int bit = 30; bit >= 0; --bit) {
        const long long higher = below + (1ll << bit);
        local = 0;
        for (int i = 0; i < EACH; ++i) local += static_cast<long long>(weight[i]) <= higher ? weight[i] : 0;
        if (static_cast<double>(across_block(local, s.longs, Add())) <= limit) below = higher;
    }
    unsigned long long mass = 0, edge = 0, best = 0;
    for (int i = 0; i < EACH; ++i) {
        const bool gone = static_cast<long long>(weight[i]) <= below;
        mass += gone ? weight[i] : 0;
        if (!gone) edge = Most()(edge, 0xffffffffull - weight[i]);
        best = Most()(best, static_cast<unsigned long long>(weight[i]) << 32 | (threadIdx.x * EACH + i));
    }
    mass = across_block(mass, s.longs, Add());
    edge = 0xffffffffull - across_block(edge, s.longs, Most());
    best = across_block(best, s.longs, Most());
    unsigned tied = 0;
    for (int i = 0; i < EACH; ++i) tied += weight[i] == edge;
    unsigned before = tied;  // tied tokens of earlier threads: scan of the warp, then of the warps
    for (int step = 1; step < 32; step *= 2) {
        const unsigned v = __shfl_up_sync(0xffffffffu, before, step);
        if (threadIdx.x % 32 >= step) before += v;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) s.sums[threadIdx.x / 32] = before;
    __syncthreads();
    before -= tied;
    for (int i = 0; i < threadIdx.x / 32; ++i) before += s.sums[i];
    float total = 0.f;
    for (int i = 0; i < EACH; ++i) {
        bool gone = static_cast<long long>(weight[i]) <= below;
        if (weight[i] == edge) gone |= static_cast<double>(mass + edge * ++before) <= limit;
        if (gone && (best & 0xffffffffull) != threadIdx.x * EACH + i) likely[i] = 0.f;
        total += likely[i];
    }
    total = across_block(total, s.floats, Add());
    for (int i = 0; i < EACH; ++i) weight[i] = quantized(likely[i] / total);
}

template <int STAGE>
__device__ __forceinline__ void draw(const Args& p) {
    __shared__ Scratch s;
    launch_dependents();
    const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, base = threadIdx.x * EACH;
    // Settings, seeds and frame counts change only between frames, and a graph holds one frame: they may be read early.
    const long long slot = p.rows[row];
    const long long frame = p.frames[slot], start = p.starts[p.codebook];
    const bool greedy = p.greedy[slot] != 0;
    const float temperature = p.temperature[slot], top_p = p.top_p[slot];
    const int wanted = static_cast<int>(p.top_k[slot]);
    const unsigned word = philox_word(p.seeds[slot], static_cast<unsigned>(frame), p.codebook);
    const float penalty = STAGE == FIRST ? p.penalty[slot] : 1.f;
    const bool early = STAGE == FIRST && frame < p.min_new[slot];
    if (threadIdx.x == 0) s.token = p.vocab - 1;
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
    if constexpr (STAGE == FIRST) {
        const unsigned long long marks = *reinterpret_cast<const unsigned long long*>(p.seen + slot * p.vocab + base);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (marks >> (8 * i) & 255) value[i] = value[i] > 0.f ? __fdiv_rn(value[i], penalty) : value[i] * penalty;
            const int token = base + i;
            if ((token >= p.suppress_from && token != p.end) || (token == p.end && early)) value[i] = -INFINITE;
        }
    }
    fine = __syncthreads_and(fine);

    if (greedy) {
        unsigned long long best = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) best = Most()(best, static_cast<unsigned long long>(ordered(value[i])) << 32 | (0xffffffffu - base - i));
        best = across_block(best, s.longs, Most());
        if (threadIdx.x == 0) s.token = 0xffffffffu - static_cast<unsigned>(best);
    } else {
        // Values of float32 may be the same once they are divided; those of bf16 are not, so only what top-k keeps is divided.
        constexpr bool DIVIDED = STAGE == FIRST;
        float likely[EACH], top = -INFINITE, total = 0.f;
        unsigned key[EACH], weight[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (DIVIDED) value[i] = __fdiv_rn(value[i], temperature);
            key[i] = ordered(value[i]);
            top = fmaxf(top, value[i]);
        }
        top = across_block(top, s.floats, Most());
        if (!DIVIDED) top = __fdiv_rn(top, temperature);
        const int k = wanted > 0 ? min(wanted, p.vocab) : p.vocab;
        unsigned threshold = 0;
        if constexpr (STAGE == FIRST) threshold = k < p.vocab ? kth_largest(key, k, s) : 0;
        else threshold = k < p.vocab ? kth_largest_of_pairs(pairs, k, s) : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            likely[i] = 0.f;
            if (key[i] >= threshold) likely[i] = expf((DIVIDED ? value[i] : __fdiv_rn(value[i], temperature)) - top);
            total += likely[i];
        }
        total = across_block(total, s.floats, Add());
#pragma unroll
        for (int i = 0; i < EACH; ++i) weight[i] = STAGE != FIRST && likely[i] == 0.f ? 0 : quantized(likely[i] / total);
        if (top_p < 1.f) apply_top_p(likely, weight, top_p, s);
        unsigned local = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) local += weight[i];
        unsigned scan = local;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const unsigned v = __shfl_up_sync(0xffffffffu, scan, step);
            if (lane >= step) scan += v;
        }
        if (lane == 31) s.sums[warp] = scan;
        __syncthreads();
        unsigned before = 0, all = 0;
        for (int i = 0; i < blockDim.x / 32; ++i) {
            before += i < warp ? s.sums[i] : 0;
            all += s.sums[i];
        }
        const unsigned place = __umulhi(word, all);
        unsigned reached = before + scan - local;
        if (place >= reached && place < reached + local) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (place >= reached && place < reached + weight[i]) s.token = base + i;
                reached += weight[i];
            }
        }
    }
    __syncthreads();
    const long long code = s.token;
    if (threadIdx.x == 0) p.codes[static_cast<long long>(row) * p.codebooks + p.codebook] = code;

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
            float sum[EACH] = {};
#pragma unroll 16
            for (int other = 0; other < p.codebooks; ++other) {
                const uint4 v = *reinterpret_cast<const uint4*>(p.table + s.places[other] * p.talker + at);
                const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[2 * i] += widen(four[i]).x, sum[2 * i + 1] += widen(four[i]).y;
            }
            const uint4 v = *reinterpret_cast<const uint4*>(p.text + text * p.talker + at);
            const uint32_t four[4] = {v.x, v.y, v.z, v.w};
            uint32_t out[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i] = narrow(rounded(sum[2 * i]) + widen(four[i]).x, rounded(sum[2 * i + 1]) + widen(four[i]).y);
            *reinterpret_cast<uint4*>(p.state_inputs + slot * p.talker + at) = make_uint4(out[0], out[1], out[2], out[3]);
        }
        if (threadIdx.x == 0) {
            p.flags[row] = static_cast<unsigned char>((__ldcg(codes) == p.end ? 1 : 0) + (fine && __ldcg(p.finite + row) != 0 ? 0 : 2));
            if (slot != p.dead) p.positions[slot] += 1, p.frames[slot] = frame + 1;
        }
    }
}

}  // namespace

// vocab is a multiple of 256 up to 4096, width and talker are multiples of 8, at most 32 codebooks; launched by kernels/lm_cuda.py.
extern "C" __global__ void __launch_bounds__(512) draw_first(const Args p) { draw<FIRST>(p); }
extern "C" __global__ void __launch_bounds__(512) draw_middle(const Args p) { draw<MIDDLE>(p); }
extern "C" __global__ void __launch_bounds__(512) draw_last(const Args p) { draw<LAST>(p); }
