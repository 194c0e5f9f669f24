// out [T, width] = weight[ids] * scale, rounded to DTYPE: rows of a weight [vocab_size, width] of CODE, which is DTYPE or 8 bits.
//
// ids and tokens: row_by_id.cuh. scales [groups, vocab_size] fp32, a group for every `span` columns; null: `scale` is for all.
// width and span are multiples of VECTOR.
//
// One load a thread; grid (T, columns / (threads * VECTOR)): a row is random access, so its loads are spread over blocks.
#include "row_by_id.cuh"

typedef Vector<CODE, VECTOR> Codes;
typedef Vector<DTYPE, VECTOR> Elements;

DEVICE float to_float(int8_t code) { return (float)code; }

template <class T>
DEVICE DTYPE times(T code, float scale) { return from_float<DTYPE>(to_float(code) * scale); }
DEVICE DTYPE times(DTYPE number, float scale) { return scale == 1.0f ? number : from_float<DTYPE>(to_float(number) * scale); }

KERNEL __launch_bounds__(256)
embedding(const int64_t* ids, const int64_t* tokens, int64_t num_tokens, const CODE* weight, const float* scales, DTYPE* out,
          int64_t vocab_size, int width, int span, float scale) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  if (column >= width) return;
  wait_for_previous_kernel();
  const int64_t id = row_by_id(ids, tokens, num_tokens, vocab_size);
  Elements row;
  if (id >= 0) {
    const Codes found = Codes::load(weight + (Index)(id * width) + column);
    if (scales) scale = scales[column / span * vocab_size + id];
    for (int i = 0; i < VECTOR; ++i) row.at[i] = times(found.at[i], scale);
  } else {
    for (int i = 0; i < VECTOR; ++i) row.at[i] = from_float<DTYPE>(0.0f);
  }
  let_next_kernel_start();
  row.store(out + (int64_t)blockIdx.x * width + column);
}
EXPORT(embedding)
