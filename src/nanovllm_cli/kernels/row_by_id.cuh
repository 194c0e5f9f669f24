// Which row of a weight a block is asked for: an embedding's.
#pragma once
#include "common.cuh"

// ids [T] int64, or, where `tokens` is not null, indices into tokens [num_tokens] int64, which holds the ids: a decode graph
// reads what the sampler left there. -1, a row of zeros, for an id or an index outside its range, as those of padding are.
DEVICE int64_t row_by_id(const int64_t* ids, const int64_t* tokens, int64_t num_tokens, int64_t num_rows) {
  int64_t id = ids[blockIdx.x];
  if (tokens) id = id >= 0 && id < num_tokens ? tokens[id] : -1;
  return id >= 0 && id < num_rows ? id : -1;
}
