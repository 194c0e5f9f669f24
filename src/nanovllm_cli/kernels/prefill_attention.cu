// Attention of any number of query tokens a sequence over a paged cache that holds their keys and values already: causal, or in
// both directions.
//
//   out[t, h] = sum over keys j of softmax_j(score(t, h, j)) v[j]     window keys up to t's own, and as far as `ahead` behind it
//   score = scale q[t, h] . k[j], or softcap * tanh of that over softcap; sinks[h] is one more logit, without a value
//
// q [T, H, D] DTYPE, k_cache and v_cache [N, KH, BLOCK_SIZE, D] KV_DTYPE, block_tables [B, table_width], out [T, H * D] DTYPE,
// sinks [H], k_scale and v_scale float, [KH] of fp8 or as int8_rows.cuh has them, or null. With DISTANCES a score also gets what `distances` [H, columns] float has for
// how far its key lies from t (layers/distances.py). FlashAttention-2 (Dao 2023).
//
// Work: one block for one item and one kv head. An item is up to ROWS rows of a sequence, a row being a (token, head of the
// group) pair, so that K and V are read once for the whole group, over a range of keys, in tiles of KEYS that begin at multiples
// of KEYS. A warp has rows of its own (prefill_rows.cuh) or, of heads too large for its registers, shares them with others, which
// have other dims (prefill_parts.cuh). fp8's scales stay out of the tiles: k_scale is part of the scale of the scores, v_scale of
// the last division. int8 is multiplied by its own on the way into a tile, so that what is there is as a cache of DTYPE has it.
//
// A range of keys that is divided: each item leaves its sums in scratch, and the last block of a tile to finish adds them up in
// order of the keys. With fold_keys > 0 sums begin anew at every multiple of fold_keys and are added up in the same order and by
// the same operations whether one item walks through several such ranges or each has an item of its own. Key tiles that a row
// does not see change none of its bits, rows of an mma are independent, and arithmetic is in intrinsics that the compiler may not
// contract: a row's bits depend on its sequence and position, not on the rows beside it, nor on where a chunk begins.
#if PARTS == 1
#include "prefill_rows.cuh"
#else
#include "prefill_parts.cuh"
#endif

// Grid (items, KH). window: 0 for all. ahead: 0 where attention is causal. counters: zeros, and zeros again afterwards.
KERNEL __launch_bounds__(THREADS, PARTS == 1 ? 2 : 1)
prefill_attention(const DTYPE* q, const KV_DTYPE* k_cache, const KV_DTYPE* v_cache, const Item* items, const int* block_tables,
                  const float* sinks, const float* k_scale, const float* v_scale, DTYPE* out, float* scratch, int* counters,
                  int kv_heads, int group, int table_width, int window, int ahead, int fold_keys, float scale, float softcap
#if DISTANCES
                  , const float* distances, int columns
#endif
) {
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
  problem.v_scale = v_scale && !INT8 ? v_scale[head] : 1.0f;
  problem.k_scales = k_scale;
  problem.v_scales = v_scale;
  problem.out = out;
  problem.scratch = scratch;
  problem.kv_heads = kv_heads;
  problem.head = head;
  problem.group = group;
  problem.one_over_group = 0xffffffffu / group + 1;
  problem.seen = window > 0 ? window : 0x7fffffff;
  problem.ahead = ahead;
  problem.fold_keys = fold_keys;
  problem.softcap = softcap;
  problem.distances = distances;
  problem.columns = columns;
  problem.to_log2 = scale * LOG2_E * (k_scale && !INT8 ? k_scale[head] : 1.0f);
  if (item.rows <= ROWS / ROW_TILES) {
    attend<1>(problem, item, shared, counters);
  } else if constexpr (ROW_TILES > 1) {
    attend<ROW_TILES>(problem, item, shared, counters);
  }
}
EXPORT(prefill_attention)
