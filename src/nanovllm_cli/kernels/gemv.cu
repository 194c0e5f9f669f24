// y = x @ weight.T for one to eight rows of x: the matmul of decoding, which does little but read the weight once.
//
//   x [rows, width] DTYPE, with NORM normalised first: round(x / rms(x) * (offset + gain)), gain [width]
//   weight [outputs, width] DTYPE; GATED: [2 * outputs, width], the gate's rows before up's; bias, or null: one a weight row
//   out [rows, outputs] OUT      = y + bias
//   residual [rows, outputs]    += y + bias, rounded once, where out is null
//   GATED: out                   = act(gate) * up, gate and up rounded to DTYPE before, as two kernels would leave them
//
// The tensor cores serve as a wide dot product, so that eight rows cost what one does, and no number is converted. A warp
// multiplies x (A, rows 8 to 15 zero) by a strip of eight weight rows (B). A lane's 16-byte load holds eight neighbouring columns
// of one weight row where two mma would have it hold four pairs far apart; x is read in the same way, so the columns of both are
// permuted alike, and a sum does not mind.
//
// Work: a warp sums UNIT columns at a time of STRIPS strips. `parts` warps of a block take turns along the width and add up
// through shared memory; the others have other strips. Blocks stay and stride over the tiles. LOADS 16-byte loads a lane make a
// unit, and two units are under way: 16 warps an SM (launch bounds) keep 64 to 128 KiB in flight, an H200 needs about 35. The first
// two units are asked for before the previous kernel has ended: a weight does not depend on it.
//
// Bits: a row's sums have an order that depends on the weight's shape and the number of SMs, never on the other rows.
#include "common.cuh"

typedef Vector<DTYPE, VECTOR> Elements;

constexpr int WARPS = 8, THREADS = WARPS * WARP_SIZE;
constexpr int MOST_ROWS = 8, STRIP = 8;
constexpr int LOADS = 8, STEPS = LOADS / STRIPS;
constexpr int STEP = 32, UNIT = STEP * STEPS;
constexpr bool GATED = ACTIVATION != 0;
constexpr int OUTPUTS = GATED ? STRIP : STRIP * STRIPS;  // of a warp's strips
static_assert(!GATED || STRIPS == 2, "a gate and its up are strips of one warp");

#ifdef BUG_INT32
typedef int Index;
#else
typedef int64_t Index;
#endif

// Eight columns of a row, zeros where not valid or past the end. STREAM: nobody reads them again.
template <bool STREAM>
DEVICE uint4 load_eight(const DTYPE* row, int column, int width, bool valid) {
  uint4 words = make_uint4(0, 0, 0, 0);
#ifdef BUG_TAIL
  width = (width + 7) / 8 * 8;
#endif
#pragma unroll
  for (int i = 0; i < 8; i += VECTOR) {
    if (!valid || column + i >= width) continue;
    if (VECTOR == 8 && STREAM) {
      words = load_streaming(row + column);
    } else {
      Elements::load(row + column + i).store(reinterpret_cast<DTYPE*>(&words) + i);
    }
  }
  return words;
}

// x, normalised, in shared memory: row r from r * stride, and the gains behind the last row. squares: shared memory, a sum for
// each warp and row. Ends with a barrier.
DEVICE void normalise(DTYPE* shared, int stride, float* squares, const DTYPE* x, const DTYPE* gain, int rows, int width, float eps,
                      float offset) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int first = threadIdx.x * VECTOR;
  DTYPE* gains = shared + rows * stride;
  for (int column = first; column < width; column += THREADS * VECTOR) Elements::load(gain + column).store(gains + column);
  wait_for_previous_kernel();
  float sums[MOST_ROWS] = {};
  for (int column = first; column < width; column += THREADS * VECTOR) {
#pragma unroll
    for (int row = 0; row < MOST_ROWS; ++row) {
      if (row >= rows) break;
      const Elements elements = Elements::load(x + (int64_t)row * width + column);
      elements.store(shared + row * stride + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sums[row] += to_float(elements.at[i]) * to_float(elements.at[i]);
    }
  }
#pragma unroll
  for (int row = 0; row < MOST_ROWS; ++row) {
    if (row >= rows) break;
    const float sum = warp_sum(sums[row]);
    if (lane == 0) squares[row * WARPS + warp] = sum;
  }
#ifndef BUG_NORM_BARRIER
  __syncthreads();
#endif
  float scales[MOST_ROWS];
#pragma unroll
  for (int row = 0; row < MOST_ROWS; ++row) {
    if (row >= rows) break;
    float sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += squares[row * WARPS + i];
    scales[row] = rsqrtf(sum / width + eps);
  }
  for (int column = first; column < width; column += THREADS * VECTOR) {  // what this very thread has put there
    const Elements factors = Elements::load(gains + column);
#pragma unroll
    for (int row = 0; row < MOST_ROWS; ++row) {
      if (row >= rows) break;
      Elements elements = Elements::load(shared + row * stride + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        elements.at[i] = from_float<DTYPE>(to_float(elements.at[i]) * scales[row] * (offset + to_float(factors.at[i])));
      elements.store(shared + row * stride + column);
    }
  }
  for (int i = threadIdx.x; i < rows * 8; i += THREADS)  // the last eight columns, where they pass the width
    if (width / 8 * 8 + i % 8 >= width && width % 8) shared[i / 8 * stride + width / 8 * 8 + i % 8] = from_float<DTYPE>(0.0f);
  __syncthreads();
}

// A warp's share of the weight: STRIPS strips, UNIT columns.
struct Unit {
  uint4 at[STRIPS][STEPS];
};

// The units of a warp, one after another: along the width, then on to the block's next tile.
struct Walk {
  int tile, unit;

  DEVICE Unit load(const DTYPE* weight, int width, int outputs, int tile_outputs, int group) const {
    const int lane = threadIdx.x % WARP_SIZE;
    const int row = tile * tile_outputs + group * OUTPUTS + lane / 4, column = unit * UNIT + lane % 4 * 8;
    Unit loaded;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int output = GATED ? row : row + strip * STRIP;
      const DTYPE* source = weight + ((Index)output + (GATED ? strip * outputs : 0)) * width;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        loaded.at[strip][step] = load_eight<true>(source, column + step * STEP, width, output < outputs);
    }
    return loaded;
  }

  DEVICE void advance(int part, int parts, int units) {
    unit += parts;
    if (unit < units) return;
    unit = part;
    tile += gridDim.x;
  }
};

// act, as reference.gated_activation has it: 1 silu, 2 gelu_tanh, 3 gelu.
DEVICE float activate(float x) {
  if (ACTIVATION == 1) return x / (1.0f + expf(-x));
  if (ACTIVATION == 2) return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
}

KERNEL __launch_bounds__(THREADS, VECTOR == 8 ? 2 : 1)
gemv(const DTYPE* x, const DTYPE* gain, const DTYPE* weight, const DTYPE* bias, DTYPE* residual, OUT* out, int rows, int width,
     int outputs, int parts, float eps, float offset) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) float partial[2][WARPS][STRIPS][MOST_ROWS][STRIP];
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int part = warp % parts, group = warp / parts, first_warp = warp - part;
  const int units = (width + UNIT - 1) / UNIT;
  const int tile_outputs = WARPS / parts * OUTPUTS;
  Walk walk{(int)blockIdx.x, part};
  Unit current = walk.load(weight, width, outputs, tile_outputs, group);
  walk.advance(part, parts, units);
  Unit next = walk.load(weight, width, outputs, tile_outputs, group);
  walk.advance(part, parts, units);

  const DTYPE* source = x;
  int stride = width;
  if (NORM) {
    stride = (width + 63) / 64 * 64 + 32;  // two rows are half of the banks apart, and 16-byte reads do not collide
    source = reinterpret_cast<DTYPE*>(shared);
    normalise(reinterpret_cast<DTYPE*>(shared), stride, &partial[0][0][0][0][0], x, gain, rows, width, eps, offset);
  } else {
    wait_for_previous_kernel();
  }
  let_next_kernel_start();  // it may ask for its weights while we wait for ours

  const int row = lane / 4;
  bool odd = false;
  for (int tile = blockIdx.x; tile * tile_outputs < outputs; tile += gridDim.x, odd = !odd) {
    const int first = tile * tile_outputs + group * OUTPUTS;
    float sums[STRIPS][4] = {};
    for (int unit = part; unit < units; unit += parts) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int column = unit * UNIT + step * STEP + lane % 4 * 8;
        uint4 a;
        if (NORM) {
          a = row < rows && column < width ? *reinterpret_cast<const uint4*>(source + row * stride + column) : make_uint4(0, 0, 0, 0);
        } else {
          a = load_eight<false>(source + (int64_t)row * stride, column, width, row < rows);
        }
        const uint32_t low[4] = {a.x, 0, a.y, 0}, high[4] = {a.z, 0, a.w, 0};
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
          const uint4 b = current.at[strip][step];
          const uint32_t words[4] = {b.x, b.y, b.z, b.w};
          mma_m16n8k16<DTYPE>(sums[strip], low, words);
          mma_m16n8k16<DTYPE>(sums[strip], high, words + 2);
        }
      }
      current = next;
      next = walk.load(weight, width, outputs, tile_outputs, group);
      walk.advance(part, parts, units);
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      partial[odd][warp][strip][row][lane % 4 * 2] = sums[strip][0];
      partial[odd][warp][strip][row][lane % 4 * 2 + 1] = sums[strip][1];
    }
    // One meeting is enough: who writes this half again has met all of its readers at the next tile.
#ifndef BUG_NO_BARRIER
    if (parts == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
#endif
    const auto summed = [&](int strip, int at_row, int column) {
      float sum = partial[odd][first_warp][strip][at_row][column];
      for (int i = 1; i < parts; ++i) sum += partial[odd][first_warp + i][strip][at_row][column];
      return sum;
    };
    for (int i = part * WARP_SIZE + lane; i < rows * OUTPUTS; i += parts * WARP_SIZE) {
      const int at_row = i / OUTPUTS, column = i % OUTPUTS, output = first + column;
      if (output >= outputs) continue;
      float y = summed(column / STRIP, at_row, column % STRIP);
      if (bias) y += to_float(bias[output]);
      const int64_t place = (int64_t)at_row * outputs + output;
      if (GATED) {
        float up = summed(1, at_row, column);
        if (bias) up += to_float(bias[outputs + output]);
        y = activate(to_float(from_float<DTYPE>(y))) * to_float(from_float<DTYPE>(up));
      }
      if (out) {
        out[place] = from_float<OUT>(y);
      } else {
        residual[place] = from_float<DTYPE>(to_float(residual[place]) + y);
      }
    }
  }
}
EXPORT(gemv)
