// What a token's experts give, added up by their weights: out[t] = residual[t] + the sum over j of weights[t, j] * y[t * taken + j].
//
//   y [tokens * taken, width] DTYPE, weights [tokens, taken] fp32; residual [tokens, width] DTYPE or null, and may be out itself
//   slots [tokens] int64, or null: a token below 0 is padding, whose rows of y nobody has written: its sum is 0
//   out [tokens, width] DTYPE, rounded once; width a multiple of VECTOR. The sum is in fp32, j ascending, before the residual.
//
// VECTOR columns of one token a thread; grid (tokens, columns / (threads * VECTOR)). Blocks are small, so that one token's work is
// on several SMs.
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;
constexpr int AHEAD = 8;  // rows under way

KERNEL __launch_bounds__(64)
expert_sum(const DTYPE* y, const float* weights, const int64_t* slots, const DTYPE* residual, DTYPE* out, int taken, int width) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (column >= width) return;
#endif
  const Index first = (Index)blockIdx.x * taken;
  const DTYPE* rows = y + first * width + column;
  const int64_t at = (int64_t)blockIdx.x * width + column;
  float sums[VECTOR] = {};
  wait_for_previous_kernel();
  let_next_kernel_start();
  Elements before;
  if (residual) before = Elements::load(residual + at);
  if (slots && slots[blockIdx.x] < 0) taken = 0;
#pragma unroll 1
  for (int j = 0; j < taken; j += AHEAD) {
    float factors[AHEAD];
    Elements loaded[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      if (j + k >= taken) break;
      factors[k] = weights[first + j + k];
      loaded[k] = Elements::load(rows + (int64_t)(j + k) * width);
    }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      if (j + k >= taken) break;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sums[i] += factors[k] * to_float(loaded[k].at[i]);
    }
  }
  Elements result;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i)
    result.at[i] = from_float<DTYPE>(residual ? to_float(before.at[i]) + sums[i] : sums[i]);
  result.store(out + at);
}
EXPORT(expert_sum)
