// Persistent kernels of sizes for tests: tests/support/persistent_kit.py builds them for the emulator and for a GPU.
#include "persistent.cuh"
#include "persistent_talker.cuh"

#define PREDICTORS(NAME, BYTES, ...)                        \
    PREDICTOR(NAME##_1, BYTES, false, __VA_ARGS__, 1)       \
    PREDICTOR(NAME##_2, BYTES, false, __VA_ARGS__, 2)       \
    PREDICTOR(NAME##_1_tested, BYTES, true, __VA_ARGS__, 1) \
    PREDICTOR(NAME##_2_tested, BYTES, true, __VA_ARGS__, 2)
#define TALKERS(NAME, BYTES, ...)                           \
    TALKER(NAME##_1, BYTES, false, __VA_ARGS__, 1, 1)       \
    TALKER(NAME##_2, BYTES, false, __VA_ARGS__, 2, 2)       \
    TALKER(NAME##_1_tested, BYTES, true, __VA_ARGS__, 1, 1) \
    TALKER(NAME##_2_tested, BYTES, true, __VA_ARGS__, 2, 2)

// width, inner, heads, kv heads, head, codes, layers, codebooks behind; blocks, warps, tiles a chunk, stages of the ring.
PREDICTORS(persistent_tiny, 32768, 64, 96, 4, 2, 32, 48, 2, 4, 4, 2, 1, 3)
PREDICTORS(persistent_golden, 65536, 40, 80, 4, 2, 32, 256, 2, 15, 4, 2, 2, 4)
TALKERS(persistent_talker_tiny, 32768, 48, 80, 4, 2, 32, 8, 1, 1, 4, 2, 1, 3)
TALKERS(persistent_talker_golden, 65536, 40, 96, 4, 2, 32, 8, 1, 1, 4, 2, 2, 4)

#ifdef EMULATED  // sizes that take long to build for a GPU and show nothing more there
PREDICTORS(persistent_odd, 49152, 72, 124, 6, 2, 16, 60, 3, 3, 6, 4, 3, 2)
PREDICTORS(persistent_shared, 49152, 96, 64, 2, 2, 64, 100, 2, 5, 8, 2, 2, 3)
PREDICTOR(persistent_least_1, 16384, false, 32, 32, 2, 1, 16, 32, 1, 2, 2, 1, 1, 2, 1)
PREDICTOR(persistent_least_1_tested, 16384, true, 32, 32, 2, 1, 16, 32, 1, 2, 2, 1, 1, 2, 1)
TALKERS(persistent_talker_odd, 49152, 72, 124, 6, 2, 16, 8, 1, 1, 6, 4, 3, 2)
TALKERS(persistent_talker_shared, 49152, 96, 64, 2, 2, 64, 8, 1, 1, 8, 2, 2, 3)
#endif
