// out [T, width] = weight[ids] * scale, weight [vocab_size, width] DTYPE; width a multiple of VECTOR.
//
// ids [T] int64, or, where `tokens` is not null, indices into tokens [num_tokens] int64, which holds the ids: a decode graph
// reads what the sampler left there. An id or an index outside its range (-1 is padding) gives a row of zeros.
//
// One load a thread; grid (T, columns / (threads * VECTOR)): a row is random access, so its loads are spread over blocks.
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

KERNEL __launch_bounds__(256)
embedding(const int64_t* ids, const int64_t* tokens, const DTYPE* weight, DTYPE* out, int64_t num_tokens, int64_t vocab_size,
          int width, float scale) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  if (column >= width) return;
  wait_for_previous_kernel();
  int64_t id = ids[blockIdx.x];
  if (tokens) id = id >= 0 && id < num_tokens ? tokens[id] : -1;
  Elements row;
  if (id >= 0 && id < vocab_size) {
#ifdef BUG_INT32
    row = Elements::load(weight + (int)(id * width) + column);
#else
    row = Elements::load(weight + id * width + column);
#endif
    if (scale != 1.0f)
      for (int j = 0; j < VECTOR; ++j) row.at[j] = from_float<DTYPE>(to_float(row.at[j]) * scale);
  } else {
    for (int j = 0; j < VECTOR; ++j) row.at[j] = from_float<DTYPE>(0.0f);
  }
  let_next_kernel_start();
  row.store(out + (int64_t)blockIdx.x * width + column);
}
EXPORT(embedding)
