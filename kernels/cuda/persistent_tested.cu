// The kernels into which tests inject faults; wheels do not contain them.
#include "persistent.cuh"
#include "persistent_talker.cuh"

PREDICTOR(persistent_published_1_tested, 232448, true, PUBLISHED_PREDICTOR, 1)
PREDICTOR(persistent_published_2_tested, 232448, true, PUBLISHED_PREDICTOR, 2)
TALKER(persistent_talker_published_1_tested, 232448, true, PUBLISHED_TALKER, 1, 1)
TALKER(persistent_talker_published_2_tested, 232448, true, PUBLISHED_TALKER, 2, 2)
