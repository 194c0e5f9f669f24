// Of prefill_attention.cu: an item's rows among groups of PARTS warps, for heads whose sums do not fit a warp's registers.
//
// The warps of a group have the same rows, 32, or 16 in an item of up to half the rows, and each a part of the dims: of what
// scores are made of, whose parts go through shared memory and are added up in order, and of the output. Of the scores a warp has
// eight rows to itself, whose weights go back through shared memory. Of a head's dims a part has every PARTS-th 16: they are as
// far apart as the swizzle repeats itself.
//
// Why so: with heads of 512 dims, 32 rows and 32 keys, shared memory moves 64 KiB of K and V and 42 of scores and weights. Two
// warps with halves of the dims of 16 rows, which fit as well, would move 176 for as much: K and V serve half the rows, and
// queries have no registers to stay in. Without queries shared memory has room for tiles that 64 rows use, and the L2 could not
// bring one for every 32.
//
// There is one place for K and one for V, and the next of either is under way while the other is in use. An 8-bit cache has its
// raw tiles there instead, and one tile for both, which each thread turns what it has copied itself into.
#pragma once

#include "prefill_tiles.cuh"

constexpr int GROUPS = WARPS / PARTS, EIGHTS = 2 * ROW_TILES;       // of warps; of a group's rows
constexpr int OWN_STEPS = DIM / 16 / PARTS, NEXT_OWN = 16 * PARTS;  // of a head's dims, 16 each; how far apart they are
static_assert(NEXT_OWN == 64 && SWIZZLED && EIGHTS <= PARTS, "");

// What a group's warps tell each other, in the order of an mma's result: lane l has row l / 4, columns 2 * (l % 4) and the next.
struct Exchange {
  typedef Vector<float, 2> Pair;
  Pair scores[PARTS][GROUPS][EIGHTS][KEYS / 8][WARP_SIZE];  // each part's
  float corrections[GROUPS][EIGHTS][WARP_SIZE];

  // What takes the place of scores that the same lane has read. Behind a range of keys: largest score, and sum over the lane's
  // own keys, of the range and of those before it.
  DEVICE Pair& of_range(int group, int eight, int lane) { return scores[1][group][eight][0][lane]; }
  DEVICE Pair& of_before(int group, int eight, int lane) { return scores[2][group][eight][0][lane]; }
  // In pairs, of 16 keys.
  DEVICE Vector<uint32_t, 2>* weights(int group, int eight, int step, int lane) {
    return reinterpret_cast<Vector<uint32_t, 2>*>(&scores[0][group][eight][step][lane]);
  }
};

// Its part of 16 rows of q, as the mma takes it: queries[i] are dims 16 * (i * PARTS + part) and on.
DEVICE void load_queries(const Problem& problem, const Item& item, uint32_t (&queries)[OWN_STEPS][4], int first_row, int part,
                         int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + 8 * i + lane / 4;
    const DTYPE* query = problem.q + (row < item.rows ? problem.query(item, row) : 0);
#pragma unroll
    for (int step = 0; step < OWN_STEPS; ++step)
      for (int j = 0; j < 2; ++j) {
        const int dim = 16 * (step * PARTS + part) + 8 * j + 2 * (lane % 4);
        const bool is_there = row < item.rows && dim < HEAD_DIM;
        queries[step][i + 2 * j] = is_there ? *reinterpret_cast<const uint32_t*>(query + dim) : 0;
      }
  }
}

// keys: where the lane points ldmatrix for its warp's first dims.
template <int TILES>
DEVICE void multiply_keys(const uint32_t (&queries)[TILES][OWN_STEPS][4], const DTYPE* keys, Exchange& exchange, int group,
                          int part, int lane) {
#pragma unroll 1  // here and of values: side by side they would take registers that are not there
  for (int n = 0; n < KEYS / 16; ++n) {
    float products[TILES][2][4] = {};
#pragma unroll
    for (int i = 0; i < OWN_STEPS; ++i) {
      uint32_t k[4];
      load_matrix_x4(k, keys + n * 16 * STRIDE + i * NEXT_OWN);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        mma_m16n8k16<DTYPE>(products[t][0], queries[t][i], k);
        mma_m16n8k16<DTYPE>(products[t][1], queries[t][i], k + 2);
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      for (int i = 0; i < 4; ++i)
        exchange.scores[part][group][2 * t + i % 2][2 * n + i / 2][lane] = {products[t][i / 2][i % 2 * 2],
                                                                            products[t][i / 2][i % 2 * 2 + 1]};
  }
}

// Weights of a lane's keys of its row. distance: from the first of them to the last that the row sees, of num_seen. by_distance:
// what that key's score gets.
DEVICE void weigh(const Problem& problem, Exchange& exchange, float& most, float& sum, int distance, unsigned num_seen,
                  const float* by_distance, int group, int eight, int lane) {
  float scores[KEYS / 4];
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) {
    Vector<float, 2> pair = exchange.scores[0][group][eight][n][lane];
#pragma unroll
    for (int part = 1; part < PARTS; ++part) {
      const Vector<float, 2> other = exchange.scores[part][group][eight][n][lane];
      for (int j = 0; j < 2; ++j) pair.at[j] = __fadd_rn(pair.at[j], other.at[j]);
    }
    for (int j = 0; j < 2; ++j) scores[2 * n + j] = pair.at[j];
  }
  if (problem.softcap > 0.0f) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) scores[i] = capped(problem, scores[i]);
  }
  if constexpr (DISTANCES) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) scores[i] = problem.moved(scores[i], __ldg(by_distance + 8 * (i / 2) + i % 2));
  }
  float top = most;
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) {
#if !defined(BUG_NO_MASK)
    if ((unsigned)(distance - 8 * (i / 2) - i % 2) >= num_seen) scores[i] = NEGATIVE_INFINITY;
#endif
    top = fmaxf(top, scores[i]);
  }
  top = warp_max(top, 4);
  const float base = log2_base(top, problem.to_log2), correction = rescaling(most, base, problem.to_log2);
  most = top;
  sum = __fmul_rn(sum, correction);
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) {
    scores[i] = exp2f(__fmaf_rn(scores[i], problem.to_log2, -base));
    sum = __fadd_rn(sum, scores[i]);
  }
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step)
    *exchange.weights(group, eight, step, lane) = {pack(scores[4 * step], scores[4 * step + 1]),
                                                  pack(scores[4 * step + 2], scores[4 * step + 3])};
  exchange.corrections[group][eight][lane] = correction;
}

// values: where the lane points ldmatrix for its warp's first columns.
template <int TILES>
DEVICE void add_values(Sums<TILES, OWN_COLUMNS>& sums, const DTYPE* values, Exchange& exchange, int group, int lane) {
  float corrections[TILES][2];
  bool changed = false;
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    corrections[i / 2][i % 2] = exchange.corrections[group][i][lane];
    changed = changed || corrections[i / 2][i % 2] != 1.0f;
  }
  if (__any_sync(ALL_LANES, changed)) {  // seldom after the first tiles
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      for (int n = 0; n < OWN_COLUMNS; ++n)
        for (int i = 0; i < 4; ++i) sums.out[t][n][i] = __fmul_rn(sums.out[t][n][i], corrections[t][i / 2]);
  }
#pragma unroll 1
  for (int n = 0; n < KEYS / 16; ++n) {
    uint32_t p[TILES][4];
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const Vector<uint32_t, 2> words = *exchange.weights(group, i, n, lane);
      for (int j = 0; j < 2; ++j) p[i / 2][i % 2 + 2 * j] = words.at[j];
    }
#pragma unroll
    for (int i = 0; i < OWN_STEPS; ++i) {
      uint32_t v[4];
      load_matrix_x4_transposed(v, values + n * 16 * STRIDE + i * NEXT_OWN);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        mma_m16n8k16<DTYPE>(sums.out[t][2 * i], p[t], v);
        mma_m16n8k16<DTYPE>(sums.out[t][2 * i + 1], p[t], v + 2);
      }
    }
  }
}

template <int TILES>
DEVICE void attend(const Problem& problem, const Item& item, unsigned char* shared, int* counters) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, part = warp % PARTS, group = warp / PARTS;
  const int pieces = (item.rows + 15) / 16, first_row = group * 16 * TILES, own_row = first_row + 8 * part;
  const int begin = item.begin, end = item.end;
  const bool active = first_row < item.rows, weighs = active && part < 2 * TILES;
  DTYPE* keys = reinterpret_cast<DTYPE*>(shared);
  DTYPE* values = QUANTIZED ? keys : keys + TILE;
  KV_DTYPE* raw_keys = reinterpret_cast<KV_DTYPE*>(QUANTIZED ? keys + TILE : keys);
  KV_DTYPE* raw_values = QUANTIZED ? raw_keys + RAW_TILE : reinterpret_cast<KV_DTYPE*>(values);
  Exchange& exchange = *reinterpret_cast<Exchange*>(shared + 2 * TILE * sizeof(DTYPE));
  const DTYPE* own_keys = keys + place(lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2);
  const DTYPE* own_values = values + place(lane % 16, 2 * part + lane / 16);
  const int weighed = min(own_row + lane / 4, item.rows - 1), last_seen = problem.last_seen(item, weighed);
  const int distance = last_seen - 2 * (lane % 4);
  const unsigned num_seen = problem.num_seen(item, weighed, last_seen);
  const float* by_distance = DISTANCES ? problem.by_distance(item, weighed) + 2 * (lane % 4) : nullptr;
  float key_scale = 0.0f, value_scale = 0.0f;  // of the raw tiles, of int8
  auto copy_tile = [&](bool of_keys, int first) {
    const KV_DTYPE* cache = of_keys ? problem.k_cache : problem.v_cache;
    KV_DTYPE* target = of_keys ? raw_keys : raw_values;
    if (first < end)
      copy_keys(problem, begin, end, first, [&](int at, int64_t offset, int chunk, bool in_range) {
        copy_chunk(target + at, cache + offset, chunk, in_range);
      });
    commit_copies();
    if constexpr (INT8) {
      const float* scales = of_keys ? problem.k_scales : problem.v_scales;
      (of_keys ? key_scale : value_scale) = load_scale(problem, scales, begin, end, first);
    }
  };
  int key = begin / KEYS * KEYS;
  copy_tile(true, key);
  if constexpr (QUANTIZED) copy_tile(false, key);
  Sums<TILES, OWN_COLUMNS> sums;
  do {
    const int range_end = problem.fold_keys ? min(end, (key / problem.fold_keys + 1) * problem.fold_keys) : end;
    float most = NEGATIVE_INFINITY, sum = 0.0f;
    sums.clear();
    uint32_t queries[TILES][OWN_STEPS][4];  // again for each range: while ranges are added up there are no registers for them
#pragma unroll
    for (int t = 0; t < TILES; ++t) load_queries(problem, item, queries[t], first_row + 16 * t, part, lane);
    for (; key < range_end; key += KEYS) {
#if !defined(BUG_NO_WAIT)
      wait_copies<QUANTIZED ? 1 : 0>();
#endif
#if !defined(BUG_NO_BARRIER)
      __syncthreads();  // keys are there, and nobody reads the values of the tile before any more
#endif
      if constexpr (QUANTIZED) {
        dequantize_keys(reinterpret_cast<const uint8_t*>(raw_keys), keys, key_scale);
        copy_tile(true, key + KEYS);
        __syncthreads();  // all threads' parts of the tile are there
      } else {
        copy_tile(false, key);
      }
      if (active) multiply_keys<TILES>(queries, own_keys, exchange, group, part, lane);
#if !defined(BUG_NO_SCORES)
      __syncthreads();  // all parts of the scores are there, and nobody reads the keys any more
#endif
      if constexpr (!QUANTIZED) copy_tile(true, key + KEYS);
      if (weighs) weigh(problem, exchange, most, sum, distance - key, num_seen, by_distance + (DISTANCES ? key : 0), group, part, lane);
#if !defined(BUG_NO_WAIT_FOR_VALUES)
      wait_copies<1>();
#endif
      if constexpr (QUANTIZED) {
        dequantize_keys(reinterpret_cast<const uint8_t*>(raw_values), values, value_scale);
        copy_tile(false, key + KEYS);
      }
#if !defined(BUG_NO_WEIGHTS)
      __syncthreads();  // weights and values are there
#endif
      if (active) add_values<TILES>(sums, own_values, exchange, group, lane);
    }
    const bool folded = problem.fold_keys && (range_end - 1) / problem.fold_keys != begin / problem.fold_keys;
    if (weighs) {
      exchange.of_range(group, part, lane) = {most, sum};
      const float* before = problem.piece(item.piece + group * TILES + part / 2) + (COLUMNS * WARP_SIZE + lane) * 4 + part % 2;
      if (folded && own_row / 16 * 16 < item.rows) exchange.of_before(group, part, lane) = {__ldcg(before), __ldcg(before + 2)};
    }
#if !defined(BUG_NO_SUMS)
    __syncthreads();  // sums are there, and nobody reads those of before any more, which a group's first warp writes
#endif
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (first_row + 16 * t >= item.rows) continue;
      Floats before;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Exchange::Pair range = exchange.of_range(group, 2 * t + i, lane);
        const Exchange::Pair earlier = exchange.of_before(group, 2 * t + i, lane);
        sums.most[t][i] = range.at[0];
        sums.sum[t][i] = range.at[1];
        before.at[i] = earlier.at[0];
        before.at[2 + i] = earlier.at[1];
      }
      float* piece = problem.piece(item.piece + group * TILES + t);
      if (folded) add_before(problem, sums, t, before, piece, lane, part);
      if (range_end < end) store_sums(sums, t, piece, lane, part);
    }
  } while (key < end);
  wait_copies<0>();
  let_next_kernel_start();
  const int own_piece = item.piece + item.split * pieces;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const int row = first_row + 16 * t;
    if (row >= item.rows) continue;
    if (item.splits > 1) {
      store_sums(sums, t, problem.piece(own_piece + group * TILES + t), lane, part);
    } else {
      write_rows(problem, item, sums, t, row + lane / 4, lane, [=](int n) { return own_column(n, part); });
    }
  }
  if (item.splits > 1) combine_if_last(problem, item, pieces, counters, warp, lane);
}
