// The end of kernels for a few rows: sums of several warps become results, with bias, residual or a gate.
//
// By macro: DTYPE, OUT, ACTIVATION (0 for none).
#pragma once
#include "activation.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP_SIZE;
constexpr bool GATED = ACTIVATION != 0;

// Where a team of `parts` warps puts what it has summed: OUTPUTS neighbours of every row. GATED: of as many gates and ups.
template <int OUTPUTS>
struct Results {
  const DTYPE *bias, *residual;
  OUT* out;
  int rows, outputs, parts;
  int mine;  // this lane's first of the team's rows * OUTPUTS results, which every (parts * 32)-th one follows

  // Until all warps of the team are here; of the block, where it is one team, or has several of more than a warp.
  DEVICE void meet() const {
#ifndef BUG_NO_BARRIER
    if (parts == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
#endif
  }

  // To result `at` of a team whose first output is `first`.
  DEVICE float added(int first, int at) const {
    const int output = first + at % OUTPUTS;
    if (GATED || at >= rows * OUTPUTS || output >= outputs) return 0.0f;
    const float shift = bias ? to_float(bias[output]) : 0.0f;
    return residual ? shift + to_float(residual[(int64_t)(at / OUTPUTS) * outputs + output]) : shift;
  }

  // sum_of(side, row, column): of all warps; side 1 is the ups. added_to_mine: added(first, mine), loaded when it was time.
  template <class SumOf>
  DEVICE void write(SumOf sum_of, int first, float added_to_mine) const {
#pragma unroll 1
    for (int i = mine; i < rows * OUTPUTS; i += parts * WARP_SIZE) {
      const int row = i / OUTPUTS, column = i % OUTPUTS, output = first + column;
      if (output >= outputs) continue;
      float y = sum_of(0, row, column);
      if (GATED) {
        float up = sum_of(1, row, column);
        if (bias) {
          y += to_float(bias[output]);
          up += to_float(bias[outputs + output]);
        }
        y = activate<ACTIVATION>(to_float(from_float<DTYPE>(y))) * to_float(from_float<DTYPE>(up));
      } else {
        y += i == mine ? added_to_mine : added(first, i);
      }
      out[(int64_t)row * outputs + output] = from_float<OUT>(y);
    }
  }
};
