// x [size] NUMBER *= factor, in place; with a cap above 0, cap * tanh(x * factor / cap). ADDS: y [size] NUMBER is added before.
//
// A load of VECTOR elements a thread. Grid (size / (threads * VECTOR)).
#include "common.cuh"

typedef Vector<NUMBER, VECTOR> Elements;

KERNEL __launch_bounds__(256)
scale(NUMBER* x, int64_t size, float factor, float cap
#ifdef ADDS
      , const NUMBER* y
#endif
) {
  const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (first >= size) return;
#endif
  wait_for_previous_kernel();
  Elements elements = Elements::load(x + first);
#ifdef ADDS
  const Elements addends = Elements::load(y + first);
#endif
  let_next_kernel_start();
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    float value = to_float(elements.at[j]);
#ifdef ADDS
    value += to_float(addends.at[j]);
#endif
    value *= factor;
    if (cap > 0) value = cap * tanhf(value / cap);
    elements.at[j] = from_float<NUMBER>(value);
  }
  elements.store(x + first);
}
EXPORT(scale)
