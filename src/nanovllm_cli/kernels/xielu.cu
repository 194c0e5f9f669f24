// x [size] NUMBER becomes xIELU of it, in place: positive x^2 + slope x above 0, else negative (expm1(min(x, edge)) - x) + slope x.
//
// A load of VECTOR elements a thread. Grid (size / (threads * VECTOR)).
#include "common.cuh"

typedef Vector<NUMBER, VECTOR> Elements;

KERNEL __launch_bounds__(256)
xielu(NUMBER* x, int64_t size, float positive, float negative, float slope, float edge) {
  const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (first >= size) return;
#endif
  wait_for_previous_kernel();
  Elements elements = Elements::load(x + first);
  let_next_kernel_start();
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const float value = to_float(elements.at[j]);
#ifdef BUG_EDGE
    const float below = edge;
#else
    const float below = fminf(value, edge);
#endif
    const float curved = value > 0.0f ? positive * value * value : negative * (expm1f(below) - value);
    elements.at[j] = from_float<NUMBER>(curved + slope * value);
  }
  elements.store(x + first);
}
EXPORT(xielu)
