// The sums of a row's splits, as latent_attention.cu leaves them, added up in the order of its keys.
//
// Grid (heads, most tokens of a group, T or groups): a block has a row of `out`; those whose keys were not split have been written.
#include "latent_work.cuh"

constexpr int THREADS = 128, AHEAD = 8;

KERNEL __launch_bounds__(THREADS)
latent_combine(const float* partials, const float* sums, const int* lens, const int4* groups, const float* kv_scale, DTYPE* out,
               int most, int least_split) {
  __shared__ float shares[MAX_SPLITS];
  const Work work = find_work(blockIdx.z, lens, nullptr, groups, least_split, most);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (work.splits <= 1 || (int)blockIdx.y >= work.tokens) return;
  const int lane = threadIdx.x % WARP_SIZE, heads = gridDim.x;
  const int64_t row = (int64_t)(work.first_token + blockIdx.y) * heads + blockIdx.x;
  if (threadIdx.x < WARP_SIZE) {
    const float* own = sums + row * most * 2;
    float top = NEGATIVE_INFINITY, sum = 0.0f;
    for (int i = lane; i < work.splits; i += WARP_SIZE) top = fmaxf(top, __ldcg(own + 2 * i));
    top = warp_max(top);
    for (int i = lane; i < work.splits; i += WARP_SIZE) {
      shares[i] = exp2f(__ldcg(own + 2 * i) - top);
      sum += shares[i] * __ldcg(own + 2 * i + 1);
    }
    const float factor = (kv_scale ? kv_scale[0] : 1.0f) / warp_sum(sum);
    for (int i = lane; i < work.splits; i += WARP_SIZE) shares[i] *= factor;
  }
#ifndef BUG_BARRIER
  __syncthreads();
#endif
  for (int column = threadIdx.x * 4; column < RANK; column += THREADS * 4) {
    const float* source = partials + row * most * RANK + column;
    float total[4] = {};
    for (int first = 0; first < work.splits; first += AHEAD) {
      float4 loaded[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + i < work.splits) loaded[i] = __ldcg(reinterpret_cast<const float4*>(source + (int64_t)(first + i) * RANK));
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (first + i >= work.splits) break;
        const float share = shares[first + i];
        total[0] += share * loaded[i].x;
        total[1] += share * loaded[i].y;
        total[2] += share * loaded[i].z;
        total[3] += share * loaded[i].w;
      }
    }
    Vector<DTYPE, 4> rounded;
#pragma unroll
    for (int j = 0; j < 4; ++j) rounded.at[j] = from_float<DTYPE>(total[j]);
    rounded.store(out + row * RANK + column);
  }
}
EXPORT(latent_combine)
