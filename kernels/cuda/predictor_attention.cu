// wheel: sm_90a compute_90
// Attention of the code predictor for one new position (1 to 15): norm and rotary embedding of q and k, append, and attention over all
// positions so far.
//
// One warp computes a (row, kv head) with its two query heads. Work that each query head needs separately is divided by heads: half-warp h
// computes query head h. Work that the heads share is divided by positions: half-warp h computes those of parity h. Lane c of a half owns
// the dimensions 8c to 8c+7 of the head's 128. Several lanes need a score and its exponential, but only one computes them: lane c of half h
// has those of query head c / 8 and position 2 * (c % 8) + h.
#include "common.cuh"

namespace {

constexpr int D = 128, SPAN = 16, GROUP = 2, WARPS = 4;

struct Args {
    const bf16 *qkv, *q_norm, *k_norm, *table;  // table: [positions, 64 cosines | 64 sines]
    bf16 *k_cache, *v_cache, *out;              // caches: [rows, kv_heads, SPAN, D]
    int rows, kv_heads, position;
    float eps, scale;
};

__device__ __forceinline__ float half_sum(float v) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 u = widen(x[i]), v = widen(y[i]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
}

__device__ __forceinline__ uint4 shuffled(const uint4& v, int step) {
    return make_uint4(__shfl_xor_sync(0xffffffffu, v.x, step), __shfl_xor_sync(0xffffffffu, v.y, step),
                      __shfl_xor_sync(0xffffffffu, v.z, step), __shfl_xor_sync(0xffffffffu, v.w, step));
}

// RMSNorm of a head that the half-warp holds, then rotary embedding; `sine` already has the sign of the crossed products. Rounds at the
// same places as the reference.
__device__ __forceinline__ uint4 normed_rope(const uint4& v, const uint4& w, const uint4& cosine, const uint4& sine, float eps) {
    const float rstd = rsqrtf(half_sum(dot(v, v)) * (1.f / D) + eps);
    const uint4 h = make_uint4(normalise(v.x, rstd, w.x), normalise(v.y, rstd, w.y), normalise(v.z, rstd, w.z), normalise(v.w, rstd, w.w));
    const uint4 other = shuffled(h, 8);
    const uint32_t a[4] = {h.x, h.y, h.z, h.w}, b[4] = {other.x, other.y, other.z, other.w};
    const uint32_t c[4] = {cosine.x, cosine.y, cosine.z, cosine.w}, s[4] = {sine.x, sine.y, sine.z, sine.w};
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 straight = widen(times(a[i], c[i])), crossed = widen(times(b[i], s[i]));
        r[i] = narrow(straight.x + crossed.x, straight.y + crossed.y);
    }
    return make_uint4(r[0], r[1], r[2], r[3]);
}

// Adds a and b over two lanes that differ in `bit`: lanes without that bit get the sum of a, the others the sum of b.
__device__ __forceinline__ float shared_sum(float a, float b, int lane, int bit) {
    const bool upper = lane & bit;
    return (upper ? b : a) + __shfl_xor_sync(0xffffffffu, upper ? a : b, bit);
}

// a / b for b >= 1 and `inverse` = 1 / b. With two corrections the result is rounded like that of a division, unless a remainder is too
// small.
__device__ __forceinline__ float quotient(float a, float b, float inverse) {
    float q = a * inverse;
    q = fmaf(fmaf(-q, b, a), inverse, q);
    return fmaf(fmaf(-q, b, a), inverse, q);
}

// A warp computes one kv head of every n-th row, one after the other. After it has read the keys of a row, it starts to copy those of its
// next row to the same place in shared memory, and likewise the values. Each thread copies the data that it reads itself. PAIRS: number of
// pairs of the positions before the new one.
template <int PAIRS>
__device__ __forceinline__ void attention(const Args& p) {
    constexpr int THREADS = WARPS * 32;
    __shared__ uint4 memory[3 + 2 * PAIRS][THREADS];
    launch_dependents();
    // The shuffle shows the compiler that all lanes have the same number.
    const int lane = threadIdx.x % 32, half = lane / 16, c = lane % 16, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int kv_head = blockIdx.y, stride = gridDim.x * WARPS;
    uint4 *const query = memory[0] + threadIdx.x, *const k = query + 2 * THREADS, *const v = k + (PAIRS + 1) * THREADS;
    int row = blockIdx.x * WARPS + warp;
    if (row >= p.rows) return;
    wait_for_previous();
    const long long width = (GROUP + 2) * p.kv_heads * D, cache_width = p.kv_heads * SPAN * D;
    const bf16* q_from = p.qkv + row * width + (kv_head * GROUP + half) * D + c * 8;
    const bf16 *k_from = p.qkv + row * width + (GROUP * p.kv_heads + kv_head) * D + c * 8, *v_from = k_from + p.kv_heads * D;
    bf16* keys = p.k_cache + row * cache_width + (kv_head * SPAN + half) * D + c * 8;  // of the positions with this half's parity
    bf16* values = p.v_cache + row * cache_width + (kv_head * SPAN + half) * D + c * 8;
    bf16* target = p.out + (static_cast<long long>(row) * p.kv_heads + kv_head) * GROUP * D + half * D + c * 8;
    const auto there = [&](int i) { return i < PAIRS - 1 || 2 * i + half < p.position; };  // half 1 has one less if `position` is odd
    const auto fetch_keys = [&] {
        copy16(query, q_from), copy16(query + THREADS, k_from);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            if (there(i)) copy16(k + i * THREADS, keys + 2 * i * D);
    };
    const auto fetch_values = [&] {
        copy16(v - THREADS, v_from);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)
            if (there(i)) copy16(v + i * THREADS, values + 2 * i * D);
    };
    fetch_keys(), copies_commit();
    fetch_values(), copies_commit();

    const bf16* angles = p.table + p.position * D + c % 8 * 8;
    const uint32_t sign = c < 8 ? 0x80008000u : 0;
    for (; row < p.rows; row += stride) {
        const bool more = row + stride < p.rows;
        const uint4 wq = *reinterpret_cast<const uint4*>(p.q_norm + c * 8), wk = *reinterpret_cast<const uint4*>(p.k_norm + c * 8);
        const uint4 cosine = *reinterpret_cast<const uint4*>(angles), s0 = *reinterpret_cast<const uint4*>(angles + D / 2);
        const uint4 sine = make_uint4(s0.x ^ sign, s0.y ^ sign, s0.z ^ sign, s0.w ^ sign);
        copies_wait_but_one();
        const uint4 mine = normed_rope(*query, wq, cosine, sine, p.eps), theirs = shuffled(mine, 16);
        const uint4 key = normed_rope(query[THREADS], wk, cosine, sine, p.eps);
        const uint4 q[GROUP] = {half == 0 ? mine : theirs, half == 0 ? theirs : mine};
        const float newest[GROUP] = {half_sum(dot(q[0], key)) * p.scale, half_sum(dot(q[1], key)) * p.scale};
        float s[PAIRS];
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint4 one = k[i * THREADS];  // undefined if the position does not exist; its score is then ignored
            s[i] = shared_sum(dot(q[0], one), dot(q[1], one), c, 8);
        }
        if (half == 0) store16(keys + p.position * D, key);
        q_from += stride * width, k_from += stride * width, keys += stride * cache_width;
        if (more) fetch_keys();
        copies_commit();
#pragma unroll
        for (int bit = 4; bit > 0; bit /= 2)
#pragma unroll
            for (int i = 0; i < bit && i < PAIRS; ++i) {
                if (i + bit < PAIRS) s[i] = shared_sum(s[i], s[i + bit], c, bit);
                else s[i] += __shfl_xor_sync(0xffffffffu, s[i], bit);
            }
        const float score = 2 * (c % 8) + half < p.position ? s[0] * p.scale : -INFINITE, latest = c < 8 ? newest[0] : newest[1];
        float top = fmaxf(latest, score);
#pragma unroll
        for (int step = 1; step < 32; step = step == 4 ? 16 : 2 * step) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        const float share = __expf(score - top), first = half == 0 ? __expf(latest - top) : 0.f;  // one half counts the newest position

        float total[GROUP], mixed[GROUP][8];
        copies_wait_but_one();
        const uint4 value = v[-THREADS];
        const uint32_t fresh[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            total[h] = __shfl_sync(0xffffffffu, first, h * 8, 16);
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                const float2 f = widen(fresh[d]);
                mixed[h][2 * d] = total[h] * f.x, mixed[h][2 * d + 1] = total[h] * f.y;
            }
        }
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint4 one = there(i) ? v[i * THREADS] : make_uint4(0, 0, 0, 0);
            const uint32_t at[4] = {one.x, one.y, one.z, one.w};
#pragma unroll
            for (int h = 0; h < GROUP; ++h) {
                const float part = __shfl_sync(0xffffffffu, share, h * 8 + i, 16);
                total[h] += part;
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    const float2 f = widen(at[d]);
                    mixed[h][2 * d] = fmaf(part, f.x, mixed[h][2 * d]);
                    mixed[h][2 * d + 1] = fmaf(part, f.y, mixed[h][2 * d + 1]);
                }
            }
        }
        if (half == 1) store16(values + (p.position - 1) * D, value);
        v_from += stride * width, values += stride * cache_width;
        if (more) fetch_values();
        copies_commit();
        const float sum = shared_sum(total[0], total[1], lane, 16), inverse = 1.f / sum;
        float m[8];
#pragma unroll
        for (int d = 0; d < 8; ++d) m[d] = quotient(shared_sum(mixed[0][d], mixed[1][d], lane, 16), sum, inverse);
        store16(target, make_uint4(narrow(m[0], m[1]), narrow(m[2], m[3]), narrow(m[4], m[5]), narrow(m[6], m[7])));
        target += static_cast<long long>(stride) * GROUP * p.kv_heads * D;
    }
}

}  // namespace

// For heads of 128, two query heads per kv head, and caches of 16 positions. kernels/lm_cuda.py launches them.
#define KERNEL(PAIRS) \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 4) predictor_attention_##PAIRS(const Args p) { attention<PAIRS>(p); }
KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6) KERNEL(7) KERNEL(8)
