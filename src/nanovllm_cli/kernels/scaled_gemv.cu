// y = (x * x_scales) @ (weight * scales).T for one to eight rows of x, both of 8-bit codes: the matmul of decoding with int8 or
// fp8 activations.
//
//   x [rows, width], weight [outputs, width] CODE; GATED: [2 * outputs, width], the gate's rows before up's
//   width is a multiple of 16
//   x_scales [groups, rows], scales [groups, weight rows] fp32; GROUPED: a group for every 128 columns, else one
//   bias, residual, out, tasks: as in gemv.cu. A task's scales are its expert's, its rows' those of x: num_inputs rows there are
//
// Weights are A of mma.m16n8k32, sixteen outputs by 32 columns, and x is B. A lane's 16-byte load holds sixteen neighbouring
// columns of one row, where two mma would have it hold four fours far apart; x is read in the same way, so the columns of both
// are permuted alike, and a sum does not mind. Nothing is converted, but where Hopper multiplies e4m3: only its warpgroups have
// such products, so for a warp ptxas makes halves of them, whose sums are fp32. int8 sums are whole numbers until they are scaled.
//
// Work and bits: as gemv.cu. With groups a unit is no longer than one, and is scaled when it is summed.
#include "gemv_parts.cuh"
#include "mma_bytes.cuh"

constexpr int STRIP = 16, TEAM_OUTPUTS = Team<STRIP>::OUTPUTS;
constexpr int LOADS = 4, QUEUE = EXPERTS && GROUPED ? 2 : 3;  // with more, those spill
constexpr int STEP = 64, STEPS = LOADS / (2 * STRIPS), UNIT = STEP * STEPS;  // columns of a load, loads and columns of a unit
constexpr int GROUP = 128;
static_assert(GROUP % UNIT == 0, "a unit has one scale a row");

// A warp's share of the weight: UNIT columns of STRIPS strips, of which a lane has rows r and r + 8.
struct Unit {
  uint4 at[STEPS][STRIPS][2];
};

KERNEL __launch_bounds__(THREADS, 2)
scaled_gemv(const int64_t* tasks, const CODE* x, const float* x_scales, const CODE* given_weight, const float* given_scales,
            const DTYPE* bias, const DTYPE* residual, OUT* out, int num_inputs, int width, int outputs, int parts,
            int taken) {
  __shared__ __align__(16) Sums<STRIP> partial[2][WARPS];
  const Assignment work(tasks, num_inputs, taken);
  const int rows = work.rows;
  if (EXPERTS && !rows) return;
  const CODE* weight = work.tensor(given_weight, 0);
  const float* scales = work.tensor(given_scales, 1);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int part = warp % parts, team_index = warp / parts, first_warp = warp - part;
  const int first_column = part * UNIT, column_stride = parts * UNIT;
  const int panel_outputs = WARPS / parts * TEAM_OUTPUTS;
  const int weight_rows = GATED ? 2 * outputs : outputs;
#ifdef BUG_TAIL
  const int end = (width + STEP - 1) / STEP * STEP;
#else
  const int end = width;
#endif

  // Row `half` of this lane's in a strip of a panel, or -1 where there is none.
  const auto row_of = [&](int panel, int strip, int half) {
    const int output = panel * panel_outputs + team_index * TEAM_OUTPUTS + (GATED ? 0 : strip * STRIP) + lane / 4 + half * 8;
    return output < outputs ? output + (GATED ? strip * outputs : 0) : -1;
  };
  // Units of this warp, one after another: along the width, then on to the block's next panel.
  int next_panel = work.block(), next_column = first_column;
  const int64_t strip_stride = (int64_t)(GATED ? outputs : STRIP) * width;
  const auto load_next = [&] {
    const int output = next_panel * panel_outputs + team_index * TEAM_OUTPUTS + lane / 4, column = next_column + lane % 4 * 16;
    const CODE* start = weight + (Index)output * width + column;
    Unit loaded;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int left = output + (GATED ? 0 : strip * STRIP) + half * 8 < outputs ? end - column : 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const CODE* source = start + strip * strip_stride + half * 8 * (int64_t)width + step * STEP;
          loaded.at[step][strip][half] = step * STEP < left ? load_streaming(source) : make_uint4(0, 0, 0, 0);
        }
      }
    }
    next_column += column_stride;
    if (next_column >= width) {
      next_column = first_column;
      next_panel += work.blocks();
    }
    return loaded;
  };
  Unit queue[QUEUE];
#pragma unroll
  for (int i = 0; i < QUEUE; ++i) queue[i] = load_next();
  wait_for_previous_kernel();
  let_next_kernel_start();  // it may ask for its weights while we wait for ours

  // Past the last row: sums that are nobody's.
  const CODE* input = x + (int64_t)work.source(min(lane / 4, rows - 1)) * width + lane % 4 * 16;
  const int input_columns = end - lane % 4 * 16;
  const Team<STRIP> team = {work, bias, residual, out, outputs, parts, part * WARP_SIZE + lane};
  const int sources[2] = {work.source(min(lane % 4 * 2, rows - 1)), work.source(min(lane % 4 * 2 + 1, rows - 1))};
  bool odd = false;
  for (int panel = work.block(); panel * panel_outputs < outputs; panel += work.blocks(), odd = !odd) {
    const int first = panel * panel_outputs + team_index * TEAM_OUTPUTS;
    const float added_to_mine = team.added(first, team.mine);  // there when it is needed
    float totals[STRIPS][4] = {};
    SUM chains[STRIPS][4] = {};
    // Adds the chains to the totals, with their scales.
    const auto scale = [&](int group) {
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row_of(panel, strip, i / 2), of_x = sources[i % 2];
          const float of_input = x_scales[(int64_t)group * num_inputs + of_x];
          const float factor = row < 0 ? 0.0f : scales[(int64_t)group * weight_rows + row] * of_input;
          totals[strip][i] += factor * (float)chains[strip][i];
          chains[strip][i] = 0;
        }
      }
    };
#pragma unroll 1
    for (int unit = first_column; unit < width; unit += column_stride) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int column = unit + step * STEP;
        uint4 b = make_uint4(0, 0, 0, 0);
        if (column < input_columns) b = *reinterpret_cast<const uint4*>(input + column);
        const uint32_t inputs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
          const uint4 low = queue[0].at[step][strip][0], high = queue[0].at[step][strip][1];
          const uint32_t words[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
          mma_m16n8k32(chains[strip], words, inputs);
          mma_m16n8k32(chains[strip], words + 4, inputs + 2);
        }
      }
#pragma unroll
      for (int i = 1; i < QUEUE; ++i) queue[i - 1] = queue[i];
      queue[QUEUE - 1] = load_next();
      if (GROUPED) scale(unit / GROUP);
    }
    if (!GROUPED) scale(0);
    partial[odd][warp].store(totals);
    team.finish(partial[odd] + first_warp, first, added_to_mine);
  }
}
EXPORT(scaled_gemv)
