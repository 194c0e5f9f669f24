// What the kernels for one to eight rows share: the norm on the way in; bias, residual or a gate on the way out.
//
// By macro: DTYPE, OUT, VECTOR (elements of a load that rows are a multiple of), STRIPS of outputs a warp has, NORM, ACTIVATION.
#pragma once
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

constexpr int WARPS = 8, THREADS = WARPS * WARP_SIZE;
constexpr int MOST_ROWS = 8;
constexpr bool GATED = ACTIVATION != 0;
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

// act, as reference.gated_activation has it: 1 silu, 2 gelu_tanh, 3 gelu.
DEVICE float activate(float x) {
  if (ACTIVATION == 1) return x / (1.0f + expf(-x));
  if (ACTIVATION == 2) return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
}

// Where a group of `parts` warps puts what it has summed: strips of STRIP outputs, or one of gates beside one of ups.
template <int STRIP>
struct Results {
  static constexpr int OUTPUTS = GATED ? STRIP : STRIP * STRIPS;
  typedef float Sums[STRIPS][MOST_ROWS][STRIP];  // of a warp

  const DTYPE *bias, *residual;
  OUT* out;
  int rows, outputs, parts;
  int mine;  // this lane's first of the group's rows * OUTPUTS results, which every (parts * 32)-th one follows

  // To result `at` of a group whose first output is `first`.
  DEVICE float added(int first, int at) const {
    const int output = first + at % OUTPUTS;
    if (GATED || at >= rows * OUTPUTS || output >= outputs) return 0.0f;
    const float shift = bias ? to_float(bias[output]) : 0.0f;
    return residual ? shift + to_float(residual[(int64_t)(at / OUTPUTS) * outputs + output]) : shift;
  }

  // sums: of the group's first warp. added_to_mine: added(first, mine), loaded when it was time.
  DEVICE void write(const Sums* sums, int first, float added_to_mine) const {
    const auto summed = [&](int strip, int row, int column) {
      float sum = sums[0][strip][row][column];
      for (int i = 1; i < parts; ++i) sum += sums[i][strip][row][column];
      return sum;
    };
#pragma unroll 1
    for (int i = mine; i < rows * OUTPUTS; i += parts * WARP_SIZE) {
      const int row = i / OUTPUTS, column = i % OUTPUTS, output = first + column;
      if (output >= outputs) continue;
      float y = summed(column / STRIP, row, column % STRIP);
      if (GATED) {
        float up = summed(1, row, column);
        if (bias) {
          y += to_float(bias[output]);
          up += to_float(bias[outputs + output]);
        }
        y = activate(to_float(from_float<DTYPE>(y))) * to_float(from_float<DTYPE>(up));
      } else {
        y += i == mine ? added_to_mine : added(first, i);
      }
      out[(int64_t)row * outputs + output] = from_float<OUT>(y);
    }
  }
};
