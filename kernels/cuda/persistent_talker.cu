// wheel: sm_90a compute_90
// The kernels of persistent_talker.cuh. kernels/lm_persistent.py lists the kernel of each model.
#include "persistent_talker.cuh"

TALKER(persistent_talker_published_1, 232448, false, PUBLISHED_TALKER, 1, 1)
TALKER(persistent_talker_published_2, 232448, false, PUBLISHED_TALKER, 2, 2)
