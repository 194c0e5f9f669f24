// The activations of gated MLPs, for all kernels that have one at their end.
#pragma once
#include "common.cuh"

// As in activation.py, which has 0 for none.
constexpr int SILU = 1, GELU_TANH = 2, GELU = 3;

// All in forms that keep their precision where the gate is far below zero: no 1 + tanh, no 1 + erf.
template <int WHICH>
DEVICE float activate(float gate) {
  if (WHICH == GELU) return 0.5f * gate * erfcf(gate * -0.70710678f);
  // gelu_tanh(g) = g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))
  const float z = WHICH == SILU ? gate : 1.5957691f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate, 1.0f + expf(-z));
}
