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
#include "common.cuh"

constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = 16 * WARPS * ROW_TILES;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // in shared memory, with zeros behind HEAD_DIM
constexpr int COLUMNS = DIM / 8;                // 16-byte chunks of a row, and mma tiles of the output
constexpr bool SWIZZLED = COLUMNS % 8 == 0;
constexpr int STRIDE = SWIZZLED ? DIM : DIM + 8;
constexpr bool QUANTIZED = sizeof(KV_DTYPE) == 1;
constexpr int RAW_CHUNKS = DIM / WIDEST<KV_DTYPE>;
constexpr int PIECE = 4 * WARP_SIZE * (COLUMNS + 1);  // floats of 16 rows' sums in scratch
constexpr int TILE = KEYS * STRIDE;
constexpr int RAW_TILE = KEYS * DIM;
constexpr float LOG2_E = 1.4426950408889634f;

struct Item {
  int sequence;
  int first_token;     // of the sequence, in q
  int first_position;  // of that token
  int first_row, rows;  // row r is head r % group of token first_token + r / group
  int begin, end;       // keys
  int piece, split, splits, counter;  // where its sums go in scratch, if it has to leave some
};

struct Problem {
  const DTYPE* q;
  const KV_DTYPE *k_cache, *v_cache;
  const int* table;
  const float *sinks, *v_scale;
  DTYPE* out;
  float* scratch;
  int kv_heads, head, group, seen, fold_keys;
  float softcap, to_score, to_log2;  // exponents of 2: those of e^2x in tanh, if there is a softcap; those of the scores

  DEVICE int position(const Item& item, int row) const { return item.first_position + (item.first_row + row) / group; }
  DEVICE int query_head(const Item& item, int row) const { return head * group + (item.first_row + row) % group; }
  DEVICE int64_t query(const Item& item, int row) const {
    const int64_t token = item.first_token + (item.first_row + row) / group;
    return (token * kv_heads * group + query_head(item, row)) * HEAD_DIM;
  }
  DEVICE float* piece(int number) const { return scratch + ((int64_t)number * kv_heads + head) * PIECE; }
};

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
#pragma unroll
  for (int i = threadIdx.x; i < KEYS * RAW_CHUNKS; i += THREADS) {
    const int row = i / RAW_CHUNKS, chunk = i % RAW_CHUNKS, key = first + row;
#if defined(BUG_NO_TAIL)
    const bool in_range = key < (end + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE;
#else
    const bool in_range = key >= begin && key < end;
#endif
#if defined(BUG_NEXT_PAGE)
    const int block = in_range ? problem.table[(key + 1) / BLOCK_SIZE] : 0;
#else
    const int block = in_range ? problem.table[key / BLOCK_SIZE] : 0;
#endif
#if defined(BUG_INT_OVERFLOW)
    const int offset = ((block * problem.kv_heads + problem.head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM;
#else
    const int64_t row_number = ((int64_t)block * problem.kv_heads + problem.head) * BLOCK_SIZE + key % BLOCK_SIZE;
    const int64_t offset = row_number * HEAD_DIM;
#endif
    const int target = QUANTIZED ? i * 16 : place(row, chunk);
    copy_chunk(keys + target, problem.k_cache + offset, chunk, in_range);
    copy_chunk(values + target, problem.v_cache + offset, chunk, in_range);
  }
}

// Pairs of DTYPE in a word. An e4m3 number whose sign, exponent and mantissa have moved to their places in DTYPE is too small by
// the difference of the exponents' biases; the product with a power of two is exact, subnormals included.
template <class T>
struct Pairs;
template <>
struct Pairs<bf16> {
  typedef __nv_bfloat162 Type;
  static constexpr int SHIFT = 4;
  static constexpr uint16_t BIAS = 0x7b80;  // 2^120
  static DEVICE Type of(float low, float high) { return __floats2bfloat162_rn(low, high); }
};
template <>
struct Pairs<half> {
  typedef __half2 Type;
  static constexpr int SHIFT = 1;
  static constexpr uint16_t BIAS = 0x5c00;  // 2^8
  static DEVICE Type of(float low, float high) { return __floats2half2_rn(low, high); }
};

template <class To, class From>
DEVICE To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

DEVICE uint32_t pack(float low, float high) { return same_bits<uint32_t>(Pairs<DTYPE>::of(low, high)); }

// Bytes a and a + 1 of a word of four e4m3 numbers.
DEVICE uint32_t dequantize(uint32_t word, int a) {
  typedef Pairs<DTYPE> To;
  const uint32_t high = __byte_perm(word, 0, a == 0 ? 0x1404 : 0x3424);
  const uint32_t moved = (high & 0x80008000u) | ((high & 0x7f007f00u) >> To::SHIFT);
  const uint32_t bias = To::BIAS * 0x10001u;
  return same_bits<uint32_t>(__hmul2(same_bits<To::Type>(moved), same_bits<To::Type>(bias)));
}

// What this thread has copied, from raw to a tile.
DEVICE void dequantize_keys(const uint8_t* raw, DTYPE* tile) {
#pragma unroll
  for (int i = threadIdx.x; i < KEYS * RAW_CHUNKS; i += THREADS) {
    const Vector<uint32_t, 4> words = Vector<uint32_t, 4>::load(reinterpret_cast<const uint32_t*>(raw + i * 16));
    for (int j = 0; j < 2; ++j) {
      Vector<uint32_t, 4> pairs;
      for (int k = 0; k < 4; ++k) pairs.at[k] = dequantize(words.at[2 * j + k / 2], k % 2 * 2);
      pairs.store(reinterpret_cast<uint32_t*>(tile + place(i / RAW_CHUNKS, i % RAW_CHUNKS * 2 + j)));
    }
  }
}

// ---- sums of rows, and their addition ----

// A lane's share of TILES x 16 rows: of each 16, rows lane / 4 and lane / 4 + 8, and of each 8 columns two (the layout of an mma's
// result). most: largest score; out and sum are relative to it, sum over the lane's own keys only.
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

DEVICE float log2_base(float most, float to_log2) { return most == NEGATIVE_INFINITY ? 0.0f : __fmul_rn(most, to_log2); }

// How much the sums of two ranges of keys count in the sums of both; most becomes that of both.
struct Shares {
  float first[2], second[2];

  DEVICE Shares(float* most, const float* second_most, float to_log2) {
    for (int i = 0; i < 2; ++i) {
      const float both = fmaxf(most[i], second_most[i]), base = log2_base(both, to_log2);
      first[i] = exp2f(__fmaf_rn(most[i], to_log2, -base));
      second[i] = exp2f(__fmaf_rn(second_most[i], to_log2, -base));
      most[i] = both;
    }
  }
  DEVICE float add(int half, float a, float b) const { return __fmaf_rn(a, first[half], __fmul_rn(b, second[half])); }
};

typedef Vector<float, 4> Floats;

// Scratch for 16 rows: for each 8 columns, then for (most, sum) of both rows, four floats of each lane. Past the L1: other blocks
// have written it.
DEVICE Floats load_floats(const float* piece, int n, int lane) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(piece) + n * WARP_SIZE + lane);
  return {four.x, four.y, four.z, four.w};
}

template <int TILES>
DEVICE void store_sums(const Sums<TILES, COLUMNS>& sums, int t, float* piece, int lane) {
  float* mine = piece + 4 * lane;
  for (int n = 0; n < COLUMNS; ++n)
    Floats{sums.out[t][n][0], sums.out[t][n][1], sums.out[t][n][2], sums.out[t][n][3]}.store(mine + n * 4 * WARP_SIZE);
  Floats{sums.most[t][0], sums.most[t][1], sums.sum[t][0], sums.sum[t][1]}.store(mine + COLUMNS * 4 * WARP_SIZE);
}

// sums = what lies in piece, then sums.
template <int TILES>
DEVICE void add_before(const Problem& problem, Sums<TILES, COLUMNS>& sums, int t, const float* piece, int lane) {
  const Floats before = load_floats(piece, COLUMNS, lane);
  float most[2] = {before.at[0], before.at[1]};
  const Shares shares(most, sums.most[t], problem.to_log2);
  for (int i = 0; i < 2; ++i) {
    sums.most[t][i] = most[i];
    sums.sum[t][i] = shares.add(i, before.at[2 + i], sums.sum[t][i]);
  }
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    const Floats out = load_floats(piece, n, lane);
    for (int i = 0; i < 4; ++i) sums.out[t][n][i] = shares.add(i / 2, out.at[i], sums.out[t][n][i]);
  }
}

// Rows `row` and `row + 8` of the item, columns 8 * first_column and on, from sums to out.
template <int TILES, int WIDTH>
DEVICE void write_rows(const Problem& problem, const Item& item, const Sums<TILES, WIDTH>& sums, int t, int row,
                       int first_column, int lane) {
  for (int i = 0; i < 2; ++i, row += 8) {
    float sum = warp_sum(sums.sum[t][i], 4), share = 1.0f;
    if (row >= item.rows) continue;
    if (problem.sinks) {
      const float sink = problem.sinks[problem.query_head(item, row)] * LOG2_E;
      const float most = sums.most[t][i] * problem.to_log2, base = fmaxf(most, sink);
      share = exp2f(most - base);
      sum = __fmaf_rn(sum, share, exp2f(sink - base));
    }
    const float factor = sum > 0.0f ? share / sum * (problem.v_scale ? problem.v_scale[problem.head] : 1.0f) : 0.0f;
    DTYPE* target = problem.out + problem.query(item, row);
#pragma unroll
    for (int n = 0; n < WIDTH; ++n) {
      const int column = 8 * (first_column + n) + 2 * (lane % 4);
      if (column < HEAD_DIM)
        Vector<DTYPE, 2>{from_float<DTYPE>(sums.out[t][n][2 * i] * factor), from_float<DTYPE>(sums.out[t][n][2 * i + 1] * factor)}
            .store(target + column);
    }
  }
}

// The last block of a tile adds up the sums of all its items, in order. A warp takes 16 rows and a few columns at a time.
DEVICE void combine(const Problem& problem, const Item& item, int first_piece, int pieces, int warp, int lane) {
  constexpr int WIDTH = 4, PARTS = (COLUMNS + WIDTH - 1) / WIDTH;
  for (int work = warp; work < pieces * PARTS; work += WARPS) {
    const int tile = work / PARTS, first_column = work % PARTS * WIDTH;
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
    write_rows(problem, item, sums, 0, tile * 16 + lane / 4, first_column, lane);
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
  if (problem.softcap > 0.0f) {
#pragma unroll
    for (int i = 0; i < TILES * KEYS / 2; ++i) {
      float& score = scores[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4];  // tanh(x) = 1 - 2 / (1 + e^2x)
      score = problem.softcap * (1.0f - __fdividef(2.0f, 1.0f + exp2f(score * problem.to_score)));
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
    correction[t][j] = exp2f(__fmaf_rn(sums.most[t][j], problem.to_log2, -base[t][j]));
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
  for (int i = threadIdx.x; i < (pieces + TILES - 1) / TILES * TILES * 16 * COLUMNS; i += THREADS) {
    const int row = i / COLUMNS, chunk = i % COLUMNS;
    const DTYPE* query = problem.q + (row < item.rows ? problem.query(item, row) : 0);
    copy_chunk(queries + place(row, chunk), query, chunk, row < item.rows);
  }
  const int first_position = problem.position(item, first_row), last_position = problem.position(item, last_row);
  int key = begin / KEYS * KEYS, stage = 0;
  bool folded = false;
  Sums<TILES, COLUMNS> sums;
  copy_next(key, stage);
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
#if !defined(BUG_NO_TILE_BARRIER)
      if constexpr (QUANTIZED) __syncthreads();  // all threads' parts of the tile are there
#endif
      if (active) {
#if defined(BUG_NO_MASK)
        const bool hidden = false;
#else
        const bool hidden = next - 1 > first_position || last_position - key >= problem.seen;
#endif
        attend_tile<TILES>(problem, item, sums, queries + first_row * STRIDE, keys, keys + TILE, first_row, key, hidden, lane);
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float* piece = problem.piece(item.piece + warp * TILES + t);
      if (first_row + 16 * t >= item.rows) continue;
      if (folded) add_before(problem, sums, t, piece, lane);
      if (range_end < end) store_sums(sums, t, piece, lane);
    }
    folded = true;
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
  problem.v_scale = v_scale;
  problem.out = out;
  problem.scratch = scratch;
  problem.kv_heads = kv_heads;
  problem.head = head;
  problem.group = group;
  problem.seen = window > 0 ? window : 0x7fffffff;
  problem.fold_keys = fold_keys;
  const float score_scale = k_scale ? scale * k_scale[head] : scale;
  problem.softcap = softcap;
  problem.to_score = softcap > 0.0f ? 2.0f * LOG2_E * score_scale / softcap : 0.0f;
  problem.to_log2 = softcap > 0.0f ? LOG2_E : score_scale * LOG2_E;
  if (item.rows <= 16 * WARPS) {
    attend<1>(problem, item, shared, counters);
  } else if constexpr (ROW_TILES > 1) {
    attend<ROW_TILES>(problem, item, shared, counters);
  }
}
EXPORT(prefill_attention)
