// What both decode attention kernels share: what a block takes, its heads on their way there, and what becomes of its result.
//
// They take q, k and v as their projection leaves them (heads.cuh), so that all of a layer's attention is one launch. A block
// norms and rotates its own queries. The newest token of a sequence goes to the cache, where its length says, by the block that
// reads it, that of the last split; no other asks for it. If a group is larger than ROWS several do so: they write the same bits.
//
// A block takes one split of one sequence's tokens, for up to ROWS query heads that share a kv head: grid (splits, KH * chunks of
// a group, B). Which splits a sequence has follows from its length (find_tokens) and the blocks beyond them end at once, so that
// a CUDA graph holds for all lengths. The splits' results meet in `partials` [B, H, grid x, D] and `sums` [B, H, grid x, 2]; the
// block that finishes last, by `counters` [B, grid y], which it sets back to zero, adds them up in the order of the splits. A
// row's bits depend on its own tokens and on how they are split.
//
// Lengths and block tables are there before a step's first layer, and no kernel writes them then. Nor does the kernel ahead, the
// projection or what belongs to it, write to the cache: all of that may be read while it still runs. The kernels further back
// have ended: this one starts when all blocks of the one ahead have called let_next_kernel_start or ended, at least one of them
// behind wait_for_previous_kernel, which returns when the kernel before, and so each before that, has ended. But past the L1:
// until a kernel has waited, nothing promises that an L1 no longer holds the lengths and tables of the step before.
//
// GATED: each row of qkv has as many numbers before q as in q, which are not read here. Not an argument: one more costs the
// largest of these kernels registers that they lack. VALUE_NORM: v has gains, v_norm, and is normed as k is.
//
// SHARED: rows of qkv are q alone, and k and v of the newest token are in the cache, where another layer's kernel wrote them. It
// has ended, unless it is the one ahead: behind rope_and_cache comes decode_attention_any alone, which reads no cache before it has
// waited. There `sequences` [B] says which of the block tables each row of q has, null for its own: so the tokens of a prompt can
// be rows with lengths of their own.
//
// DISTANCES: scores get what `distances` [H, columns] fp32 has for how far a token lies from the query (layers/distances.py).
#pragma once
#include "heads.cuh"

#ifndef GATED
#define GATED 0
#endif
#ifndef VALUE_NORM
#define VALUE_NORM 0
#endif
#ifndef SHARED
#define SHARED 0
#endif

#ifndef DISTANCES
#define DISTANCES 0
#endif

#if !VALUE_NORM
constexpr const DTYPE* v_norm = nullptr;  // an argument where there is one
#endif
#if !DISTANCES
constexpr const float* distances = nullptr;
constexpr int columns = 0;
#endif

constexpr bool INT8 = IS_INT8<KV_DTYPE>;  // k_scale and v_scale are of each row; else of each kv head, in fp8
constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int MAX_SPLITS = 64;  // as in decode_attention.py
constexpr int GRAIN = 64;       // splits begin at multiples of it
constexpr float LOG2E = 1.4426950408889634f;

// The largest power of two that divides the number, or `most` if that is less.
constexpr int largest_power(int number, int most) { return (number & -number) < most ? number & -number : most; }

// ---- what a block does ----

struct Split {
  int kv_head, head, rows;  // query heads [head, head + rows), all of kv_head
  int begin, end;           // its tokens
  int length;               // the sequence's tokens
  int splits;               // how many the sequence has
  bool has_newest;          // its tokens end with the sequence's last, which is not in the cache yet
};

// Which query heads the block has.
DEVICE void find_heads(Split& split, int kv_heads, int group) {
  const int chunks = group > ROWS ? gridDim.y / kv_heads : 1;
  split.kv_head = chunks > 1 ? blockIdx.y / chunks : blockIdx.y;
  const int chunk = blockIdx.y - split.kv_head * chunks;
  split.head = split.kv_head * group + chunk * ROWS;
  split.rows = min(ROWS, group - chunk * ROWS);
}

// Which tokens; false where the sequence has none. As many splits as the grid has, but none below least_split tokens.
DEVICE bool find_tokens(Split& split, const int* kv_lens, int window, int least_split) {
  const int kv_len = __ldcg(kv_lens + blockIdx.z);
  if (kv_len == 0) return false;
  split.length = kv_len;
  const int first = window > 0 ? max(0, kv_len - window) : 0, most = gridDim.x;
  const int origin = first / GRAIN * GRAIN;
  int size = least_split;
  if ((int64_t)size * most < kv_len - origin) size = ((kv_len - origin + most - 1) / most + GRAIN - 1) / GRAIN * GRAIN;
  split.splits = (kv_len - origin + size - 1) / size;
  split.begin = max(first, origin + (int)blockIdx.x * size);
  split.end = min(kv_len, origin + ((int)blockIdx.x + 1) * size);
  split.has_newest = !SHARED && split.end == kv_len;
  return true;
}

// Where a kv head's rows of a block begin in a cache, and where its scales do, of int8.
DEVICE int64_t first_scale(int block, int kv_head, int kv_heads) { return ((int64_t)block * kv_heads + kv_head) * BLOCK_SIZE; }

DEVICE int64_t block_offset(int block, int kv_head, int kv_heads) {
  const int64_t offset = ((int64_t)block * kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM);
#ifdef BUG_INT32
  return offset & 0x7fffffff;
#endif
  return offset;
}

DEVICE int block_of(const int* table, int token) {
#ifdef BUG_PAGE
  token += BLOCK_SIZE;
#endif
  return __ldcg(table + token / BLOCK_SIZE);
}

// A token of the split itself, to load instead of one beyond it: always there to be read, and finite.
DEVICE int clamped(int token, const Split& split) { return min(max(token, split.begin), split.end - 1); }

DEVICE bool is_seen(int token, const Split& split) {
#ifdef BUG_TAIL
  return token >= split.begin;
#endif
  return token >= split.begin && token < split.end;
}

// q.k to the score, as a power of two. softcap * tanh(x / softcap) = softcap - 2 * softcap / (1 + exp(2 * x / softcap)), whose
// error is of the size of softcap's own rounding. `factor` is score_factor's.
DEVICE float score_of(float product, float factor, float softcap) {
  if (softcap <= 0.0f) return product * factor;
  return softcap * LOG2E - __fdividef(2.0f * LOG2E * softcap, 1.0f + exp2f(product * factor));
}

// Of the kv head, in fp8.
DEVICE float head_scale(const float* scales, int kv_head) { return scales && !INT8 ? scales[kv_head] : 1.0f; }

DEVICE float score_factor(float scale, float softcap, const float* k_scale, int kv_head) {
  return scale * LOG2E * head_scale(k_scale, kv_head) * (softcap > 0.0f ? 2.0f / softcap : 1.0f);
}

// What scores of one of the block's queries get, at the sequence's first token. The middle of a head's columns, but for the BEYOND
// last ones, is the query's own place.
DEVICE const float* by_distance(const float* distances, int columns, const Split& split, int row) {
  constexpr int BEYOND = 64;
#ifdef BUG_DISTANCE
  --columns;
#endif
  return distances + (int64_t)(split.head + min(row, split.rows - 1)) * columns + (columns - BEYOND) / 2 - (split.length - 1);
}

// From global memory by way of the L2 alone: the cache is read once.
struct PastL1 {
  template <class T>
  static DEVICE T load(const T* address) { return __ldcg(address); }
};

struct FromShared {
  template <class T>
  static DEVICE T load(const T* address) { return *address; }
};

template <int BYTES, class By>
DEVICE void load_words(uint32_t* words, const void* address) {
  if constexpr (BYTES == 16) {
    const uint4 loaded = By::load((const uint4*)address);
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
  } else if constexpr (BYTES == 8) {
    const uint2 loaded = By::load((const uint2*)address);
    words[0] = loaded.x, words[1] = loaded.y;
  } else if constexpr (BYTES == 4) {
    words[0] = By::load((const uint32_t*)address);
  } else {
    static_assert(BYTES == 2);
    words[0] = By::load((const uint16_t*)address);
  }
}

// ---- heads ----

constexpr int lanes_for(int loads) {
  int lanes = 1;
  while (lanes < loads && lanes < WARP_SIZE) lanes *= 2;
  return lanes;
}

constexpr int HEAD_UNITS = (HEAD_DIM + 2 * ROPE_LOAD - 1) / (2 * ROPE_LOAD), HEAD_LANES = lanes_for(HEAD_UNITS);
constexpr int HEADS_AT_ONCE = THREADS / HEAD_LANES, UNITS_OF_LANE = (HEAD_UNITS + HEAD_LANES - 1) / HEAD_LANES;
constexpr int NEWEST = SHARED ? 0 : 2;                                       // heads of k and v
constexpr int PASSES = (ROWS + NEWEST + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;  // over the queries, k and v
constexpr int QUERY_STRIDE = (HEAD_DIM + 7) / 8 * 8 + 8;                     // neighbouring rows begin in other banks

// Of int8 with room for the row's scale.
constexpr int NEWEST_ROW = INT8 ? (HEAD_DIM + 15) / 16 * 16 + 16 : HEAD_DIM;

struct Heads {
  alignas(16) DTYPE queries[ROWS][QUERY_STRIDE];
#if !SHARED
  alignas(16) KV_DTYPE newest[2][NEWEST_ROW];  // k and v; only where the split has the newest token
  DEVICE float& newest_scale(bool is_value) { return *reinterpret_cast<float*>(newest[is_value] + NEWEST_ROW - 16); }
#endif
};

// The kernels' arguments for it; as heads.cuh has them, norms null for none.
struct Projected {
  const DTYPE *qkv, *q_norm, *k_norm, *v_norm;
  const float *cos, *sin;
  int num_angles;
  bool interleaved;
  float eps, norm_offset;
};

// Waits for the kernel ahead. All threads call it; it ends with a barrier, behind which the block finds the newest token in the
// cache, too.
DEVICE void take_heads(Heads& heads, const Projected& projected, const Split& split, int kv_heads, int group, const int* table,
                       KV_DTYPE* k_cache, KV_DTYPE* v_cache, float* k_scale, float* v_scale) {
  const Place<ROPE_LOAD> place = {(int)threadIdx.x % HEAD_LANES, HEAD_LANES, HEAD_DIM, projected.num_angles,
                                  projected.interleaved};
  // The block's heads are its queries, then k, then v. What is not there repeats the last one.
  const int key = split.rows, value = key + 1, last = split.has_newest ? value : key - 1;
  int head[PASSES];
  const DTYPE* gains[PASSES];
  Head<ROPE_LOAD, UNITS_OF_LANE> mine[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    head[pass] = pass * HEADS_AT_ONCE + threadIdx.x / HEAD_LANES;
    gains[pass] = head[pass] < key ? projected.q_norm : nullptr;
    if (head[pass] == key) gains[pass] = projected.k_norm;
    if (head[pass] == value) gains[pass] = projected.v_norm;
    if (TURNED && gains[pass] && head[pass] < key) gains[pass] += (split.head + head[pass]) * HEAD_DIM;
    if (gains[pass]) mine[pass].load_gains(place, gains[pass]);
  }
  const int newest_block = split.has_newest ? block_of(table, split.end - 1) : 0;

  wait_for_previous_kernel();
  let_next_kernel_start();  // where few sequences leave multiprocessors idle, it may ask for its weights meanwhile
  const int64_t token = blockIdx.z;
  const int query_heads = kv_heads * group;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int there = min(head[pass], last);
    const int row = there < key ? split.head + there : query_heads + (there - key) * kv_heads + split.kv_head;
    mine[pass].load(place, projected.qkv + (token * ((1 + GATED) * query_heads + NEWEST * kv_heads) + row) * HEAD_DIM);
  }
  Angles<ROPE_LOAD, UNITS_OF_LANE> angles;
  angles.load(place, projected.cos + token * projected.num_angles, projected.sin + token * projected.num_angles);

#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    mine[pass].norm_and_rotate(place, projected.q_norm || projected.k_norm || projected.v_norm, gains[pass], projected.eps,
                               projected.norm_offset, head[pass] != value, angles);
    float own_scale = 1.0f;
    if constexpr (INT8 && !SHARED) own_scale = mine[pass].own_scale(place);
    if (head[pass] > last) continue;
    if (head[pass] < key) {
      mine[pass].store(place, 1.0f, heads.queries[head[pass]]);
#if !SHARED
    } else {
      const bool is_value = head[pass] == value;
      float* scales = is_value ? v_scale : k_scale;
      const float scale = INT8 ? own_scale : head_scale(scales, split.kv_head);
      const int64_t offset = block_offset(newest_block, split.kv_head, kv_heads) + (split.end - 1) % BLOCK_SIZE * HEAD_DIM;
      if (INT8 && place.lane == 0) {
        heads.newest_scale(is_value) = scale;
        scales[first_scale(newest_block, split.kv_head, kv_heads) + (split.end - 1) % BLOCK_SIZE] = scale;
      }
      mine[pass].store(place, scale, heads.newest[is_value], (is_value ? v_cache : k_cache) + offset);
#endif
    }
  }
  __syncthreads();
}

// ---- what becomes of the warps' results ----

// Order::of(dim): the place of a dim in a row of Order::FLOATS, in which a kernel's lanes have no bank conflicts.
template <class Order>
struct Result {
  float out[ROWS][Order::FLOATS];  // sum of exp2(score - top) * value
  float sum[ROWS];                 // sum of exp2(score - top)
  float tops[WARPS][ROWS];         // each warp's; the block's is the highest
  float weights[ROWS][MAX_SPLITS];
  bool last;
};

template <class Order>
DEVICE float block_top(const Result<Order>& result, int row) {
  float top = result.tops[0][row];
  for (int warp = 1; warp < WARPS; ++warp) top = fmaxf(top, result.tops[warp][row]);
  return top;
}

DEVICE void add(float& sum, float value, bool is_first) { sum = is_first ? value : sum + value; }

// add_all(is_first) by one warp after the other, since their sums go into the same place.
template <class AddAll>
DEVICE void in_order_of_warps(AddAll add_all) {
  for (int warp = 0; warp < WARPS; ++warp) {
    if (threadIdx.x / WARP_SIZE == warp) add_all(warp == 0);
#ifndef BUG_BARRIER
    __syncthreads();
#endif
  }
}

// From the block's result to the output, with those of the sequence's other splits. All threads call it, after a barrier.
template <class Order>
DEVICE void finish(Result<Order>& result, const Split& split, int kv_heads, int group, const float* sinks, const float* v_scale,
                   float* partials, float* sums, int* counters, DTYPE* out) {
  constexpr int VECTOR = HEAD_DIM % 4 ? 1 : 4, AHEAD = 8;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int pair = blockIdx.z * gridDim.y + blockIdx.y, size = split.rows * HEAD_DIM;
  const bool alone = split.splits == 1;
  const int64_t head = (int64_t)blockIdx.z * kv_heads * group + split.head;
  const auto place = [&](int row, int at) { return (head + row) * gridDim.x + at; };
  const auto own = [&](int i) {
    Vector<float, VECTOR> dims;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) dims.at[j] = result.out[i / HEAD_DIM][Order::of(i % HEAD_DIM + j)];
    return dims;
  };
  if (!alone) {
    for (int i = threadIdx.x * VECTOR; i < size; i += THREADS * VECTOR)
      own(i).store(partials + place(i / HEAD_DIM, blockIdx.x) * HEAD_DIM + i % HEAD_DIM);
    if (threadIdx.x < split.rows) {
      sums[place(threadIdx.x, blockIdx.x) * 2] = block_top(result, threadIdx.x);
      sums[place(threadIdx.x, blockIdx.x) * 2 + 1] = result.sum[threadIdx.x];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      result.last = atomicAdd(counters + pair, 1) == split.splits - 1;
#ifndef BUG_COUNTER
      if (result.last) counters[pair] = 0;
#endif
    }
    __syncthreads();
    if (!result.last) return;
    __threadfence();
  }
  for (int row = warp; row < split.rows; row += WARPS) {
    const float sink = sinks ? sinks[split.head + row] * LOG2E : NEGATIVE_INFINITY;
    float* weights = result.weights[row];
    float top = sink, sum = 0.0f;
    for (int i = lane; i < split.splits; i += WARP_SIZE) {
      weights[i] = alone ? block_top(result, row) : __ldcg(sums + place(row, i) * 2);
      top = fmaxf(top, weights[i]);
    }
    top = warp_max(top);
    for (int i = lane; i < split.splits; i += WARP_SIZE) {
      weights[i] = exp2f(weights[i] - top);
      sum += weights[i] * (alone ? result.sum[row] : __ldcg(sums + place(row, i) * 2 + 1));
    }
    const float factor = head_scale(v_scale, split.kv_head) / (warp_sum(sum) + exp2f(sink - top));
    for (int i = lane; i < split.splits; i += WARP_SIZE) weights[i] *= factor;
  }
  __syncthreads();
  for (int i = threadIdx.x * VECTOR; i < size; i += THREADS * VECTOR) {
    const float* weights = result.weights[i / HEAD_DIM];
    float total[VECTOR] = {};
    if (alone) {
      const Vector<float, VECTOR> dims = own(i);
      for (int j = 0; j < VECTOR; ++j) total[j] = weights[0] * dims.at[j];
    }
    for (int start = 0; start < split.splits && !alone; start += AHEAD) {
      uint32_t loaded[AHEAD][VECTOR];
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead)
        if (start + ahead < split.splits)
          load_words<4 * VECTOR, PastL1>(loaded[ahead],
                                         partials + place(i / HEAD_DIM, start + ahead) * HEAD_DIM + i % HEAD_DIM);
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead)
        for (int j = 0; j < VECTOR && start + ahead < split.splits; ++j)
          total[j] += weights[start + ahead] * __uint_as_float(loaded[ahead][j]);
    }
    Vector<DTYPE, VECTOR> rounded;
    for (int j = 0; j < VECTOR; ++j) rounded.at[j] = from_float<DTYPE>(total[j]);
    rounded.store(out + head * HEAD_DIM + i);
  }
}

// The output of a sequence without tokens, as the padding of a batch has none.
DEVICE void write_zeros(const Split& split, int kv_heads, int group, DTYPE* out) {
  wait_for_previous_kernel();
  out += ((int64_t)blockIdx.z * kv_heads * group + split.head) * HEAD_DIM;
  for (int i = threadIdx.x; i < split.rows * HEAD_DIM && blockIdx.x == 0; i += THREADS) out[i] = from_float<DTYPE>(0.0f);
}
