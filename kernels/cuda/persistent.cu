// wheel: sm_90a compute_90
// The kernels of persistent.cuh. kernels/lm_persistent.py lists the kernel of each model, with its blocks and shared memory.
#include "persistent.cuh"

PREDICTOR(persistent_published_1, 232448, false, PUBLISHED_PREDICTOR, 1)
PREDICTOR(persistent_published_2, 232448, false, PUBLISHED_PREDICTOR, 2)
