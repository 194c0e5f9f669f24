// cos and sin [T, num_angles] fp32 of one step, from positions [T] int64 and frequencies [num_angles] fp32 (radians a token).
//
//   angle = float(position) * frequency;  cos = cosf(angle) * factor;  sin = sinf(angle) * factor
//
// With lengths [T] int64: a token whose length is past original_len takes long_frequencies (LongRoPE).
//
// A kernel of its own, once a step, and not a part of rope_cache.cu: an angle of 10^5 and more takes the slow path of sincosf,
// which every layer would repeat on the way to its attention, where a table of 512 bytes a token is read from the L2. The
// angle is rounded before its cosine is taken, as in torch: no fused multiply-add, and no fast math.
#include "common.cuh"

#if defined(__USE_FAST_MATH__) && __USE_FAST_MATH__
#error "sincosf must be exact to a few units in the last place for angles up to 10^6"
#endif

KERNEL __launch_bounds__(256)
rope_tables(const int64_t* positions, const int64_t* lengths, const float* frequencies, const float* long_frequencies,
            float* cos, float* sin, int64_t count, int num_angles, int64_t original_len, float factor) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t token = i / num_angles;
  const int column = i % num_angles;
  wait_for_previous_kernel();
  const float* table = lengths && lengths[token] > original_len ? long_frequencies : frequencies;
  const float angle = __fmul_rn((float)positions[token], table[column]);
  float c, s;
  sincosf(angle, &s, &c);
  let_next_kernel_start();
  cos[i] = c * factor;
  sin[i] = s * factor;
}
EXPORT(rope_tables)
