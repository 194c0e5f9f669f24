// The activations of MLPs, for all kernels that have one at their end.
#pragma once
#include "common.cuh"

// As in activation.py, which has 0 for none.
constexpr int SILU = 1, GELU_TANH = 2, GELU = 3, SWIGLU_OAI = 4, RELU2 = 5, LONE_GELU = 6, LONE_GELU_TANH = 7,
              RELU2_GATED = 8, RELU_GATED = 9;
constexpr float OAI_LIMIT = 7.0f, OAI_SLOPE = 1.702f;

// act(gate) * up. All in forms that keep their precision where the gate is far below zero: no 1 + tanh, no 1 + erf. gpt-oss's has
// bounds for the gate and for up, and 1 is added to up; a NaN stays one. RELU2 and LONE_… are of MLPs without a gate, whose up is
// both.
constexpr bool has_gate(int which) { return which != 0 && (which < RELU2 || which >= RELU2_GATED); }

template <int WHICH>
DEVICE float gated(float gate, float up) {
  if (WHICH == RELU2) return gate < 0.0f ? 0.0f : gate * gate;
  if (!has_gate(WHICH)) up = 1.0f;
  if (WHICH == RELU2_GATED) return gate < 0.0f ? 0.0f * up : gate * gate * up;
  if (WHICH == RELU_GATED) return gate < 0.0f ? 0.0f * up : gate * up;
  if (WHICH == GELU || WHICH == LONE_GELU) return 0.5f * gate * erfcf(gate * -0.70710678f) * up;
  if (WHICH == SWIGLU_OAI) {
    gate = gate > OAI_LIMIT ? OAI_LIMIT : gate;
    up = (up > OAI_LIMIT ? OAI_LIMIT : up < -OAI_LIMIT ? -OAI_LIMIT : up) + 1.0f;
    return __fdividef(gate, 1.0f + expf(-OAI_SLOPE * gate)) * up;
  }
  // gelu_tanh(g) = g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))
  const float z = WHICH == SILU ? gate : 1.5957691f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate, 1.0f + expf(-z)) * up;
}
