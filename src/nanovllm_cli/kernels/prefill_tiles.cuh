// Of prefill_attention.cu: its way of a tile of keys, or values, from the paged cache into shared memory.
//
// Rows of DIM elements, 16-byte chunks swizzled by the row (DIM a multiple of 64) or rows 16 bytes apart more, so that the eight
// rows of an ldmatrix lie in different banks.
#pragma once

#include "pairs.cuh"
#include "prefill_sums.cuh"

DEVICE int place(int row, int chunk) { return row * STRIDE + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 8; }

// 16 bytes of a row of HEAD_DIM elements; zeros behind its end, and where not in_range.
template <class T>
DEVICE void copy_chunk(T* target, const T* row, int chunk, bool in_range) {
  constexpr int COUNT = WIDEST<T>;
  if constexpr (HEAD_DIM % COUNT == 0) {
    copy_async_16(target, row + chunk * COUNT, in_range && chunk * COUNT < HEAD_DIM);
  } else {
    Vector<T, COUNT> elements;
    for (int j = 0; j < COUNT; ++j)
      elements.at[j] = in_range && chunk * COUNT + j < HEAD_DIM ? row[chunk * COUNT + j] : from_float<T>(0.0f);
    elements.store(target);
  }
}

// copy(place in a tile, offset in a cache, chunk, whether it is there) for what this thread copies of the keys from `first` on.
// Keys outside of the item's range become zeros: what lies there may be anything, and 0 * NaN is not 0.
template <class Copy>
DEVICE void copy_keys(const Problem& problem, int begin, int end, int first, const Copy& copy) {
  const int chunk = threadIdx.x % LANES;
  if (chunk >= RAW_CHUNKS) return;
  int block = 0;
#pragma unroll(HEAD_DIM % WIDEST<KV_DTYPE> ? 1 : KEYS / STEP)  // element by element it is long enough as it is
  for (int passed = 0; passed < KEYS; passed += STEP) {
    const int row = passed + threadIdx.x / LANES, key = first + row;
#if defined(BUG_NO_TAIL)
    const bool in_range = key < (end + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE;
    const int source = key;
#else
    const bool in_range = key >= begin && key < end;
    const int source = min(max(key, begin), end - 1);
#endif
#if defined(BUG_NEXT_PAGE)
    if (passed % 16 == 0) block = problem.table[source / BLOCK_SIZE + 1];
#else
    if (passed % 16 == 0) block = problem.table[source / BLOCK_SIZE];  // 16 keys from here on share a block
#endif
#if defined(BUG_INT_OVERFLOW)
    const int offset = ((block * problem.kv_heads + problem.head) * BLOCK_SIZE + source % BLOCK_SIZE) * HEAD_DIM;
#else
    const int64_t row_number = ((int64_t)block * problem.kv_heads + problem.head) * BLOCK_SIZE + source % BLOCK_SIZE;
    const int64_t offset = row_number * HEAD_DIM;
#endif
    copy(QUANTIZED ? row * DIM + chunk * 16 : place(row, chunk), offset, chunk, in_range);
  }
}

// Of int8, the scale of one of the keys from `first` on that this thread's lanes copy; 0 outside of the item's range.
DEVICE float load_scale(const Problem& problem, const float* scales, int begin, int end, int first) {
  const int key = first + threadIdx.x % LANES * STEP + threadIdx.x / LANES;
  if (threadIdx.x % LANES >= KEYS / STEP || key < begin || key >= end) return 0.0f;
  const int64_t block = problem.table[key / BLOCK_SIZE];
  return __ldcg(scales + (block * problem.kv_heads + problem.head) * BLOCK_SIZE + key % BLOCK_SIZE);
}

// What this thread has copied, from raw to a tile. scale: see load_scale.
DEVICE void dequantize_keys(const uint8_t* raw, DTYPE* tile, float scale) {
  const int chunk = threadIdx.x % LANES;
  if (!INT8 && chunk >= RAW_CHUNKS) return;
#pragma unroll
  for (int row = threadIdx.x / LANES, i = 0; row < KEYS; row += STEP, ++i) {
    const Dequantizer<KV_DTYPE> number(INT8 ? __shfl_sync(ALL_LANES, scale, i, LANES) : 0.0f);
    if (INT8 && chunk >= RAW_CHUNKS) continue;
    const uint4 words = *reinterpret_cast<const uint4*>(raw + row * DIM + chunk * 16);
    for (int turn = 0; turn < 2; ++turn) {
      const int j = turn ^ chunk / 4 % 2;  // of eight lanes half write even chunks, and half odd ones: other banks
      const uint32_t low = j ? words.z : words.x, high = j ? words.w : words.y;
      const Vector<uint32_t, 4> pairs = {number.pair(low, 0), number.pair(low, 2), number.pair(high, 0), number.pair(high, 2)};
      pairs.store(reinterpret_cast<uint32_t*>(tile + place(row, 2 * chunk + j)));
    }
  }
}
