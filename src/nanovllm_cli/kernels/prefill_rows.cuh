// Of prefill_attention.cu: an item's rows among warps, where a warp's registers hold the sums of whole heads.
//
// A warp has 16 rows, or 32 in an item of more than half the rows: then a K or V fragment from shared memory serves two mma.
// Tiles of keys arrive by cp.async while the tile before is computed on. An 8-bit cache arrives raw, and each thread turns what
// it has copied itself into DTYPE: once a block, where converting fragments would do so once a warp.
#pragma once

#include "prefill_tiles.cuh"

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
  if constexpr (DISTANCES) {  // before the products: behind them there are no registers for it
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
      const int row = min(first_row + i * 8 + lane / 4, item.rows - 1);
      const float* distances = problem.by_distance(item, row) + first_key + 2 * (lane % 4);
      for (int n = 0; n < KEYS / 8; ++n)
        for (int j = 0; j < 2; ++j) scores[i / 2][n][i % 2 * 2 + j] = problem.moved(0.0f, __ldg(distances + 8 * n + j));
    }
  }
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
  if (problem.softcap > 0.0f) {
#pragma unroll
    for (int i = 0; i < TILES * KEYS / 2; ++i) {
      float& score = scores[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4];
      score = capped(problem, score);
    }
  }
  if (hidden) {
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
      const int row = min(first_row + i * 8 + lane / 4, item.rows - 1);
      const int last = problem.last_seen(item, row), distance = last - (first_key + 2 * (lane % 4));
      const unsigned num_seen = problem.num_seen(item, row, last);
      for (int n = 0; n < KEYS / 8; ++n)
        for (int j = 0; j < 2; ++j)
          if ((unsigned)(distance - 8 * n - j) >= num_seen) scores[i / 2][n][i % 2 * 2 + j] = NEGATIVE_INFINITY;
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
  float key_scale = 0.0f, value_scale = 0.0f;  // of the raw tiles, of int8
  auto copy_next = [&](int key, int stage) {
    KV_DTYPE* keys = QUANTIZED ? raw : reinterpret_cast<KV_DTYPE*>(tiles + stage * 2 * TILE);
    KV_DTYPE* values = keys + (QUANTIZED ? RAW_TILE : TILE);
    copy_keys(problem, begin, end, key, [&](int target, int64_t offset, int chunk, bool in_range) {
      copy_chunk(keys + target, problem.k_cache + offset, chunk, in_range);
      copy_chunk(values + target, problem.v_cache + offset, chunk, in_range);
    });
    commit_copies();
    if constexpr (INT8) {
      key_scale = load_scale(problem, problem.k_scales, begin, end, key);
      value_scale = load_scale(problem, problem.v_scales, begin, end, key);
    }
  };
  constexpr int QUERY_LANES = power_from(COLUMNS);
  for (int row = threadIdx.x / QUERY_LANES; row < (pieces + TILES - 1) / TILES * TILES * 16; row += THREADS / QUERY_LANES) {
    const int chunk = threadIdx.x % QUERY_LANES;
    const DTYPE* query = problem.q + (row < item.rows ? problem.query(item, row) : 0);
    if (chunk < COLUMNS) copy_chunk(queries + place(row, chunk), query, chunk, row < item.rows);
  }
  commit_copies();
  const int seen_by_all = problem.last_seen(item, first_row), last_position = problem.position(item, last_row);
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
        dequantize_keys(reinterpret_cast<const uint8_t*>(raw), keys, key_scale);
        dequantize_keys(reinterpret_cast<const uint8_t*>(raw + RAW_TILE), keys + TILE, value_scale);
      } else {
        stage ^= 1;
      }
      if (next < end) copy_next(next, stage);
      if constexpr (QUANTIZED) __syncthreads();  // all threads' parts of the tile are there
      if (active) {
#if defined(BUG_NO_MASK)
        const bool hidden = false;
#else
        const bool hidden = next - 1 > seen_by_all || last_position - key >= problem.seen;
#endif
        attend_tile<TILES>(problem, item, sums, queries + first_row * STRIDE, keys, keys + TILE, first_row, key, hidden, lane);
      }
    }
    const bool folded = problem.fold_keys && (range_end - 1) / problem.fold_keys != begin / problem.fold_keys;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float* piece = problem.piece(item.piece + warp * TILES + t);
      if (first_row + 16 * t >= item.rows) continue;
      if (folded) add_before(problem, sums, t, load_floats(piece, COLUMNS, lane), piece, lane);
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
      write_rows(problem, item, sums, t, row + lane / 4, lane, [](int n) { return n; });
    }
  }
  if (item.splits > 1) combine_if_last(problem, item, pieces, counters, warp, lane);
}
