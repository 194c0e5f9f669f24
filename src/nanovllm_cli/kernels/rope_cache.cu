// What happens to q, k and v between their projection and attention: norm of each head, rotation of those of q and k by position
// (or first the rotation: TURNED), and the write of k and v to their slots of the paged cache. heads.cuh has qkv, the gains and
// the angles, and how lanes share a head. In steps of decodes attention does it itself (decode_split.cuh). With no kv_heads there
// is q alone, and no write.
//
//   q_norm, k_norm, v_norm: gains, or null; with TURNED each head of q has its own, q_norm [heads, dim]
//   slots [T] int64 = block * BLOCK_SIZE + offset; -1 is padding: nothing is written to the cache
//   q [T, heads, dim] DTYPE;  k_cache, v_cache [blocks, kv_heads, BLOCK_SIZE, dim] KV_DTYPE: fp8 is divided by k_scale, v_scale
//   [kv_heads] fp32; int8 leaves its scales there, [blocks, kv_heads, BLOCK_SIZE]; null for other types
//
// With 16-byte loads a lane has 32 bytes in flight, a full SM 32 KB (64 registers), about what the memory of an H200 needs.
// Grid (T, heads / heads a block).
#include "heads.cuh"

KERNEL __launch_bounds__(128)
rope_and_cache(const DTYPE* qkv, const DTYPE* q_norm, const DTYPE* k_norm, const DTYPE* v_norm, const float* cos,
               const float* sin, const int64_t* slots, float* k_scale, float* v_scale, DTYPE* q, KV_DTYPE* k_cache,
               KV_DTYPE* v_cache, int row_heads, int heads, int kv_heads, int dim, int num_angles, int interleaved,
               int lane_bits, float eps, float norm_offset) {
  const int64_t token = blockIdx.x;
  const int lanes = 1 << lane_bits, num_heads = heads + 2 * kv_heads;
  const Place<VECTOR> place = {(int)threadIdx.x & (lanes - 1), lanes, dim, num_angles, interleaved != 0};
  const int head = (blockIdx.y * blockDim.x + threadIdx.x) >> lane_bits, there = min(head, num_heads - 1);
  const bool is_query = head < heads, is_value = head >= heads + kv_heads;

  // Gains are weights: their way from memory is spent waiting for the projection.
  const DTYPE* gains = is_query ? q_norm : is_value ? v_norm : k_norm;
  if (TURNED && is_query && gains) gains += head * dim;
  Head<VECTOR, UNITS> mine;
  if (gains) mine.load_gains(place, gains);

  // All loads before the first sum.
  wait_for_previous_kernel();
  let_next_kernel_start();
  mine.load(place, qkv + (token * row_heads + there) * dim);
  Angles<VECTOR, UNITS> angles;
  if (!is_value) angles.load(place, cos + token * num_angles, sin + token * num_angles);
  const int64_t slot = is_query ? -1 : slots[token];

  mine.norm_and_rotate(place, q_norm || k_norm || v_norm, gains, eps, norm_offset, !is_value, angles);
  float scale = 1.0f;
  if constexpr (IS_INT8<KV_DTYPE>) scale = mine.own_scale(place);

  if (is_query) return mine.store(place, 1.0f, q + (token * heads + head) * dim);
  if (slot < 0 || head >= num_heads) return;
  const int kv_head = head - heads - (is_value ? kv_heads : 0);
  float* scales = is_value ? v_scale : k_scale;
  int64_t row = (slot / BLOCK_SIZE * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;
#ifdef BUG_PAGE
  row = ((slot + 1) / BLOCK_SIZE * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;
#endif
  int64_t first = row * dim;
#ifdef BUG_INT32
  first = (int)first;
#endif
  if constexpr (IS_INT8<KV_DTYPE>) {
    if (place.lane == 0) scales[row] = scale;
  } else if (scales) {
    scale = scales[kv_head];
  }
  mine.store(place, scale, (is_value ? v_cache : k_cache) + first);
}
EXPORT(rope_and_cache)
