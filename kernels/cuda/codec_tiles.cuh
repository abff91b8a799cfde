// The arguments of the kernels of the codec's residual units, and how their blocks share the tiles of a launch. Include it after wgmma.cuh.
#pragma once

namespace {

enum Parameter { BIAS1, FREQUENCY1, GAIN1, BIAS2, FREQUENCY2, GAIN2, PARAMETERS };

struct Args {
    const bf16 *a, *residual;
    const char* weights;                         // as they lie in shared memory, in the order of use
    const float* parameters[PARAMETERS];         // [channels]; the last two are null without `active`
    bf16 *raw, *active;                          // null where not wanted
    const int* ends;                             // null: all rows are whole
    long long active_stride;                     // values from a row of `active` to the next
    int rows, steps, lead, dilation, open_ends;  // open_ends: steps after an end may be left unwritten
};

struct TensorArgs {
    Args p;
    TensorMap map;  // of `a`: boxes of 32 channels x the steps of a tile with what its taps reach back for
};

__device__ __forceinline__ float snake(float x, float frequency, float gain) {
    const float sine = fast_sine(x * frequency);
    return x + gain * sine * sine;
}

// The tiles of STEPS steps of one of a block's GROUPS, in order: its share of those with steps in front of their row's end or, with
// `behind`, of the others. In each turn a block takes one for each group; in its last one there may be none for the last groups.
template <int STEPS, int GROUPS = 1>
struct Tiles {
    const Args& p;
    const bool behind;
    int row = -1, start, end = 0, limit = 0;  // what is activated is zero from `end` on; limit: where those tiles of the row end
    int item = 0;                             // tiles before this one

    __device__ __forceinline__ explicit Tiles(const Args& arguments, int group = 0, bool others = false)
        : p(arguments), behind(others), start((group * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * STEPS) {
        settle();
    }
    __device__ __forceinline__ bool found() const { return row < p.rows; }
    __device__ __forceinline__ void next() {
        item += 1, start += GROUPS * static_cast<int>(gridDim.x) * STEPS;
        settle();
    }

private:
    __device__ __forceinline__ static int whole(int steps) { return (steps + STEPS - 1) / STEPS * STEPS; }
    // Goes on to the row that has the tile, where this one has too few.
    __device__ __forceinline__ void settle() {
        while (start >= limit && ++row < p.rows) {
            start -= limit;
            end = p.ends == nullptr ? p.steps : p.ends[row];
            limit = whole(behind ? p.steps : end);
            if (behind) start += whole(end);
        }
    }
};

}  // namespace
