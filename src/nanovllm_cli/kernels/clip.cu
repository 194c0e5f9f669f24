// x [T, width] DTYPE, held between least and most in place; what is no number stays none. Rows begin row_stride elements apart;
// width a multiple of VECTOR.
//
// A load of VECTOR elements a thread. Grid (T, width / (threads * VECTOR)).
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

KERNEL __launch_bounds__(256)
clip(DTYPE* x, int64_t row_stride, int width, float least, float most) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (column >= width) return;
#endif
  wait_for_previous_kernel();
  DTYPE* target = x + (Index)blockIdx.x * (Index)row_stride + column;
  Elements elements = Elements::load(target);
  let_next_kernel_start();
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const float value = to_float(elements.at[j]);
#ifdef BUG_NAN
    elements.at[j] = from_float<DTYPE>(fminf(fmaxf(value, least), most));
#else
    if (value > most) elements.at[j] = from_float<DTYPE>(most);
    if (value < least) elements.at[j] = from_float<DTYPE>(least);
#endif
  }
  elements.store(target);
}
EXPORT(clip)
