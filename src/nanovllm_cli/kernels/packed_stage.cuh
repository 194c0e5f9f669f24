// What a block that multiplies packed weights by rows of x keeps in a stage of shared memory, and what becomes of its sums.
//
// By macro, besides what packed.cuh and gemm_parts.cuh take: a block's TOKENS rows of x, its strips ACROSS the outputs, of which a
// warp has STRIPS, and its slices of 64 columns ALONG them.
#pragma once
#include "gemm_parts.cuh"
#include "packed.cuh"

constexpr int THREADS = ACROSS / STRIPS * ALONG * WARP_SIZE, TILE_N = ACROSS * TILE_OUTPUTS;
constexpr int GROUPS = GROUP == 0 ? 0 : GROUP < DEPTH ? DEPTH / GROUP : 1;  // that 64 columns scale; 0: all columns are one
constexpr int ZERO_GROUPS = GROUPS ? GROUPS : 1;
constexpr int SCALES = GROUPS * TILE_OUTPUTS * sizeof(SCALE), ZERO_POINTS = ZEROS * ZERO_GROUPS * TILE_OUTPUTS;
constexpr int SLICE = TOKENS * DEPTH * sizeof(DTYPE), X_STAGE = ALONG * SLICE;  // bytes in a stage
constexpr int STRIP_STAGE = TILE_BYTES + SCALES + ZERO_POINTS;

// Four neighbouring outputs of a row of y.
DEVICE void finish_four(const float* sums, const DTYPE* bias, const DTYPE* residual, OUT* out, int row, int output, int outputs) {
  const int64_t place = (int64_t)row * outputs + output;
  if (outputs % 4 == 0) {
    if (output < outputs) finish<4>(sums, bias, residual, out, place, output);
  } else {
    for (int j = 0; j < 4 && output + j < outputs; ++j) finish<1>(sums + j, bias, residual, out, place + j, output + j);
  }
}

// Of a tile, from the sums that several blocks left of it, parts first to last, to `out`. part_of: where one's are, [TOKENS, TILE_N].
template <class PartOf>
DEVICE void finish_tile(PartOf part_of, int first, int last, const DTYPE* bias, const DTYPE* residual, OUT* out,
                        int first_row, int rows, int first_output, int outputs) {
  typedef Vector<float, 4> Four;
  constexpr int FOURS = TOKENS * TILE_N / 4, BATCH = FOURS < 4 * THREADS ? (FOURS + THREADS - 1) / THREADS : 4;
#pragma unroll 1
  for (int start = threadIdx.x; start < FOURS; start += BATCH * THREADS) {
    Four sums[BATCH] = {};
    for (int index = first; index <= last; ++index) {
      const float4* sums_of = reinterpret_cast<const float4*>(part_of(index));
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (start + i * THREADS >= FOURS) break;
        const float4 part = __ldcg(sums_of + start + i * THREADS);
        sums[i].at[0] += part.x, sums[i].at[1] += part.y, sums[i].at[2] += part.z, sums[i].at[3] += part.w;
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int at = (start + i * THREADS) * 4, row = first_row + at / TILE_N, output = first_output + at % TILE_N;
      if (at >= FOURS * 4 || row >= rows) break;
      finish_four(sums[i].at, bias, residual, out, row, output, outputs);
    }
  }
}
