// Causal attention of any number of query tokens a sequence over a paged cache that holds their keys and values already.
//
//   out[t, h] = sum over keys j of softmax_j(score(t, h, j)) v[j]     j up to the position of t, `window` keys at most
//   score = scale q[t, h] . k[j], or softcap * tanh of that over softcap; sinks[h] is one more logit, without a value
//
// q [T, H, D] DTYPE, k_cache and v_cache [N, KH, BLOCK_SIZE, D] KV_DTYPE, block_tables [B, table_width], out [T, H * D] DTYPE,
// sinks [H], k_scale and v_scale [KH] float or null. FlashAttention-2 (Dao 2023): scores live in registers only.
//
// Work: one block for one item and one kv head. An item is up to ROWS rows of a sequence, a row being a (token, head of the
// group) pair, so that K and V are read once for the whole group, over a range of keys. A warp has 16 rows, or 32 in an item of
// more than half the rows: then a K or V fragment from shared memory serves two mma. Tiles of KEYS keys, which begin at multiples
// of KEYS, arrive by cp.async while the tile before is computed on. An 8-bit cache arrives raw, and each thread turns what it has
// copied itself into DTYPE: once a block, where converting fragments would do so once a warp. Its scales stay out of the tiles:
// k_scale is part of the scale of the scores, v_scale of the last division.
// Shared memory: rows of D elements, 16-byte chunks swizzled by the row (D a multiple of 64) or rows 16 bytes apart more, so
// that the eight rows of an ldmatrix lie in different banks.
//
// A range of keys that is divided: each item leaves its sums in scratch, and the last block of a tile to finish adds them up in
// order of the keys. With fold_keys > 0 sums begin anew at every multiple of fold_keys and are added up in the same order and by
// the same operations whether one item walks through several such ranges or each has an item of its own. Key tiles that a row
// does not see change none of its bits, rows of an mma are independent, and arithmetic is in intrinsics that the compiler may not
// contract: a row's bits depend on its sequence and position, not on the rows beside it, nor on where a chunk begins.
#include "pairs.cuh"
#include "prefill_sums.cuh"

// ---- tiles into shared memory ----

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

// Keys outside of the item's range become zeros: what lies there may be anything, and 0 * NaN is not 0.
DEVICE void copy_keys(const Problem& problem, int begin, int end, int first, KV_DTYPE* keys, KV_DTYPE* values) {
  const int chunk = threadIdx.x % LANES;
  if (chunk >= RAW_CHUNKS) return;
  int block = 0;
#pragma unroll
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
    if (passed % 16 == 0) block = problem.table[(source + 1) / BLOCK_SIZE];
#else
    if (passed % 16 == 0) block = problem.table[source / BLOCK_SIZE];  // 16 keys from here on share a block
#endif
#if defined(BUG_INT_OVERFLOW)
    const int offset = ((block * problem.kv_heads + problem.head) * BLOCK_SIZE + source % BLOCK_SIZE) * HEAD_DIM;
#else
    const int64_t row_number = ((int64_t)block * problem.kv_heads + problem.head) * BLOCK_SIZE + source % BLOCK_SIZE;
    const int64_t offset = row_number * HEAD_DIM;
#endif
    const int target = QUANTIZED ? row * DIM + chunk * 16 : place(row, chunk);
    copy_chunk(keys + target, problem.k_cache + offset, chunk, in_range);
    copy_chunk(values + target, problem.v_cache + offset, chunk, in_range);
  }
}

// What this thread has copied, from raw to a tile.
DEVICE void dequantize_keys(const uint8_t* raw, DTYPE* tile) {
  const int chunk = threadIdx.x % LANES;
  if (chunk >= RAW_CHUNKS) return;
#pragma unroll
  for (int row = threadIdx.x / LANES; row < KEYS; row += STEP) {
    const uint4 words = *reinterpret_cast<const uint4*>(raw + row * DIM + chunk * 16);
    for (int turn = 0; turn < 2; ++turn) {
      const int j = turn ^ chunk / 4 % 2;  // of eight lanes half write even chunks, and half odd ones: other banks
      const uint32_t low = j ? words.z : words.x, high = j ? words.w : words.y;
      const Vector<uint32_t, 4> pairs = {dequantize(low, 0), dequantize(low, 2), dequantize(high, 0), dequantize(high, 2)};
      pairs.store(reinterpret_cast<uint32_t*>(tile + place(row, 2 * chunk + j)));
    }
  }
}

// ---- one tile of keys ----

// Where a lane points ldmatrix to get 16 x 16 elements: row and half of the 16 columns that are its own, and the 16 columns.
DEVICE const DTYPE* fragment(const DTYPE* rows, int lane_row, int lane_half, int step) {
  const int chunk = SWIZZLED ? step / 4 * 8 + ((2 * (step % 4)) ^ lane_half ^ (lane_row & 7)) : 2 * step + lane_half;
  return rows + lane_row * STRIDE + chunk * 8;
}

// queries, keys, values: in shared memory, the warp's first row. hidden: whether some key is, to some row from first_row on.
template <int TILES>
DEVICE void attend_tile(const Problem& problem, const Item& item, Sums<TILES, COLUMNS>& sums, const DTYPE* queries,
                        const DTYPE* keys, const DTYPE* values, int first_row, int first_key, bool hidden, int lane) {
  float scores[TILES][KEYS / 8][4] = {};
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    uint32_t q[TILES][4];
    for (int t = 0; t < TILES; ++t) load_matrix_x4(q[t], fragment(queries + t * 16 * STRIDE, lane % 16, lane / 16, step));
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      uint32_t k[4];
      load_matrix_x4(k, fragment(keys + n * 16 * STRIDE, lane / 16 * 8 + lane % 8, lane / 8 % 2, step));
      for (int t = 0; t < TILES; ++t) {
        mma_m16n8k16<DTYPE>(scores[t][2 * n], q[t], k);
        mma_m16n8k16<DTYPE>(scores[t][2 * n + 1], q[t], k + 2);
      }
    }
  }
  if (problem.softcap > 0.0f) {  // cap tanh(x), as a score: tanh(x) = 1 - 2 / (1 + e^2x)
    const float slope = 2.0f * problem.to_log2 / problem.softcap, cap = problem.softcap * LOG2_E / problem.to_log2;
#pragma unroll
    for (int i = 0; i < TILES * KEYS / 2; ++i) {
      float& score = scores[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4];
      score = cap * (1.0f - __fdividef(2.0f, 1.0f + exp2f(score * slope)));
    }
  }
  if (hidden) {
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
      const int row = min(first_row + i * 8 + lane / 4, item.rows - 1);
      const int distance = problem.position(item, row) - (first_key + 2 * (lane % 4));
      for (int n = 0; n < KEYS / 8; ++n)
        for (int j = 0; j < 2; ++j)
          if ((unsigned)(distance - 8 * n - j) >= (unsigned)problem.seen) scores[i / 2][n][i % 2 * 2 + j] = NEGATIVE_INFINITY;
    }
  }
  float base[TILES][2], correction[TILES][2];
  bool changed = false;
#pragma unroll
  for (int i = 0; i < TILES * 2; ++i) {
    const int t = i / 2, j = i % 2;
    float most = sums.most[t][j];
    for (int n = 0; n < KEYS / 8; ++n) most = fmaxf(most, fmaxf(scores[t][n][2 * j], scores[t][n][2 * j + 1]));
    most = warp_max(most, 4);
    base[t][j] = log2_base(most, problem.to_log2);
    correction[t][j] = rescaling(sums.most[t][j], base[t][j], problem.to_log2);
    changed = changed || most != sums.most[t][j];
    sums.most[t][j] = most;
  }
  if (__any_sync(ALL_LANES, changed)) {  // seldom after the first tiles; where nothing changed, the factors are 1
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
      const int t = i / 2, j = i % 2;
      sums.sum[t][j] = __fmul_rn(sums.sum[t][j], correction[t][j]);
      for (int n = 0; n < COLUMNS; ++n)
        for (int c = 2 * j; c < 2 * j + 2; ++c) sums.out[t][n][c] = __fmul_rn(sums.out[t][n][c], correction[t][j]);
    }
  }
#pragma unroll
  for (int n = 0; n < KEYS / 16; ++n) {
    uint32_t p[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      for (int i = 0; i < 8; ++i) {
        float& score = scores[t][2 * n + i / 4][i % 4];
        score = exp2f(__fmaf_rn(score, problem.to_log2, -base[t][i / 2 % 2]));
        sums.sum[t][i / 2 % 2] = __fadd_rn(sums.sum[t][i / 2 % 2], score);
      }
      for (int i = 0; i < 4; ++i) p[t][i] = pack(scores[t][2 * n + i / 2][i % 2 * 2], scores[t][2 * n + i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      uint32_t v[4];
      load_matrix_x4_transposed(v, fragment(values + n * 16 * STRIDE, lane % 16, lane / 16, step));
      for (int t = 0; t < TILES; ++t) {
        mma_m16n8k16<DTYPE>(sums.out[t][2 * step], p[t], v);
        mma_m16n8k16<DTYPE>(sums.out[t][2 * step + 1], p[t], v + 2);
      }
    }
  }
}

// ---- one item ----

template <int TILES>
DEVICE void attend(const Problem& problem, const Item& item, unsigned char* shared, int* counters) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int pieces = (item.rows + 15) / 16, first_row = warp * 16 * TILES, last_row = min(first_row + 16 * TILES, item.rows) - 1;
  const int begin = item.begin, end = item.end;
  const bool active = first_row < item.rows;
  DTYPE* queries = reinterpret_cast<DTYPE*>(shared);
  DTYPE* tiles = queries + ROWS * STRIDE;                                  // keys, values, and the next ones; or
  KV_DTYPE* raw = reinterpret_cast<KV_DTYPE*>(tiles + 2 * TILE);           // keys, values, and raw the next ones
  auto copy_next = [&](int key, int stage) {
    KV_DTYPE* keys = QUANTIZED ? raw : reinterpret_cast<KV_DTYPE*>(tiles + stage * 2 * TILE);
    copy_keys(problem, begin, end, key, keys, keys + (QUANTIZED ? RAW_TILE : TILE));
    commit_copies();
  };
  constexpr int QUERY_LANES = power_from(COLUMNS);
  for (int row = threadIdx.x / QUERY_LANES; row < (pieces + TILES - 1) / TILES * TILES * 16; row += THREADS / QUERY_LANES) {
    const int chunk = threadIdx.x % QUERY_LANES;
    const DTYPE* query = problem.q + (row < item.rows ? problem.query(item, row) : 0);
    if (chunk < COLUMNS) copy_chunk(queries + place(row, chunk), query, chunk, row < item.rows);
  }
  commit_copies();
  const int first_position = problem.position(item, first_row), last_position = problem.position(item, last_row);
  int key = begin / KEYS * KEYS, stage = 0;
  Sums<TILES, COLUMNS> sums;
  if (key < end) copy_next(key, stage);
  do {
    const int range_end = problem.fold_keys ? min(end, (key / problem.fold_keys + 1) * problem.fold_keys) : end;
    sums.clear();
    for (; key < range_end; key += KEYS) {
#if !defined(BUG_NO_WAIT)
      wait_copies<0>();
#endif
#if !defined(BUG_NO_BARRIER)
      __syncthreads();  // the tile is complete, and nobody reads the one before any more
#endif
      const int next = key + KEYS;
      DTYPE* keys = tiles + stage * 2 * TILE;
      if constexpr (QUANTIZED) {
        dequantize_keys(reinterpret_cast<const uint8_t*>(raw), keys);
        dequantize_keys(reinterpret_cast<const uint8_t*>(raw + RAW_TILE), keys + TILE);
      } else {
        stage ^= 1;
      }
      if (next < end) copy_next(next, stage);
      if constexpr (QUANTIZED) __syncthreads();  // all threads' parts of the tile are there
      if (active) {
#if defined(BUG_NO_MASK)
        const bool hidden = false;
#else
        const bool hidden = next - 1 > first_position || last_position - key >= problem.seen;
#endif
        attend_tile<TILES>(problem, item, sums, queries + first_row * STRIDE, keys, keys + TILE, first_row, key, hidden, lane);
      }
    }
    const bool folded = problem.fold_keys && (range_end - 1) / problem.fold_keys != begin / problem.fold_keys;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float* piece = problem.piece(item.piece + warp * TILES + t);
      if (first_row + 16 * t >= item.rows) continue;
      if (folded) add_before(problem, sums, t, piece, lane);
      if (range_end < end) store_sums(sums, t, piece, lane);
    }
  } while (key < end);
  wait_copies<0>();
  let_next_kernel_start();
  const int own_piece = item.piece + item.split * pieces;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const int row = first_row + 16 * t, piece = own_piece + warp * TILES + t;
    if (row >= item.rows) continue;
    if (item.splits > 1) {
      store_sums(sums, t, problem.piece(piece), lane);
    } else {
      write_rows(problem, item, sums, t, row + lane / 4, 0, lane);
    }
  }
  if (item.splits > 1) {
    int* counter = counters + (int64_t)item.counter * problem.kv_heads + problem.head;
    __threadfence();
    __syncthreads();
    const bool last = threadIdx.x == 0 && atomicAdd(counter, 1) == item.splits - 1;
    if (!__syncthreads_or(last)) return;
    __threadfence();
#if !defined(BUG_NO_RESET)
    if (threadIdx.x == 0) *counter = 0;  // for the next launch
#endif
    combine(problem, item, item.piece, pieces, warp, lane);
  }
}

// Grid (items, KH). window: 0 for all. counters: zeros, and zeros again afterwards.
KERNEL __launch_bounds__(THREADS, 2)
prefill_attention(const DTYPE* q, const KV_DTYPE* k_cache, const KV_DTYPE* v_cache, const Item* items, const int* block_tables,
                  const float* sinks, const float* k_scale, const float* v_scale, DTYPE* out, float* scratch, int* counters,
                  int kv_heads, int group, int table_width, int window, int fold_keys, float scale, float softcap) {
  DYNAMIC_SHARED(shared);
  wait_for_previous_kernel();
  const Item& item = items[blockIdx.x];  // read where it is needed: the loop over tiles has no registers to spare
  const int head = blockIdx.y;
  Problem problem;
  problem.q = q;
  problem.k_cache = k_cache;
  problem.v_cache = v_cache;
  problem.table = block_tables + (int64_t)item.sequence * table_width;
  problem.sinks = sinks;
  problem.v_scale = v_scale ? v_scale[head] : 1.0f;
  problem.out = out;
  problem.scratch = scratch;
  problem.kv_heads = kv_heads;
  problem.head = head;
  problem.group = group;
  problem.one_over_group = 0xffffffffu / group + 1;
  problem.seen = window > 0 ? window : 0x7fffffff;
  problem.fold_keys = fold_keys;
  problem.softcap = softcap;
  problem.to_log2 = scale * LOG2_E * (k_scale ? k_scale[head] : 1.0f);
  if (item.rows <= 16 * WARPS) {
    attend<1>(problem, item, shared, counters);
  } else if constexpr (ROW_TILES > 1) {
    attend<ROW_TILES>(problem, item, shared, counters);
  }
}
EXPORT(prefill_attention)
