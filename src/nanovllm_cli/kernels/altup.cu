// Several residual streams, of which layers compute with the first (AltUp; see reference.py and layers/altup.py).
//
//   altup_predict   streams[k] += sum over s of a[k][s] * streams[s],       a = coefficients [S, S, S] @ tanh(logits * factor);
//                   first[t] = streams[0][t] as it is then
//   altup_correct   streams[k] += b[k] * (found - streams[0]),              b = 1 + coefficients [S, S] @ tanh(logits * factor);
//                   first[t] = streams[0][t] as it is then, times gains
//
// streams [S, T, width] DTYPE in place, found and first [T, width] DTYPE, gains [width] DTYPE, logits [T, S] and coefficients fp32.
// STREAMS is S, a macro as VECTOR is, of which width is a multiple. A thread has a load of VECTOR elements of each stream, so that
// it alone reads what it writes. Grid (T, width / (threads * VECTOR)).
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

// One row of coefficients [S] times shares.
DEVICE float weighted(const float* row, const float* shares) {
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < STREAMS; ++j) total += row[j] * shares[j];
  return total;
}

DEVICE void read_shares(const float* logits, float factor, float* shares) {
#pragma unroll
  for (int j = 0; j < STREAMS; ++j) shares[j] = tanhf(logits[(Index)blockIdx.x * STREAMS + j] * factor);
}

KERNEL __launch_bounds__(256)
altup_predict(DTYPE* streams, const float* logits, const float* coefficients, DTYPE* first, int num_tokens, int width,
              float factor) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  if (column >= width) return;
  const Index row = (Index)blockIdx.x * width + column, apart = (Index)num_tokens * width;
  wait_for_previous_kernel();
  float shares[STREAMS];
  read_shares(logits, factor, shares);
  Elements own[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) own[s] = Elements::load(streams + s * apart + row);
  let_next_kernel_start();
#pragma unroll
  for (int k = 0; k < STREAMS; ++k) {
    float weights[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
#ifdef BUG_TURNED
      weights[s] = weighted(coefficients + (s * STREAMS + k) * STREAMS, shares);
#else
      weights[s] = weighted(coefficients + (k * STREAMS + s) * STREAMS, shares);
#endif
    }
    Elements sums;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      float total = to_float(own[k].at[j]);
#pragma unroll
      for (int s = 0; s < STREAMS; ++s) total += weights[s] * to_float(own[s].at[j]);
      sums.at[j] = from_float<DTYPE>(total);
    }
    sums.store(streams + k * apart + row);
    if (k == 0) sums.store(first + row);
  }
}
EXPORT(altup_predict)

KERNEL __launch_bounds__(256)
altup_correct(DTYPE* streams, const DTYPE* found, const float* logits, const float* coefficients, const DTYPE* gains, DTYPE* first,
              int num_tokens, int width, float factor) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  if (column >= width) return;
  const Index row = (Index)blockIdx.x * width + column, apart = (Index)num_tokens * width;
  wait_for_previous_kernel();
  float shares[STREAMS];
  read_shares(logits, factor, shares);
  const Elements made = Elements::load(found + row), scales = Elements::load(gains + column);
  Elements own = Elements::load(streams + row);
  float news[VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) news[j] = to_float(made.at[j]) - to_float(own.at[j]);
  let_next_kernel_start();
#pragma unroll
  for (int k = 0; k < STREAMS; ++k) {
#ifdef BUG_WITHOUT_ONE
    const float weight = weighted(coefficients + k * STREAMS, shares);
#else
    const float weight = 1.0f + weighted(coefficients + k * STREAMS, shares);
#endif
    if (k > 0) own = Elements::load(streams + k * apart + row);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) own.at[j] = from_float<DTYPE>(to_float(own.at[j]) + weight * news[j]);
    own.store(streams + k * apart + row);
    if (k == 0) {
      Elements scaled;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) scaled.at[j] = from_float<DTYPE>(to_float(own.at[j]) * to_float(scales.at[j]));
      scaled.store(first + row);
    }
  }
}
EXPORT(altup_correct)
