// out [rows, width] NUMBER = x [rows, width] fp32 * scales [rows, modules] fp32, of the module [width] of each column; 0 where that
// is 0, whatever x is. See reference.scale_ranks.
//
// A column a thread. Grid (rows, width / threads).
#include "common.cuh"

KERNEL __launch_bounds__(256)
scale_ranks(const float* x, const float* scales, const int* modules, NUMBER* out, int width, int num_modules) {
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const int module = modules[column];
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const float factor = scales[row * num_modules + module];
  const float number = x[row * width + column];
  let_next_kernel_start();
  out[row * width + column] = from_float<NUMBER>(factor == 0 ? 0.0f : number * factor);
}
EXPORT(scale_ranks)
