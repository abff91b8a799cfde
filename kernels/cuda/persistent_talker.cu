// The kernels of persistent_talker.cuh; kernels/lm_persistent.py says which model takes which, with how many blocks and how much shared memory.
#include "persistent_talker.cuh"

#define TALKER(NAME, BYTES, TESTED, ...)                                                                           \
    extern "C" __global__ void __launch_bounds__(Shape<__VA_ARGS__>::THREADS + 32, 1) NAME(const TalkArgs p) {     \
        static_assert(sizeof(TalkShared<Shape<__VA_ARGS__>>) <= BYTES, "more shared memory than the launch asks for"); \
        talk<Shape<__VA_ARGS__>, TESTED>(p);                                                                       \
    }
#define TALKERS(NAME, BYTES, ...)                           \
    TALKER(NAME##_1, BYTES, false, __VA_ARGS__, 1, 1)       \
    TALKER(NAME##_2, BYTES, false, __VA_ARGS__, 2, 2)       \
    TALKER(NAME##_1_tested, BYTES, true, __VA_ARGS__, 1, 1) \
    TALKER(NAME##_2_tested, BYTES, true, __VA_ARGS__, 2, 2)

// width, inner, heads, kv heads, head; three that only a predictor has; blocks, warps, tiles a chunk, stages of the ring; rows.
TALKERS(persistent_talker_published, 232448, 1024, 3072, 16, 8, 128, 8, 1, 1, 128, 8, 4, 8)
