// out [T, channels] = silu(bias + the sum of a channel's last WIDTH inputs, each times a weight): the convolution before a selective
// scan, of a step's tokens behind what the states have of their sequences (state_rules.causal_conv has the formula).
//
//   projected [T, 2, channels]: inputs, and what is not read here.  taps [WIDTH, channels], the token's own last;  taps_bias
//   [channels], or null.  DTYPE all
//   Of a state, two places: inputs [states, 2, WIDTH - 1, channels], guesses [states, 2, G, 2, channels] DTYPE, the first of which
//   are written; stamps and reaches [states, 2, V] int32
//   starts [B + 1], lens, known_lens [B] int32: as in Batch; a length of 0 is a row of padding.  state_of [B]: a sequence's state
//
// What a step writes is no state before the scan says so, which comes next and takes the same places: until then the place's stamp
// is 0. A thread takes a channel of a sequence, whose tokens it goes through in their order, TOKENS of them on their way at once.
#include "scan_places.cuh"

constexpr int TOKENS = 8;

KERNEL __launch_bounds__(MAX_THREADS)
causal_conv(const DTYPE* projected, const DTYPE* taps, const DTYPE* taps_bias, DTYPE* inputs, DTYPE* guesses, int* stamps,
            const int* reaches, const int* starts, const int* lens, const int* known_lens, const int* state_of, DTYPE* out,
            int value_dim, int max_guesses) {
  const int sequence = blockIdx.x, head = blockIdx.y, num_values = gridDim.y;
  const int channels = num_values * value_dim, channel = head * value_dim + threadIdx.x;
  const bool has_channel = threadIdx.x < value_dim;
  float tap[WIDTH], bias = 0.0f, window[WIDTH];
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) tap[k] = has_channel ? to_float(taps[(Index)k * channels + channel]) : 0.0f;
  if (taps_bias && has_channel) bias = to_float(taps_bias[channel]);
  const Lengths own = Lengths::load(starts, lens, known_lens, state_of, sequence);
  wait_for_previous_kernel();

  const Places at = Places::find(own, stamps, reaches, num_values, head);
  let_next_kernel_start();
  __syncthreads();
  if (threadIdx.x == 0 && at.is_there && own.len > 0 && own.known > 0) stamps[(Index)at.target * num_values + head] = 0;
  if (!has_channel) return;
  out += (Index)own.begin * channels + channel;
  if (!at.is_there || own.len == 0) return fill(out, own, channels);

  inputs += channel, guesses += channel;
#pragma unroll
  for (int k = 0; k < WIDTH - 1; ++k) {
    const int position = own.position - (WIDTH - 1) + k, guess = position - at.stamp;
    window[k] = 0.0f;
    if (position < 0) continue;
    const Index row = guess < 0 ? (Index)at.place * (WIDTH - 1) + WIDTH - 1 + guess
                                : ((Index)at.place * max_guesses + guess) * 2;
    window[k] = to_float((guess < 0 ? inputs : guesses)[row * channels]);
  }
  projected += (Index)own.begin * 2 * channels + channel;
#pragma unroll 1
  for (int start = 0; start < own.count; start += TOKENS) {
    DTYPE rows[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      if (start + i < own.count) rows[i] = projected[(Index)(start + i) * 2 * channels];
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int token = start + i;
      if (token >= own.count) break;
      window[WIDTH - 1] = to_float(rows[i]);
      float sum = bias;
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) sum = fmaf(tap[k], window[k], sum);
      out[(Index)token * channels] = from_float<DTYPE>(silu(sum));
#pragma unroll
      for (int k = 0; k < WIDTH - 1; ++k) window[k] = window[k + 1];
      const int guess = own.position + token - at.first_guess;
      if (token >= own.known && guess < max_guesses) {
        guesses[((Index)at.target * max_guesses + guess) * 2 * channels] = rows[i];
      }
      if (token + 1 != own.known) continue;
#pragma unroll
      for (int k = 0; k < WIDTH - 1; ++k) {
        inputs[((Index)at.target * (WIDTH - 1) + k) * channels] = from_float<DTYPE>(window[k]);
      }
    }
  }
}
EXPORT(causal_conv)
