// y = x @ weight.T for packed weights (packed.py): codes become 16-bit numbers in registers, on their way into the tensor cores.
// The scheme is Marlin's (Frantar et al. 2024): weights in the order of fragments, so that a warp copies what it multiplies; a
// deep queue of asynchronous copies; and stripes, so that every multiprocessor reads the same share of the weight.
//
//   x [rows, width] DTYPE, columns in the weight's order; codes, scales SCALE and zeros as packed.py has them
//   bias [outputs] DTYPE, or null; out [rows, outputs] OUT = y + bias + residual, rounded once; residual may be out, or null
//   partials [stripes, row tiles, 2, TOKENS, TILE_N] floats; counters: zeros, an int for each block
//
// A *tile* of outputs is ACROSS strips of 16; a *unit* is the next ALONG slices of 64 columns of a tile. All units lie in one
// row, tile after tile, and a block has an even share of it, a *stripe*: *segments* of a tile or more. The block's warps have
// STRIPS strips of one slice each, which they multiply (A of mma.m16n8k16: 16 outputs) by TOKENS rows of x (B: eight rows). A
// group is summed by the tensor cores, then scaled in fp32. Slices meet in shared memory, a tile's segments in `partials`: the
// block that comes last, by the counter, adds them up in the order of the columns, and sets the counter back to zero.
//
// Both operands pass through STAGES buffers, STAGES - 1 units ahead, across segments.
//
// Bits: a row's sums have an order that depends on the weight's shape and the number of stripes, never on the other rows.
#include "packed_stage.cuh"

constexpr int TOKEN_TILES = TOKENS / 8, FRAGMENT = TOKEN_TILES * 4;  // of mma; sums of a lane
constexpr int STAGE = X_STAGE + ACROSS * ALONG * STRIP_STAGE;
constexpr bool FULL = TOKENS * STRIPS > 64;  // registers, of sums alone: no room for two halves of a unit at once
static_assert(ALONG == 1 || ACROSS <= 2 * ALONG, "a tile's sums fit the x of a stage");

DEVICE int next_stage(int stage) { return stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE; }

// A unit, and the offset of the stage that it passes through.
struct Cursor {
  int unit, tile, step, stage;

  DEVICE void advance(int steps) {
    ++unit;
    if (++step == steps) step = 0, ++tile;
    stage = next_stage(stage);
  }
};

// The first unit of a stripe, and the stripe that has a unit.
DEVICE int first_unit(int stripe, int units, int stripes) { return (int64_t)stripe * units / stripes; }
DEVICE int stripe_of(int unit, int units, int stripes) { return (((int64_t)unit + 1) * stripes - 1) / units; }

// Codes, scales and zero points of 64 columns of a strip, on their way to a stage.
DEVICE void copy_weight(unsigned char* target, const Weight& weight, int strips, int strip, int slice) {
  const int lane = threadIdx.x % WARP_SIZE;
  const bool inside = strip < strips && slice < weight.slices;
  const uint8_t* codes = weight.codes_of(strip, slice, lane);
#pragma unroll
  for (int i = 0; i < TILE_BYTES; i += HALF_BYTES)
    copy_async_16_once(target + i + lane * 16, inside ? codes + i : weight.codes, inside);
  target += TILE_BYTES;
  const int group = weight.group_of(slice * DEPTH);
  const int64_t first = weight.group_at(strip, group);
  constexpr int CHUNKS_A_GROUP = TILE_OUTPUTS * sizeof(SCALE) / 16;
  if (GROUPS && lane < GROUPS * CHUNKS_A_GROUP) {
    const bool there = inside && group + lane / CHUNKS_A_GROUP < weight.groups;
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(weight.scales + first) + lane * 16;
    copy_async_16(target + lane * 16, there ? scales : weight.codes, there);
  }
  if (ZEROS && lane < ZERO_GROUPS) {
    const bool there = inside && group + lane < weight.groups;
    copy_async_16(target + SCALES + lane * 16, there ? weight.zeros + first + lane * TILE_OUTPUTS : weight.codes, there);
  }
}

// TOKENS rows of x, one unit's columns; zeros outside of x.
DEVICE void copy_x(unsigned char* stage, const DTYPE* x, int first_row, int rows, int first_column, int width) {
  const int chunk = threadIdx.x % CHUNKS;
#pragma unroll 1
  for (int i = threadIdx.x / CHUNKS; i < ALONG * TOKENS; i += THREADS / CHUNKS) {
    const int row = first_row + i % TOKENS, column = first_column + i / TOKENS * DEPTH + chunk * CHUNK;
    DTYPE* target = chunk_of(reinterpret_cast<DTYPE*>(stage), i, chunk);
    copy_chunk(target, x + (int64_t)row * width + column, x, row < rows && column < width, width - column);
  }
}

struct Sums {
  float at[TOKEN_TILES][4];  // output lane / 4 of two tokens, output lane / 4 + 8 of two: token 8 i + lane % 4 * 2 and the next

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) at[i][j] = 0.0f;
  }

  DEVICE void add_scaled(const Sums& other, const Vector<SCALE, 2>& scales) {
    const float low = to_float(scales.at[0]), high = to_float(scales.at[1]);
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) at[i][j] += (j < 2 ? low : high) * other.at[i][j];
  }

  // Between warps of the same strip, by way of shared memory: FRAGMENT * WARP_SIZE floats.
  DEVICE void store(float* memory) const {
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) memory[i * WARP_SIZE + threadIdx.x % WARP_SIZE] = at[i / 4][i % 4];
  }

  DEVICE void add(const float* memory) {
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) at[i / 4][i % 4] += memory[i * WARP_SIZE + threadIdx.x % WARP_SIZE];
  }

  // To the warp's columns of [TOKENS, TILE_N].
  DEVICE void store_rows(float* columns) const {
    const int lane = threadIdx.x % WARP_SIZE;
    columns += lane % 4 * 2 * TILE_N + lane / 4;
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) columns[(i / 4 * 8 + i % 2) * TILE_N + i / 2 % 2 * 8] = at[i / 4][i % 4];
  }
};

// One unit of a warp: to `sums` of whole rows, or by way of them to `totals`. In a stage its slice of x, and its first strip.
DEVICE void multiply(Sums* sums, Sums* totals, unsigned char* x_slice, const unsigned char* own) {
  const int lane = threadIdx.x % WARP_SIZE;
  DTYPE* tokens = reinterpret_cast<DTYPE*>(x_slice);
  const auto codes_of = [&](int strip, int half) { return own + strip * STRIP_STAGE + half * HALF_BYTES + lane * 16; };
  uint4 whole[STRIPS][HALVES];  // one load without bank conflicts, where registers have room for it
#pragma unroll
  for (int i = 0; i < STRIPS * HALVES && !FULL; ++i)
    whole[i / HALVES][i % HALVES] = *reinterpret_cast<const uint4*>(codes_of(i / HALVES, i % HALVES));
#pragma unroll FULL ? 1 : 2
  for (int deep = 0; deep < 2; ++deep) {  // 32 columns, two mma deep
    const int group = deep * ZERO_GROUPS / 2 * TILE_OUTPUTS + lane / 4 * 2;
    uint32_t a[STRIPS][2][4];
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const uint8_t* zeros = own + strip * STRIP_STAGE + TILE_BYTES + SCALES + group;
      const uint32_t middle = middle_of(ZEROS ? zeros[0] : DEFAULT_ZERO);
      const uint32_t other_middle = middle_of(ZEROS ? zeros[1] : DEFAULT_ZERO);
      uint32_t words[2][HALVES];  // of two steps
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const uint4 all = whole[strip][half];
        uint2 two = deep ? make_uint2(all.z, all.w) : make_uint2(all.x, all.y);
        if (FULL) two = *reinterpret_cast<const uint2*>(codes_of(strip, half) + deep * 8);
        words[0][half] = two.x, words[1][half] = two.y;
      }
      numbers_of(a[strip][0], words[0], middle, other_middle);
      numbers_of(a[strip][1], words[1], middle, other_middle);
    }
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
      uint32_t b[4];
      load_matrix_x4(b, chunk_of(tokens, i * 8 + lane % 8, deep * 4 + lane / 8));
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip) {
        mma_m16n8k16<DTYPE>(sums[strip].at[i], a[strip][0], b);
        mma_m16n8k16<DTYPE>(sums[strip].at[i], a[strip][1], b + 2);
      }
    }
    if (GROUPS == 2 || (GROUPS == 1 && deep == 1)) {
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip) {
        const SCALE* scales = reinterpret_cast<const SCALE*>(own + strip * STRIP_STAGE + TILE_BYTES) + group;
        totals[strip].add_scaled(sums[strip], Vector<SCALE, 2>::load(scales));
        sums[strip].clear();
      }
    }
  }
}

KERNEL __launch_bounds__(THREADS, 1)
packed_gemm(const DTYPE* x, const uint8_t* codes, const SCALE* scales, const uint8_t* zeros, const DTYPE* bias,
            const DTYPE* residual, OUT* out, float* partials, int* counters, int rows, int width, int outputs, int stripes) {
  DYNAMIC_SHARED(shared);
  __shared__ bool is_last;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int own_strip = warp / ALONG * STRIPS, own_slice = warp % ALONG;
  const int row_tiles = (rows + TOKENS - 1) / TOKENS;
  const int row_tile = blockIdx.x % row_tiles, stripe = blockIdx.x / row_tiles, first_row = row_tile * TOKENS;
  const Weight weight(codes, scales, zeros, width);
  const int strips = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
  const int steps = (weight.slices + ALONG - 1) / ALONG, units = (strips + ACROSS - 1) / ACROSS * steps;
  const int begin = first_unit(stripe, units, stripes), end = first_unit(stripe + 1, units, stripes);
  const auto segment_of = [&](int other, int tile) {  // where a stripe leaves its part of a tile: of two, the first or the last
    const bool first = first_unit(other, units, stripes) / steps == tile;
    return partials + (((int64_t)other * row_tiles + row_tile) * 2 + !first) * (TOKENS * TILE_N);
  };

  const Cursor start = {begin, begin / steps, begin % steps, 0};
  const int own = X_STAGE + (own_slice * ACROSS + own_strip) * STRIP_STAGE;
  const auto copy_weight_of = [&](const Cursor& to) {
    if (to.unit >= end) return;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      const int strip = to.tile * ACROSS + own_strip + i, slice = to.step * ALONG + own_slice;
      copy_weight(shared + to.stage + own + i * STRIP_STAGE, weight, strips, strip, slice);
    }
  };
  const auto copy_x_of = [&](const Cursor& to) {
    if (to.unit < end) copy_x(shared + to.stage, x, first_row, rows, to.step * ALONG * DEPTH, width);
    commit_copies();
  };
  Cursor ahead = start;
  for (int i = 1; i < STAGES; ++i, ahead.advance(steps)) copy_weight_of(ahead);
  wait_for_previous_kernel();
  ahead = start;
  for (int i = 1; i < STAGES; ++i, ahead.advance(steps)) copy_x_of(ahead);

  int stage = 0;
  for (int unit = begin; unit < end;) {
    const int tile = unit / steps, stop = min(end, (tile + 1) * steps);
    Sums sums[STRIPS], totals[STRIPS];
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      sums[i].clear();
      totals[i].clear();
    }
    for (; unit < stop; ++unit) {
#ifndef BUG_NO_WAIT
      wait_copies<STAGES - 2>();
#endif
#ifndef BUG_NO_BARRIER
      __syncthreads();  // this unit's copies are there, and everyone is done with the stage of the unit before
#endif
      copy_weight_of(ahead);
      copy_x_of(ahead);
      ahead.advance(steps);
      multiply(sums, totals, shared + stage + own_slice * SLICE, shared + stage + own);
      stage = next_stage(stage);
    }
    float* meeting = reinterpret_cast<float*>(shared + ahead.stage) + own_strip * (WARP_SIZE * FRAGMENT);
    float* segment = segment_of(stripe, tile) + own_strip * TILE_OUTPUTS;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      if (!GROUPS) {
        const int strip = min(tile * ACROSS + own_strip + i, strips - 1);  // beyond the last, sums are zero
        totals[i].add_scaled(sums[i], Vector<SCALE, 2>::load(scales + (int64_t)strip * TILE_OUTPUTS + lane / 4 * 2));
      }
      for (int other = 1; other < ALONG; ++other) {
        __syncthreads();  // everyone is done with the stage, or with the sums that met before
        if (own_slice == other) totals[i].store(meeting + i * (WARP_SIZE * FRAGMENT));
        __syncthreads();
        if (own_slice == 0) totals[i].add(meeting + i * (WARP_SIZE * FRAGMENT));
      }
      if (own_slice == 0) totals[i].store_rows(segment + i * TILE_OUTPUTS);
    }
    const int first = stripe_of(tile * steps, units, stripes), last = stripe_of((tile + 1) * steps - 1, units, stripes);
    if (first < last) __threadfence();
    __syncthreads();
    if (first < last) {
      if (threadIdx.x == 0) {
        int* counter = counters + first * row_tiles + row_tile;  // a stripe is the first of one divided tile, its last
        is_last = atomicAdd(counter, 1) == last - first;
#ifndef BUG_COUNTER
        if (is_last) *counter = 0;
#endif
      }
      __syncthreads();
      if (!is_last) continue;
      __threadfence();
    }
    finish_tile([&](int other) { return segment_of(other, tile); }, first, last, bias, residual, out, first_row, rows,
                tile * TILE_N, outputs);
  }
  wait_copies<0>();
  let_next_kernel_start();
}
EXPORT(packed_gemm)
