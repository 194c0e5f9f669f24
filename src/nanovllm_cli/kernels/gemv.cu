// y = x @ weight.T for one to eight rows of x: the matmul of decoding, which does little but read the weight once.
//
//   x [rows, width] DTYPE; with NORM it is normalised first: round(x / rms(x) * (offset + gain)), gain [width]
//   weight [outputs, width] DTYPE; GATED: [2 * outputs, width], the gate's rows before up's. bias: one a weight row, or null
//   out [rows, outputs] OUT = y + bias + residual, rounded once; residual, where it is not null, may be out itself
//   GATED: out = act(gate) * up, gate and up rounded to DTYPE before, as two kernels would leave them; of RELU2 so is y
//   EXPERTS: rows, weight and bias are a task's (experts.cuh), and there is neither norm nor residual
//
// The tensor cores serve as a wide dot product, so that eight rows cost what one does, and no number is converted: a warp
// multiplies x (A) by a strip of eight weight rows (B). A lane's 16-byte load holds eight neighbouring columns of one weight row,
// where two mma would have it hold four pairs far apart; x is read in the same way, so the columns of both are permuted alike,
// and a sum does not mind. A has room for sixteen rows: the lower half takes the second half of the lane's columns, so that its
// words are A as they are, and the two mma are chains of their own. Each leaves garbage in the other's half.
//
// Work: a warp has STRIPS strips; `parts` warps of a block take turns along the width in units of LOADS 16-byte loads a lane,
// and add up through shared memory; the block's other warps have other strips. Blocks stay, and stride over the tiles. A queue of
// units is under way all the time, across tiles too: 16 warps an SM (launch bounds) ask for 96 KiB ahead, where an H200 needs
// about 35. It is filled before the previous kernel has ended, for a weight does not depend on it.
//
// Bits: a row's sums have an order that depends on the weight's shape and the number of SMs, never on the other rows.
#include "gemv_parts.cuh"
#include "load_eight.cuh"

constexpr int STRIP = 8, TEAM_OUTPUTS = Team<STRIP>::OUTPUTS;
constexpr int LOADS = 4, QUEUE = 3;
constexpr int STEP = 32, STEPS = LOADS / STRIPS, UNIT = STEP * STEPS;  // columns of a load, loads and columns of a unit

// A warp's share of the weight: UNIT columns of STRIPS strips.
struct Unit {
  uint4 at[STEPS][STRIPS];
};

KERNEL __launch_bounds__(THREADS, VECTOR == 8 ? 2 : 1)
gemv(const int64_t* tasks, const DTYPE* x, const DTYPE* gain, const DTYPE* given_weight, const DTYPE* bias,
     const DTYPE* residual, OUT* out, int given_rows, int width, int outputs, int parts, float eps, float offset, int taken) {
  static_assert(!EXPERTS || !NORM);
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) Sums<STRIP> partial[2][WARPS];
  const Assignment work(tasks, given_rows, taken);
  const int rows = work.rows;
  if (EXPERTS && !rows) return;
  const DTYPE* weight = work.tensor(given_weight, 0);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int part = warp % parts, team_index = warp / parts, first_warp = warp - part;
  const int first_column = part * UNIT, column_stride = parts * UNIT;
  const int tile_outputs = WARPS / parts * TEAM_OUTPUTS;
  const int row = lane / 4;  // of x, and of a strip

  const int64_t strip_stride = (int64_t)(GATED ? outputs : STRIP) * width;
  // Units of this warp, one after another: along the width, then on to the block's next tile.
  int next_tile = work.block(), next_column = first_column;
  const auto load_next = [&] {
    const int output = next_tile * tile_outputs + team_index * TEAM_OUTPUTS + row, column = next_column + lane % 4 * 8;
    const DTYPE* start = weight + (Index)output * width + column;
    Unit loaded;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int left = (GATED ? output : output + strip * STRIP) < outputs ? width - column : 0;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        loaded.at[step][strip] = load_eight<true>(start + strip * strip_stride + step * STEP, left - step * STEP);
    }
    next_column += column_stride;
    if (next_column >= width) {
      next_column = first_column;
      next_tile += work.blocks();
    }
    return loaded;
  };
  Unit queue[QUEUE];
#pragma unroll
  for (int i = 0; i < QUEUE; ++i) queue[i] = load_next();

  const DTYPE* source = x;
  int stride = width;
  if (NORM) {
    stride = (width + 63) / 64 * 64 + 32;  // two rows are half of the banks apart, and 16-byte reads do not collide
    source = reinterpret_cast<DTYPE*>(shared);
    const auto same = [](int column) { return column; };
    normalise<8>(reinterpret_cast<DTYPE*>(shared), stride, partial[0][0].at, x, gain, rows, width, eps, offset, same);
  } else {
    wait_for_previous_kernel();
  }
  let_next_kernel_start();  // it may ask for its weights while we wait for ours

  const DTYPE* input_row = source + (int64_t)(row < rows ? work.source(row) : 0) * stride + lane % 4 * 8;
  const int input_columns = row < rows ? width - lane % 4 * 8 : 0;
  const Team<STRIP> team = {work, bias, residual, out, outputs, parts, part * WARP_SIZE + lane};
  bool odd = false;
  for (int tile = work.block(); tile * tile_outputs < outputs; tile += work.blocks(), odd = !odd) {
    const int first = tile * tile_outputs + team_index * TEAM_OUTPUTS;
    const float added_to_mine = team.added(first, team.mine);  // there when it is needed
    float chains[STRIPS][2][4] = {};
#pragma unroll 1  // unrolled, it spills
    for (int unit = first_column; unit < width; unit += column_stride) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int column = unit + step * STEP;
        uint4 a = make_uint4(0, 0, 0, 0);
        if (!NORM) {
          a = load_eight<false>(input_row + column, input_columns - column);
        } else if (column < input_columns) {
          a = *reinterpret_cast<const uint4*>(input_row + column);
        }
        const uint32_t inputs[4] = {a.x, a.z, a.y, a.w};
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
          const uint4 b = queue[0].at[step][strip];
          const uint32_t words[4] = {b.x, b.y, b.z, b.w};
          mma_m16n8k16<DTYPE>(chains[strip][0], inputs, words);
          mma_m16n8k16<DTYPE>(chains[strip][1], inputs, words + 2);
        }
      }
#pragma unroll
      for (int i = 1; i < QUEUE; ++i) queue[i - 1] = queue[i];
      queue[QUEUE - 1] = load_next();
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const float *low = chains[strip][0], *high = chains[strip][1] + 2;
      Vector<float, 2>{low[0] + high[0], low[1] + high[1]}.store(&partial[odd][warp].of(strip, row, lane % 4 * 2));
    }
    team.finish(partial[odd] + first_warp, first, added_to_mine);
  }
}
EXPORT(gemv)
