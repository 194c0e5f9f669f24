// What the kernels for one to eight rows share: the norm on the way in; bias, residual or a gate on the way out.
//
// By macro, besides those of results.cuh: VECTOR (elements of a load that rows are a multiple of), STRIPS of outputs a warp has,
// NORM.
#pragma once
#include "results.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

constexpr int MOST_ROWS = 8;
static_assert(!GATED || STRIPS == 2, "a gate and its up are strips of one warp");

// x, normalised, in shared memory: row r from r * stride, zeros up to a multiple of PAD columns, and the gains behind the last
// row. source_of: the column of x and gain that is the n-th here. squares: shared memory, a sum for each warp and row. Ends with a
// barrier.
template <int PAD, class SourceOf>
DEVICE void normalise(DTYPE* shared, int stride, float* squares, const DTYPE* x, const DTYPE* gain, int rows, int width,
                      float eps, float offset, SourceOf source_of) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int first = threadIdx.x * VECTOR;
  DTYPE* gains = shared + rows * stride;
  for (int column = first; column < width; column += THREADS * VECTOR)
    Elements::load(gain + source_of(column)).store(gains + column);
  wait_for_previous_kernel();
  float sums[MOST_ROWS] = {};
  for (int column = first; column < width; column += THREADS * VECTOR) {
    const int source = source_of(column);
#pragma unroll
    for (int row = 0; row < MOST_ROWS; ++row) {
      if (row >= rows) break;
      const Elements elements = Elements::load(x + (int64_t)row * width + source);
      elements.store(shared + row * stride + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sums[row] += to_float(elements.at[i]) * to_float(elements.at[i]);
    }
  }
#pragma unroll
  for (int row = 0; row < MOST_ROWS; ++row) {
    if (row >= rows) break;
    const float sum = warp_sum(sums[row]);
    if (lane == 0) squares[row * WARPS + warp] = sum;
  }
#ifndef BUG_NORM_BARRIER
  __syncthreads();
#endif
  float scales[MOST_ROWS];
#pragma unroll
  for (int row = 0; row < MOST_ROWS; ++row) {
    if (row >= rows) break;
    float sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += squares[row * WARPS + i];
    scales[row] = rsqrtf(sum / width + eps);
  }
  for (int column = first; column < width; column += THREADS * VECTOR) {  // what this very thread has put there
    const Elements factors = Elements::load(gains + column);
#pragma unroll
    for (int row = 0; row < MOST_ROWS; ++row) {
      if (row >= rows) break;
      Elements elements = Elements::load(shared + row * stride + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        elements.at[i] = from_float<DTYPE>(to_float(elements.at[i]) * scales[row] * (offset + to_float(factors.at[i])));
      elements.store(shared + row * stride + column);
    }
  }
  for (int i = threadIdx.x; i < rows * PAD; i += THREADS)  // the last PAD columns, where they pass the width
    if (width / PAD * PAD + i % PAD >= width && width % PAD)
      shared[i / PAD * stride + width / PAD * PAD + i % PAD] = from_float<DTYPE>(0.0f);
  __syncthreads();
}

// Sums of one warp, in shared memory: strips of STRIP outputs, or one of gates beside one of ups. Rows and strips are as far apart
// as lets lanes that write four rows, or read two strips, find banks of their own; lanes that read two rows of sixteen do not.
template <int STRIP>
struct Sums {
  static constexpr int ROW = STRIP == 16 ? STRIPS * STRIP + 4 : STRIP, SIDE = STRIP == 16 ? STRIP : MOST_ROWS * ROW + 16;
  float at[STRIP == 16 ? MOST_ROWS * ROW : STRIPS * SIDE];

  DEVICE float& of(int strip, int row, int column) { return at[strip * SIDE + row * ROW + column]; }
  DEVICE float of(int strip, int row, int column) const { return at[strip * SIDE + row * ROW + column]; }

  // Of products whose A is a strip of sixteen outputs, and whose B is eight rows.
  DEVICE void store(const float (*totals)[4]) {
    static_assert(STRIP == 16);
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of(strip, lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8) = totals[strip][i];
    }
  }
};

// A team of warps, and its outputs of a panel.
template <int STRIP>
struct Team : Results<GATED ? STRIP : STRIP * STRIPS> {
  static constexpr int OUTPUTS = GATED ? STRIP : STRIP * STRIPS;

  // sums: of its first warp, the others' behind them. first: the panel's first output of the team. added_to_mine: as in `write`.
  // One meeting is enough, where sums have two places in turn: who writes one again has met all of its readers at the other.
  DEVICE void finish(const Sums<STRIP>* sums, int first, float added_to_mine) const {
    const DTYPE* bias = this->bias_of_gates();
    this->meet();
    const auto sum_of = [&](int side, int row, int column) {
      const int strip = GATED ? side : column / STRIP;
      float sum = sums[0].of(strip, row, column % STRIP);
      for (int i = 1; i < this->parts; ++i) sum += sums[i].of(strip, row, column % STRIP);
      return sum;
    };
    this->write(sum_of, first, added_to_mine, bias);
  }
};
