// By macro: DTYPE, and VECTOR (elements of a load that rows are a multiple of).
#pragma once
#include "common.cuh"

// Eight elements from `source` on, of which `left` are the row's and the rest is zero. STREAM: nobody reads them again.
template <bool STREAM>
DEVICE uint4 load_eight(const DTYPE* source, int left) {
  uint4 words = make_uint4(0, 0, 0, 0);
#ifdef BUG_TAIL
  left = (left + 7) / 8 * 8;
#endif
#pragma unroll
  for (int i = 0; i < 8; i += VECTOR) {
    if (i >= left) break;
    if (VECTOR == 8 && STREAM) {
      words = load_streaming(source);
    } else {
      Vector<DTYPE, VECTOR>::load(source + i).store(reinterpret_cast<DTYPE*>(&words) + i);
    }
  }
  return words;
}
