// out [T, width] DTYPE = x times the sigmoid of each row's largest of `count` logits [T, count] fp32, a NaN being above all numbers;
// width a multiple of VECTOR.
//
// Each warp finds the largest for itself, which is less than waiting for another: a lane takes each 32nd. Then a thread takes a load
// of VECTOR elements. Grid (T, width / (threads * VECTOR)).
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

DEVICE float larger(float a, float b) { return b > a || b != b ? b : a; }

KERNEL __launch_bounds__(256)
best_gate(const DTYPE* x, const float* logits, DTYPE* out, int width, int count) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  wait_for_previous_kernel();
  const float* row = logits + (Index)blockIdx.x * count;
  float best = row[0];
  for (int i = threadIdx.x % WARP_SIZE; i < count; i += WARP_SIZE) best = larger(best, row[i]);
#ifndef BUG_ONE_LANE
  for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
    best = larger(best, __shfl_xor_sync(ALL_LANES, best, distance));
#endif
#ifndef BUG_UNMASKED_TAIL
  if (column >= width) return;
#endif
  Elements elements = Elements::load(x + (Index)blockIdx.x * width + column);
  let_next_kernel_start();
  const float divisor = 1.0f + expf(-best);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) elements.at[j] = from_float<DTYPE>(__fdividef(to_float(elements.at[j]), divisor));
  elements.store(out + (Index)blockIdx.x * width + column);
}
EXPORT(best_gate)
