// Causal attention over a paged cache of one row a token, which is its key for all heads, and whose last numbers are its value.
//
//   out[t, h] = sum over j of softmax_j(scale * rows[t, h] . cache[j]) cache[j, ROTARY:],   j before the length that t has
//
//   rows [T, heads, ROTARY + RANK] DTYPE, cache [blocks, BLOCK_SIZE, ROTARY + RANK] KV_DTYPE (times kv_scale [1] where not null),
//   out [T, heads, RANK] DTYPE; ROTARY a multiple of 8, or of 16 for an 8-bit cache, RANK of 16. Needs mma and cp.async: sm_80.
//
// A block has up to ROWS rows, (token, head) pairs of one sequence: chunk_heads heads of a token, or all heads of some tokens
// (`groups`). They are the sixteens of rows of mma.m16n8k16, and share tiles of KEYS keys in shared memory, which serve as keys and
// then, transposed by ldmatrix, as values. Of a tile's scores a warp computes 16 rows by WARP_KEYS keys; weights go through shared
// memory, for of what they sum a warp has all rows and a part of the columns. The softmax starts from what all warps have seen.
//
// Tiles come by cp.async through STAGES places, STAGES - 1 ahead; the first are under way before the kernel ahead has ended: that
// one, head_matmul, writes rows alone, and the one that wrote the cache, latent_rows, ended before this one could start. An 8-bit
// cache comes raw, all STAGES ahead, and each thread turns what it has copied into DTYPE, once a block.
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
constexpr bool SWIZZLED = CHUNKS % 8 == 0, QUANTIZED = sizeof(KV_DTYPE) == 1;
constexpr int STRIDE = SWIZZLED ? DIM : DIM + 8, RAW_CHUNKS = HEAD_DIM / 16;
constexpr int THREADS = WARPS * WARP_SIZE, ROW_TILES = ROWS / 16, KEY_GROUPS = WARPS / ROW_TILES;
constexpr int WARP_KEYS = KEYS / KEY_GROUPS, KEY_TILES = WARP_KEYS / 8;
constexpr int OUT_TILES = (RANK / 16 + WARPS - 1) / WARPS * 2;  // of 8 columns, a warp
constexpr int COPIERS = 8, ROWS_AT_ONCE = THREADS / COPIERS, PASSES = KEYS / ROWS_AT_ONCE;  // threads of a row in copies
constexpr int WEIGHT_STRIDE = KEYS + 8, UNROLLED = ROWS == 64 ? 6 : 64;  // what 64 rows sum up leaves few registers
constexpr int TILE = KEYS * STRIDE, RAW_TILE = KEYS * HEAD_DIM, AHEAD = QUANTIZED ? STAGES : STAGES - 1;
static_assert(ROTARY % (QUANTIZED ? 16 : 8) == 0 && RANK % 16 == 0 && KEY_TILES >= 1 && KEY_TILES <= 2 && PASSES >= 1);
static_assert(GRAIN % KEYS == 0);

DEVICE int place(int row, int chunk) { return row * STRIDE + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 8; }

// What this thread has copied, from raw to the tile.
DEVICE void dequantize_own(const uint8_t* raw, DTYPE* tile) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = pass * ROWS_AT_ONCE + threadIdx.x / COPIERS;
    for (int chunk = threadIdx.x % COPIERS; chunk < RAW_CHUNKS; chunk += COPIERS) {
      const uint4 words = *reinterpret_cast<const uint4*>(raw + row * HEAD_DIM + chunk * 16);
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int j = turn ^ chunk / 4 % 2;  // of eight lanes half write even chunks, and half odd ones: other banks
        const uint32_t low = j ? words.z : words.x, high = j ? words.w : words.y;
        const Vector<uint32_t, 4> pairs = {dequantize(low, 0), dequantize(low, 2), dequantize(high, 0), dequantize(high, 2)};
        pairs.store(reinterpret_cast<uint32_t*>(tile + place(row, 2 * chunk + j)));
      }
    }
  }
}

// scores[chain] of 16 rows by WARP_KEYS keys, in two chains of products that do not wait for each other.
DEVICE void multiply_keys(float (*scores)[KEY_TILES][4], const DTYPE* queries, const DTYPE* keys, int lane) {
#pragma unroll UNROLLED
  for (int pair = 0; pair < (STEPS + 1) / 2; ++pair) {
    uint32_t k[4];
    if (KEY_TILES == 1) load_matrix_x4(k, keys + place(lane % 8, min(4 * pair + lane / 8, CHUNKS - 1)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * pair + i;
      if (STEPS % 2 && step >= STEPS) break;
      uint32_t q[4];
      load_matrix_x4(q, queries + place(lane % 16, 2 * step + lane / 16));
      if (KEY_TILES == 2) load_matrix_x4(k, keys + place(lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) mma_m16n8k16<DTYPE>(scores[i][n], q, k + 2 * (KEY_TILES == 1 ? i : n));
    }
  }
}

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS)
latent_attention(const DTYPE* rows, const KV_DTYPE* cache, const int* block_tables, const int* lens, const int* sequences,
                 const int4* groups, const float* kv_scale, DTYPE* out, float* partials, float* sums, int heads, int chunk_heads,
                 int table_width, int least_split, float scale) {
  DYNAMIC_SHARED(shared);
  DTYPE* queries = reinterpret_cast<DTYPE*>(shared);
  DTYPE* tiles = queries + ROWS * STRIDE;  // STAGES of them; or one, and behind it STAGES raw ones
  uint8_t* raw = reinterpret_cast<uint8_t*>(tiles + TILE);
  DTYPE* weights = QUANTIZED ? reinterpret_cast<DTYPE*>(raw + STAGES * RAW_TILE) : tiles + STAGES * TILE;
  float(*warp_tops)[ROWS] = reinterpret_cast<float(*)[ROWS]>(weights + ROWS * WEIGHT_STRIDE);
  float(*warp_sums)[ROWS] = warp_tops + KEY_GROUPS;

  const int lane = threadIdx.x % WARP_SIZE, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP_SIZE, 0);
  const int row_tile = warp % ROW_TILES, key_group = warp / ROW_TILES;
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
  find_blocks(begin);
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

  // Lane l has rows l / 4 and l / 4 + 8 of a tile of rows (the layout of an mma's result): own_ of those whose scores its warp
  // computes, the others of all that it sums up.
  float tops[ROW_TILES][2], own_tops[2], own_sums[2] = {}, totals[ROW_TILES][OUT_TILES][4] = {};
  int own_ends[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own_tops[i] = NEGATIVE_INFINITY;
    own_ends[i] = min(end, work.first_len + (row_tile * 16 + i * 8 + lane / 4) / own_heads);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) tops[tile][i] = NEGATIVE_INFINITY;
  }
  const float factor = scale * LOG2_E * (kv_scale ? kv_scale[0] : 1.0f);
  // The highest score of a row so far, from what it was and what the warps saw of this tile.
  const auto raised = [&](float top, int row) {
#pragma unroll
    for (int group = 0; group < KEY_GROUPS; ++group) top = fmaxf(top, warp_tops[group][row]);
    return top;
  };
  const auto base_of = [](float top) { return top == NEGATIVE_INFINITY ? 0.0f : top; };  // a row that has seen no key yet

#ifndef BUG_NO_WAIT
  wait_copies<0>();  // the queries came last
#endif
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
      dequantize_own(raw + stage * RAW_TILE, tile);
      copy_tile(first_key + AHEAD * KEYS, stage);
      __syncthreads();  // all threads' parts of it are there
    } else {
      tile += stage * TILE;
      copy_tile(first_key + AHEAD * KEYS, stage == 0 ? STAGES - 1 : stage - 1);
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;

    float scores[2][KEY_TILES][4] = {};
    multiply_keys(scores, queries + row_tile * 16 * STRIDE, tile + key_group * WARP_KEYS * STRIDE, lane);
    const int first_own = first_key + key_group * WARP_KEYS + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = NEGATIVE_INFINITY;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[0][n][2 * i + j];
          score = (score + scores[1][n][2 * i + j]) * factor;
#ifndef BUG_MASK
          if (first_own + n * 8 + j >= own_ends[i]) score = NEGATIVE_INFINITY;
#endif
          top = fmaxf(top, score);
        }
      top = warp_max(top, 4);
      if (lane % 4 == 0) warp_tops[key_group][row_tile * 16 + i * 8 + lane / 4] = top;
    }
#ifndef BUG_TOPS
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_tile * 16 + i * 8 + lane / 4;
      const float top = raised(own_tops[i], row), base = base_of(top);
      own_sums[i] *= exp2f(own_tops[i] - base);
      own_tops[i] = top;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        const float* pair = scores[0][n] + 2 * i;
        const auto rounded = Pairs<DTYPE>::of(exp2f(pair[0] - base), exp2f(pair[1] - base));
        own_sums[i] += to_float(rounded.x) + to_float(rounded.y);  // of what is multiplied with values
        DTYPE* target = weights + row * WEIGHT_STRIDE + key_group * WARP_KEYS + n * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(target) = same_bits<uint32_t>(rounded);
      }
    }
    float corrections[ROW_TILES][2];
    bool changed = false;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float top = raised(tops[t][i], t * 16 + i * 8 + lane / 4);
        corrections[t][i] = exp2f(tops[t][i] - base_of(top));
        changed = changed || top != tops[t][i];
        tops[t][i] = top;
      }
    if (__any_sync(ALL_LANES, changed)) {  // seldom after the first tiles; where nothing changed, the factors are 1
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
        for (int n = 0; n < OUT_TILES; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) totals[t][n][j] *= corrections[t][j / 2];
    }
#ifndef BUG_WEIGHTS
    __syncthreads();
#endif
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
  for (int i = 0; i < 2; ++i) {
    const float sum = warp_sum(own_sums[i], 4);
    if (lane % 4 == 0) warp_sums[key_group][row_tile * 16 + i * 8 + lane / 4] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = t * 16 + i * 8 + lane / 4;
      if (row >= num_rows) continue;
      float sum = 0.0f;
#pragma unroll
      for (int group = 0; group < KEY_GROUPS; ++group) sum += warp_sums[group][row];
      const int64_t to = row_of_all(row), part = to * gridDim.x + blockIdx.x;
      const float share = (kv_scale ? kv_scale[0] : 1.0f) / sum;
      if (work.splits > 1 && warp == 0 && lane % 4 == 0) {
        sums[part * 2] = tops[t][i];
        sums[part * 2 + 1] = sum;
      }
#pragma unroll
      for (int n = 0; n < OUT_TILES; ++n) {
        const int column = (warp * OUT_TILES + n) * 8 + lane % 4 * 2;
        if (RANK % (WARPS * 16) && column >= RANK) break;
        const float first = totals[t][n][2 * i], second = totals[t][n][2 * i + 1];
        if (work.splits > 1) {
          Vector<float, 2>{first, second}.store(partials + part * RANK + column);
        } else {
          Vector<DTYPE, 2>{from_float<DTYPE>(first * share), from_float<DTYPE>(second * share)}.store(out + to * RANK + column);
        }
      }
    }
}
EXPORT(latent_attention)
