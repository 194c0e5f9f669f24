// x [T, width] DTYPE *= sigmoid(gate), or with SOFTPLUS *= log(1 + exp(gate)), in place; width a multiple of VECTOR.
//
//   gate: with GATE_ROWS 0 [T, width] DTYPE, whose rows begin gate_stride elements apart; with GATE_ROWS 1 a fp32 number a row;
//         with GATE_ROWS 2 [T, width / each] DTYPE, of which one is for `each` numbers, a multiple of VECTOR
//
// One load of VECTOR elements of each a thread. Grid (T, width / (threads * VECTOR)).
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

// Far below zero the exponential is infinite and the quotient zero, as it should be. Far above it the logarithm is its argument.
DEVICE float gated(float x, float gate) {
  if constexpr (SOFTPLUS) return x * (gate > 20.0f ? gate : log1pf(expf(gate)));
  return __fdividef(x, 1.0f + expf(-gate));
}

KERNEL __launch_bounds__(256)
sigmoid_gate(DTYPE* x, const void* gate, int width, int64_t gate_stride, int each) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
#ifndef BUG_UNMASKED_TAIL
  if (column >= width) return;
#endif
  DTYPE* target = x + (Index)blockIdx.x * width + column;
  wait_for_previous_kernel();
  Elements elements = Elements::load(target);
  if constexpr (GATE_ROWS) {
    float row_gate;
    if constexpr (GATE_ROWS == 1) {
      row_gate = static_cast<const float*>(gate)[blockIdx.x];
    } else {
      row_gate = to_float(static_cast<const DTYPE*>(gate)[(Index)blockIdx.x * (Index)gate_stride + column / each]);
    }
    let_next_kernel_start();
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) elements.at[j] = from_float<DTYPE>(gated(to_float(elements.at[j]), row_gate));
  } else {
    const Elements gates = Elements::load(static_cast<const DTYPE*>(gate) + (Index)blockIdx.x * (Index)gate_stride + column);
    let_next_kernel_start();
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      elements.at[j] = from_float<DTYPE>(gated(to_float(elements.at[j]), to_float(gates.at[j])));
    }
  }
  elements.store(target);
}
EXPORT(sigmoid_gate)
