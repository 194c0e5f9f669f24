// Rows of activations, normalised where they are to be, and rounded to eight bits: the rules that quantize_activations.cu and
// block_gemv.cu share, so that a row has the same bits wherever it is rounded. A block of ROUNDING_THREADS takes a row; a thread
// has eight neighbouring columns of it at a time.
#pragma once
#include "common.cuh"

constexpr int ROUNDING_THREADS = 256;
constexpr int ROUNDING_SPAN = ROUNDING_THREADS * 8;  // columns a block takes at a time

struct Eight {
  float at[8];
};

// Eight elements from `source` on, of which `left` are the row's; zeros beyond.
DEVICE Eight load_eight_as_floats(const DTYPE* source, int left) {
  typedef Vector<DTYPE, VECTOR> Elements;
  Eight values = {};
#pragma unroll
  for (int i = 0; i < 8; i += VECTOR) {
    if (i >= left) break;
    const Elements elements = Elements::load(source + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) values.at[i + j] = to_float(elements.at[j]);
  }
  return values;
}

// What a row is multiplied by to be normalised. All threads of the block call it; scratch as in block_sum.
DEVICE float norm_factor(const DTYPE* row, int width, float eps, float* scratch) {
  float squares = 0.0f;
  for (int column = threadIdx.x * 8; column < width; column += ROUNDING_SPAN) {
    const Eight values = load_eight_as_floats(row + column, width - column);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += values.at[i] * values.at[i];
  }
  return rsqrtf(block_sum(squares, scratch) / width + eps);
}

// Eight columns as they are to be rounded: normalised and in DTYPE, as the norm's kernel leaves them, where there is a gain.
DEVICE Eight load_normalised(const DTYPE* row, const DTYPE* gain, int column, int width, float factor, float offset) {
  Eight values = load_eight_as_floats(row + column, width - column);
  if (gain) {
    const Eight gains = load_eight_as_floats(gain + column, width - column);
#pragma unroll
    for (int i = 0; i < 8; ++i) values.at[i] = to_float(from_float<DTYPE>(values.at[i] * factor * (offset + gains.at[i])));
  }
  return values;
}

// The largest magnitude as a bit pattern: among those infinities and NaNs lie above all numbers.
DEVICE uint32_t largest_of(const Eight& values) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(values.at[i]) & 0x7fffffffu);
  return most;
}

// Of `width` neighbouring lanes, a power of two; each gets it.
DEVICE uint32_t largest_of_lanes(uint32_t most, int width) {
  for (int bits = width / 2; bits; bits >>= 1) most = max(most, __shfl_xor_sync(ALL_LANES, most, bits));
  return most;
}

// int8: a scale of the largest magnitude / 127. A group with a NaN or an infinity has codes of zero, and a scale that makes a NaN
// of whatever it is multiplied with.
struct Int8Rule {
  float scale, inverse;

  DEVICE Int8Rule(uint32_t most) {
    const float largest = __uint_as_float(most);
    const bool finite = most < 0x7f800000u;
    scale = finite ? largest / 127.0f : __uint_as_float(0x7fc00000u);
    inverse = finite && largest > 1e-36f ? 127.0f / largest : 0.0f;
  }
  DEVICE int code(float value) const { return (int)rintf(inverse == 0.0f ? 0.0f : value * inverse); }
};

// Eight columns of a row from `column` on, as round_blocks (quantize_activations.cu) leaves them: codes and factors are the row's.
// Whole warps call it, with columns that follow each other; past `padded` nothing is stored.
DEVICE void round_eight(const Eight& values, int column, int padded, int group, uint32_t* codes, float2* factors) {
  const Int8Rule rule(largest_of_lanes(largest_of(values), group / 8));
  int sum = 0;
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int code = rule.code(values.at[i]);
    sum += code;
    words[i / 4] |= (uint32_t)(code & 0xff) << i % 4 * 8;
  }
  for (int bits = group / 16; bits; bits >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, bits);
  if (column >= padded) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int k = column % 64 + i * 4;
    codes[column / 64 * 16 + k % 16 / 4 * 4 + k / 16] = words[i];
  }
  if (column % group == 0) factors[column / group] = make_float2(rule.scale, (float)sum);
}
