// Attention of the code predictor for one new position (2..15): q/k norm, rope, append, at most 16 positions in registers.
//
// One warp a (row, kv head) with its two query heads. Half-warp h works for query head h where heads differ, and on positions of
// parity h where they are shared; lane c of a half owns dimensions 8c..8c+7 of the head's 128.
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

// RMSNorm over a head that the half-warp holds, then rope; every rounding is the reference's.
__device__ __forceinline__ uint4 normed_rope(const uint4& v, const uint4& w, const uint4& cosine, const uint4& sine, bool upper, float eps) {
    const float rstd = rsqrtf(half_sum(dot(v, v)) * (1.f / D) + eps);
    const uint4 h = make_uint4(normalise(v.x, rstd, w.x), normalise(v.y, rstd, w.y), normalise(v.z, rstd, w.z), normalise(v.w, rstd, w.w));
    const uint4 other = shuffled(h, 8);
    const uint32_t a[4] = {h.x, h.y, h.z, h.w}, b[4] = {other.x, other.y, other.z, other.w};
    const uint32_t c[4] = {cosine.x, cosine.y, cosine.z, cosine.w}, s[4] = {sine.x, sine.y, sine.z, sine.w};
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 straight = widen(times(a[i], c[i])), crossed = widen(times(b[i], s[i]));
        r[i] = upper ? narrow(straight.x + crossed.x, straight.y + crossed.y) : narrow(straight.x - crossed.x, straight.y - crossed.y);
    }
    return make_uint4(r[0], r[1], r[2], r[3]);
}

// SKIP: absent positions cost no arithmetic, which pays once there are many rows; the sums are the same bits.
template <bool SKIP>
__device__ __forceinline__ void attention(const Args& p) {
    launch_dependents();
    const int lane = threadIdx.x % 32, half = lane / 16, c = lane % 16, task = blockIdx.x * WARPS + threadIdx.x / 32;
    const int row = task / p.kv_heads, kv_head = task % p.kv_heads, width = (GROUP + 2) * p.kv_heads * D;
    const bool upper = c >= 8;
    const uint4 wq = *reinterpret_cast<const uint4*>(p.q_norm + c * 8), wk = *reinterpret_cast<const uint4*>(p.k_norm + c * 8);
    const uint4 cosine = *reinterpret_cast<const uint4*>(p.table + p.position * D + (c % 8) * 8);
    const uint4 sine = *reinterpret_cast<const uint4*>(p.table + p.position * D + D / 2 + (c % 8) * 8);
    wait_for_previous();
    if (row >= p.rows) return;
    const bf16* base = p.qkv + static_cast<long long>(row) * width + c * 8;
    const long long cache = (static_cast<long long>(row) * p.kv_heads + kv_head) * SPAN * D + c * 8;
    const uint4 raw_q = load16(base + (kv_head * GROUP + half) * D);
    const uint4 raw_k = load16(base + (GROUP * p.kv_heads + kv_head) * D);
    const uint4 value = load16(base + ((GROUP + 1) * p.kv_heads + kv_head) * D);
    uint4 k[SPAN / 2], v[SPAN / 2];
#pragma unroll
    for (int i = 0; i < SPAN / 2; ++i) {
        const int j = 2 * i + half;
        if (SKIP && 2 * i >= p.position) continue;
        if (j < p.position) k[i] = load16(p.k_cache + cache + j * D), v[i] = load16(p.v_cache + cache + j * D);
        else k[i] = v[i] = make_uint4(0, 0, 0, 0);
    }
    const uint4 mine = normed_rope(raw_q, wq, cosine, sine, upper, p.eps);
    const uint4 key = normed_rope(raw_k, wk, cosine, sine, upper, p.eps);
    if (half == 0) *reinterpret_cast<uint4*>(p.k_cache + cache + p.position * D) = key;
    else *reinterpret_cast<uint4*>(p.v_cache + cache + p.position * D) = value;
    const uint4 theirs = shuffled(mine, 16);
    const uint4 q[GROUP] = {half == 0 ? mine : theirs, half == 0 ? theirs : mine};

    float score[GROUP][SPAN / 2], newest[GROUP], top[GROUP], total[GROUP], mixed[GROUP][8];
#pragma unroll
    for (int h = 0; h < GROUP; ++h) top[h] = newest[h] = half_sum(dot(q[h], key)) * p.scale;
#pragma unroll
    for (int i = 0; i < SPAN / 2; ++i) {
        if (SKIP && 2 * i >= p.position) continue;
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            const float s = half_sum(dot(q[h], k[i])) * p.scale;
            score[h][i] = 2 * i + half < p.position ? s : -INFINITE;
            top[h] = fmaxf(top[h], score[h][i]);
        }
    }
    const uint32_t fresh[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 16));
        total[h] = half == 0 ? __expf(newest[h] - top[h]) : 0.f;  // one half counts the newest position
#pragma unroll
        for (int d = 0; d < 4; ++d) {
            const float2 f = widen(fresh[d]);
            mixed[h][2 * d] = total[h] * f.x, mixed[h][2 * d + 1] = total[h] * f.y;
        }
    }
#pragma unroll
    for (int i = 0; i < SPAN / 2; ++i) {
        if (SKIP && 2 * i >= p.position) continue;
        const uint32_t at[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        float share[GROUP];
#pragma unroll
        for (int h = 0; h < GROUP; ++h) share[h] = __expf(score[h][i] - top[h]), total[h] += share[h];
#pragma unroll
        for (int d = 0; d < 4; ++d) {
            const float2 f = widen(at[d]);
#pragma unroll
            for (int h = 0; h < GROUP; ++h) {
                mixed[h][2 * d] = fmaf(share[h], f.x, mixed[h][2 * d]);
                mixed[h][2 * d + 1] = fmaf(share[h], f.y, mixed[h][2 * d + 1]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 16);
#pragma unroll
        for (int d = 0; d < 8; ++d) mixed[h][d] = (mixed[h][d] + __shfl_xor_sync(0xffffffffu, mixed[h][d], 16)) / total[h];
    }
    uint32_t r[4];
#pragma unroll
    for (int d = 0; d < 4; ++d) r[d] = half == 0 ? narrow(mixed[0][2 * d], mixed[0][2 * d + 1]) : narrow(mixed[1][2 * d], mixed[1][2 * d + 1]);
    bf16* target = p.out + static_cast<long long>(row) * GROUP * p.kv_heads * D + (kv_head * GROUP + half) * D + c * 8;
    *reinterpret_cast<uint4*>(target) = make_uint4(r[0], r[1], r[2], r[3]);
}

}  // namespace

// Heads of 128, two query heads a kv head, caches of 16 positions; launched by kernels/lm_cuda.py.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3) predictor_attention(const Args p) { attention<false>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3) predictor_attention_skip(const Args p) { attention<true>(p); }
