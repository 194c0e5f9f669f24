// RMS norm over rows, alone or together with the addition to the residual stream before it.
//
//   residual[t] += x[t]                      in place, rounded to DTYPE; without a residual, x itself is normalised
//   out[t] = residual[t] / rms(residual[t]) * (offset + weight)
//
// With CENTERED (a macro, as VECTOR and DTYPE) it is the norm of what the row is without its mean: layer norm, to which shift
// [width] is added where it is not null.
//
// x, residual, out [T * G, width] DTYPE, whose rows lie row_stride elements apart; out may be x or residual. weight [G, width]
// DTYPE: rows take turns at its gains. width and row_stride are multiples of VECTOR, the elements of one load.
// One block a row, grid (T, G); each thread keeps its elements in registers if they are at most KEEP loads, and reads them again
// if not.
#include "common.cuh"

constexpr int KEEP = 4;

KERNEL __launch_bounds__(1024)
add_rms_norm(const DTYPE* x, DTYPE* residual, const DTYPE* weight, const DTYPE* shift, DTYPE* out, int width, int row_stride,
             float eps, float offset) {
  typedef Vector<DTYPE, VECTOR> Elements;
  __shared__ float scratch[WARP_SIZE];
  const int64_t row = ((int64_t)blockIdx.x * gridDim.y + blockIdx.y) * row_stride;
  const int first = threadIdx.x * VECTOR, stride = blockDim.x * VECTOR;
  const DTYPE* source = residual ? residual : x;
#ifndef BUG_FIRST_GAINS
  weight += blockIdx.y * width;
#endif
  Elements kept[KEEP];
  const auto counted = [](float value) { return CENTERED ? value : value * value; };
  float total = 0.0f, mean = 0.0f;
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    const int column = first + i * stride;
    if (column >= width) break;
    kept[i] = Elements::load(source + row + column);
    if (residual) {
      const Elements added = Elements::load(x + row + column);
      for (int j = 0; j < VECTOR; ++j)
        kept[i].at[j] = from_float<DTYPE>(to_float(kept[i].at[j]) + to_float(added.at[j]));
      kept[i].store(residual + row + column);
    }
    for (int j = 0; j < VECTOR; ++j) total += counted(to_float(kept[i].at[j]));
  }
  for (int column = first + KEEP * stride; column < width; column += stride) {
    Elements elements = Elements::load(source + row + column);
    if (residual) {
      const Elements added = Elements::load(x + row + column);
      for (int j = 0; j < VECTOR; ++j)
        elements.at[j] = from_float<DTYPE>(to_float(elements.at[j]) + to_float(added.at[j]));
      elements.store(residual + row + column);
    }
    for (int j = 0; j < VECTOR; ++j) total += counted(to_float(elements.at[j]));
  }
#if CENTERED
  mean = block_sum(total, scratch) / width;
  total = 0.0f;
  const auto beside = [&](const Elements& elements) {
    for (int j = 0; j < VECTOR; ++j) total += (to_float(elements.at[j]) - mean) * (to_float(elements.at[j]) - mean);
  };
#pragma unroll
  for (int i = 0; i < KEEP; ++i)
    if (first + i * stride < width) beside(kept[i]);
  for (int column = first + KEEP * stride; column < width; column += stride) beside(Elements::load(source + row + column));
#endif
  const float scale = rsqrtf(block_sum(total, scratch) / width + eps);
  const auto normed = [&](Elements& elements, int column) {
    const Elements gains = Elements::load(weight + column);
    Elements added = {};
    if (CENTERED && shift) added = Elements::load(shift + column);
    for (int j = 0; j < VECTOR; ++j) {
      const float value = (to_float(elements.at[j]) - mean) * scale * (offset + to_float(gains.at[j]));
      elements.at[j] = from_float<DTYPE>(CENTERED ? value + to_float(added.at[j]) : value);
    }
    elements.store(out + row + column);
  };
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    const int column = first + i * stride;
    if (column >= width) break;
    normed(kept[i], column);
  }
  for (int column = first + KEEP * stride; column < width; column += stride) {
    Elements elements = Elements::load(source + row + column);
    normed(elements, column);
  }
}
EXPORT(add_rms_norm)
