// The sums of a row's splits, as latent_attention.cu leaves them, added up: each warp those of a quarter of them, in the order of
// keys, and then the warps' in theirs.
//
// Grid (heads * parts of RANK, most tokens of a group, T or groups): a block has COLUMNS columns of a row of `out`, a lane four. Few
// tokens have few rows, and many splits: so narrow, their blocks are enough to fetch them at once. Rows whose keys were not split
// have been written.
#include "latent_work.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE, AHEAD = 8;
constexpr int COLUMNS = 4 * WARP_SIZE, COLUMN_PARTS = (RANK + COLUMNS - 1) / COLUMNS;

KERNEL __launch_bounds__(THREADS)
latent_combine(const float* partials, const float* sums, const int* lens, const int4* groups, const float* kv_scale, DTYPE* out,
               int most, int least_split) {
  __shared__ float shares[MAX_SPLITS];
  __shared__ __align__(16) Vector<float, 4> of_warps[WARPS][WARP_SIZE];
  const Work work = find_work(blockIdx.z, lens, nullptr, groups, least_split, most);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (work.splits <= 1 || (int)blockIdx.y >= work.tokens) return;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int heads = gridDim.x / COLUMN_PARTS, head = blockIdx.x / COLUMN_PARTS;
  const int column = blockIdx.x % COLUMN_PARTS * COLUMNS + lane * 4;
  const int64_t row = (int64_t)(work.first_token + blockIdx.y) * heads + head;
  if (warp == 0) {
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
  const int each = (work.splits + WARPS - 1) / WARPS, end = min(work.splits, (warp + 1) * each);
  const float* source = partials + row * most * RANK + column;
  Vector<float, 4> total = {};
  for (int first = warp * each; first < end && column < RANK; first += AHEAD) {
    float4 loaded[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < end) loaded[i] = __ldcg(reinterpret_cast<const float4*>(source + (int64_t)(first + i) * RANK));
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (first + i >= end) break;
      const float share = shares[first + i];
      total.at[0] += share * loaded[i].x;
      total.at[1] += share * loaded[i].y;
      total.at[2] += share * loaded[i].z;
      total.at[3] += share * loaded[i].w;
    }
  }
  total.store(of_warps[warp][lane].at);
#ifndef BUG_WARPS
  __syncthreads();
#endif
  if (warp > 0 || column >= RANK) return;
#pragma unroll
  for (int other = 1; other < WARPS; ++other) {
    const float4 next = *reinterpret_cast<const float4*>(of_warps[other][lane].at);
    total.at[0] += next.x;
    total.at[1] += next.y;
    total.at[2] += next.z;
    total.at[3] += next.w;
  }
  Vector<DTYPE, 4> rounded;
#pragma unroll
  for (int j = 0; j < 4; ++j) rounded.at[j] = from_float<DTYPE>(total.at[j]);
  rounded.store(out + row * RANK + column);
}
EXPORT(latent_combine)
