// Rows of activations rounded to eight bits (the rules: rounding.cuh), normalised first where there is a gain.
//
//   x [rows, width] DTYPE; gain [width] DTYPE, or null: rows are normalised, round(x / rms(x) * (offset + gain))
//
// round_rows: what eight-bit matmuls of the vendor take. group: columns that share a scale, 16 to 256 and a power of two, or 0 for
// a row. CODE int8: scale = largest magnitude / 127; e4m3: / 448, or the number at `fixed`, where that is not null.
//   codes [rows, width] CODE, scales [groups, rows] float
// round_blocks: what block_gemv.cu takes. Columns become a multiple of 128, by zeros; of each 64 the bytes lie as a lane
// of mma.m16n8k32 wants them: column k at k % 16 / 4 * 16 + k / 16 * 4 + k % 4.
//   codes [rows, padded] int8, factors [rows, padded / group] of two floats: the scale, and the sum of the codes
//
// Grid (rows, parts): blocks share a row where nothing has to be known of all of it.
#include "rounding.cuh"

#ifdef CODE
struct E4m3Rule {
  float scale, inverse;

  DEVICE E4m3Rule(uint32_t most, const float* fixed) {
    scale = fixed ? *fixed : __uint_as_float(most) / 448.0f;
    inverse = scale >= 1.17549435e-38f ? 1.0f / scale : 0.0f;  // of subnormal ones infinite
  }
  DEVICE fp8 code(float value) const { return from_float<fp8>(value * inverse); }
};

DEVICE Int8Rule rule_of(uint32_t most, const float*, int8_t) { return Int8Rule(most); }
DEVICE E4m3Rule rule_of(uint32_t most, const float* fixed, fp8) { return E4m3Rule(most, fixed); }

KERNEL __launch_bounds__(ROUNDING_THREADS)
round_rows(const DTYPE* x, const DTYPE* gain, const float* fixed, CODE* codes, float* scales, int width, int group, float eps,
           float offset) {
  typedef Vector<CODE, VECTOR> Codes;
  __shared__ float scratch[WARP_SIZE];
  __shared__ uint32_t largest[WARP_SIZE];
  const int64_t place = (int64_t)blockIdx.x * width;
  const int first = (blockIdx.y * ROUNDING_THREADS + threadIdx.x) * 8;
  const DTYPE* row = x + place;
  wait_for_previous_kernel();
  const float factor = gain ? norm_factor(row, width, eps, scratch) : 1.0f;
  uint32_t most = 0;
  if (group == 0 && !fixed) {
    for (int column = first; column < width; column += ROUNDING_SPAN)
      most = max(most, largest_of(load_normalised(row, gain, column, width, factor, offset)));
    most = largest_of_lanes(most, WARP_SIZE);
    if (threadIdx.x % WARP_SIZE == 0) largest[threadIdx.x / WARP_SIZE] = most;
#ifndef BUG_NO_BARRIER
    __syncthreads();
#endif
    for (int warp = 0; warp < ROUNDING_THREADS / WARP_SIZE; ++warp) most = max(most, largest[warp]);
  }
  let_next_kernel_start();
  // Whole warps go round together, for they exchange.
  for (int column = first; column - threadIdx.x % WARP_SIZE * 8 < width; column += ROUNDING_SPAN * gridDim.y) {
    const Eight values = load_normalised(row, gain, min(column, width), width, factor, offset);
    if (group && !fixed) {
#ifdef BUG_GROUP
      most = largest_of_lanes(largest_of(values), group / 16);
#else
      most = largest_of_lanes(largest_of(values), group / 8);
#endif
    }
    if (column >= width) continue;
    const auto rule = rule_of(most, fixed, CODE());
#pragma unroll
    for (int i = 0; i < 8; i += VECTOR) {
      if (i >= width - column) break;
      Codes rounded;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) rounded.at[j] = rule.code(values.at[i + j]);
      rounded.store(codes + place + column + i);
    }
    if (group ? column % group == 0 : column == 0)
      scales[(int64_t)(group ? column / group : 0) * gridDim.x + blockIdx.x] = rule.scale;
  }
}
EXPORT(round_rows)
#else
KERNEL __launch_bounds__(ROUNDING_THREADS)
round_blocks(const DTYPE* x, const DTYPE* gain, uint32_t* codes, float2* factors, int width, int padded, int group, float eps,
             float offset) {
  __shared__ float scratch[WARP_SIZE];
  const int first = (blockIdx.y * ROUNDING_THREADS + threadIdx.x) * 8;
  const DTYPE* row = x + (int64_t)blockIdx.x * width;
  wait_for_previous_kernel();
  const float factor = gain ? norm_factor(row, width, eps, scratch) : 1.0f;
  let_next_kernel_start();
  codes += (int64_t)blockIdx.x * (padded / 4);
  factors += (int64_t)blockIdx.x * (padded / group);
  for (int column = first; column - threadIdx.x % WARP_SIZE * 8 < padded; column += ROUNDING_SPAN * gridDim.y) {
    const Eight values = load_normalised(row, gain, min(column, width), width, factor, offset);
    round_eight(values, column, padded, group, codes, factors);
  }
}
EXPORT(round_blocks)
#endif
