// Products with a matrix of each head: out[t, h, n] = sum over k of weight[h, n, k] x[t, h, k], rounded once.
//
//   weight [heads, num_rows, width] DTYPE
//   x: token t's columns for head h begin at t * x_stride + h * x_step; out: its results at t * out_stride + h * out_step
//
// As in gemv.cu the tensor cores serve as a wide dot product: a lane's 16-byte load holds eight neighbouring columns of one row of
// the weight (B), and x (A) is read in the same way, so that the columns of both are permuted alike. A's sixteen rows are sixteen
// tokens, and TILES tiles of those share what was loaded of the weight.
//
// Work: grid (outputs, heads, tokens). A warp has STRIPS strips of eight rows of the weight, and of their width every PARTS-th unit
// of STEPS loads; PARTS warps add up through shared memory. Its first unit is on its way before the kernel ahead has ended, for a
// weight does not depend on it; where the width is no more than PARTS units, as in all models so far, that is all it reads.
//
// Bits: a sum's order follows from the width alone, so a token's do not depend on how many there are.
#include "load_eight.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE, TEAMS = WARPS / PARTS;
constexpr int STRIP = 8, STRIPS = 2, OUTPUTS = STRIP * STRIPS;                // of a team of PARTS warps
constexpr int STEP = 32, STEPS = 4, UNIT = STEP * STEPS, TOKENS = 16 * TILES;  // columns of a load and of a unit; of a block
constexpr int STRIDE = OUTPUTS + 8;  // of sums in shared memory: the four rows that half a warp writes have banks of their own
static_assert(TEAMS * PARTS == WARPS);

struct Unit {
  uint4 at[STEPS][STRIPS];
};

// Two neighbouring results, the second of which may not exist.
DEVICE void write_pair(DTYPE* target, float first, float second, int left) {
  const Vector<DTYPE, 2> pair = {from_float<DTYPE>(first), from_float<DTYPE>(second)};
  if (PAIRS) {
    if (left > 0) pair.store(target);
  } else {
    for (int i = 0; i < min(left, 2); ++i) target[i] = pair.at[i];
  }
}

KERNEL __launch_bounds__(THREADS, 4)  // 64 KiB of the weight under way a multiprocessor
head_matmul(const DTYPE* x, const DTYPE* weight, DTYPE* out, int tokens, int num_rows, int width, int x_stride, int x_step,
            int out_stride, int out_step) {
  __shared__ __align__(16) float partial[PARTS > 1 ? WARPS : 1][PARTS > 1 ? TOKENS : 1][STRIDE];
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, part = warp % PARTS, team = warp / PARTS;
  const int row = lane / 4, column = lane % 4 * 8, head = blockIdx.y;
  const int first_output = (blockIdx.x * TEAMS + team) * OUTPUTS, first_token = blockIdx.z * TOKENS;

  const auto load_unit = [&](int first_column) {
    Unit unit;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int output = first_output + strip * STRIP + row;
      const DTYPE* start = weight + ((Index)head * num_rows + output) * width;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int at = first_column + step * STEP + column;
        unit.at[step][strip] = load_eight<true>(start + at, output < num_rows ? width - at : 0);
      }
    }
    return unit;
  };
  Unit unit = load_unit(part * UNIT);
  wait_for_previous_kernel();
  let_next_kernel_start();

  float sums[TILES][STRIPS][4] = {};
#pragma unroll 1
  for (int first_column = part * UNIT; first_column < width; first_column += PARTS * UNIT) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int token = first_token + tile * 16 + row;
      if (first_token + tile * 16 >= tokens) break;
      const DTYPE* source = x + (Index)token * x_stride + (Index)head * x_step + first_column + column;
      uint4 inputs[STEPS][2];
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int left = token + half * 8 < tokens ? width - first_column - column - step * STEP : 0;
          inputs[step][half] = load_eight<false>(source + (Index)half * 8 * x_stride + step * STEP, left);
        }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint4 low = inputs[step][0], high = inputs[step][1];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
          const uint4 b = unit.at[step][strip];
          const uint32_t words[4] = {b.x, b.y, b.z, b.w};
          mma_m16n8k16<DTYPE>(sums[tile][strip], first, words);
          mma_m16n8k16<DTYPE>(sums[tile][strip], second, words + 2);
        }
      }
    }
    if (first_column + PARTS * UNIT < width) unit = load_unit(first_column + PARTS * UNIT);
  }

  const auto target = [&](int token, int output) { return out + (Index)token * out_stride + (Index)head * out_step + output; };
  if constexpr (PARTS == 1) {
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) {
      const int token = first_token + i * 8 + row;
      if (token >= tokens) break;
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip) {
        const int output = first_output + strip * STRIP + lane % 4 * 2;
        const float* pair = sums[i / 2][strip] + i % 2 * 2;
        write_pair(target(token, output), pair[0], pair[1], num_rows - output);
      }
    }
  } else {
    const int there = min(tokens - first_token, TOKENS);
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i)
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip) {
        const float* pair = sums[i / 2][strip] + i % 2 * 2;
        if (i * 8 < there)
          Vector<float, 2>{pair[0], pair[1]}.store(&partial[warp][i * 8 + row][strip * STRIP + lane % 4 * 2]);
      }
#ifndef BUG_BARRIER
    __syncthreads();
#endif
    for (int i = part * WARP_SIZE + lane; i < there * (OUTPUTS / 2); i += PARTS * WARP_SIZE) {
      const int token = i / (OUTPUTS / 2), output = i % (OUTPUTS / 2) * 2;
      float first = 0.0f, second = 0.0f;
#pragma unroll
      for (int other = 0; other < PARTS; ++other) {
        const auto pair = Vector<float, 2>::load(&partial[team * PARTS + other][token][output]);
        first += pair.at[0];
        second += pair.at[1];
      }
      write_pair(target(first_token + token, first_output + output), first, second, num_rows - first_output - output);
    }
  }
}
EXPORT(head_matmul)
