// The arguments of the kernels of the codec's residual units, and how their blocks share the tiles of a launch. Include this file after
// wgmma.cuh.
#pragma once

namespace {

enum Parameter { BIAS1, FREQUENCY1, GAIN1, BIAS2, FREQUENCY2, GAIN2, PARAMETERS };

struct Args {
    const bf16 *a, *residual;
    const char* weights;                         // packed by kernels/codec_cuda.py
    const float* parameters[PARAMETERS];         // [channels]; the last two are null without `active`
    bf16 *raw, *active;                          // null if not wanted
    const int* ends;                             // null if all rows have `steps` steps
    long long active_stride;                     // values from a row of `active` to the next
    int rows, steps, lead, dilation, open_ends;  // open_ends: steps after an end may be left unwritten
};

struct TensorArgs {
    Args p;
    TensorMap map;  // of `a`, for boxes of 32 channels x the steps of a tile and the history that its taps read
};

__device__ __forceinline__ float snake(float x, float frequency, float gain) {
    const float sine = fast_sine(x * frequency);
    return x + gain * sine * sine;
}

// The tiles (each of STEPS steps) that one of a block's GROUPS computes, in order: its share of the tiles that begin before the end of their
// row, or with `after_end` its share of the other tiles. In each turn a block takes one tile for each group; in its last turn the last
// groups may get none.
template <int STEPS, int GROUPS = 1>
struct Tiles {
    const Args& p;
    const bool after_end;
    int row = -1, start, end = 0, limit = 0;  // end: activations are zero from this step; limit: the row has no such tile from this step on
    int item = 0;                             // number of tiles before this one

    __device__ __forceinline__ explicit Tiles(const Args& arguments, int group = 0, bool others = false)
        : p(arguments), after_end(others), start((group * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * STEPS) {
        settle();
    }
    __device__ __forceinline__ bool found() const { return row < p.rows; }
    __device__ __forceinline__ void next() {
        item += 1, start += GROUPS * static_cast<int>(gridDim.x) * STEPS;
        settle();
    }

private:
    __device__ __forceinline__ static int whole(int steps) { return (steps + STEPS - 1) / STEPS * STEPS; }
    // Moves to the row that has the tile, if the current row has too few tiles.
    __device__ __forceinline__ void settle() {
        while (start >= limit && ++row < p.rows) {
            start -= limit;
            end = p.ends == nullptr ? p.steps : p.ends[row];
            limit = whole(after_end ? p.steps : end);
            if (after_end) start += whole(end);
        }
    }
};

}  // namespace
