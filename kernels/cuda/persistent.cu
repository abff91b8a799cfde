// The kernels of persistent.cuh; kernels/lm_persistent.py says which model takes which, with how many blocks and how much shared memory.
#include "persistent.cuh"

#define KERNEL(NAME, BYTES, TESTED, ...)                                                                       \
    extern "C" __global__ void __launch_bounds__(Shape<__VA_ARGS__>::THREADS + 32, 1) NAME(const Args p) {     \
        static_assert(sizeof(Shared<Shape<__VA_ARGS__>>) <= BYTES, "more shared memory than the launch asks for"); \
        predict<Shape<__VA_ARGS__>, TESTED>(p);                                                                \
    }
#define KERNELS(NAME, BYTES, ...)                        \
    KERNEL(NAME##_1, BYTES, false, __VA_ARGS__, 1)       \
    KERNEL(NAME##_2, BYTES, false, __VA_ARGS__, 2)       \
    KERNEL(NAME##_1_tested, BYTES, true, __VA_ARGS__, 1) \
    KERNEL(NAME##_2_tested, BYTES, true, __VA_ARGS__, 2)

// width, inner, heads, kv heads, head, codes, layers, codebooks behind; blocks, warps, tiles a chunk, stages of the ring; rows.
KERNELS(persistent_published, 232448, 1024, 3072, 16, 8, 128, 2048, 5, 15, 128, 8, 4, 8)
KERNELS(persistent_tiny, 32768, 64, 96, 4, 2, 32, 48, 2, 4, 4, 2, 1, 3)
KERNELS(persistent_golden, 65536, 40, 80, 4, 2, 32, 256, 2, 15, 4, 2, 2, 4)
