// wheel: sm_90a compute_90
// Skinny GEMM for decoding: y[rows, N] = epilogue(norm(x)[rows, K] @ W[N, K]^T), with up to 32 rows per block.
//
// One block owns NT groups of 8 weight rows over the whole K; its warps split K. Weights do not depend on earlier kernels, so
// BEFORE griddepcontrol.wait (programmatic dependent launch) every lane copies its weights into shared memory, as 16-byte pieces
// that no other lane reads. So the weight stream of a kernel overlaps the arithmetic of the previous kernels. Partial sums of the warps
// are added in warp order, so results do not depend on timing. They depend on the number of rows only by whether it is more than 8.
//
// Inside a 32-wide block of K, lane t of a quad owns the 8 consecutive values at 8t. A and B of the mma have the same
// permutation of k, so plain row-major weights can be read by 16-byte loads and need no packing.
#include "common.cuh"

namespace {

enum Epilogue { PLAIN = 0, RESIDUAL = 1, SWIGLU = 2, BIAS = 3 };

struct Args {
    const bf16* x;          // [rows, K], row stride x_stride
    const bf16* w;          // [N, K]; SWIGLU: [2 * N, K], gate rows then up rows
    const bf16* norm;       // [K] or null
    const bf16* extra;      // RESIDUAL: [rows, N] added to the product; BIAS: [N]
    bf16* y;                // [rows, N]
    bf16* normed;           // [rows, K] copy of norm(x), or null
    const char* ahead;      // bytes that a later kernel will read, which are prefetched into the L2 cache
    long long ahead_bytes;
    int rows, n, x_stride, y_stride, late;
    float eps;
};

__device__ constexpr int padded(int width) { return (width % 32 == 8 || width % 32 == 24) ? width : width + 8; }

template <int NT, int MT, int WARPS, int NB, bool NORM, int EPI>
__device__ __forceinline__ void skinny(const Args& p) {
    char* memory = dynamic_shared();
    constexpr int K = WARPS * NB * 32;
    constexpr int STRIDE = padded(NT * 8);
    uint4* weights = reinterpret_cast<uint4*>(memory);
    float* partial = reinterpret_cast<float*>(memory + WARPS * NT * NB * 32 * 16);
    float* squares = partial + WARPS * MT * 16 * STRIDE;

    if (!p.late) launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int k0 = warp * NB * 32 + t * 8;
    constexpr int GATES = EPI == SWIGLU ? NT / 2 : NT;
    const int n0 = blockIdx.x * GATES * 8;
    uint4* mine = weights + warp * NT * NB * 32 + lane;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
        const int n = nt < GATES ? n0 + nt * 8 + g : p.n + n0 + (nt - GATES) * 8 + g;
        const bf16* row = p.w + static_cast<long long>(n) * K + k0;
#pragma unroll
        for (int b = 0; b < NB; ++b) copy16(mine + (nt * NB + b) * 32, row + b * 32);
    }
    copies_commit();
    uint4 scale[NORM ? NB : 1];
    if constexpr (NORM) {
#pragma unroll
        for (int b = 0; b < NB; ++b) scale[b] = *reinterpret_cast<const uint4*>(p.norm + k0 + b * 32);
    }

    wait_for_previous();
    const int first = blockIdx.y * MT * 16;
    uint4 a[MT][2][NB];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = first + m * 16 + h * 8 + g;
            const bf16* row = p.x + static_cast<long long>(r) * p.x_stride + k0;
#pragma unroll
            for (int b = 0; b < NB; ++b)
                a[m][h][b] = r < p.rows ? load16(row + b * 32) : make_uint4(0, 0, 0, 0);
        }
    constexpr int PAIRS = GATES * 4;
    uint32_t extra = 0;
    if constexpr (EPI == RESIDUAL || EPI == BIAS) {
        static_assert(MT * 16 * PAIRS <= WARPS * 32, "one pair of outputs per thread");
        const int row = first + threadIdx.x / PAIRS, n = n0 + threadIdx.x % PAIRS * 2;
        if (threadIdx.x < MT * 16 * PAIRS && row < p.rows)
            extra = load4(EPI == BIAS ? p.extra + n : p.extra + static_cast<long long>(row) * p.y_stride + n);
    }

    if constexpr (!NORM) __syncthreads();  // keeps the loads before it, because the assembler moves none to after a barrier
    if constexpr (NORM) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (first + m * 16 + h * 8 >= p.rows) continue;
                float sum = 0.f;
#pragma unroll
                for (int b = 0; b < NB; ++b) {
                    const uint32_t v[4] = {a[m][h][b].x, a[m][h][b].y, a[m][h][b].z, a[m][h][b].w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float2 f = widen(v[i]);
                        sum = fmaf(f.x, f.x, fmaf(f.y, f.y, sum));
                    }
                }
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (t == 0) squares[warp * MT * 16 + m * 16 + h * 8 + g] = sum;
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (first + m * 16 + h * 8 >= p.rows) continue;
                float sum = 0.f;
#pragma unroll
                for (int i = 0; i < WARPS; ++i) sum += squares[i * MT * 16 + m * 16 + h * 8 + g];
                const float rstd = rsqrtf(sum * (1.f / K) + p.eps);
#pragma unroll
                for (int b = 0; b < NB; ++b) {
                    uint4& v = a[m][h][b];
                    v.x = normalise(v.x, rstd, scale[b].x);
                    v.y = normalise(v.y, rstd, scale[b].y);
                    v.z = normalise(v.z, rstd, scale[b].z);
                    v.w = normalise(v.w, rstd, scale[b].w);
                    const int r = first + m * 16 + h * 8 + g;
                    if (p.normed != nullptr && blockIdx.x == 0 && r < p.rows)
                        *reinterpret_cast<uint4*>(p.normed + static_cast<long long>(r) * K + k0 + b * 32) = v;
                }
            }
    }

    // Only now, after the activations were loaded, because copies of the next kernel would have delayed their loads.
    if (p.late) launch_dependents();
    if (p.ahead_bytes > 0 && threadIdx.x == 0 && blockIdx.y == 0) {
        const long long chunk = (p.ahead_bytes / gridDim.x + 127) / 128 * 128, from = chunk * blockIdx.x;
        const long long size = min(chunk, p.ahead_bytes - from);
        if (size > 0) prefetch(p.ahead + from, static_cast<uint32_t>(size));
    }
    copies_wait();
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        float acc[NT][4];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[nt][i] = 0.f;
#pragma unroll
        for (int b = 0; b < NB; ++b)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                const uint4 w = mine[(nt * NB + b) * 32];
                mma(acc[nt], a[m][0][b].x, a[m][1][b].x, a[m][0][b].y, a[m][1][b].y, w.x, w.y);
                mma(acc[nt], a[m][0][b].z, a[m][1][b].z, a[m][0][b].w, a[m][1][b].w, w.z, w.w);
            }
        float* slab = partial + (warp * MT + m) * 16 * STRIDE;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            *reinterpret_cast<float2*>(slab + g * STRIDE + nt * 8 + t * 2) = make_float2(acc[nt][0], acc[nt][1]);
            *reinterpret_cast<float2*>(slab + (g + 8) * STRIDE + nt * 8 + t * 2) = make_float2(acc[nt][2], acc[nt][3]);
        }
    }
    __syncthreads();

    for (int i = threadIdx.x; i < MT * 16 * PAIRS; i += WARPS * 32) {
        const int r = i / PAIRS, c = i % PAIRS * 2, row = first + r;
        if (row >= p.rows) continue;
        float2 sum = make_float2(0.f, 0.f), up = make_float2(0.f, 0.f);
#pragma unroll
        for (int wp = 0; wp < WARPS; ++wp) {
            const float* slab = partial + (wp * MT * 16 + r) * STRIDE + c;
            const float2 v = *reinterpret_cast<const float2*>(slab);
            sum.x += v.x, sum.y += v.y;
            if constexpr (EPI == SWIGLU) {
                const float2 u = *reinterpret_cast<const float2*>(slab + GATES * 8);
                up.x += u.x, up.y += u.y;
            }
        }
        const int n = n0 + c;
        if constexpr (EPI == RESIDUAL || EPI == BIAS) {
            const float2 e = widen(extra);
            if constexpr (EPI == RESIDUAL) sum = make_float2(rounded(sum.x) + e.x, rounded(sum.y) + e.y);
            else sum = make_float2(sum.x + e.x, sum.y + e.y);
        }
        if constexpr (EPI == SWIGLU) {
            const float gx = rounded(sum.x), gy = rounded(sum.y);
            sum.x = rounded(gx / (1.f + __expf(-gx))) * rounded(up.x);
            sum.y = rounded(gy / (1.f + __expf(-gy))) * rounded(up.y);
        }
        *reinterpret_cast<uint32_t*>(p.y + static_cast<long long>(row) * p.y_stride + n) = narrow(sum.x, sum.y);
    }
}

}  // namespace

// One kernel for each partition. kernels/lm_cuda.py has the partition of each shape, its grid and its shared memory.
#define KERNEL(NT, MT, WARPS, NB, NORM, EPI)                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) skinny_##NT##_##MT##_##WARPS##_##NB##_##NORM##_##EPI(const Args p) { \
        skinny<NT, MT, WARPS, NB, NORM, EPI>(p);                                                                         \
    }
#define NARROW_AND_WIDE(NT, WARPS, NB, NORM, EPI) KERNEL(NT, 1, WARPS, NB, NORM, EPI) KERNEL(NT, 2, WARPS, NB, NORM, EPI)

NARROW_AND_WIDE(4, 8, 4, 1, 0)
NARROW_AND_WIDE(2, 8, 4, 1, 0)
NARROW_AND_WIDE(6, 8, 4, 1, 2)
KERNEL(4, 1, 16, 4, 1, 0)
KERNEL(4, 1, 16, 4, 1, 2)
KERNEL(1, 1, 8, 8, 0, 1)
NARROW_AND_WIDE(1, 16, 4, 0, 1)
NARROW_AND_WIDE(1, 8, 8, 0, 3)
KERNEL(1, 1, 12, 8, 0, 1)
NARROW_AND_WIDE(1, 16, 6, 0, 1)
KERNEL(1, 1, 16, 12, 0, 1)
