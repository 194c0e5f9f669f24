// x[t][i] = max(x[t][i] - mean(x[t]) - cutoff * deviation(x[t]), 0), in place: of normal numbers few stay (see reference.sparse_gate)
//
// x [T, width] DTYPE, whose rows lie row_stride elements apart; both are multiples of VECTOR, the elements of one load (a macro). The
// deviation is of the row as it is, sqrt(mean((x - mean)^2)). One block a row, which is read three times, from the cache; grid (T).
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

KERNEL __launch_bounds__(1024)
sparse_gate(DTYPE* x, int width, int64_t row_stride, float cutoff) {
  __shared__ float scratch[WARP_SIZE];
  DTYPE* row = x + (Index)blockIdx.x * (Index)row_stride;
  const int first = threadIdx.x * VECTOR, stride = blockDim.x * VECTOR;
  wait_for_previous_kernel();
  float total = 0.0f;
  for (int column = first; column < width; column += stride) {
    const Elements elements = Elements::load(row + column);
    for (int j = 0; j < VECTOR; ++j) total += to_float(elements.at[j]);
  }
  const float mean = block_sum(total, scratch) / width;
  total = 0.0f;
  for (int column = first; column < width; column += stride) {
    const Elements elements = Elements::load(row + column);
    for (int j = 0; j < VECTOR; ++j) total += (to_float(elements.at[j]) - mean) * (to_float(elements.at[j]) - mean);
  }
#ifdef BUG_OF_ONE_LESS
  const float bound = mean + cutoff * sqrtf(block_sum(total, scratch) / (width - 1));
#else
  const float bound = mean + cutoff * sqrtf(block_sum(total, scratch) / width);
#endif
  let_next_kernel_start();
  for (int column = first; column < width; column += stride) {
    Elements elements = Elements::load(row + column);
    for (int j = 0; j < VECTOR; ++j) {
      const float above = to_float(elements.at[j]) - bound;
      elements.at[j] = from_float<DTYPE>(above < 0.0f ? 0.0f : above);  // NaN stays
    }
    elements.store(row + column);
  }
}
EXPORT(sparse_gate)
