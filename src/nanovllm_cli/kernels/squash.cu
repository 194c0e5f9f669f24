// out [n] DTYPE = tanh(x), or with SIGMOID the sigmoid of x [n] fp32: what RWKV-7's narrow matrices gave. A number a thread.
#include "common.cuh"

KERNEL __launch_bounds__(256)
squash(const float* x, DTYPE* out, int64_t count) {
  const Index index = (Index)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= count) return;
  wait_for_previous_kernel();
  const float number = x[index];
  let_next_kernel_start();
  out[index] = from_float<DTYPE>(SIGMOID ? __fdividef(1.0f, 1.0f + expf(-number)) : tanhf(number));
}
EXPORT(squash)
