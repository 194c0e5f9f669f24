// RMS norm over rows, alone or together with the addition to the residual stream before it.
//
//   residual[t] += x[t]                      in place, rounded to DTYPE; without a residual, x itself is normalised
//   out[t] = residual[t] / rms(residual[t]) * (offset + weight)
//
// x, residual, out [T, width] DTYPE, weight [width] DTYPE; width a multiple of VECTOR, the elements of one load (a macro).
// One block a row; each thread keeps its elements in registers if they are at most KEEP loads, and reads them again if not.
#include "common.cuh"

constexpr int KEEP = 4;

KERNEL __launch_bounds__(1024)
add_rms_norm(const DTYPE* x, DTYPE* residual, const DTYPE* weight, DTYPE* out, int width, float eps, float offset) {
  typedef Vector<DTYPE, VECTOR> Elements;
  __shared__ float scratch[WARP_SIZE];
  const int64_t row = (int64_t)blockIdx.x * width;
  const int first = threadIdx.x * VECTOR, stride = blockDim.x * VECTOR;
  const DTYPE* source = residual ? residual : x;
  Elements kept[KEEP];
  float squares = 0.0f;
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
    for (int j = 0; j < VECTOR; ++j) squares += to_float(kept[i].at[j]) * to_float(kept[i].at[j]);
  }
  for (int column = first + KEEP * stride; column < width; column += stride) {
    Elements elements = Elements::load(source + row + column);
    if (residual) {
      const Elements added = Elements::load(x + row + column);
      for (int j = 0; j < VECTOR; ++j)
        elements.at[j] = from_float<DTYPE>(to_float(elements.at[j]) + to_float(added.at[j]));
      elements.store(residual + row + column);
    }
    for (int j = 0; j < VECTOR; ++j) squares += to_float(elements.at[j]) * to_float(elements.at[j]);
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / width + eps);
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    const int column = first + i * stride;
    if (column >= width) break;
    const Elements gains = Elements::load(weight + column);
    for (int j = 0; j < VECTOR; ++j)
      kept[i].at[j] = from_float<DTYPE>(to_float(kept[i].at[j]) * scale * (offset + to_float(gains.at[j])));
    kept[i].store(out + row + column);
  }
  for (int column = first + KEEP * stride; column < width; column += stride) {
    Elements elements = Elements::load(source + row + column);
    const Elements gains = Elements::load(weight + column);
    for (int j = 0; j < VECTOR; ++j)
      elements.at[j] = from_float<DTYPE>(to_float(elements.at[j]) * scale * (offset + to_float(gains.at[j])));
    elements.store(out + row + column);
  }
}
EXPORT(add_rms_norm)
