// Several residual streams, of which halves of layers read sums, and all of which they write (hyper-connections; see reference.py and
// layers/connections.py).
//
//   spread          streams[s][t] = x[t]
//   read_streams    out[t] = sum over s of (sigmoid(g[t][s]) + least) * streams[s][t];
//                   kept[t][w] = most * sigmoid(g[t][S + w]) + least;        g = matrix @ x / rms(x) * scale + base, x: all streams
//   write_streams   streams[s][t] += kept[t][s] * found[t]
//
// streams [S, T, width], x, out and found [T, width] DTYPE; kept [T, WRITES], matrix [S + WRITES, S, width], base [S + WRITES] and scale
// [2] (of what reads, and of what writes) fp32. STREAMS is S, WRITES as many or 0, and VECTOR, 4 at the most, the elements of one load, of
// which width is a multiple: macros all. read_streams has a block for a token, grid (T), and reads its streams twice; of the others a
// thread has a load of each stream, grid (T, width / (threads * VECTOR)). So a token's bits depend on its own streams alone.
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;
constexpr int SHARES = STREAMS + WRITES;

DEVICE int own_column() { return (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR; }

KERNEL __launch_bounds__(512)
spread(const DTYPE* x, DTYPE* streams, int num_tokens, int width) {
  const int column = own_column();
  if (column >= width) return;
  const Index row = (Index)blockIdx.x * width + column, apart = (Index)num_tokens * width;
  wait_for_previous_kernel();
  const Elements own = Elements::load(x + row);
  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) own.store(streams + s * apart + row);
}
EXPORT(spread)

KERNEL __launch_bounds__(512)
read_streams(const DTYPE* streams, const float* matrix, const float* base, const float* scale, DTYPE* out, float* kept,
             int num_tokens, int width, float eps, float least, float most) {
  __shared__ float scratch[WARP_SIZE];
  const Index row = (Index)blockIdx.x * width, apart = (Index)num_tokens * width, all = (Index)STREAMS * width;
  float logits[SHARES] = {}, square = 0.0f;
  wait_for_previous_kernel();
  for (int column = threadIdx.x * VECTOR; column < width; column += blockDim.x * VECTOR) {
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      const Elements own = Elements::load(streams + s * apart + row + column);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) square += to_float(own.at[j]) * to_float(own.at[j]);
#pragma unroll
      for (int k = 0; k < SHARES; ++k) {
        const Vector<float, VECTOR> factors = Vector<float, VECTOR>::load(matrix + k * all + s * width + column);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) logits[k] += to_float(own.at[j]) * factors.at[j];
      }
    }
  }
  let_next_kernel_start();
#ifdef BUG_ONE_NORM
  const float norm = rsqrtf(block_sum(square, scratch) / width + eps);
#else
  const float norm = rsqrtf(block_sum(square, scratch) / all + eps);
#endif
#pragma unroll
  for (int k = 0; k < SHARES; ++k) {
    const float logit = block_sum(logits[k], scratch) * norm * scale[k / STREAMS] + base[k];
    logits[k] = 1.0f / (1.0f + expf(-logit));
    if (k >= STREAMS && threadIdx.x == 0) kept[(Index)blockIdx.x * WRITES + k - STREAMS] = most * logits[k] + least;
  }
  for (int column = threadIdx.x * VECTOR; column < width; column += blockDim.x * VECTOR) {
    float totals[VECTOR] = {};
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      const Elements own = Elements::load(streams + s * apart + row + column);
#ifdef BUG_WITHOUT_LEAST
      const float weight = logits[s];
#else
      const float weight = logits[s] + least;
#endif
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) totals[j] += weight * to_float(own.at[j]);
    }
    Elements rounded;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) rounded.at[j] = from_float<DTYPE>(totals[j]);
    rounded.store(out + row + column);
  }
}
EXPORT(read_streams)

#if WRITES > 0
KERNEL __launch_bounds__(512)
write_streams(DTYPE* streams, const DTYPE* found, const float* kept, int num_tokens, int width) {
  const int column = own_column();
  if (column >= width) return;
  const Index row = (Index)blockIdx.x * width + column, apart = (Index)num_tokens * width;
  wait_for_previous_kernel();
  const Elements made = Elements::load(found + row);
  float weights[STREAMS];
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) weights[s] = kept[(Index)blockIdx.x * STREAMS + s];
  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STREAMS; ++s) {
    Elements own = Elements::load(streams + s * apart + row);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
#ifdef BUG_REPLACED
      own.at[j] = from_float<DTYPE>(weights[s] * to_float(made.at[j]));
#else
      own.at[j] = from_float<DTYPE>(weights[s] * to_float(made.at[j]) + to_float(own.at[j]));
#endif
    }
    own.store(streams + s * apart + row);
  }
}
EXPORT(write_streams)
#endif
