// The parts of draws that kernels share, with the results that kernels/sampler.py defines: the random word, top-k, top-p and the choice of
// a code, by all warps of a block (sampler.cu) or by some of them (persistent.cuh). Probabilities are whole multiples of 2^-30, so that
// their sums are exact in any order.
#pragma once
#include "common.cuh"

namespace {

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

__device__ __forceinline__ unsigned ordered(float v) {  // integers in the order of the floats; -0 counts as 0
    const unsigned bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ unsigned quantized(float share) { return __float2uint_rn(share * 1073741824.f); }

struct Add {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    template <typename T>
    __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};

constexpr int WHOLE_BLOCK = 0;

// A team of WARPS warps with a separate barrier, or of all warps of a block. Thread i holds the logits of the EACH codes from i * EACH.
template <int WARPS, int EACH>
struct Team {
    static constexpr int MAX_WARPS = WARPS == WHOLE_BLOCK ? 32 : WARPS;
    struct Board {
        unsigned long long longs[MAX_WARPS];
        unsigned counts[2][MAX_WARPS], sums[MAX_WARPS];
        float floats[MAX_WARPS];
        int code;
    };
    static_assert(32 * EACH < 1024, "three counts of a warp in one word");

    Board& board;
    const int thread, barrier;

    __device__ void sync() const {
        if constexpr (WARPS == WHOLE_BLOCK) __syncthreads();
        else sync_some(barrier, WARPS * 32);
    }
    __device__ int code(int i) const { return thread * EACH + i; }

    template <typename Visit>
    __device__ void each_warp(int from, Visit visit) const {
        if constexpr (WARPS == WHOLE_BLOCK) {
            for (int i = from; i < blockDim.x / 32; ++i) visit(i);
        } else {
#pragma unroll
            for (int i = from; i < WARPS; ++i) visit(i);
        }
    }

    // Joins the values of all threads; `places` has room for one value per warp.
    template <typename T, typename Join>
    __device__ T together(T v, T* places, Join join) const {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) v = join(v, __shfl_xor_sync(0xffffffffu, v, step));
        sync();
        if (thread % 32 == 0) places[thread / 32] = v;
        sync();
        v = places[0];
        each_warp(1, [&](int i) { v = join(v, places[i]); });
        return v;
    }

    // The sum of the values of the threads before this one; `all`: the sum of all threads' values.
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
        each_warp(0, [&](int i) { earlier += i < thread / 32 ? board.sums[i] : 0, all += board.sums[i]; });
        return earlier + scan - mine;
    }

    // The code with the greatest logit, the first one if several are equal.
    __device__ int likeliest(const float (&logit)[EACH]) const {
        unsigned long long best = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) best = Max()(best, static_cast<unsigned long long>(ordered(logit[i])) << 32 | (0xffffffffu - code(i)));
        return static_cast<int>(0xffffffffu - static_cast<unsigned>(together(best, board.longs, Max())));
    }

    // The k-th largest of all keys, found two bits per round. The bits below LOWEST must be equal in all keys.
    template <int LOWEST>
    __device__ unsigned kth_largest(const unsigned (&key)[EACH], int k) const {
        unsigned threshold = 0;
#pragma unroll 1
        for (int bit = 30; bit >= LOWEST; bit -= 2) {
            const unsigned step = 1u << bit, one = threshold + step, two = one + step, three = two + step;
            unsigned counts = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) counts += (key[i] >= one) + ((key[i] >= two) << 10) + ((key[i] >= three) << 20);
            counts = __reduce_add_sync(0xffffffffu, counts);
            unsigned* places = board.counts[(bit / 2) & 1];
            if (thread % 32 == 0) places[thread / 32] = counts;
            sync();
            int above_one = 0, above_two = 0, above_three = 0;
            each_warp(0, [&](int i) {
                const unsigned c = places[i];
                above_one += c & 1023, above_two += (c >> 10) & 1023, above_three += c >> 20;
            });
            threshold = above_three >= k ? three : above_two >= k ? two : above_one >= k ? one : threshold;
        }
        return threshold;
    }

    // Computes the weights of the codes that top-p keeps. A code is removed if it and all less likely ones together have 1 - p or less; the
    // likeliest code is never removed.
    __device__ void keep_nucleus(float (&likely)[EACH], unsigned (&weight)[EACH], float top_p) const {
        unsigned long long local = 0;
        for (int i = 0; i < EACH; ++i) local += weight[i];
        const double limit = (1.0 - static_cast<double>(top_p)) * static_cast<double>(together(local, board.longs, Add()));
        long long below = -1;
        for (int bit = 30; bit >= 0; --bit) {
            const long long higher = below + (1ll << bit);
            local = 0;
            for (int i = 0; i < EACH; ++i) local += static_cast<long long>(weight[i]) <= higher ? weight[i] : 0;
            if (static_cast<double>(together(local, board.longs, Add())) <= limit) below = higher;
        }
        unsigned long long mass = 0, edge = 0, best = 0;
        for (int i = 0; i < EACH; ++i) {
            const bool gone = static_cast<long long>(weight[i]) <= below;
            mass += gone ? weight[i] : 0;
            if (!gone) edge = Max()(edge, 0xffffffffull - weight[i]);
            best = Max()(best, static_cast<unsigned long long>(weight[i]) << 32 | code(i));
        }
        mass = together(mass, board.longs, Add());
        edge = 0xffffffffull - together(edge, board.longs, Max());
        best = together(best, board.longs, Max());
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
        total = together(total, board.floats, Add());
        for (int i = 0; i < EACH; ++i) weight[i] = quantized(likely[i] / total);
    }

    // Draws a code and writes it to the board. 32 random bits (`word`) select a place in the sum of all weights, and the drawn code is the
    // one whose weight contains this place. Before the call, the board must have the last code of the vocabulary, which remains if all
    // weights are zero; after it, call `sync`.
    __device__ void choose(const unsigned (&weight)[EACH], unsigned word) const {
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
    }
};

// Writes 8 elements from `at` of a slot's next input: the rounded sum of its codes' rows in `table`, plus a row of text.
// row_of: returns the row in `table` of the code that the slot has for a codebook.
template <int UNROLL, typename Row>
__device__ __forceinline__ void write_next_input(bf16* input, const bf16* table, const bf16* text, int width, int at, int codebooks, Row row_of) {
    float sum[8] = {};
#pragma unroll UNROLL
    for (int book = 0; book < codebooks; ++book) {
        const uint4 v = *reinterpret_cast<const uint4*>(table + row_of(book) * width + at);
        const uint32_t four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[2 * i] += widen(four[i]).x, sum[2 * i + 1] += widen(four[i]).y;
    }
    const uint4 v = *reinterpret_cast<const uint4*>(text + at);
    const uint32_t four[4] = {v.x, v.y, v.z, v.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = narrow(rounded(sum[2 * i]) + widen(four[i]).x, rounded(sum[2 * i + 1]) + widen(four[i]).y);
    *reinterpret_cast<uint4*>(input + at) = make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace
