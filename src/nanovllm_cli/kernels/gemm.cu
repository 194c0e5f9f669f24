// y = x @ weight.T at any number of rows, with bits that do not depend on it: the matmul of --deterministic.
//
//   x [rows, width], weight [outputs, width] DTYPE; bias [outputs] DTYPE, or null
//   out [rows, outputs] OUT = y + bias + residual, rounded once; residual, where it is not null, may be out itself
//   EXPERTS: a task (experts.cuh) has a tile's rows, weight and bias, and there is no residual
//
// Every element of y is one chain of mma.m16n8k16 over the width, from zero, sixteen columns at a time, in order; the tail is
// filled with zeros. So neither the other rows nor the tile's shape enter its bits, and a tile may fit the number of rows. Nothing
// is split along the width: that would be another chain.
//
// A block computes TILE_M rows by TILE_N outputs, a warp its share of them (WARPS_M by WARPS_N). Both operands pass through
// STAGES buffers of DEPTH columns (gemm_parts.cuh), filled by cp.async STAGES - 1 steps ahead.
// Blocks are numbered down BAND row tiles before they go across, so that those that run together share both operands in L2; those
// of tasks, down all of them.
#ifdef EXPERTS
#define TASK_ROWS TILE_M
#endif
#include "experts.cuh"
#include "gemm_parts.cuh"

constexpr int WARPS = WARPS_M * WARPS_N, THREADS = WARPS * WARP_SIZE;
constexpr int ROW_TILES = TILE_M / WARPS_M / 16, COLUMN_TILES = TILE_N / WARPS_N / 8;  // of mma, a warp
constexpr int BAND = 8;
static_assert(TILE_M % (WARPS_M * 16) == 0 && TILE_N % (WARPS_N * 8) == 0, "a warp computes whole mma tiles");

// ROWS rows of a matrix, DEPTH columns, on their way to a buffer; zeros outside the matrix.
template <int ROWS>
DEVICE void copy_tile(DTYPE* tile, const DTYPE* matrix, int first_row, int rows, int first_column, int width) {
#ifdef BUG_TAIL
  const int end = (width + DEPTH - 1) / DEPTH * DEPTH;
#else
  const int end = width;
#endif
  constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;
  const int row = threadIdx.x / CHUNKS, column = first_column + threadIdx.x % CHUNKS * CHUNK;
  const DTYPE* source = matrix + (Index)(first_row + row) * width + column;
#pragma unroll 2
  for (int i = 0; i < ROWS; i += ROWS_AT_ONCE, source += (int64_t)ROWS_AT_ONCE * width) {
    if (ROWS % ROWS_AT_ONCE && row + i >= ROWS) break;
    DTYPE* target = chunk_of(tile, row + i, threadIdx.x % CHUNKS);
    copy_chunk(target, source, matrix, first_row + row + i < rows && column < end, end - column);
  }
}

// The same of TILE_M rows that lie anywhere: `rows` are this thread's. Behind a task's last it comes again, and is nobody's.
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS, OWN_ROWS = (TILE_M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
DEVICE void copy_rows(DTYPE* tile, const DTYPE* matrix, const int* rows, int first_column, int width) {
  const int column = first_column + threadIdx.x % CHUNKS * CHUNK;
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    const int row = threadIdx.x / CHUNKS + i * ROWS_AT_ONCE;
    if (TILE_M % ROWS_AT_ONCE && row >= TILE_M) break;
    DTYPE* target = chunk_of(tile, row, threadIdx.x % CHUNKS);
    copy_chunk(target, matrix + (int64_t)rows[i] * width + column, matrix, column < width, width - column);
  }
}

#if __CUDA_ARCH__ >= 900
constexpr int WARPS_AN_SM = 16;
#else
constexpr int WARPS_AN_SM = 8;  // shared memory has no room for two of the largest blocks
#endif

KERNEL __launch_bounds__(THREADS, WARPS_AN_SM / WARPS)
gemm(const int64_t* tasks, const DTYPE* x, const DTYPE* given_weight, const DTYPE* given_bias, const DTYPE* residual, OUT* out,
     int given_rows, int width, int outputs, int taken) {
  DYNAMIC_SHARED(shared);
  const Assignment work(tasks, given_rows, taken);
  const int rows = work.rows;
  if (EXPERTS && !rows) return;
  const DTYPE *weight = work.tensor(given_weight, 0), *bias = work.tensor(given_bias, BIAS);
  constexpr int STAGE = (TILE_M + TILE_N) * DEPTH;  // elements: rows of x, then of the weight
  DTYPE* stages = reinterpret_cast<DTYPE*>(shared);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int down = (rows + TILE_M - 1) / TILE_M, across = (outputs + TILE_N - 1) / TILE_N;
  const int band = blockIdx.x / (BAND * across), in_band = blockIdx.x % (BAND * across);
  const int height = min(BAND, down - band * BAND);
  const int first_row = EXPERTS ? 0 : (band * BAND + in_band % height) * TILE_M;
  const int first_output = (EXPERTS ? work.block() : in_band / height) * TILE_N;
  const int warp_row = warp / WARPS_N * ROW_TILES * 16, warp_output = warp % WARPS_N * COLUMN_TILES * 8;
  const int steps = (width + DEPTH - 1) / DEPTH;

  int sources[OWN_ROWS];  // of x
#pragma unroll
  for (int i = 0; i < OWN_ROWS && EXPERTS; ++i)
    sources[i] = work.source(min((int)threadIdx.x / CHUNKS + i * ROWS_AT_ONCE, TILE_M - 1));
  const auto copy_x = [&](DTYPE* tile, int column) {
    if (EXPERTS) {
      copy_rows(tile, x, sources, column, width);
    } else {
      copy_tile<TILE_M>(tile, x, first_row, rows, column, width);
    }
  };

  wait_for_previous_kernel();  // the weight, too, may be what it has just unpacked
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage < steps) {
      copy_x(stages + stage * STAGE, stage * DEPTH);
      copy_tile<TILE_N>(stages + stage * STAGE + TILE_M * DEPTH, weight, first_output, outputs, stage * DEPTH, width);
    }
    commit_copies();
  }

  float sums[ROW_TILES][COLUMN_TILES][4] = {};
  int reading = 0, writing = (STAGES - 1) * STAGE;
  for (int step = 0; step < steps; ++step) {
#ifndef BUG_NO_WAIT
    wait_copies<STAGES - 2>();
#endif
#ifndef BUG_NO_BARRIER
    __syncthreads();  // this step's copies are there, and everyone is done with the buffer of the step before
#endif
    const int column = (step + STAGES - 1) * DEPTH;
    if (column < width) {
      copy_x(stages + writing, column);
      copy_tile<TILE_N>(stages + writing + TILE_M * DEPTH, weight, first_output, outputs, column, width);
    }
    commit_copies();
    DTYPE* x_tile = stages + reading;
    DTYPE* weight_tile = x_tile + TILE_M * DEPTH;
#pragma unroll 1  // as in the copies: with more at once NVRTC 13.0 spills, or 13.5 does
    for (int deep = 0; deep < 2; ++deep) {  // 32 columns, two mma deep
      uint32_t b[COLUMN_TILES][4];
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; ++j)
        load_matrix_x4(b[j], chunk_of(weight_tile, warp_output + j * 8 + lane % 8, deep * 4 + lane / 8));
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t a[ROW_TILES][4];
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
          load_matrix_x4(a[i], chunk_of(x_tile, warp_row + i * 16 + lane % 16, deep * 4 + k * 2 + lane / 16));
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
          for (int j = 0; j < COLUMN_TILES; ++j) mma_m16n8k16<DTYPE>(sums[i][j], a[i], b[j] + k * 2);
      }
    }
    writing = reading;  // all are done with it after the next barrier
    reading = reading == (STAGES - 1) * STAGE ? 0 : reading + STAGE;
  }
  wait_copies<0>();
  let_next_kernel_start();

#pragma unroll
  for (int i = 0; i < ROW_TILES * 2; ++i) {
    const int row = first_row + warp_row + i * 8 + lane / 4;
    if (row >= rows) break;
    const int64_t line = (int64_t)work.place(row) * outputs;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      const int output = first_output + warp_output + j * 8 + lane % 4 * 2;
      const int64_t place = line + output;
      const float* pair = sums[i / 2][j] + i % 2 * 2;
      if (output >= outputs) break;
      if (outputs % 2 == 0) {
        finish<2>(pair, bias, residual, out, place, output);
      } else {
        finish<1>(pair, bias, residual, out, place, output);
        if (output + 1 < outputs) finish<1>(pair + 1, bias, residual, out, place + 1, output + 1);
      }
    }
  }
}
EXPORT(gemm)
