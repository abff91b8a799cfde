// One draw by some warps of a block: top-k, top-p and the choice, in the meaning of kernels/sampler.py, as kernels/cuda/sampler.cu does it
// with a whole block. Probabilities are whole multiples of 2^-30, so sums are exact in any order.
#pragma once
#include "common.cuh"

namespace {

struct DrawSettings {
    float temperature, top_p;
    int top_k;
    bool greedy;
};

__device__ __forceinline__ unsigned philox(unsigned long long seed, unsigned frame, unsigned codebook) {
    unsigned c0 = frame, c1 = codebook, c2 = 0, c3 = 0, k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0, high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

struct Sum {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
};
struct Largest {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};

// A team of WARPS warps with a barrier of its own; thread i holds the logits of codes i * EACH and on.
template <int WARPS, int EACH>
struct Team {
    struct Board {
        unsigned long long longs[WARPS];
        unsigned counts[2][WARPS], sums[WARPS];
        float floats[WARPS];
        int code;
    };
    static_assert(32 * EACH < 1024, "three counts of a warp in one word");

    Board& board;
    const int thread, barrier;

    __device__ void sync() const { sync_some(barrier, WARPS * 32); }
    __device__ int code(int i) const { return thread * EACH + i; }

    template <typename T, typename Join>
    __device__ T together(T v, T* places, Join join) const {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) v = join(v, __shfl_xor_sync(0xffffffffu, v, step));
        sync();
        if (thread % 32 == 0) places[thread / 32] = v;
        sync();
        v = places[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) v = join(v, places[i]);
        return v;
    }

    // Sum of what threads before this one hold, and of all.
    __device__ unsigned before(unsigned mine, unsigned& all) const {
        unsigned scan = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const unsigned v = __shfl_up_sync(0xffffffffu, scan, step);
            if (thread % 32 >= step) scan += v;
        }
        sync();
        if (thread % 32 == 31) board.sums[thread / 32] = scan;
        sync();
        unsigned earlier = 0;
        all = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            earlier += i < thread / 32 ? board.sums[i] : 0;
            all += board.sums[i];
        }
        return earlier + scan - mine;
    }

    // Greater logit, greater key. Logits are bfloat16, so keys differ in their upper half.
    __device__ static unsigned key_of(float v) {
        const unsigned bits = __float_as_uint(v + 0.f);
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }

    // The k-th largest of all keys, two bits a round.
    __device__ unsigned kth_largest(const unsigned (&key)[EACH], int k) const {
        unsigned threshold = 0;
#pragma unroll 1
        for (int bit = 30; bit >= 16; bit -= 2) {
            const unsigned step = 1u << bit, one = threshold + step, two = one + step, three = two + step;
            unsigned counts = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) counts += (key[i] >= one) + ((key[i] >= two) << 10) + ((key[i] >= three) << 20);
            counts = __reduce_add_sync(0xffffffffu, counts);
            unsigned* places = board.counts[(bit / 2) & 1];
            if (thread % 32 == 0) places[thread / 32] = counts;
            sync();
            int above_one = 0, above_two = 0, above_three = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) above_one += places[i] & 1023, above_two += (places[i] >> 10) & 1023, above_three += places[i] >> 20;
            threshold = above_three >= k ? three : above_two >= k ? two : above_one >= k ? one : threshold;
        }
        return threshold;
    }

    __device__ static unsigned quantized(float share) { return __float2uint_rn(share * 1073741824.f); }

    // Weights of the codes that top-p keeps: a code goes when it and all less likely ones have at most 1 - p; never the likeliest.
    __device__ void keep_nucleus(float (&likely)[EACH], unsigned (&weight)[EACH], float top_p) const {
        unsigned long long local = 0;
        for (int i = 0; i < EACH; ++i) local += weight[i];
        const double limit = (1.0 - static_cast<double>(top_p)) * static_cast<double>(together(local, board.longs, Sum()));
        long long below = -1;
        for (int bit = 30; bit >= 0; --bit) {
            const long long higher = below + (1ll << bit);
            local = 0;
            for (int i = 0; i < EACH; ++i) local += static_cast<long long>(weight[i]) <= higher ? weight[i] : 0;
            if (static_cast<double>(together(local, board.longs, Sum())) <= limit) below = higher;
        }
        unsigned long long mass = 0, edge = 0, best = 0;
        for (int i = 0; i < EACH; ++i) {
            const bool gone = static_cast<long long>(weight[i]) <= below;
            mass += gone ? weight[i] : 0;
            if (!gone) edge = Largest()(edge, 0xffffffffull - weight[i]);
            best = Largest()(best, static_cast<unsigned long long>(weight[i]) << 32 | code(i));
        }
        mass = together(mass, board.longs, Sum());
        edge = 0xffffffffull - together(edge, board.longs, Largest());
        best = together(best, board.longs, Largest());
        unsigned tied = 0, all = 0;
        for (int i = 0; i < EACH; ++i) tied += weight[i] == edge;
        unsigned rank = before(tied, all);
        float total = 0.f;
        for (int i = 0; i < EACH; ++i) {
            bool gone = static_cast<long long>(weight[i]) <= below;
            if (weight[i] == edge) gone |= static_cast<double>(mass + edge * ++rank) <= limit;
            if (gone && (best & 0xffffffffull) != static_cast<unsigned>(code(i))) likely[i] = 0.f;
            total += likely[i];
        }
        total = together(total, board.floats, Sum());
        for (int i = 0; i < EACH; ++i) weight[i] = quantized(likely[i] / total);
    }

    // The code that these logits and 32 random bits give; of `codes` ones, the logits beyond are -infinity.
    __device__ int draw(const float (&logit)[EACH], const DrawSettings& settings, unsigned word, int codes) const {
        if (settings.greedy) {
            unsigned long long best = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) best = Largest()(best, static_cast<unsigned long long>(key_of(logit[i])) << 32 | (0xffffffffu - code(i)));
            return static_cast<int>(0xffffffffu - static_cast<unsigned>(together(best, board.longs, Largest())));
        }
        float scaled[EACH], likely[EACH], top = -INFINITE, total = 0.f;
        unsigned key[EACH], weight[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            scaled[i] = __fdiv_rn(logit[i], settings.temperature);
            key[i] = key_of(logit[i]);
            top = fmaxf(top, scaled[i]);
        }
        if (thread == 0) board.code = codes - 1;
        top = together(top, board.floats, Largest());
        const int k = settings.top_k > 0 ? min(settings.top_k, codes) : codes;
        const unsigned threshold = k < codes ? kth_largest(key, k) : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) likely[i] = key[i] >= threshold ? expf(scaled[i] - top) : 0.f, total += likely[i];
        total = together(total, board.floats, Sum());
#pragma unroll
        for (int i = 0; i < EACH; ++i) weight[i] = quantized(likely[i] / total);
        if (settings.top_p < 1.f) keep_nucleus(likely, weight, settings.top_p);
        unsigned local = 0, all = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) local += weight[i];
        unsigned reached = before(local, all);
        const unsigned place = __umulhi(word, all);
        if (place >= reached && place < reached + local) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (place >= reached && place < reached + weight[i]) board.code = code(i);
                reached += weight[i];
            }
        }
        sync();
        return board.code;
    }
};

}  // namespace
