// out [T, width] = gated(gate, up) of DTYPE; width a multiple of VECTOR. Rows of gate, and of up, begin gate_stride and up_stride
// elements apart. Without a gate up is gate, and only gate is read.
//
// One load of VECTOR elements from each half a thread, 32 bytes in flight: at full occupancy 64 KB an SM, more than memory
// needs. Grid (T, columns / (threads * VECTOR)). The kind is a runtime number, switched on once a thread.
#include "activation.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

template <int KIND>
DEVICE Elements gated_elements(const Elements& gate, const Elements& up) {
  Elements result;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) result.at[j] = from_float<DTYPE>(gated<KIND>(to_float(gate.at[j]), to_float(up.at[j])));
  return result;
}

KERNEL __launch_bounds__(256)
gated_activation(const DTYPE* gate_rows, const DTYPE* up_rows, DTYPE* out, int64_t gate_stride, int64_t up_stride, int width,
                 int kind) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (column >= width) return;
#endif
  const Index row = blockIdx.x;
  wait_for_previous_kernel();
  const Elements gate = Elements::load(gate_rows + row * (Index)gate_stride + column);
  const Elements up = !has_gate(kind) ? gate : Elements::load(up_rows + row * (Index)up_stride + column);
  let_next_kernel_start();
  Elements result;
  switch (kind) {
    case SILU: result = gated_elements<SILU>(gate, up); break;
    case GELU_TANH: result = gated_elements<GELU_TANH>(gate, up); break;
    case SWIGLU_OAI: result = gated_elements<SWIGLU_OAI>(gate, up); break;
    case RELU2: result = gated_elements<RELU2>(gate, up); break;
    case RELU2_GATED: result = gated_elements<RELU2_GATED>(gate, up); break;
    case RELU_GATED: result = gated_elements<RELU_GATED>(gate, up); break;
    case LONE_GELU: result = gated_elements<LONE_GELU>(gate, up); break;
    case LONE_GELU_TANH: result = gated_elements<LONE_GELU_TANH>(gate, up); break;
    default: result = gated_elements<GELU>(gate, up);
  }
  result.store(out + row * width + column);
}
EXPORT(gated_activation)
