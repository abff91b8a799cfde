// The kernels whose blocks stumble where a test or a benchmark says so; no wheel brings them.
#include "persistent.cuh"
#include "persistent_talker.cuh"

PREDICTOR(persistent_published_1_tested, 232448, true, PUBLISHED_PREDICTOR, 1)
PREDICTOR(persistent_published_2_tested, 232448, true, PUBLISHED_PREDICTOR, 2)
TALKER(persistent_talker_published_1_tested, 232448, true, PUBLISHED_TALKER, 1, 1)
TALKER(persistent_talker_published_2_tested, 232448, true, PUBLISHED_TALKER, 2, 2)
