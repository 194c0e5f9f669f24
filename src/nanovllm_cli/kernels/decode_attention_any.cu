// Attention of one query token a sequence over the paged cache, on CUDA cores: for the head dims and types that
// decode_attention.cu, which says what is computed, does not take. ROWS 1, 2, 4 or 8; decode_split.cuh says how work is split.
//
// A head lies over LANES lanes, a power of two, in loads of up to 8 elements; a warp takes tiles of AT_ONCE tokens side by side,
// AHEAD times, all of whose loads start before the first is used. Lanes keep their own softmax until the end.
#include "decode_split.cuh"

constexpr int VECTOR = largest_power(HEAD_DIM, 8), LOADS = HEAD_DIM / VECTOR, LANES = lanes_for(LOADS);
constexpr int STEPS = (LOADS + LANES - 1) / LANES, AT_ONCE = WARP_SIZE / LANES;
// Where queries and sums fill the registers, fewer loads fit in, which are the longer.
constexpr int AHEAD = ROWS * STEPS * VECTOR > 32 || STEPS * VECTOR > 16 ? 2 : 4, TILE = AT_ONCE * AHEAD;

// The result in the order of registers: [step][j] of all lanes.
struct Registers {
  static constexpr int FLOATS = STEPS * VECTOR * LANES;

  static DEVICE int of(int step, int j, int lane) { return (step * VECTOR + j) * LANES + lane; }
  static DEVICE int of(int dim) { return of(dim / VECTOR / LANES, dim % VECTOR, dim / VECTOR % LANES); }
};

KERNEL __launch_bounds__(THREADS, 2)
decode_attention_any(const DTYPE* qkv, const DTYPE* q_norm, const DTYPE* k_norm, const float* cos, const float* sin,
                     KV_DTYPE* k_cache, KV_DTYPE* v_cache, const int* block_tables, const int* kv_lens, const float* sinks,
                     float* k_scale, float* v_scale, float* partials, float* sums, int* counters, DTYPE* out,
                     int kv_heads, int group, int num_angles, int interleaved, int table_width, int window, int least_split,
                     float eps, float norm_offset, float scale, float softcap
#if VALUE_NORM
                     , const DTYPE* v_norm
#endif
#if DISTANCES
                     , const float* distances, int columns
#endif
#if SHARED
                     , const int* sequences
#endif
) {
  typedef Vector<KV_DTYPE, VECTOR> Elements;
  __shared__ Result<Registers> result;
  __shared__ Heads heads;
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % LANES, slot = threadIdx.x % WARP_SIZE / LANES;
  Split split;
  find_heads(split, kv_heads, group);
  if (!find_tokens(split, kv_lens, window, least_split)) return write_zeros(split, kv_heads, group, out);
  if (blockIdx.x >= split.splits) return;
#if SHARED
  const int64_t sequence = sequences ? __ldcg(sequences + blockIdx.z) : blockIdx.z;
#else
  const int64_t sequence = blockIdx.z;
#endif
  const int* table = block_tables + sequence * table_width;
  const Projected projected = {qkv, q_norm, SHARED ? nullptr : k_norm, v_norm, cos, sin, num_angles, interleaved != 0, eps,
                               norm_offset};
  take_heads(heads, projected, split, kv_heads, group, table, k_cache, v_cache, k_scale, v_scale);

  float query[ROWS][STEPS][VECTOR] = {}, out_sums[ROWS][STEPS][VECTOR] = {}, tops[ROWS], weight_sums[ROWS] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    tops[row] = NEGATIVE_INFINITY;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int load = step * LANES + lane;
      if (row >= split.rows || load >= LOADS) continue;
      const auto loaded = Vector<DTYPE, VECTOR>::load(heads.queries[row] + load * VECTOR);
      for (int i = 0; i < VECTOR; ++i) query[row][step][i] = to_float(loaded.at[i]);
    }
  }
  const float factor = score_factor(scale, softcap, k_scale, split.kv_head);
  const int first_tile = split.begin / TILE, end_tile = (split.end + TILE - 1) / TILE;

  for (int tile = first_tile + ((warp - first_tile) & (WARPS - 1)); tile < end_tile; tile += WARPS) {
    Elements keys[AHEAD][STEPS], values[AHEAD][STEPS];
    float key_scales[AHEAD], value_scales[AHEAD];  // of int8
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int token = clamped(tile * TILE + i * AT_ONCE + slot, split);
      const int block = block_of(table, token);
      const int64_t offset = block_offset(block, split.kv_head, kv_heads) + token % BLOCK_SIZE * HEAD_DIM;
      if constexpr (INT8) {
        const int64_t row = first_scale(block, split.kv_head, kv_heads) + token % BLOCK_SIZE;
        key_scales[i] = k_scale[row];
        value_scales[i] = v_scale[row];
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int element = min(step * LANES + lane, LOADS - 1) * VECTOR;
        keys[i][step] = Elements::load(k_cache + offset + element);
        values[i][step] = Elements::load(v_cache + offset + element);
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float scores[AHEAD], top = tops[row];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float product = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          for (int j = 0; j < VECTOR; ++j) product += query[row][step][j] * to_float(keys[i][step].at[j]);
        product = warp_sum(product, LANES);
        if constexpr (INT8) product *= key_scales[i];
        const bool seen = is_seen(tile * TILE + i * AT_ONCE + slot, split);
        scores[i] = seen ? score_of(product, factor, softcap) : NEGATIVE_INFINITY;
        if constexpr (DISTANCES) {
          const int token = clamped(tile * TILE + i * AT_ONCE + slot, split);
          scores[i] += LOG2E * __ldg(by_distance(distances, columns, split, row) + token);
        }
        top = fmaxf(top, scores[i]);
      }
      const float base = top == NEGATIVE_INFINITY ? 0.0f : top;  // these lanes have seen no token yet
      const float correction = exp2f(tops[row] - base);
      tops[row] = top;
      weight_sums[row] *= correction;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        for (int j = 0; j < VECTOR; ++j) out_sums[row][step][j] *= correction;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float weight = exp2f(scores[i] - base);
        weight_sums[row] += weight;
        if constexpr (INT8) weight *= value_scales[i];
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          for (int j = 0; j < VECTOR; ++j) out_sums[row][step][j] += weight * to_float(values[i][step].at[j]);
      }
    }
  }

  const auto sum_of_slots = [](float value) {
    for (int bits = WARP_SIZE / 2; bits >= LANES; bits /= 2) value += __shfl_xor_sync(ALL_LANES, value, bits);
    return value;
  };
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const float top = warp_max(tops[row]), factor = top == NEGATIVE_INFINITY ? 0.0f : exp2f(tops[row] - top);
    tops[row] = top;
    weight_sums[row] = sum_of_slots(weight_sums[row] * factor);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      for (int j = 0; j < VECTOR; ++j) out_sums[row][step][j] = sum_of_slots(out_sums[row][step][j] * factor);
    if (threadIdx.x % WARP_SIZE == 0) result.tops[warp][row] = top;
  }
  __syncthreads();
  in_order_of_warps([&](bool is_first) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float factor = exp2f(tops[row] - block_top(result, row));
      if (threadIdx.x % WARP_SIZE == 0) add(result.sum[row], factor * weight_sums[row], is_first);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        for (int j = 0; j < VECTOR; ++j) {
          const int element = (step * LANES + lane) * VECTOR + j;
          if (slot == 0 && element < HEAD_DIM)
            add(result.out[row][Registers::of(step, j, lane)], factor * out_sums[row][step][j], is_first);
        }
    }
  });
  finish(result, split, kv_heads, group, sinks, v_scale, partials, sums, counters, out);
}
EXPORT(decode_attention_any)
