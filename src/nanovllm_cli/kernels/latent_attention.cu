// Causal attention over a paged cache of one row a token, which is its key for all heads, and whose last numbers are its value.
//
//   out[t, h] = sum over j of softmax_j(scale * rows[t, h] . cache[j]) cache[j, ROTARY:],   j before the length that t has
//
//   sinks [heads], where not null: logits that take part in the softmax's sum without a value, in the first split
//   rows [T, heads, ROTARY + RANK] DTYPE, cache [blocks, BLOCK_SIZE, ROTARY + RANK] KV_DTYPE (times kv_scale, [1] of fp8, where not null),
//   out [T, heads, RANK] DTYPE; ROTARY a multiple of 8, or of 16 for an 8-bit cache, RANK of 16. Needs mma and cp.async: sm_80.
//
// A block has up to ROWS rows, (token, head) pairs of one sequence: chunk_heads heads of a token, or all heads of some tokens
// (`groups`). They are the sixteens of rows of mma.m16n8k16, and share tiles of KEYS keys in shared memory, which serve as keys and
// then, transposed by ldmatrix, as values. Shared memory is what would hold this up, so that nothing is read from it twice that
// need not be: of a tile's scores a warp computes a quarter of the dims for all keys, and for a tile of rows, whose queries stay in
// its registers (of 64 rows two, which don't). The quarters are added up, in order, by warps that have whole rows, a lane a key:
// there the softmax is. Weights go through shared memory, too, for of what they sum a warp has all rows and a part of the columns.
//
// Tiles come by cp.async through STAGES places, STAGES - 1 ahead; the first are under way before the kernel ahead has ended: that
// one, head_matmul, writes rows alone, and the one that wrote the cache, latent_rows, ended before this one could start (behind
// torch's product this one starts last: see CudaHeadMatrices). An 8-bit cache comes raw, all STAGES ahead, and each thread turns
// what it has copied into DTYPE, once a block; int8 times its scales.
// Shared memory: 16-byte chunks swizzled by the row where a row has a multiple of 8, else rows 16 bytes further apart.
//
// Splits: grid (splits, chunks of heads, T or groups). How many a row's keys have follows from its length, or the last token's of
// its group (find_work), so that a recorded step holds for all lengths. Where there are several, their sums go to `partials`
// [T, heads, grid x, RANK] and `sums` [T, heads, grid x, 2], and latent_combine.cu adds them up: one block would take longer to add
// a token's up than all did to make them. A split begins at a multiple of GRAIN, tiles lie at multiples of KEYS, rows of an mma are
// independent and masked keys add exact zeros: so a row's bits depend on its length and its split's size alone.
#include "latent_work.cuh"
#include "pairs.cuh"

constexpr int HEAD_DIM = ROTARY + RANK, DIM = (HEAD_DIM + 15) / 16 * 16;  // in shared memory, with zeros behind
constexpr int CHUNKS = DIM / 8, STEPS = DIM / 16;
constexpr bool SWIZZLED = CHUNKS % 8 == 0, QUANTIZED = sizeof(KV_DTYPE) == 1, INT8 = IS_INT8<KV_DTYPE>;
constexpr int STRIDE = SWIZZLED ? DIM : DIM + 8, RAW_CHUNKS = HEAD_DIM / 16;
constexpr int THREADS = WARPS * WARP_SIZE, ROW_TILES = ROWS / 16;
constexpr int DIM_PARTS = 4, OWN_TILES = ROW_TILES / (WARPS / DIM_PARTS), OWN_STEPS = (STEPS + DIM_PARTS - 1) / DIM_PARTS;
constexpr int OWN_ROWS = ROWS / WARPS;  // of a softmax, a warp
constexpr bool KEEPS_QUERIES = OWN_TILES == 1;
constexpr int OUT_TILES = (RANK / 16 + WARPS - 1) / WARPS * 2;  // of 8 columns, a warp
constexpr int COPIERS = 8, ROWS_AT_ONCE = THREADS / COPIERS, PASSES = KEYS / ROWS_AT_ONCE;  // threads of a row in copies
constexpr int SCORE_STRIDE = KEYS + 8, WEIGHT_STRIDE = KEYS + 8;
constexpr int TILE = KEYS * STRIDE, RAW_TILE = KEYS * HEAD_DIM, AHEAD = QUANTIZED ? STAGES : STAGES - 1;
constexpr int QUERY_BYTES = ROWS * STRIDE * 2, SCORE_BYTES = DIM_PARTS * ROWS * SCORE_STRIDE * 4;
// Scores take the place of queries that are kept in registers.
constexpr int FIRST_BYTES = KEEPS_QUERIES ? (QUERY_BYTES > SCORE_BYTES ? QUERY_BYTES : SCORE_BYTES) : QUERY_BYTES + SCORE_BYTES;
static_assert(ROTARY % (QUANTIZED ? 16 : 8) == 0 && RANK % 16 == 0 && PASSES >= 1);
static_assert(KEYS == WARP_SIZE && GRAIN % KEYS == 0);

DEVICE int place(int row, int chunk) { return row * STRIDE + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 8; }

// What this thread has copied, from raw to the tile.
DEVICE void dequantize_own(const uint8_t* raw, DTYPE* tile, const float (&scales)[PASSES]) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = pass * ROWS_AT_ONCE + threadIdx.x / COPIERS;
    const Dequantizer<KV_DTYPE> number(scales[pass]);
    for (int chunk = threadIdx.x % COPIERS; chunk < RAW_CHUNKS; chunk += COPIERS) {
      const uint4 words = *reinterpret_cast<const uint4*>(raw + row * HEAD_DIM + chunk * 16);
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int j = turn ^ chunk / 4 % 2;  // of eight lanes half write even chunks, and half odd ones: other banks
        const uint32_t low = j ? words.z : words.x, high = j ? words.w : words.y;
        const Vector<uint32_t, 4> pairs = {number.pair(low, 0), number.pair(low, 2), number.pair(high, 0), number.pair(high, 2)};
        pairs.store(reinterpret_cast<uint32_t*>(tile + place(row, 2 * chunk + j)));
      }
    }
  }
}

// Where a lane points ldmatrix to get 16 x 16 elements of the first step of its warp's part of the dims; of each other step they lie
// DIM_PARTS steps further. Queries: 16 rows. Keys: two tiles of 8.
DEVICE int query_place(int part, int lane) { return place(lane % 16, 2 * part + lane / 16); }
DEVICE int key_place(int part, int lane) { return place(lane / 16 * 8 + lane % 8, 2 * part + lane / 8 % 2); }

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS)
latent_attention(const DTYPE* rows, const KV_DTYPE* cache, const int* block_tables, const int* lens, const int* sequences,
                 const int4* groups, const float* kv_scale, const float* sinks, DTYPE* out, float* partials, float* sums, int heads,
                 int chunk_heads, int table_width, int least_split, float scale) {
  DYNAMIC_SHARED(shared);
  DTYPE* queries = reinterpret_cast<DTYPE*>(shared);
  float(*scores)[ROWS][SCORE_STRIDE] =  // [DIM_PARTS]
      reinterpret_cast<float(*)[ROWS][SCORE_STRIDE]>(shared + FIRST_BYTES - SCORE_BYTES);
  DTYPE* tiles = reinterpret_cast<DTYPE*>(shared + FIRST_BYTES);  // STAGES of them; or one, and behind it STAGES raw ones
  uint8_t* raw = reinterpret_cast<uint8_t*>(tiles + TILE);
  DTYPE* weights = QUANTIZED ? reinterpret_cast<DTYPE*>(raw + STAGES * RAW_TILE) : tiles + STAGES * TILE;
  float* corrections = reinterpret_cast<float*>(weights + ROWS * WEIGHT_STRIDE);  // of each row, for a tile; then two of its sums
  float *row_tops = corrections + ROWS, *row_sums = row_tops + ROWS;

  const int lane = threadIdx.x % WARP_SIZE, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP_SIZE, 0);
  const int part = warp % DIM_PARTS, first_tile = warp / DIM_PARTS * OWN_TILES;  // of dims; of tiles of rows
  const int first_head = blockIdx.y * chunk_heads, own_heads = min(chunk_heads, heads - first_head);
  const Work work = find_work(blockIdx.z, lens, sequences, groups, least_split, gridDim.x);
  const int num_rows = work.tokens * own_heads;
  const auto row_of_all = [&](int row) { return (int64_t)(work.first_token + row / own_heads) * heads + first_head + row % own_heads; };
  if (work.end == 0) {  // padding
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < num_rows * RANK && blockIdx.x == 0; i += THREADS)
      out[row_of_all(i / RANK) * RANK + i % RANK] = from_float<DTYPE>(0.0f);
    return;
  }
  if ((int)blockIdx.x >= work.splits) return;
  const int begin = blockIdx.x * work.split_size, end = min(work.end, begin + work.split_size);

  const int* table = block_tables + (int64_t)work.sequence * table_width;
  int blocks[PASSES];  // of this thread's keys of the next tile to be copied
  const auto own_key = [&](int first_key, int pass) { return first_key + pass * ROWS_AT_ONCE + (int)threadIdx.x / COPIERS; };
  const auto find_blocks = [&](int first_key) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
#ifdef BUG_PAGE
      blocks[pass] = __ldcg(table + (min(own_key(first_key, pass), end - 1) + 1) / BLOCK_SIZE);
#else
      blocks[pass] = __ldcg(table + min(own_key(first_key, pass), end - 1) / BLOCK_SIZE);
#endif
    }
  };
  // Keys past the end become zeros: what lies there may be anything, and 0 * NaN is not 0.
  const auto copy_tile = [&](int first_key, int stage) {
    if (first_key < end) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const int key = own_key(first_key, pass), row = key - first_key;
#ifdef BUG_TAIL
        const bool in_range = key < (end + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE;
        const int offset = key % BLOCK_SIZE;
#else
        const bool in_range = key < end;
        const int offset = min(key, end - 1) % BLOCK_SIZE;
#endif
        int64_t first = ((int64_t)blocks[pass] * BLOCK_SIZE + offset) * HEAD_DIM;
#ifdef BUG_INT32
        first &= 0x7fffffff;
#endif
        const KV_DTYPE* source = cache + first;
#pragma unroll
        for (int chunk = threadIdx.x % COPIERS; chunk < (QUANTIZED ? RAW_CHUNKS : CHUNKS); chunk += COPIERS) {
          if constexpr (QUANTIZED) {
            copy_async_16(raw + stage * RAW_TILE + row * HEAD_DIM + chunk * 16, source + chunk * 16, in_range);
          } else {
            const bool there = in_range && chunk * 8 < HEAD_DIM;
            copy_async_16(tiles + stage * TILE + place(row, chunk), there ? source + chunk * 8 : source, there);
          }
        }
      }
      find_blocks(first_key + KEYS);
    }
    commit_copies();
  };
  float scales[PASSES] = {};  // of int8, of this thread's keys of the next tile to be turned into DTYPE; 0 past the end
  const auto load_scales = [&](int first_key) {
    if constexpr (INT8) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const int key = own_key(first_key, pass);
        scales[pass] = 0.0f;
        if (key < end) scales[pass] = __ldcg(kv_scale + (int64_t)__ldcg(table + key / BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE);
      }
    }
  };
  find_blocks(begin);
  load_scales(begin);
#pragma unroll
  for (int stage = 0; stage < AHEAD; ++stage) copy_tile(begin + stage * KEYS, stage);

  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int row = threadIdx.x / COPIERS; row < ROWS; row += ROWS_AT_ONCE) {
    const DTYPE* source = rows + row_of_all(min(row, num_rows - 1)) * HEAD_DIM;
    for (int chunk = threadIdx.x % COPIERS; chunk < CHUNKS; chunk += COPIERS) {
      const bool there = row < num_rows && chunk * 8 < HEAD_DIM;
      copy_async_16(queries + place(row, chunk), there ? source + chunk * 8 : source, there);
    }
  }
  commit_copies();

  float tops[OWN_ROWS], sums_of_lane[OWN_ROWS], totals[ROW_TILES][OUT_TILES][4] = {};
  int ends[OWN_ROWS];
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    tops[i] = NEGATIVE_INFINITY;
    sums_of_lane[i] = 0.0f;
    if (sinks && blockIdx.x == 0) {  // as if a key had been seen whose value is 0
      tops[i] = sinks[first_head + (warp * OWN_ROWS + i) % own_heads] * LOG2_E;
#ifdef BUG_SINKS
      sums_of_lane[i] = 1.0f;
#else
      sums_of_lane[i] = lane == 0;
#endif
    }
    ends[i] = min(end, work.first_len + (warp * OWN_ROWS + i) / own_heads);
  }
  const float scale_of_all = kv_scale && !INT8 ? kv_scale[0] : 1.0f, factor = scale * LOG2_E * scale_of_all;
#ifndef BUG_NO_WAIT
  wait_copies<0>();  // the queries came last
#endif
  uint32_t kept[KEEPS_QUERIES ? OWN_STEPS : 1][4];
  if constexpr (KEEPS_QUERIES) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN_STEPS; ++i)
      if (i * DIM_PARTS + part < STEPS)
        load_matrix_x4(kept[i], queries + first_tile * 16 * STRIDE + query_place(part, lane) + i * DIM_PARTS * 16);
  }
  int stage = 0;
#pragma unroll 1
  for (int first_key = begin; first_key < end; first_key += KEYS) {
#ifndef BUG_NO_WAIT
    wait_copies<AHEAD - 1>();
#endif
#ifndef BUG_NO_BARRIER
    __syncthreads();  // the tile is there, and nobody reads the one before any more
#endif
    DTYPE* tile = tiles;
    if constexpr (QUANTIZED) {
      dequantize_own(raw + stage * RAW_TILE, tile, scales);
      copy_tile(first_key + AHEAD * KEYS, stage);
      load_scales(first_key + KEYS);
      __syncthreads();  // all threads' parts of it are there
    } else {
      tile += stage * TILE;
      copy_tile(first_key + AHEAD * KEYS, stage == 0 ? STAGES - 1 : stage - 1);
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;

    float products[OWN_TILES][KEYS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < OWN_STEPS; ++i) {
      if (STEPS % DIM_PARTS && i * DIM_PARTS + part >= STEPS) break;
      uint32_t k[KEYS / 16][4];
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n)
        load_matrix_x4(k[n], tile + key_place(part, lane) + n * 16 * STRIDE + i * DIM_PARTS * 16);
#pragma unroll
      for (int t = 0; t < OWN_TILES; ++t) {
        uint32_t loaded[4];
        if (!KEEPS_QUERIES)
          load_matrix_x4(loaded, queries + (first_tile + t) * 16 * STRIDE + query_place(part, lane) + i * DIM_PARTS * 16);
        const uint32_t* q = KEEPS_QUERIES ? kept[KEEPS_QUERIES ? i : 0] : loaded;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) mma_m16n8k16<DTYPE>(products[t][n], q, k[n / 2] + n % 2 * 2);
      }
    }
    // Lane l has of a tile's rows l / 4 and l / 4 + 8, and of each 8 columns 2 * (l % 4) and the next: the layout of an mma's result.
#pragma unroll
    for (int t = 0; t < OWN_TILES; ++t)
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          Vector<float, 2>{products[t][n][2 * i], products[t][n][2 * i + 1]}.store(
              &scores[part][(first_tile + t) * 16 + i * 8 + lane / 4][n * 8 + lane % 4 * 2]);
#ifndef BUG_SCORES
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      const int row = warp * OWN_ROWS + i;
      float score = scores[0][row][lane];
#pragma unroll
      for (int other = 1; other < DIM_PARTS; ++other) score += scores[other][row][lane];
      score *= factor;
#ifndef BUG_MASK
      if (first_key + lane >= ends[i]) score = NEGATIVE_INFINITY;
#endif
      const float top = fmaxf(tops[i], warp_max(score));
      const float base = top == NEGATIVE_INFINITY ? 0.0f : top;  // a row that has seen no key yet
      const float correction = exp2f(tops[i] - base);
      const DTYPE weight = from_float<DTYPE>(exp2f(score - base));
      tops[i] = top;
      sums_of_lane[i] = sums_of_lane[i] * correction + to_float(weight);  // of what is multiplied with values
      weights[row * WEIGHT_STRIDE + lane] = weight;
      if (lane == 0) corrections[row] = correction;
    }
#ifndef BUG_WEIGHTS
    __syncthreads();
#endif
    float own_corrections[ROW_TILES][2];
    bool changed = false;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        own_corrections[t][i] = corrections[t * 16 + i * 8 + lane / 4];
        changed = changed || own_corrections[t][i] != 1.0f;
      }
    if (__any_sync(ALL_LANES, changed)) {  // seldom after the first tiles
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
        for (int n = 0; n < OUT_TILES; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) totals[t][n][j] *= own_corrections[t][j / 2];
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      uint32_t p[ROW_TILES][4];
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t)
        load_matrix_x4(p[t], weights + (t * 16 + lane % 16) * WEIGHT_STRIDE + step * 16 + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < OUT_TILES; n += 2) {
        const int column_tile = warp * OUT_TILES + n;
        if (RANK % (WARPS * 16) && column_tile * 8 >= RANK) break;
        uint32_t v[4];
        load_matrix_x4_transposed(v, tile + place(step * 16 + lane % 16, ROTARY / 8 + column_tile + lane / 16));
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
          mma_m16n8k16<DTYPE>(totals[t][n], p[t], v);
          mma_m16n8k16<DTYPE>(totals[t][n + 1], p[t], v + 2);
        }
      }
    }
  }

  wait_copies<0>();
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    const float sum = warp_sum(sums_of_lane[i]);
    if (lane == 0) {
      row_tops[warp * OWN_ROWS + i] = tops[i];
      row_sums[warp * OWN_ROWS + i] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = t * 16 + i * 8 + lane / 4;
      if (row >= num_rows) continue;
      const int64_t to = row_of_all(row), place_of_sums = to * gridDim.x + blockIdx.x;
      const float share = scale_of_all / row_sums[row];
      if (work.splits > 1 && warp == 0 && lane % 4 == 0) {
        sums[place_of_sums * 2] = row_tops[row];
        sums[place_of_sums * 2 + 1] = row_sums[row];
      }
#pragma unroll
      for (int n = 0; n < OUT_TILES; ++n) {
        const int column = (warp * OUT_TILES + n) * 8 + lane % 4 * 2;
        if (RANK % (WARPS * 16) && column >= RANK) break;
        const float first = totals[t][n][2 * i], second = totals[t][n][2 * i + 1];
        if (work.splits > 1) {
          Vector<float, 2>{first, second}.store(partials + place_of_sums * RANK + column);
        } else {
          Vector<DTYPE, 2>{from_float<DTYPE>(first * share), from_float<DTYPE>(second * share)}.store(out + to * RANK + column);
        }
      }
    }
}
EXPORT(latent_attention)
