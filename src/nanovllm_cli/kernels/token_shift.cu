// out [SHARES, T, channels] = x + (before - x) * shares: rows that take a share of the row before them, of a step's tokens behind what
// the states have of their sequences (wkv_rules.token_shift has the formula).
//
//   x [T, channels] DTYPE;  shares [SHARES, channels] fp32;  channels are V heads of value_dim
//   Of a state, two places: inputs [states, 2, 2, channels], guesses [states, 2, G, 2, channels] DTYPE, of which `part` is read and
//   written; stamps and reaches [states, 2, V] int32
//   starts [B + 1], lens, known_lens [B] int32: as in Batch; a length of 0 is a row of padding.  state_of [B]: a sequence's state
//
// A layer has two of these, around wkv7.cu: what part 0 writes is no state before part 1 says so. A block takes a head of a sequence,
// grid (B, V), and its threads `columns` channels of as many tokens as there is room for, TOKENS of each on their way at once.
#include "scan_places.cuh"

constexpr int TOKENS = 4;

KERNEL __launch_bounds__(256, 3)
token_shift(const DTYPE* x, const float* shares, DTYPE* inputs, DTYPE* guesses, int* stamps, int* reaches, const int* starts,
            const int* lens, const int* known_lens, const int* state_of, DTYPE* out, int num_tokens, int part, int value_dim,
            int columns, int max_guesses) {
  const int sequence = blockIdx.x, head = blockIdx.y, num_values = gridDim.y, channels = num_values * value_dim;
  const int rows = blockDim.x / columns, row = threadIdx.x / columns;
  const Lengths own = Lengths::load(starts, lens, known_lens, state_of, sequence);
  wait_for_previous_kernel();

  const Places at = Places::find(own, stamps, reaches, num_values, head);
  let_next_kernel_start();
  const bool is_there = at.is_there && own.len > 0;
#pragma unroll 1
  for (int column = threadIdx.x % columns; column < value_dim; column += columns) {
    const int channel = head * value_dim + column;
    const Index first = (Index)own.begin * channels + channel;
    if (!is_there) {
#pragma unroll 1
      for (int i = row; i < SHARES; i += rows) fill(out + first + (Index)i * num_tokens * channels, own, channels);
      continue;
    }
    float share[SHARES];
#pragma unroll
    for (int i = 0; i < SHARES; ++i) share[i] = shares[(Index)i * channels + channel];
    const Index own_part = (Index)part * channels + channel;
#pragma unroll 1
    for (int start = row; start < own.count; start += rows * TOKENS) {
      float mine[TOKENS], before[TOKENS];
#pragma unroll
      for (int i = 0; i < TOKENS; ++i) {
        const int token = start + i * rows;
        mine[i] = before[i] = 0.0f;
        if (token >= own.count) continue;
        mine[i] = to_float(x[first + (Index)token * channels]);
        if (token > 0) {
          before[i] = to_float(x[first + (Index)(token - 1) * channels]);
        } else if (own.position > 0 && at.held == 0) {
          before[i] = to_float(inputs[(Index)at.place * 2 * channels + own_part]);
        } else if (own.position > 0) {
          before[i] = to_float(guesses[((Index)at.place * max_guesses + at.held - 1) * 2 * channels + own_part]);
        }
      }
#pragma unroll
      for (int i = 0; i < TOKENS; ++i) {
        const int token = start + i * rows;
        if (token >= own.count) continue;
#pragma unroll
        for (int p = 0; p < SHARES; ++p) {
          out[first + ((Index)p * num_tokens + token) * channels] = from_float<DTYPE>(fmaf(before[i] - mine[i], share[p], mine[i]));
        }
        const int guess = own.position + token - at.first_guess;
        if (token >= own.known && guess < max_guesses) {
          guesses[((Index)at.target * max_guesses + guess) * 2 * channels + own_part] = from_float<DTYPE>(mine[i]);
        }
        if (token + 1 == own.known) inputs[(Index)at.target * 2 * channels + own_part] = from_float<DTYPE>(mine[i]);
      }
    }
  }
#ifndef BUG_NO_BARRIER
  __syncthreads();  // all have read where the state is
#endif
  if (threadIdx.x != 0 || !is_there) return;
  const Index stamp = (Index)at.target * num_values + head;
  if (part == 0) {
    if (own.known > 0) stamps[stamp] = 0;
    return;
  }
  if (own.known > 0) stamps[stamp] = own.position + own.known;
  if (own.position == 0) stamps[(Index)at.place * num_values + head] = 0;  // what another sequence may have left there
  reaches[stamp] = min(own.len, at.first_guess + max_guesses);
}
EXPORT(token_shift)
