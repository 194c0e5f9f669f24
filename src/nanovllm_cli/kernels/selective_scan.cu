// out [T, channels] = (S C + skip * x) * silu(z), by Mamba's first rule, of a step's tokens behind what the states have of their
// sequences (state_rules.selective_scan has the formula). N is KEY_DIM, channels are V heads of value_dim.
//
//   projected [T, 2, channels] DTYPE, the second of which is z;  x [T, channels] DTYPE, as causal_conv gave it
//   rates [T, channels], both [T, 2, N]: B and C;  decay [V, N, value_dim], rate_bias, skip [channels].  fp32 all
//   Of a state, two places: matrices [states, 2, V, N, value_dim] fp32, guesses [states, 2, G, 2, channels] DTYPE, the second of
//   which is x, guess_gates [states, 2, G, channels + N] fp32: rates, and B.  The rest as causal_conv.cu has it
//
// A thread has a channel's state in registers, and goes through a sequence's tokens in their order: the guesses that held, then the
// step's own, SLOTS of them on their way at once. What a token is computed from does not depend on those beside it.
#include "scan_places.cuh"

constexpr int SLOTS = 4;

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

KERNEL __launch_bounds__(MAX_THREADS)
selective_scan(const DTYPE* projected, const DTYPE* x, const float* rates, const float* both, const float* decay,
               const float* rate_bias, const float* skip, float* matrices, DTYPE* guesses, float* guess_gates, int* stamps,
               int* reaches, const int* starts, const int* lens, const int* known_lens, const int* state_of, DTYPE* out,
               int value_dim, int max_guesses) {
  __shared__ float of_tokens[SLOTS][2 * KEY_DIM];
  const int sequence = blockIdx.x, head = blockIdx.y, num_values = gridDim.y;
  const int channels = num_values * value_dim, channel = head * value_dim + threadIdx.x, num_gates = channels + KEY_DIM;
  const bool has_channel = threadIdx.x < value_dim;
  float state[KEY_DIM], decays[KEY_DIM];
#pragma unroll
  for (int n = 0; n < KEY_DIM; ++n) decays[n] = has_channel ? decay[((Index)head * KEY_DIM + n) * value_dim + threadIdx.x] : 0.0f;
  const float own_bias = has_channel ? rate_bias[channel] : 0.0f, own_skip = has_channel ? skip[channel] : 0.0f;
  const Lengths own = Lengths::load(starts, lens, known_lens, state_of, sequence);
  wait_for_previous_kernel();

  const Places at = Places::find(own, stamps, reaches, num_values, head);
  let_next_kernel_start();
  out += (Index)own.begin * channels + channel;
  if (!at.is_there || own.len == 0) {
    if (has_channel) fill(out, own, channels);
    return;
  }
  const Index matrix = (Index)KEY_DIM * value_dim;
#pragma unroll
  for (int n = 0; n < KEY_DIM; ++n) {
    const bool is_known = has_channel && own.position > 0;
    state[n] = is_known ? matrices[((Index)at.place * num_values + head) * matrix + n * value_dim + threadIdx.x] : 0.0f;
  }
  projected += (Index)own.begin * 2 * channels + channels + channel, x += (Index)own.begin * channels + channel;
  rates += (Index)own.begin * channels + channel, both += (Index)own.begin * 2 * KEY_DIM;

#pragma unroll 1
  for (int start = -at.held; start < own.count; start += SLOTS) {
    float xs[SLOTS], steps[SLOTS], gates[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const int token = start + i;
      xs[i] = steps[i] = gates[i] = 0.0f;
      if (token >= own.count || !has_channel) continue;
      if (token < 0) {
        const Index guess = (Index)at.place * max_guesses + at.held + token;
        xs[i] = to_float(guesses[(guess * 2 + 1) * channels + channel]), steps[i] = guess_gates[guess * num_gates + channel];
      } else {
        xs[i] = to_float(x[(Index)token * channels]), steps[i] = rates[(Index)token * channels];
        gates[i] = to_float(projected[(Index)token * 2 * channels]);
      }
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < SLOTS * 2 * KEY_DIM; i += blockDim.x) {
      const int slot = i / (2 * KEY_DIM), n = i % (2 * KEY_DIM), token = start + slot;
      if (token >= own.count) break;
      float number = 0.0f;  // of C of a guess, whose output nobody reads
      if (token >= 0) {
        number = both[(Index)token * 2 * KEY_DIM + n];
      } else if (n < KEY_DIM) {
        number = guess_gates[((Index)at.place * max_guesses + at.held + token) * num_gates + channels + n];
      }
      of_tokens[slot][n] = number;
    }
#ifndef BUG_NO_BARRIER
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const int token = start + i;
      if (token >= own.count) break;
      const float step = softplus(steps[i] + own_bias), pushed = step * xs[i];
      float found = 0.0f;
#pragma unroll
      for (int n = 0; n < KEY_DIM; ++n) {
        state[n] = fmaf(expf(decays[n] * step), state[n], pushed * of_tokens[i][n]);
        found = fmaf(state[n], of_tokens[i][KEY_DIM + n], found);
      }
      if (token < 0) continue;
      if (has_channel) out[(Index)token * channels] = from_float<DTYPE>(fmaf(own_skip, xs[i], found) * silu(gates[i]));
      const int guess = own.position + token - at.first_guess;
      if (token >= own.known && guess < max_guesses) {
        const Index kept = (Index)at.target * max_guesses + guess;
        if (has_channel) {
          guesses[(kept * 2 + 1) * channels + channel] = from_float<DTYPE>(xs[i]);
          guess_gates[kept * num_gates + channel] = steps[i];
        }
        if (head == 0) {
          for (int n = threadIdx.x; n < KEY_DIM; n += blockDim.x) guess_gates[kept * num_gates + channels + n] = of_tokens[i][n];
        }
      }
      if (token + 1 != own.known || !has_channel) continue;
#pragma unroll
      for (int n = 0; n < KEY_DIM; ++n) {
        matrices[((Index)at.target * num_values + head) * matrix + n * value_dim + threadIdx.x] = state[n];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (own.known > 0) stamps[(Index)at.target * num_values + head] = own.position + own.known;
  if (own.position == 0) stamps[(Index)at.place * num_values + head] = 0;  // what another sequence may have left there
  reaches[(Index)at.target * num_values + head] = min(own.len, at.first_guess + max_guesses);
}
EXPORT(selective_scan)
