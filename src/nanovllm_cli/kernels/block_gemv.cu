// y = x @ weight.T for GGUF's blocks and few rows of x, which are rounded to int8: the matmul of decoding.
//
//   weight [tiles, records, RECORD_BYTES] (block_records.cuh); GATED: the gate's rows before up's, of whole tiles each
//   x [rows, width] DTYPE, with FUSED: each block rounds it, normalised first where there is a gain [width]; else
//   codes [rows, padded] int8 and factors [rows, padded / GROUP] (scale, sum), as round_blocks (quantize_activations.cu) leaves them
//   out [rows, outputs] OUT = y + bias + residual, rounded once; residual, where it is not null, may be out itself
//   GATED: out = act(gate) * up, gate and up rounded to DTYPE before, as two kernels would leave them
//   tasks: as in gemv.cu, with rows that are rounded already
//
//   y[row, n] = sum over groups of factor * (scale * (sum of codes * (code - OFFSET)) + low * sum of codes)
//
// The tensor cores multiply: 16 outputs (A) by 8 rows of x (B), a group's columns at a time, in whole numbers. They start from
// MAGIC, 1.5 * 2^23, so that a sum, read as a float, is MAGIC plus itself: no conversion, and one subtraction takes the offset
// off as well. A lane has two outputs of LANE_ROWS rows; with one, four rows of x lie in every second column of B, and scaling,
// which is the work of this kernel, is halved.
//
// A warp copies records into a ring of STAGES in shared memory, whatever is in them: STAGES - 1 are under way all the time, from
// before the previous kernel has ended, and across tiles. `parts` warps of a block take turns along the width and add up at the
// end; the block's other warps have other tiles. Blocks stay, and stride over the tiles.
//
// Bits: a row's sums have an order that depends on the weight's shape and the number of SMs, never on the other rows.
#include "block_records.cuh"
#include "mma_bytes.cuh"
#include "results.cuh"
#include "rounding.cuh"

constexpr int ROW_TILES = LANE_ROWS < 2 ? 1 : LANE_ROWS / 2, TILE_ROWS = LANE_ROWS < 2 ? 4 : 8, MOST_ROWS = ROW_TILES * TILE_ROWS;
constexpr int LANE_COLUMNS = LANE_ROWS == 1 ? 1 : 2;  // of two that a lane has of an mma's result
constexpr int PASSES = GATED ? 2 : 1;
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;
static_assert(THREADS == ROUNDING_THREADS, "a block rounds as quantize_activations does");

// Scales and sums of a row's groups of a step.
struct Factors {
  float4 pairs[STEP_GROUPS / 2];

  DEVICE float scale(int group) const { return group % 2 ? pairs[group / 2].z : pairs[group / 2].x; }
  DEVICE float sum(int group) const { return group % 2 ? pairs[group / 2].w : pairs[group / 2].y; }
};

// Rounded rows, in global or in shared memory, and the lane's places in them. Past the last row it is read again: what becomes of
// that is not stored.
struct Rows {
  const uint4* codes;
  const float4* factors;
  int code_at[ROW_TILES], factor_at[ROW_TILES][LANE_COLUMNS];

  DEVICE Rows(const Assignment& work, const uint32_t* codes, const float2* factors, int padded)
      : codes(reinterpret_cast<const uint4*>(codes)), factors(reinterpret_cast<const float4*>(factors)) {
    const int n = threadIdx.x % WARP_SIZE / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
      const int b_row = LANE_ROWS == 1 ? n / 2 : tile * 8 + n;  // with one row a lane, only every second column counts
      code_at[tile] = work.source(min(b_row, work.rows - 1)) * (padded / 16) + c;
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        const int d_row = LANE_ROWS == 1 ? c : tile * 8 + c * 2 + i;
        factor_at[tile][i] = work.source(min(d_row, work.rows - 1)) * (padded / GROUP / 2);
      }
    }
  }

  // The lane's codes of B in a step.
  DEVICE uint4 b(int tile, int step) const { return codes[code_at[tile] + step * 4]; }

  DEVICE Factors of(int tile, int i, int step) const {
    Factors found;
#pragma unroll
    for (int pair = 0; pair < STEP_GROUPS / 2; ++pair)
      found.pairs[pair] = factors[factor_at[tile][i] + step * (STEP_GROUPS / 2) + pair];
    return found;
  }
};

// The sums of two outputs and LANE_ROWS rows.
struct Sums {
  float at[ROW_TILES][4];
};

// sums += a record times its columns of x, which are the steps from `first_step` on.
DEVICE void multiply(Sums& sums, const uint8_t* record, const Rows& x, int first_step) {
  const int lane = threadIdx.x % WARP_SIZE;
  const RowSupers upper_supers(record, lane / 4), lower_supers(record, lane / 4 + 8);
#pragma unroll(LANE_ROWS == 1 ? STEPS : 1)  // with more sums, loads of all steps at once would spill
  for (int step = 0; step < STEPS; ++step) {
    const Words words = load_words(record, step, lane);
    const RowScales upper(record, lane / 4, step, upper_supers), lower(record, lane / 4 + 8, step, lower_supers);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
      const uint4 b = x.b(tile, first_step + step);
      const uint32_t rows[4] = {b.x, b.y, b.z, b.w};
      Factors factors[LANE_COLUMNS];
#pragma unroll
      for (int j = 0; j < LANE_COLUMNS; ++j) factors[j] = x.of(tile, j, first_step + step);
#pragma unroll
      for (int i = 0; i < STEP_GROUPS; ++i) {
        int d[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
        mma_s8<GROUP>(d, words.at + i * (GROUP / 8), rows + i * (GROUP / 16));
#pragma unroll
        for (int j = 0; j < LANE_COLUMNS; ++j) {
          const float zero = OFFSET ? fmaf((float)OFFSET, factors[j].sum(i), MAGIC) : MAGIC;
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const RowScales& weight = k ? lower : upper;
            float sum = weight.scale(i) * (__int_as_float(d[2 * k + j]) - zero);
            if (LOW != NO_LOW) sum = fmaf(weight.low(i), factors[j].sum(i), sum);
            sums.at[tile][2 * k + j] = fmaf(factors[j].scale(i), sum, sums.at[tile][2 * k + j]);
          }
        }
      }
    }
  }
}

// Where in shared memory the sum of a row and one of sixteen outputs lies: lanes that write what mma leaves them, and lanes that
// read a row, find banks of their own.
DEVICE int place_of_sum(int row, int output) { return (row ^ row / 2 % 2) * 16 + (output ^ (row / 2 ^ row / 4) % 2 * 8); }

KERNEL __launch_bounds__(THREADS, LANE_ROWS == 8 ? 1 : 2)
block_gemv(const int64_t* tasks, const uint8_t* given_weight, const DTYPE* x, const DTYPE* gain, const uint32_t* codes,
           const float2* factors, const DTYPE* bias, const DTYPE* residual, OUT* out, int given_rows, int width,
           int outputs, int parts, float eps, float offset, int taken) {
  static_assert(!EXPERTS || !FUSED);
  DYNAMIC_SHARED(shared);  // rings; FUSED: codes and factors of x
  __shared__ __align__(16) float partial[WARPS][PASSES][TILE * MOST_ROWS];
  const Assignment work(tasks, given_rows, taken);
  const int rows = work.rows;
  if (EXPERTS && !rows) return;
  const uint8_t* weight = work.tensor(given_weight, 0);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int part = warp % parts, first_warp = warp - part, groups = WARPS / parts;
  const int records = (width + COLUMNS - 1) / COLUMNS, padded = records * COLUMNS;
  const int tiles = (outputs + TILE - 1) / TILE;
  uint8_t* ring = shared + warp * (STAGES * RECORD_BYTES);

  // Records of this warp, one after another: along the width, from gate to up, then on to the block's next tile.
  int next_tile = work.block() * groups + warp / parts, next_pass = 0, next_record = part, writing = 0;
  const auto place_of_next = [&] {
    return weight + (((Index)next_tile + next_pass * tiles) * records + part) * RECORD_BYTES + lane * 16;
  };
  const uint8_t* source = place_of_next();
  const auto copy_next = [&] {
    if (next_tile < tiles) {
      uint8_t* target = ring + writing + lane * 16;
#pragma unroll
      for (int i = 0; i < RECORD_BYTES; i += WARP_SIZE * 16)
        if (i + WARP_SIZE * 16 <= RECORD_BYTES || i + lane * 16 < RECORD_BYTES) copy_async_16(target + i, source + i);
    }
    commit_copies();
    writing = writing == (STAGES - 1) * RECORD_BYTES ? 0 : writing + RECORD_BYTES;
    next_record += parts;
    source += parts * RECORD_BYTES;
    if (next_record < records) return;
    next_record = part;
    if (++next_pass == PASSES) {
      next_pass = 0;
      next_tile += work.blocks() * groups;
    }
    source = place_of_next();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) copy_next();

  wait_for_previous_kernel();
  if (FUSED) {
    uint32_t* own_codes = reinterpret_cast<uint32_t*>(shared + WARPS * STAGES * RECORD_BYTES);
    float2* own_factors = reinterpret_cast<float2*>(own_codes + rows * padded / 4);
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const DTYPE* source = x + (int64_t)row * width;
      const float factor = gain ? norm_factor(source, width, eps, partial[0][0]) : 1.0f;
#pragma unroll 1
      for (int column = threadIdx.x * 8; column - lane * 8 < padded; column += ROUNDING_SPAN)
        round_eight(load_normalised(source, gain, min(column, width), width, factor, offset), column, padded, GROUP,
                    own_codes + row * padded / 4, own_factors + row * (padded / GROUP));
    }
#ifndef BUG_NO_ROUNDING_BARRIER
    __syncthreads();
#endif
    codes = own_codes;
    factors = own_factors;
  }
  let_next_kernel_start();
  const Rows rounded(work, codes, factors, padded);

  const Results<TILE> team = {work, bias, residual, out, outputs, parts, part * WARP_SIZE + lane};
  int reading = 0;
  for (int first_tile = work.block() * groups; first_tile < tiles; first_tile += work.blocks() * groups) {
    const int tile = first_tile + warp / parts, first_output = tile * TILE;
    const float added_to_mine = team.added(first_output, team.mine);  // there when it is needed
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
      Sums sums = {};
#pragma unroll 1
      for (int record = part; record < records && tile < tiles; record += parts) {
        wait_copies<STAGES - 2>();
#ifndef BUG_NO_WARP_BARRIER
        __syncwarp();  // all lanes' copies are there, and all are done with the record that the next copy overwrites
#endif
        copy_next();
        multiply(sums, ring + reading, rounded, record * STEPS);
        reading = reading == (STAGES - 1) * RECORD_BYTES ? 0 : reading + RECORD_BYTES;
      }
#pragma unroll
      for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto put = [&](int row, int k) {
            partial[warp][pass][place_of_sum(row, lane / 4 + 8 * i)] = sums.at[row_tile][2 * i + k];
          };
          if (LANE_ROWS == 1) {
            put(lane % 4, 0);
          } else {
            put(row_tile * 8 + lane % 4 * 2, 0);
            put(row_tile * 8 + lane % 4 * 2 + 1, 1);
          }
        }
      }
    }
    const DTYPE* bias_of_gates = team.bias_of_gates();
    team.meet();
    const auto sum_of = [&](int side, int row, int output) {
      const int pass = GATED ? side : 0, place = place_of_sum(row, output);
      float sum = partial[first_warp][pass][place];
      for (int i = 1; i < parts; ++i) sum += partial[first_warp + i][pass][place];
      return sum;
    };
    team.write(sum_of, first_output, added_to_mine, bias_of_gates);
    team.meet();  // before the next tile's sums
  }
  wait_copies<0>();
}
EXPORT(block_gemv)
