// The end of kernels for a few rows: sums of several warps become results, with bias, residual or an activation.
//
// By macro, besides that of experts.cuh: DTYPE, OUT, ACTIVATION (0 for none).
#pragma once
#include "activation.cuh"
#include "experts.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP_SIZE;
constexpr bool GATED = has_gate(ACTIVATION);

// Where a team of `parts` warps puts what it has summed: OUTPUTS neighbours of every row. GATED: of as many gates and ups.
template <int OUTPUTS>
struct Results {
  Assignment work;
  const DTYPE *given_bias, *residual;
  OUT* out;
  int outputs, parts;
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
    if (GATED || at >= work.rows * OUTPUTS || output >= outputs) return 0.0f;
    const DTYPE* bias = work.tensor(given_bias, BIAS);  // a task's is looked up when it is needed: no registers until then
    const float shift = bias ? to_float(bias[output]) : 0.0f;
    if (EXPERTS || !residual) return shift;
    return shift + to_float(residual[(int64_t)(at / OUTPUTS) * outputs + output]);
  }

  // Of gates and ups, before the team meets.
  DEVICE const DTYPE* bias_of_gates() const { return GATED ? work.tensor(given_bias, BIAS) : nullptr; }

  // sum_of(side, row, column): of all warps; side 1 is the ups. added_to_mine: added(first, mine), and bias: bias_of_gates(), both
  // loaded when it was time.
  template <class SumOf>
  DEVICE void write(SumOf sum_of, int first, float added_to_mine, const DTYPE* bias) const {
#pragma unroll 1
    for (int i = mine; i < work.rows * OUTPUTS; i += parts * WARP_SIZE) {
      const int row = i / OUTPUTS, column = i % OUTPUTS, output = first + column;
      if (output >= outputs) continue;
      float y = sum_of(0, row, column);
      if (GATED) {
        float up = sum_of(1, row, column);
        if (bias) {
          y += to_float(bias[output]);
          up += to_float(bias[outputs + output]);
        }
        y = gated<ACTIVATION>(to_float(from_float<DTYPE>(y)), to_float(from_float<DTYPE>(up)));
      } else {
        y += i == mine ? added_to_mine : added(first, i);
        if (ACTIVATION != 0) {
          y = to_float(from_float<DTYPE>(y));
          y = gated<ACTIVATION>(y, y);
        }
      }
      out[(int64_t)work.place(row) * outputs + output] = from_float<OUT>(y);
    }
  }
};
