// What latent attention reads of a token, made of its projections: of each head's query what is rotated, and the row that is kept.
//
//   q [T, heads, key_dim + rotary], kept [T, rank + rotary], norm [rank] DTYPE
//   cos, sin [T, num_angles] fp32, rotary / 2 or, without positions, 0, where numbers to be rotated stay as they are
//   rows [T, heads, rotary + rank] DTYPE: a head's rotated numbers first; the others are head_matmul's
//   cache [blocks, BLOCK_SIZE, rotary + rank] KV_DTYPE at slots [T] (-1 is padding: nothing is written): the kept row's rotated
//   numbers, then rank others, x / rms(x) * (offset + norm); fp8 is divided by scale [1], int8 leaves scales there, [blocks,
//   BLOCK_SIZE]; null for other types
//
// Everything is fp32 between a load and the one rounding. heads.cuh has the pairs that are rotated, and how lanes share a head.
// Grid (T, 1 + blocks of heads): a token's first block makes what is kept, the others its heads.
#include "heads.cuh"

constexpr int THREADS = 128;
typedef Vector<DTYPE, VECTOR> Elements;

KERNEL __launch_bounds__(THREADS)
latent_rows(const DTYPE* q, const DTYPE* kept, const DTYPE* norm, const float* cos, const float* sin, const int64_t* slots,
            float* scale, DTYPE* rows, KV_DTYPE* cache, int heads, int key_dim, int rotary, int rank, int num_angles,
            int interleaved, int lane_bits, float eps, float offset) {
  __shared__ float scratch[WARP_SIZE];
  const int64_t token = blockIdx.x;
  const int lanes = 1 << lane_bits, dim = rotary + rank;
  const bool is_kept = blockIdx.y == 0;
  const int head = is_kept ? threadIdx.x >> lane_bits : ((blockIdx.y - 1) * THREADS + threadIdx.x) >> lane_bits;
  const Place<VECTOR> place = {(int)threadIdx.x & (lanes - 1), lanes, rotary, num_angles, interleaved != 0};

  wait_for_previous_kernel();
  let_next_kernel_start();
  Angles<VECTOR, UNITS> angles;
  angles.load(place, cos + token * num_angles, sin + token * num_angles);
  Head<VECTOR, UNITS> mine;
  if (!is_kept) {
    mine.load(place, q + (token * heads + min(head, heads - 1)) * (key_dim + rotary) + key_dim);
    mine.widen();
    mine.rotate(place, angles);
    if (head < heads) mine.store(place, 1.0f, rows + (token * heads + head) * dim);
    return;
  }

  const DTYPE* source = kept + token * dim;
  mine.load(place, source + rank);
  float squares = 0.0f;
  for (int i = threadIdx.x * VECTOR; i < rank; i += THREADS * VECTOR) {
    const Elements elements = Elements::load(source + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) squares = fmaf(to_float(elements.at[j]), to_float(elements.at[j]), squares);
  }
  const float factor = rsqrtf(block_sum(squares, scratch) / rank + eps);
  const int64_t slot = slots[token];
  if (slot < 0) return;
  int64_t row = slot;
#ifdef BUG_PAGE
  row = slot / BLOCK_SIZE * BLOCK_SIZE + (slot + 1) % BLOCK_SIZE;
#endif
  int64_t first = row * dim;
#ifdef BUG_INT32
  first &= 0x7fffffff;
#endif
  KV_DTYPE* target = cache + first;
  float divisor = scale && !IS_INT8<KV_DTYPE> ? scale[0] : 1.0f;
  mine.widen();
  mine.rotate(place, angles);
  const auto normed = [&](const Elements& elements, const Elements& gains, int j) {
    return to_float(elements.at[j]) * factor * (offset + to_float(gains.at[j]));
  };
  if constexpr (IS_INT8<KV_DTYPE>) {
    uint32_t largest = head == 0 ? mine.largest(place) : 0;
    for (int i = threadIdx.x * VECTOR; i < rank; i += THREADS * VECTOR) {
      const Elements elements = Elements::load(source + i), gains = Elements::load(norm + i);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) largest = max(largest, __float_as_uint(normed(elements, gains, j)) & 0x7fffffffu);
    }
    __shared__ uint32_t of_warps[THREADS / WARP_SIZE];
    largest = warp_max(largest);
    if (threadIdx.x % WARP_SIZE == 0) of_warps[threadIdx.x / WARP_SIZE] = largest;
    __syncthreads();
    for (int warp = 0; warp < THREADS / WARP_SIZE; ++warp) largest = max(largest, of_warps[warp]);
    divisor = int8_scale(largest);
    if (threadIdx.x == 0) scale[row] = divisor;
  }
  if (head == 0) mine.store(place, divisor, target);
  for (int i = threadIdx.x * VECTOR; i < rank; i += THREADS * VECTOR) {
    const Elements elements = Elements::load(source + i), gains = Elements::load(norm + i);
    Vector<KV_DTYPE, VECTOR> rounded;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) rounded.at[j] = ::kept<KV_DTYPE>(normed(elements, gains, j), divisor);
    rounded.store(target + rotary + i);
  }
}
EXPORT(latent_rows)
