// out [T, channels] = c * (bias + conv(b * h)), where conv sums a channel's last WIDTH inputs b * h, each times a weight: the short
// convolution of a step's tokens, behind what the cache has of their sequences.
//
//   projected [T, 3, channels]: b, c and h;  weight [WIDTH, channels], the token's own row last;  bias [channels], or null
//   cache [blocks, BLOCK_SIZE, channels]: the inputs of each block's tokens. DTYPE all.
//   starts [B + 1], lens [B] int32: where sequences begin among the T rows, and their lengths with these; a length of 0 is a row of
//   padding, whose output is 0.  tables [B, table_width] int32: a sequence's blocks
//
// A block takes TOKENS tokens of a sequence, in their order, a thread VECTOR channels. Grid (T, channels / (threads * VECTOR)): those
// at rows in between end at once. Only what was written before this step is read from the cache.
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;
constexpr int TOKENS = 16;

// The sequence of a row.
DEVICE int sequence_of(const int* starts, int num_sequences, int row) {
  if (row < num_sequences && starts[row] == row) return row;  // all before it have one row, as in steps of decodes
  int first = 0, behind = num_sequences;
  while (behind - first > 1) {
    const int middle = (first + behind) / 2;
    if (starts[middle] <= row) {
      first = middle;
    } else {
      behind = middle;
    }
  }
  return first;
}

struct Gates {
  Elements in, out, value;

  static DEVICE Gates load(const DTYPE* row, int channels) {
    return {Elements::load(row), Elements::load(row + channels), Elements::load(row + 2 * channels)};
  }
};

KERNEL __launch_bounds__(256)
gated_conv(const DTYPE* projected, const DTYPE* weight, const DTYPE* bias, DTYPE* cache, const int* starts, const int* lens,
           const int* tables, DTYPE* out, int num_sequences, int table_width, int channels) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, row = blockIdx.x;
#ifndef BUG_UNMASKED_TAIL
  if (column >= channels) return;
#endif
  // Taps are weights: their way from memory is spent waiting for the projection.
  Elements taps[WIDTH], offsets;
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) taps[k] = Elements::load(weight + (Index)k * channels + column);
  if (bias) offsets = Elements::load(bias + column);
  wait_for_previous_kernel();

  const int sequence = sequence_of(starts, num_sequences, row);
  const int begin = starts[sequence], end = starts[sequence + 1], len = lens[sequence];
  DTYPE* result = out + (Index)row * channels + column;
  if (len == 0) {
    Elements zeros;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) zeros.at[j] = from_float<DTYPE>(0.0f);
    return zeros.store(result);
  }
  if ((row - begin) % TOKENS != 0) return;
  const int* table = tables + (Index)sequence * table_width;
  const int last = min(row + TOKENS, end), first_position = len - (end - begin) + (row - begin);

  const DTYPE* source = projected + (Index)row * 3 * channels + column;
  Gates next = Gates::load(source, channels);
  float inputs[WIDTH][VECTOR];
#pragma unroll
  for (int k = 0; k < WIDTH - 1; ++k) {
    // Of a token before: computed in this step, or before it.
    const int behind = WIDTH - 1 - k, position = first_position - behind;
    Elements before;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) before.at[j] = from_float<DTYPE>(0.0f);
    if (row - behind >= begin) {
      const Gates gates = Gates::load(source - (Index)behind * 3 * channels, channels);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        before.at[j] = from_float<DTYPE>(to_float(gates.in.at[j]) * to_float(gates.value.at[j]));
      }
    } else if (position >= 0) {
#ifdef BUG_PAGE
      const int block = table[first_position / BLOCK_SIZE];
#else
      const int block = table[position / BLOCK_SIZE];
#endif
      before = Elements::load(cache + ((Index)block * BLOCK_SIZE + position % BLOCK_SIZE) * channels + column);
    }
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) inputs[k][j] = to_float(before.at[j]);
  }
  let_next_kernel_start();

  int position = first_position;
  for (int t = row; t < last; ++t, ++position) {
    const Gates gates = next;
    source += (Index)3 * channels;
    if (t + 1 < last) next = Gates::load(source, channels);
    Elements input, sums;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      input.at[j] = from_float<DTYPE>(to_float(gates.in.at[j]) * to_float(gates.value.at[j]));
      inputs[WIDTH - 1][j] = to_float(input.at[j]);
      float sum = bias ? to_float(offsets.at[j]) : 0.0f;
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) sum += to_float(taps[k].at[j]) * inputs[k][j];
      sums.at[j] = from_float<DTYPE>(to_float(gates.out.at[j]) * sum);
#pragma unroll
      for (int k = 0; k < WIDTH - 1; ++k) inputs[k][j] = inputs[k + 1][j];
    }
    sums.store(result);
    result += channels;
    const int block = table[position / BLOCK_SIZE];
    input.store(cache + ((Index)block * BLOCK_SIZE + position % BLOCK_SIZE) * channels + column);
  }
}
EXPORT(gated_conv)
