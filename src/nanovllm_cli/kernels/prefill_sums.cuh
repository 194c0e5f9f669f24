// Of prefill_attention.cu: its constants, what a block is told, and the sums of rows of q over ranges of keys: their addition,
// their way through scratch, and into out.
#pragma once

#include "int8_rows.cuh"

constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = 16 * WARPS / PARTS * ROW_TILES;
constexpr int GRAIN = 16 * PARTS, DIM = (HEAD_DIM + GRAIN - 1) / GRAIN * GRAIN;  // in shared memory, with zeros behind HEAD_DIM
constexpr int COLUMNS = DIM / 8;              // 16-byte chunks of a row, and mma tiles of the output
constexpr int OWN_COLUMNS = COLUMNS / PARTS;  // a warp's
constexpr bool SWIZZLED = COLUMNS % 8 == 0;
constexpr int STRIDE = SWIZZLED ? DIM : DIM + 8;
constexpr bool QUANTIZED = sizeof(KV_DTYPE) == 1, INT8 = IS_INT8<KV_DTYPE>;
constexpr int RAW_CHUNKS = DIM / WIDEST<KV_DTYPE>;
constexpr int power_from(int n) { return n <= 1 ? 1 : 2 * power_from((n + 1) / 2); }
// Threads that copy a row of keys, so many that a tile has rows for all; rows copied at once.
constexpr int LANES = power_from(RAW_CHUNKS > THREADS / KEYS ? RAW_CHUNKS : THREADS / KEYS), STEP = THREADS / LANES;
static_assert(STEP <= KEYS && KEYS % 16 == 0 && KEYS / STEP <= LANES, "");
constexpr int PIECE = 4 * WARP_SIZE * (COLUMNS + 1);  // floats of 16 rows' sums in scratch
constexpr int TILE = KEYS * STRIDE;
constexpr int RAW_TILE = KEYS * DIM;
constexpr float LOG2_E = 1.4426950408889634f;
#ifndef DISTANCES
#define DISTANCES 0
#endif
#if !DISTANCES
constexpr const float* distances = nullptr;
constexpr int columns = 0;
#endif

struct Item {
  int sequence;
  int first_token;     // of the sequence, in q
  int first_position;  // of that token
  int first_row, rows;  // row r is head r % group of token first_token + r / group
  int begin, end;       // keys
  int piece, split, splits, counter;  // where its sums go in scratch, if it has to leave some
  int last_key;                       // of the sequence
};

struct Problem {
  const DTYPE* q;
  const KV_DTYPE *k_cache, *v_cache;
  const float *k_scales, *v_scales;  // of int8's rows
  const int* table;
  const float* sinks;
  DTYPE* out;
  float* scratch;
  int kv_heads, head, group, fold_keys;
  int seen, ahead;                              // keys that a query sees up to its own, and at most behind it
  unsigned one_over_group;                      // 2^32 / group, rounded up
  float v_scale, softcap, to_log2;              // a score times to_log2 is an exponent of 2
  const float* distances;                       // see prefill_attention.cu
  int columns;

  // Exact for rows below 2^32 / group.
  DEVICE int token(const Item& item, int row) const {
    return group == 1 ? item.first_row + row : __umulhi(item.first_row + row, one_over_group);
  }
  DEVICE int position(const Item& item, int row) const { return item.first_position + token(item, row); }
  // The last key that a row sees, and how many it does with those that would lie before its sequence.
  DEVICE int last_seen(const Item& item, int row) const {
#if defined(BUG_CAUSAL)
    return position(item, row);
#elif defined(BUG_PAST_THE_END)
    return position(item, row) + ahead;
#else
    return min(position(item, row) + ahead, item.last_key);
#endif
  }
  DEVICE unsigned num_seen(const Item& item, int row, int last) const { return last - position(item, row) + (unsigned)seen; }
  DEVICE int query_head(const Item& item, int row) const {
    return head * group + item.first_row + row - token(item, row) * group;
  }
  DEVICE int64_t query(const Item& item, int row) const {
    return ((int64_t)(item.first_token + token(item, row)) * kv_heads * group + query_head(item, row)) * HEAD_DIM;
  }
  // What a row's scores get, at its sequence's first key. The middle of a head's columns, but for the BEYOND last ones, is the
  // row's own place.
  DEVICE const float* by_distance(const Item& item, int row) const {
    constexpr int BEYOND = 64;
#if defined(BUG_DISTANCE)
    return distances + (int64_t)query_head(item, row) * columns + (columns - BEYOND) / 2 - item.first_position;
#endif
    return distances + (int64_t)query_head(item, row) * columns + (columns - BEYOND) / 2 - position(item, row);
  }
  // A score and what it gets.
  DEVICE float moved(float score, float by) const { return __fmaf_rn(by, LOG2_E / to_log2, score); }
  DEVICE float* piece(int number) const { return scratch + ((int64_t)number * kv_heads + head) * PIECE; }
};

// cap tanh(x), as a score: tanh(x) = 1 - 2 / (1 + e^2x).
DEVICE float capped(const Problem& problem, float score) {
  const float slope = 2.0f * problem.to_log2 / problem.softcap, cap = problem.softcap * LOG2_E / problem.to_log2;
  return cap * (1.0f - __fdividef(2.0f, 1.0f + exp2f(score * slope)));
}

// ---- sums of rows, and their addition ----

// A lane's share of TILES x 16 rows: of each 16, rows lane / 4 and lane / 4 + 8, and of each 8 columns two (the layout of an
// mma's result). most: largest score; out and sum are relative to it, sum over the lane's own keys only.
template <int TILES, int WIDTH>
struct Sums {
  float out[TILES][WIDTH][4], most[TILES][2], sum[TILES][2];

  DEVICE void clear() {
    for (int t = 0; t < TILES; ++t) {
      for (int n = 0; n < WIDTH; ++n)
        for (int i = 0; i < 4; ++i) out[t][n][i] = 0.0f;
      for (int i = 0; i < 2; ++i) {
        most[t][i] = NEGATIVE_INFINITY;
        sum[t][i] = 0.0f;
      }
    }
  }
};

// Weights are powers of 2 relative to this, rounded as it is: where the largest score stays, sums are scaled by exactly 1.
DEVICE float log2_base(float most, float to_log2) { return most == NEGATIVE_INFINITY ? 0.0f : __fmul_rn(most, to_log2); }
DEVICE float rescaling(float old_most, float base, float to_log2) {
#if defined(BUG_INEXACT_RESCALING)
  return exp2f(__fmaf_rn(old_most, to_log2, -base));
#else
  return exp2f(__fadd_rn(__fmul_rn(old_most, to_log2), -base));
#endif
}

// How much the sums of two ranges of keys count in the sums of both; most becomes that of both.
struct Shares {
  float first[2], second[2];

  DEVICE Shares(float* most, const float* second_most, float to_log2) {
    for (int i = 0; i < 2; ++i) {
      const float both = fmaxf(most[i], second_most[i]), base = log2_base(both, to_log2);
      first[i] = rescaling(most[i], base, to_log2);
      second[i] = rescaling(second_most[i], base, to_log2);
      most[i] = both;
    }
  }
  DEVICE float add(int half, float a, float b) const { return __fmaf_rn(a, first[half], __fmul_rn(b, second[half])); }
};

// A part's n-th 8 columns, in units of 8: of 16, which are a fragment of values, it has every PARTS-th.
DEVICE int own_column(int n, int part) { return n / 2 * 2 * PARTS + n % 2 + 2 * part; }

typedef Vector<float, 4> Floats;

// Scratch for 16 rows: for each 8 columns, then for (most, sum) of both rows, four floats of each lane. Past the L1: other blocks
// have written it.
DEVICE Floats load_floats(const float* piece, int n, int lane) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(piece) + n * WARP_SIZE + lane);
  return {four.x, four.y, four.z, four.w};
}

template <int TILES>
DEVICE void store_sums(const Sums<TILES, OWN_COLUMNS>& sums, int t, float* piece, int lane, int part = 0) {
  float* mine = piece + 4 * lane;
  for (int n = 0; n < OWN_COLUMNS; ++n)
    Floats{sums.out[t][n][0], sums.out[t][n][1], sums.out[t][n][2], sums.out[t][n][3]}
        .store(mine + own_column(n, part) * 4 * WARP_SIZE);
  if (part == 0) Floats{sums.most[t][0], sums.most[t][1], sums.sum[t][0], sums.sum[t][1]}.store(mine + COLUMNS * 4 * WARP_SIZE);
}

// sums = what lies in piece, then sums. before: the last of it.
template <int TILES>
DEVICE void add_before(const Problem& problem, Sums<TILES, OWN_COLUMNS>& sums, int t, const Floats& before, const float* piece,
                       int lane, int part = 0) {
  float most[2] = {before.at[0], before.at[1]};
  const Shares shares(most, sums.most[t], problem.to_log2);
  for (int i = 0; i < 2; ++i) {
    sums.most[t][i] = most[i];
    sums.sum[t][i] = shares.add(i, before.at[2 + i], sums.sum[t][i]);
  }
#pragma unroll
  for (int n = 0; n < OWN_COLUMNS; ++n) {
    if (n % 8 == 0) __syncwarp();  // keeps the compiler from loading all at once: there are no registers for it
    const Floats out = load_floats(piece, own_column(n, part), lane);
    for (int i = 0; i < 4; ++i) sums.out[t][n][i] = shares.add(i / 2, out.at[i], sums.out[t][n][i]);
  }
}

// Rows `row` and `row + 8` of the item from sums to out; column_of(n): where the n-th 8 columns belong, in units of 8.
template <int TILES, int WIDTH, class ColumnOf>
DEVICE void write_rows(const Problem& problem, const Item& item, const Sums<TILES, WIDTH>& sums, int t, int row, int lane,
                       const ColumnOf& column_of) {
  for (int i = 0; i < 2; ++i, row += 8) {
    float sum = warp_sum(sums.sum[t][i], 4), share = 1.0f;
    if (row >= item.rows) continue;
    if (problem.sinks) {
      const float sink = __fmul_rn(problem.sinks[problem.query_head(item, row)], LOG2_E);
      const float base = fmaxf(__fmul_rn(sums.most[t][i], problem.to_log2), sink);
      share = rescaling(sums.most[t][i], base, problem.to_log2);
      sum = __fmaf_rn(sum, share, exp2f(sink - base));
    }
    const float factor = sum > 0.0f ? share / sum * problem.v_scale : 0.0f;
    DTYPE* target = problem.out + problem.query(item, row);
#pragma unroll
    for (int n = 0; n < WIDTH; ++n) {
      const int column = 8 * column_of(n) + 2 * (lane % 4);
      if (column < HEAD_DIM)
        Vector<DTYPE, 2>{from_float<DTYPE>(sums.out[t][n][2 * i] * factor), from_float<DTYPE>(sums.out[t][n][2 * i + 1] * factor)}
            .store(target + column);
    }
  }
}

// The last block of a tile adds up the sums of all its items, in order. A warp takes 16 rows and a few columns at a time.
DEVICE void combine(const Problem& problem, const Item& item, int first_piece, int pieces, int warp, int lane) {
  constexpr int WIDTH = 4, STRIPES = (COLUMNS + WIDTH - 1) / WIDTH;
  for (int work = warp; work < pieces * STRIPES; work += WARPS) {
    const int tile = work / STRIPES, first_column = work % STRIPES * WIDTH;
    Sums<1, WIDTH> sums;
    sums.clear();
#pragma unroll 4
    for (int split = 0; split < item.splits; ++split) {
      const float* piece = problem.piece(first_piece + split * pieces + tile);
      const Floats next = load_floats(piece, COLUMNS, lane);
      const Shares shares(sums.most[0], next.at, problem.to_log2);
      for (int i = 0; i < 2; ++i) sums.sum[0][i] = shares.add(i, sums.sum[0][i], next.at[2 + i]);
      for (int n = 0; n < WIDTH; ++n) {
        if (first_column + n >= COLUMNS) break;
        const Floats out = load_floats(piece, first_column + n, lane);
        for (int i = 0; i < 4; ++i) sums.out[0][n][i] = shares.add(i / 2, sums.out[0][n][i], out.at[i]);
      }
    }
    write_rows(problem, item, sums, 0, tile * 16 + lane / 4, lane, [=](int n) { return first_column + n; });
  }
}

// All threads call it, when their sums are in scratch.
DEVICE void combine_if_last(const Problem& problem, const Item& item, int pieces, int* counters, int warp, int lane) {
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
