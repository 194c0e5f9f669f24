// into [T, rank] DTYPE and both [T, 2, N] fp32, of x [T, rank + 2 N] fp32: its columns, and with gains [rank + 2 N] fp32, which may be
// null, each of the three parts divided by its root mean square and times its own of them (state_rules.scan_parts).
//
// A block takes a row, a warp of it a part. Grid (T).
#include "common.cuh"

KERNEL __launch_bounds__(3 * WARP_SIZE)
scan_parts(const float* x, const float* gains, DTYPE* into, float* both, int rank, int size, float eps) {
  const int part = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int first = part == 0 ? 0 : rank + (part - 1) * size, count = part == 0 ? rank : size;
  wait_for_previous_kernel();
  const Index row = blockIdx.x;
  x += row * (rank + 2 * size) + first;
  float squares = 0.0f;
  for (int i = lane; gains && i < count; i += WARP_SIZE) squares = fmaf(x[i], x[i], squares);
  const float factor = gains ? rsqrtf(warp_sum(squares) / count + eps) : 1.0f;
  let_next_kernel_start();
#pragma unroll 1
  for (int i = lane; i < count; i += WARP_SIZE) {
    const float number = gains ? x[i] * factor * gains[first + i] : x[i];
    if (part == 0) {
      into[row * rank + i] = from_float<DTYPE>(number);
    } else {
      both[row * 2 * size + first - rank + i] = number;
    }
  }
}
EXPORT(scan_parts)
