// out [T, width] = codes[ids] * scales[:, ids], rounded to DTYPE: rows of a weight [vocab_size, width] of 8-bit codes, CODE.
//
// ids and tokens as in embedding.cu. scales [groups, vocab_size] fp32, a group for every `span` columns.
// width and span are multiples of 8.
//
// One 8-byte load a thread; grid (T, columns / (threads * 8)).
#include "common.cuh"

constexpr int VECTOR = 8;
typedef Vector<CODE, VECTOR> Codes;
typedef Vector<DTYPE, VECTOR> Elements;

DEVICE float to_float(int8_t code) { return (float)code; }

KERNEL __launch_bounds__(256)
scaled_rows(const int64_t* ids, const int64_t* tokens, const CODE* codes, const float* scales, DTYPE* out, int64_t num_tokens,
            int64_t vocab_size, int width, int span) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  if (column >= width) return;
  wait_for_previous_kernel();
  int64_t id = ids[blockIdx.x];
  if (tokens) id = id >= 0 && id < num_tokens ? tokens[id] : -1;
  Elements row;
  if (id >= 0 && id < vocab_size) {
#ifdef BUG_INT32
    const Codes found = Codes::load(codes + (int)(id * width) + column);
#else
    const Codes found = Codes::load(codes + id * width + column);
#endif
    const float scale = scales[column / span * vocab_size + id];
    for (int i = 0; i < VECTOR; ++i) row.at[i] = from_float<DTYPE>(to_float(found.at[i]) * scale);
  } else {
    for (int i = 0; i < VECTOR; ++i) row.at[i] = from_float<DTYPE>(0.0f);
  }
  let_next_kernel_start();
  row.store(out + (int64_t)blockIdx.x * width + column);
}
EXPORT(scaled_rows)
