// out [rows, columns] = sums * row_scales[row] * column_scales[column] + bias[column] + residual, rounded once: what is left to
// do behind a matmul of 8-bit codes that knows no scales. columns a multiple of 4.
//
//   sums SUM (int or float), scales fp32, bias and residual DTYPE or null, out OUT; residual may be out itself
//
// Four neighbours a thread; grid (rows, columns / (4 * threads)).
#include "common.cuh"

constexpr int VECTOR = 4;
typedef Vector<SUM, VECTOR> Sums;
typedef Vector<DTYPE, VECTOR> Elements;
typedef Vector<OUT, VECTOR> Results;

KERNEL __launch_bounds__(256)
scale_sums(const SUM* sums, const float* row_scales, const float* column_scales, const DTYPE* bias, const DTYPE* residual,
           OUT* out, int columns) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  if (column >= columns) return;
  const Vector<float, VECTOR> factors = Vector<float, VECTOR>::load(column_scales + column);
  Elements shift;
  if (bias) shift = Elements::load(bias + column);
  wait_for_previous_kernel();
  const int64_t at = (int64_t)blockIdx.x * columns + column;
  const float row_scale = row_scales[blockIdx.x];
  const Sums whole = Sums::load(sums + at);
  Elements before;
  if (residual) before = Elements::load(residual + at);
  let_next_kernel_start();
  Results results;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    float y = (float)whole.at[i] * row_scale * factors.at[i];
    if (bias) y += to_float(shift.at[i]);
    if (residual) y += to_float(before.at[i]);
    results.at[i] = from_float<OUT>(y);
  }
  results.store(out + at);
}
EXPORT(scale_sums)
