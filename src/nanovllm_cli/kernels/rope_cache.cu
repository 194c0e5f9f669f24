// What happens to q, k and v between their projection and attention: norm of each head of q and k, rotation by position, and
// the write of k and v to their slots of the paged cache.
//
//   qkv [T, heads + 2 kv_heads, dim] DTYPE: the heads of q, then of k, then of v
//   q_norm, k_norm [dim] DTYPE, or null: head / rms(head) * gain
//   cos, sin [T, num_angles] fp32: rotation of the first 2 * num_angles dims, in pairs (i, num_angles + i), or (2i, 2i + 1) if
//   interleaved
//   slots [T] int64 = block * BLOCK_SIZE + offset; -1 is padding: nothing is written to the cache
//   q [T, heads, dim] DTYPE;  k_cache, v_cache [blocks, kv_heads, BLOCK_SIZE, dim] KV_DTYPE, divided by k_scale, v_scale
//   [kv_heads] fp32 where those are not null
//
// Everything is fp32 between the load and the one rounding at the store, as on the CPU.
//
// A head belongs to `lanes` lanes (a power of two), a lane's elements to units of two loads of VECTOR: for half-split pairs
// one load from either half, so that both ends of a pair meet in one lane and nothing is exchanged. With 16-byte loads a head
// of 128 takes 8 lanes and a warp four heads; a lane has 32 bytes in flight, a full SM 28 KB (72 registers), about what the
// memory of an H200 needs. UNITS a lane is 1 but for odd heads that 32 lanes with narrow loads don't cover.
// Grid (T, heads / heads a block).
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

// One unit: elements 0 to VECTOR - 1 from the first load, the others from the second. Both layouts have angle j for its pair j.
DEVICE void rotate(float* unit, const Vector<float, VECTOR>& cos, const Vector<float, VECTOR>& sin, bool interleaved) {
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    float& a = interleaved ? unit[2 * j] : unit[j];
    float& b = interleaved ? unit[2 * j + 1] : unit[VECTOR + j];
    const float turned = a * cos.at[j] - b * sin.at[j];
    b = b * cos.at[j] + a * sin.at[j];
    a = turned;
  }
}

template <class T>
DEVICE void store(T* target, const float* values, float scale) {
  Vector<T, VECTOR> rounded;
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) rounded.at[j] = from_float<T>(sizeof(T) == 1 ? values[j] / scale : values[j]);
  rounded.store(target);
}

KERNEL __launch_bounds__(128)
rope_and_cache(const DTYPE* qkv, const DTYPE* q_norm, const DTYPE* k_norm, const float* cos, const float* sin,
               const int64_t* slots, const float* k_scale, const float* v_scale, DTYPE* q, KV_DTYPE* k_cache,
               KV_DTYPE* v_cache, int heads, int kv_heads, int dim, int num_angles, int interleaved, int lane_bits, float eps) {
  const int64_t token = blockIdx.x;
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
  const int head = (blockIdx.y * blockDim.x + threadIdx.x) >> lane_bits;
  const int num_heads = heads + 2 * kv_heads;
  const bool is_query = head < heads, is_value = head >= heads + kv_heads, is_there = head < num_heads;
  const DTYPE* norm = is_query ? q_norm : is_value ? nullptr : k_norm;

  // Where this lane's loads begin within a head, and whether they lie inside it.
  int columns[UNITS][2];
  bool valid[UNITS][2];
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const int unit = (lane + i * lanes) * VECTOR;
    const bool split = !interleaved && unit < num_angles;
    columns[i][0] = split ? unit : 2 * unit;
    columns[i][1] = split ? num_angles + unit : 2 * unit + VECTOR;
    for (int part = 0; part < 2; ++part) valid[i][part] = is_there && columns[i][part] < dim;
  }
  // Gains are weights: their way from memory is spent waiting for the projection.
  Elements gains[UNITS][2];
  if (norm) {
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
      for (int part = 0; part < 2; ++part)
        if (valid[i][part]) gains[i][part] = Elements::load(norm + columns[i][part]);
  }

  // All loads before the first sum.
  wait_for_previous_kernel();
  let_next_kernel_start();  // attention may look for its blocks meanwhile
  const DTYPE* source = qkv + (token * num_heads + head) * dim;
  Elements loaded[UNITS][2];
  Vector<float, VECTOR> angle_cos[UNITS], angle_sin[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    for (int part = 0; part < 2; ++part)
      if (valid[i][part]) loaded[i][part] = Elements::load(source + columns[i][part]);
    const int angle = (lane + i * lanes) * VECTOR;
    if (angle < num_angles && !is_value) {
      angle_cos[i] = Vector<float, VECTOR>::load(cos + token * num_angles + angle);
      angle_sin[i] = Vector<float, VECTOR>::load(sin + token * num_angles + angle);
    }
  }
  const int64_t slot = is_query ? -1 : slots[token];

  float values[UNITS][2 * VECTOR];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < UNITS; ++i)
    for (int part = 0; part < 2; ++part)
      if (valid[i][part])
        for (int j = 0; j < VECTOR; ++j) {
          const float value = to_float(loaded[i][part].at[j]);
          values[i][part * VECTOR + j] = value;
          squares += value * value;
#ifdef BUG_UNMASKED_TAIL
          if (columns[i][part] + j == dim - 1) squares += to_float(source[dim]) * to_float(source[dim]);
#endif
        }
  if (q_norm || k_norm) {  // by all lanes of a warp, whatever their heads are
    const float inverse = rsqrtf(warp_sum(squares, lanes) / dim + eps);
    if (norm) {
#pragma unroll
      for (int i = 0; i < UNITS; ++i)
        for (int j = 0; j < 2 * VECTOR; ++j) values[i][j] *= inverse * to_float(gains[i][j / VECTOR].at[j % VECTOR]);
    }
  }
#pragma unroll
  for (int i = 0; i < UNITS; ++i)
    if ((lane + i * lanes) * VECTOR < num_angles && !is_value) rotate(values[i], angle_cos[i], angle_sin[i], interleaved);

  if (is_query) {
    DTYPE* target = q + (token * heads + head) * dim;
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
      for (int part = 0; part < 2; ++part)
        if (valid[i][part]) store(target + columns[i][part], values[i] + part * VECTOR, 1.0f);
    return;
  }
  if (slot < 0 || !is_there) return;
  const int kv_head = head - heads - (is_value ? kv_heads : 0);
  const float* scales = is_value ? v_scale : k_scale;
  const float scale = scales ? scales[kv_head] : 1.0f;
  int64_t first = ((slot / BLOCK_SIZE * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * dim;
#ifdef BUG_PAGE
  first = (((slot + 1) / BLOCK_SIZE * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * dim;
#endif
#ifdef BUG_INT32
  first = (int)first;
#endif
  KV_DTYPE* target = (is_value ? v_cache : k_cache) + first;
#pragma unroll
  for (int i = 0; i < UNITS; ++i)
    for (int part = 0; part < 2; ++part)
      if (valid[i][part]) store(target + columns[i][part], values[i] + part * VECTOR, scale);
}
EXPORT(rope_and_cache)
