// x [T, width] DTYPE *= 1 + scale * log(1 + floor((position + offset) / length)), in place; positions [T] int64. Rows begin
// row_stride elements apart; width a multiple of VECTOR.
//
// A load of VECTOR elements a thread, which none does of a row whose factor is 1. Grid (T, width / (threads * VECTOR)).
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

KERNEL __launch_bounds__(256)
temper(DTYPE* x, const int64_t* positions, int64_t row_stride, int width, int64_t length, int64_t offset, float scale) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (column >= width) return;
#endif
  wait_for_previous_kernel();
#ifdef BUG_ROUNDS
  const int64_t steps = (positions[blockIdx.x] + offset + length / 2) / length;
#else
  const int64_t steps = (positions[blockIdx.x] + offset) / length;
#endif
  if (steps == 0) return;
  DTYPE* target = x + (Index)blockIdx.x * (Index)row_stride + column;
  Elements elements = Elements::load(target);
  let_next_kernel_start();
  const float factor = 1.0f + scale * logf(1.0f + (float)steps);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) elements.at[j] = from_float<DTYPE>(to_float(elements.at[j]) * factor);
  elements.store(target);
}
EXPORT(temper)
