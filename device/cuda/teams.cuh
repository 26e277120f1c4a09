// Teams of 1, 2, 4 ... 32 neighbouring lanes of a warp, each with several short rows in its registers.
//
// What a row's statistic costs beside its sum, a division or two and a root, every lane of a team would do alike: lane j
// does it for row j, and hands it out.
#pragma once
#include "tree.cuh"

VT_FN float from_lane(float x, int lane) { return __shfl_sync(VT_ALL_LANES, x, lane); }

struct Team {
    int lanes, place, begin;  // its size, this thread's place in it, the warp's lane that it begins at

    VT_MEMBER Team(int shift) : lanes(1 << shift), place((int)threadIdx.x & (lanes - 1)) {
        begin = ((int)threadIdx.x & 31) - place;
    }

    // tree_of_lanes of each row, then 1 / root of the one that this lane looks after: at most `lanes` rows count.
    template <int ROWS> VT_MEMBER float roots(float (&partial)[ROWS], float count, float eps) const {
        for (int m = lanes >> 1; m >= 1; m >>= 1) {
#pragma unroll
            for (int j = 0; j < ROWS; ++j) partial[j] += other_lane(partial[j], m);
        }
        float total = partial[0];
#pragma unroll
        for (int j = 1; j < ROWS; ++j)
            if (place == j) total = partial[j];
        return inverse_root(total, count, eps);
    }

    VT_MEMBER float root_of(float roots, int row) const { return from_lane(roots, begin + row); }
};

// The team's number in a grid of 1-D blocks of whole warps: less than 2^32, which the launcher sees to.
VT_FN unsigned team_number(unsigned block, int shift) { return block * (blockDim.x >> shift) + (threadIdx.x >> shift); }
