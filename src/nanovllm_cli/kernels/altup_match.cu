// Projections of a row that get its size, as further streams begin and end (AltUp; see reference.altup_match).
//
//   out[part][t] = rows[t][part] * rms(like[t]) / max(rms(rows[t][part]), sqrt(1e-5)); with COPIES 1 out[0] is like itself, and
//   the parts lie behind it
//
// like [T, width], rows [T, N, width], out [COPIES + N, T, width] DTYPE; out may be rows, where N is 1. width is a multiple of VECTOR,
// the elements of one load (macros all). One block a row and part, grid (T, COPIES + N); rows are read twice.
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

DEVICE float mean_square(const DTYPE* row, int width, float* scratch) {
  float total = 0.0f;
  for (int column = threadIdx.x * VECTOR; column < width; column += blockDim.x * VECTOR) {
    const Elements elements = Elements::load(row + column);
    for (int j = 0; j < VECTOR; ++j) total += to_float(elements.at[j]) * to_float(elements.at[j]);
  }
  return block_sum(total, scratch) / width;
}

KERNEL __launch_bounds__(1024)
altup_match(const DTYPE* like, const DTYPE* rows, DTYPE* out, int width) {
  __shared__ float scratch[WARP_SIZE];
  const int part = (int)blockIdx.y - COPIES, parts = (int)gridDim.y - COPIES;
  const DTYPE* wanted = like + (Index)blockIdx.x * width;
  DTYPE* target = out + ((Index)blockIdx.y * gridDim.x + blockIdx.x) * width;
  const DTYPE* source = part < 0 ? wanted : rows + ((Index)blockIdx.x * parts + part) * width;
  float ratio = 1.0f;
  wait_for_previous_kernel();
  if (part >= 0) {
    const float size = sqrtf(mean_square(wanted, width, scratch));
#ifdef BUG_NO_LEAST
    ratio = size / sqrtf(mean_square(source, width, scratch));
#else
    ratio = size / sqrtf(fmaxf(mean_square(source, width, scratch), 1e-5f));
#endif
  }
  let_next_kernel_start();
  for (int column = threadIdx.x * VECTOR; column < width; column += blockDim.x * VECTOR) {
    Elements elements = Elements::load(source + column);
    for (int j = 0; j < VECTOR; ++j) elements.at[j] = from_float<DTYPE>(to_float(elements.at[j]) * ratio);
    elements.store(target + column);
  }
}
EXPORT(altup_match)
