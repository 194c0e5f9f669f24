// y = x @ weight.T for one to eight rows of x and a packed weight (packed.py): the matmul of decoding a quantized model.
//
//   x [rows, width] DTYPE; with NORM it is normalised first, as in gemv.cu; with ORDERED column j here is column order[j] of x
//   codes [strips, tiles, TILE_BYTES], scales SCALE [strips, groups, 16], zeros uint8 the same (ZEROS), order int32 [width]
//   GATED: outputs is a multiple of 16, and the weight has the gate's rows before up's. bias, residual, out, tasks: as in gemv.cu
//
// Weights are A of mma.m16n8k16, sixteen outputs by sixteen columns, and x is B: eight rows of x cost what one does, and no lane
// works in vain. Codes are converted in registers (packed.cuh); a group's sums are exact products in fp32 accumulators, which are
// scaled and added to the total.
//
// Work: as gemv.cu. A warp has STRIPS strips of 16 outputs; `parts` warps of a block take turns along the width in units of
// LOADS 16-byte loads a lane, and add up through shared memory; blocks stay, and stride over panels of outputs. A queue of units
// is under way all the time: 16 warps an SM ask for 96 KiB ahead (where there are many scales, 64 or 48), an H200 needs about 35,
// and it is filled before the previous kernel has ended. Scales follow the codes along the width, so that a line of them serves
// neighbouring warps: one unit ahead will do.
//
// An SM of an H200 can issue 113 instructions while 512 bytes arrive (28 cycles at 4.3 TB/s). For so much of a weight the loop's
// machine code (NVRTC 13.5, sm_90a) has 93 to 104 of int4, 69 of int8, 76 of fp8, and 150 to 174 of nf4, which is bound by them.
//
// Bits: a row's sums have an order that depends on the weight's shape and the number of SMs, never on the other rows.
#include "gemv_parts.cuh"
#include "packed.cuh"

typedef Vector<SCALE, 2> Scales;  // of outputs g and g + 8
typedef Vector<uint8_t, 2> Zeros;

constexpr int LOADS = 4;
constexpr int STEPS = LOADS / (STRIPS * HALVES), UNIT = TILE_COLUMNS * STEPS;  // tiles along the width, and columns of a unit
constexpr int SPAN = GROUP == 0 || GROUP > UNIT ? UNIT : GROUP;                // columns that are summed before they are scaled
constexpr int SPANS = UNIT / SPAN;
constexpr int FACTOR_WORDS = STRIPS * SPANS * ((int)sizeof(Scales) / 4 + ZEROS);  // registers, twice
constexpr int RESIDENT = FACTOR_WORDS >= 16 || (VECTOR == 1 && !ORDERED) ? 1 : 2;  // blocks an SM: what does not spill
constexpr int QUEUE = FACTOR_WORDS < 8 || RESIDENT == 1 ? 3 : 2;
constexpr bool STAGED = NORM || ORDERED;  // x lies in shared memory

// A warp's share of the codes, UNIT columns of STRIPS strips, and what scales them.
struct Unit {
  uint4 at[STEPS][STRIPS][HALVES];
};
struct Factors {
  Scales scales[STRIPS][SPANS];
  Zeros zeros[STRIPS][SPANS];
};

// Two neighbouring elements, of which `left` are the row's and the rest is zero.
DEVICE uint32_t load_pair(const DTYPE* source, int left) {
#ifdef BUG_TAIL
  left = 2;
#endif
  if (VECTOR > 1) return !TAIL || left > 0 ? *reinterpret_cast<const uint32_t*>(source) : 0;
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(source);
  return (left > 0 ? (uint32_t)bits[0] : 0) | (left > 1 ? (uint32_t)bits[1] << 16 : 0);
}

// Rows of x in the order of the columns, in shared memory as `normalise` leaves them. Ends with a barrier.
DEVICE void gather(DTYPE* shared, int stride, const DTYPE* x, int rows, int width, const int* order) {
  wait_for_previous_kernel();
  const int columns = (width + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
  for (int column = threadIdx.x; column < columns; column += THREADS) {
    const int source = column < width ? order[column] : 0;
    for (int row = 0; row < rows; ++row)
      shared[row * stride + column] = column < width ? x[(int64_t)row * width + source] : from_float<DTYPE>(0.0f);
  }
  __syncthreads();
}

KERNEL __launch_bounds__(THREADS, RESIDENT)
packed_gemv(const int64_t* tasks, const DTYPE* x, const DTYPE* gain, const uint8_t* given_codes, const SCALE* given_scales,
            const uint8_t* given_zeros, const int* order, const DTYPE* bias, const DTYPE* residual, OUT* out,
            int given_rows, int width, int outputs, int parts, float eps, float offset, int taken) {
  static_assert(!EXPERTS || !STAGED);
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) Sums<TILE_OUTPUTS> partial[2][WARPS];
  const Assignment work(tasks, given_rows, taken);
  const int rows = work.rows;
  if (EXPERTS && !rows) return;
  const uint8_t *codes = work.tensor(given_codes, 0), *zeros = ZEROS ? work.tensor(given_zeros, 2) : nullptr;
  const SCALE* scales = work.tensor(given_scales, 1);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int part = warp % parts, team_index = warp / parts, first_warp = warp - part;
  const int first_tile = part * STEPS, tile_stride = parts * STEPS;
  const Weight weight(codes, scales, zeros, width);
  const int tiles = weight.slices;
  const int strips = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;

  // Where this warp's strips begin in a panel: they lie next to each other, or are a gate's and, `strips` later, its up's.
  const int panel_strips = WARPS / parts * (GATED ? 1 : STRIPS), first_strip = team_index * (GATED ? 1 : STRIPS);
  const auto strip_of = [&](int panel) { return panel * panel_strips + first_strip; };
  // Units of this warp, one after another: along the width, then on to the block's next panel.
  const auto advance = [&](int& panel, int& tile) {
    tile += tile_stride;
    if (tile >= tiles) {
      tile = first_tile;
      panel += work.blocks();
    }
  };
  const int first_panel = first_tile < tiles ? work.block() : strips;  // behind the last: a narrow row has too few units for all
  int next_panel = first_panel, next_tile = first_tile;
  const auto load_next = [&] {
    Unit loaded;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int place = strip_of(next_panel) + (GATED ? 0 : strip);
      const int left = place < strips ? TAIL ? tiles - next_tile : STEPS : 0;
      const uint8_t* start = weight.codes_of(place + (GATED ? strip * strips : 0), next_tile, lane);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
          loaded.at[step][strip][half] =
              step < left ? load_streaming(start + step * TILE_BYTES + half * HALF_BYTES) : make_uint4(0, 0, 0, 0);
    }
    advance(next_panel, next_tile);
    return loaded;
  };
  const auto load_factors = [&](int panel, int tile) {
    Factors loaded;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const int place = strip_of(panel) + (GATED ? 0 : strip);
      const int first_group = weight.group_of(tile * TILE_COLUMNS);
      const int64_t first = weight.group_at(place + (GATED ? strip * strips : 0), first_group) + lane / 4 * 2;
#pragma unroll
      for (int span = 0; span < SPANS; ++span) {
        loaded.scales[strip][span] = Scales();
        loaded.zeros[strip][span] = Zeros();
        if (place >= strips || (TAIL && first_group + span >= weight.groups)) continue;
        loaded.scales[strip][span] = Scales::load(scales + first + span * TILE_OUTPUTS);
        if (ZEROS) loaded.zeros[strip][span] = Zeros::load(zeros + first + span * TILE_OUTPUTS);
      }
    }
    return loaded;
  };
  Unit queue[QUEUE];
#pragma unroll
  for (int i = 0; i < QUEUE; ++i) queue[i] = load_next();
  Factors factors = load_factors(first_panel, first_tile);

  const int row = min(STAGED ? lane % 8 : lane / 4, rows - 1);  // of x; what the rows past the last one give is nobody's
  const DTYPE* input = x + (int64_t)work.source(row) * width + lane % 4 * 2;
  if (STAGED) {
    DTYPE* staged = reinterpret_cast<DTYPE*>(shared);
    const int stride = tiles * TILE_COLUMNS + 8;  // eight rows' 16 bytes are in different banks
    const auto source_of = [&](int column) { return ORDERED ? order[column] : column; };
    if (NORM) {
      normalise<TILE_COLUMNS>(staged, stride, partial[0][0].at, x, gain, rows, width, eps, offset, source_of);
    } else {
      gather(staged, stride, x, rows, width, order);
    }
    input = staged + row * stride + lane / 8 * 8;
  } else {
    wait_for_previous_kernel();
  }
  let_next_kernel_start();  // it may ask for its weights while we wait for ours

  // The constant, as the compiler can't know it; but where zero points take the last registers.
  const uint32_t kept = KIND == INT8 && ZEROS ? KEPT : KEPT ^ (uint32_t)(rows >> 31);
  const Team<TILE_OUTPUTS> team = {work, bias, residual, out, outputs, parts, part * WARP_SIZE + lane};
  bool odd = false;
  for (int panel = work.block(); panel * panel_strips < strips; panel += work.blocks(), odd = !odd) {
    const int first = strip_of(panel) * TILE_OUTPUTS;
    const float added_to_mine = team.added(first, team.mine);  // there when it is needed
    float totals[STRIPS][4] = {};
#pragma unroll 1
    for (int unit = first_tile; unit < tiles; unit += tile_stride) {
      int coming_panel = panel, coming = unit;
      advance(coming_panel, coming);
      const Factors coming_factors = load_factors(coming_panel, coming);
      float chains[STRIPS][4] = {};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int column = (unit + step) * TILE_COLUMNS;
        uint32_t inputs[TILE_STEPS][2] = {};
        if (STAGED) {
          if (!TAIL || column < width) {
            load_matrix_x4(inputs[0], input + column);
            load_matrix_x4(inputs[2], input + column + 32);
          }
        } else {
#pragma unroll
          for (int i = 0; i < TILE_STEPS * 2; ++i)
            inputs[i / 2][i % 2] = load_pair(input + column + i * 8, width - (column + i * 8 + lane % 4 * 2));
        }
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
          for (int i = 0; i < TILE_STEPS; ++i) {
            const int span = (step * TILE_COLUMNS + i * 16) / SPAN;
            const Zeros zero = factors.zeros[strip][span];
            const uint32_t middle = middle_of(ZEROS ? zero.at[0] : DEFAULT_ZERO);
            const uint32_t other_middle = middle_of(ZEROS ? zero.at[1] : DEFAULT_ZERO);
            uint32_t words[HALVES], numbers[4];
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
              words[half] = reinterpret_cast<const uint32_t*>(&queue[0].at[step][strip][half])[i];
            numbers_of(numbers, words, middle, other_middle, kept);
            mma_m16n8k16<DTYPE>(chains[strip], numbers, inputs[i]);
            if ((step * TILE_COLUMNS + (i + 1) * 16) % SPAN) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              totals[strip][j] += to_float(factors.scales[strip][span].at[j / 2]) * chains[strip][j];
              chains[strip][j] = 0.0f;
            }
          }
        }
      }
#pragma unroll
      for (int i = 1; i < QUEUE; ++i) queue[i - 1] = queue[i];
      queue[QUEUE - 1] = load_next();
      factors = coming_factors;
    }
    partial[odd][warp].store(totals);
    team.finish(partial[odd] + first_warp, first, added_to_mine);
  }
}
EXPORT(packed_gemv)
