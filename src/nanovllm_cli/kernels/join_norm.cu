// What joins the residual stream through a norm of its own, and the norm behind it: two rows of norms in one launch.
//
//   residual[t] = (residual[t] + norm(x[t])) * factor       in place; the norm and the sum are rounded to DTYPE
//   out[t]      = norm(residual[t])                         with NORMS 1
//
// norm(r) = r / rms(r) * (offset + gains). x, residual, out [T, width] DTYPE, gains and weight [width] DTYPE; width a multiple of
// VECTOR, the elements of one load (a macro). One block a row. A thread keeps its elements of the sum in registers if they are at
// most KEEP loads, and reads them again if not; x it reads twice.
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;
constexpr int KEEP = 2;  // twice as many, and registers of 1024 threads are spilled

// `sum` and the squares, in norm.cu's order: their sum has its bits.
DEVICE float with_squares(float sum, const Elements& elements) {
  for (int j = 0; j < VECTOR; ++j) sum += to_float(elements.at[j]) * to_float(elements.at[j]);
  return sum;
}

DEVICE Elements normed(const Elements& elements, const Elements& gains, float scale, float offset) {
  Elements result;
  for (int j = 0; j < VECTOR; ++j)
    result.at[j] = from_float<DTYPE>(to_float(elements.at[j]) * scale * (offset + to_float(gains.at[j])));
  return result;
}

KERNEL __launch_bounds__(1024)
join_norm(const DTYPE* x, const DTYPE* gains, DTYPE* residual, const DTYPE* weight, DTYPE* out, int width, float eps,
          float offset, float factor, float out_eps, float out_offset) {
  __shared__ float scratch[WARP_SIZE];
  const int64_t row = (int64_t)blockIdx.x * width;
  const int first = threadIdx.x * VECTOR, stride = blockDim.x * VECTOR;
  wait_for_previous_kernel();
  float squares = 0.0f;
  for (int column = first; column < width; column += stride) squares = with_squares(squares, Elements::load(x + row + column));
  const float scale = rsqrtf(block_sum(squares, scratch) / width + eps);

  const auto joined = [&](int column) {
    const Elements added = normed(Elements::load(x + row + column), Elements::load(gains + column), scale, offset);
    Elements sum = Elements::load(residual + row + column);
    for (int j = 0; j < VECTOR; ++j) sum.at[j] = from_float<DTYPE>((to_float(sum.at[j]) + to_float(added.at[j])) * factor);
    sum.store(residual + row + column);
    return sum;
  };
  Elements kept[KEEP];
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    const int column = first + i * stride;
    if (column >= width) break;
    kept[i] = joined(column);
    squares = with_squares(squares, kept[i]);
  }
  for (int column = first + KEEP * stride; column < width; column += stride) squares = with_squares(squares, joined(column));
#if NORMS
  const float out_scale = rsqrtf(block_sum(squares, scratch) / width + out_eps);
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < KEEP; ++i) {
    const int column = first + i * stride;
    if (column >= width) break;
    normed(kept[i], Elements::load(weight + column), out_scale, out_offset).store(out + row + column);
  }
  for (int column = first + KEEP * stride; column < width; column += stride) {
    const Elements sum = Elements::load(residual + row + column), gain = Elements::load(weight + column);
    normed(sum, gain, out_scale, out_offset).store(out + row + column);
  }
#else
  let_next_kernel_start();
#endif
}
EXPORT(join_norm)
