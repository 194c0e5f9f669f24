// out [T, width] = act(x[:, :width]) * x[:, width:], x [T, 2 width] DTYPE; width a multiple of VECTOR.
//
// One load of VECTOR elements from each half a thread, 32 bytes in flight: at full occupancy 64 KB an SM, more than memory
// needs. Grid (T, columns / (threads * VECTOR)). The kind is a runtime number, switched on once a thread.
#include "common.cuh"

// As in activation.py.
constexpr int SILU = 0, GELU_TANH = 1, GELU = 2;
typedef Vector<DTYPE, VECTOR> Elements;

// All in forms that keep their precision where the gate is far below zero: no 1 + tanh, no 1 + erf.
template <int KIND>
DEVICE float activate(float gate) {
  if (KIND == GELU) return 0.5f * gate * erfcf(gate * -0.70710678f);
  // gelu_tanh(g) = g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))
  const float z = KIND == SILU ? gate : 1.5957691f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate, 1.0f + expf(-z));
}

template <int KIND>
DEVICE Elements gated(const Elements& gate, const Elements& up) {
  Elements result;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) result.at[j] = from_float<DTYPE>(activate<KIND>(to_float(gate.at[j])) * to_float(up.at[j]));
  return result;
}

KERNEL __launch_bounds__(256)
gated_activation(const DTYPE* x, DTYPE* out, int width, int kind) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (column >= width) return;
#endif
  const DTYPE* row = x + 2 * (int64_t)blockIdx.x * width + column;
  wait_for_previous_kernel();
  const Elements gate = Elements::load(row), up = Elements::load(row + width);
  let_next_kernel_start();
  Elements result;
  switch (kind) {
    case SILU: result = gated<SILU>(gate, up); break;
    case GELU_TANH: result = gated<GELU_TANH>(gate, up); break;
    default: result = gated<GELU>(gate, up);
  }
  result.store(out + (int64_t)blockIdx.x * width + column);
}
EXPORT(gated_activation)
