// y = x @ weight.T for packed weights (packed.py) and many rows, by Hopper's wgmma. As in Machete (Wilkinson et al. 2024), the
// weight is the first operand: codes become 16-bit numbers in the registers that it is read from; x is read from shared memory.
//
//   x [rows, width] DTYPE, columns in the weight's order; codes, scales SCALE and zeros as packed.py has them
//   bias [outputs] DTYPE, or null; out [rows, outputs] OUT = y + bias + residual, rounded once; residual may be out, or null
//   partials [tiles, splits, TOKENS, TILE_N] floats; counters: zeros, an int a tile; both null where splits is 1
//
// Grid: tiles of ACROSS strips of 16 outputs by TOKENS rows, `splits` blocks each. A *unit* is the next ALONG slices of 64
// columns, of which a tile's blocks have even shares: the one that ends last, by the counter, adds their sums up and sets the
// counter to zero. A warp has one strip of one slice; a warpgroup four strips, 64 outputs, and sums of its own; slices meet in
// shared memory. Where a group of columns has a scale, the number is multiplied by it and rounded to DTYPE, as unpack.cu does; a
// scale of all columns multiplies the sum.
//
// Both operands pass through STAGES buffers, STAGES - 1 units ahead. Half a unit's numbers are made while the tensor cores multiply
// the half before it, so there is one barrier a unit, with products under way.
//
// Bits: a row's sums have an order that depends on ALONG and splits, never on the other rows.
#include "packed_stage.cuh"
#include "wgmma.cuh"

constexpr int STAGE = (X_STAGE + ACROSS * ALONG * STRIP_STAGE + PATTERN_BYTES - 1) / PATTERN_BYTES * PATTERN_BYTES;
constexpr int SUMS = TOKENS / 2;           // of a lane
constexpr int MEETING_ROW = TILE_N + 4;    // floats; of lanes that store at once no two meet in a bank
constexpr int BAND = 16;                   // tiles of rows that share a weight in the L2
static_assert(STRIPS == 1 && ACROSS % WARPGROUP_WARPS == 0 && STAGES >= 3);

DEVICE int next_stage(int stage) { return stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE; }

struct Tile {
  int first_row, tile;
};

// Blocks that run at once share rows of x and weights: bands of rows, in them the rows first.
DEVICE Tile tile_of(int block, int rows, int tiles) {
  const int row_tiles = (rows + TOKENS - 1) / TOKENS;
  const int band = block / (BAND * tiles) * BAND, within = block - band * tiles, height = min(BAND, row_tiles - band);
  return {(band + within % height) * TOKENS, within / height};
}

// TOKENS rows of a slice of x, copied by the warps that multiply it; zeros outside of x and behind the block's last unit. A
// thread has a chunk of every ROWS-th row.
struct CopyOfX {
  static constexpr int ROWS = THREADS / ALONG / CHUNKS;

  const DTYPE* source;
  int width, left, rows_left, target;

  DEVICE CopyOfX(const DTYPE* x, int slice, int first_row, int rows, int width, int end) : width(width) {
    const int thread = threadIdx.x % (THREADS / ALONG), row = thread / CHUNKS, chunk = thread % CHUNKS;
    const int column = slice * DEPTH + chunk * CHUNK;
    left = min((int64_t)width, (int64_t)end * (ALONG * DEPTH)) - column;
    source = x + (int64_t)(first_row + row) * width + column;
    rows_left = rows - first_row - row;
    target = slice * SLICE + row * DEPTH * (int)sizeof(DTYPE) + (chunk ^ row % CHUNKS) * CHUNK * (int)sizeof(DTYPE);
  }

  DEVICE void copy(unsigned char* stage, const DTYPE* x, int unit) const {
    const int skipped = unit * ALONG * DEPTH;
#pragma unroll
    for (int i = 0; i < TOKENS; i += ROWS) {
      if (TOKENS % ROWS && i + ROWS > TOKENS && (int)threadIdx.x % (THREADS / ALONG) / CHUNKS + i >= TOKENS) break;
      DTYPE* place = reinterpret_cast<DTYPE*>(stage + target + i * DEPTH * sizeof(DTYPE));
      const DTYPE* chunk = source + (int64_t)i * width + skipped;
      const bool inside = i < rows_left && skipped < left;
      if (VECTOR == CHUNK) {
        copy_async_16(place, chunk, inside);
      } else {
        copy_chunk(place, chunk, x, inside, left - skipped);
      }
    }
  }
};

// Codes, scales and zero points of a warp's strip, a slice at a time.
struct CopyOfWeight {
  const uint8_t *codes, *scales, *zeros;
  int slices, groups;  // none where the strip is behind the last

  DEVICE CopyOfWeight(const Weight& weight, int strip, int strips, int end) {
    const int lane = threadIdx.x % WARP_SIZE;
    codes = weight.codes_of(strip, 0, lane);
    scales = reinterpret_cast<const uint8_t*>(weight.scales + weight.group_at(strip, 0)) + lane * 16;
    zeros = weight.zeros + weight.group_at(strip, lane);
    slices = strip < strips ? min(weight.slices, end * ALONG) : 0;
    groups = strip < strips ? weight.groups : 0;
  }

  DEVICE void copy(unsigned char* target, int slice) const {
    constexpr int CHUNKS_A_GROUP = TILE_OUTPUTS * sizeof(SCALE) / 16;
    const int lane = threadIdx.x % WARP_SIZE, group = GROUP ? (unsigned)slice * DEPTH / Weight::DIVISOR : 0;
#pragma unroll
    for (int i = 0; i < TILE_BYTES; i += HALF_BYTES)
      copy_async_16(target + i + lane * 16, codes + (int64_t)slice * TILE_BYTES + i, slice < slices);
    target += TILE_BYTES + lane * 16;
    if (GROUPS && lane < GROUPS * CHUNKS_A_GROUP)
      copy_async_16(target, scales + (int64_t)group * CHUNKS_A_GROUP * 16, group + lane / CHUNKS_A_GROUP < groups);
    if (ZEROS && lane < ZERO_GROUPS)
      copy_async_16(target + SCALES, zeros + (int64_t)group * TILE_OUTPUTS, group + lane < groups);
  }
};

template <class A, class B>
constexpr bool ARE_SAME = false;
template <class A>
constexpr bool ARE_SAME<A, A> = true;

// Scales of outputs g and g + 8, which numbers are multiplied by. One that DTYPE has is multiplied in its instructions, with one
// rounding. To a bf16 number, others are two: number * high + number * low rounds as number * scale does, but for one case in
// 2^8. half has no room for the second of small scales: fp32 there.
struct Scales {
  static constexpr bool SPLIT = !ARE_SAME<SCALE, DTYPE> && IS_BF16;

  Vector<SCALE, 2> whole;
  Vector<DTYPE, 2> high, low;

  DEVICE Scales(const SCALE* place) {
    whole = Vector<SCALE, 2>::load(place);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high.at[i] = from_float<DTYPE>(to_float(whole.at[i]));
      low.at[i] = from_float<DTYPE>(to_float(whole.at[i]) - to_float(high.at[i]));
    }
  }

  // Two numbers of an output, by register.
  DEVICE uint32_t times(uint32_t pair, int i) const {
    i %= 2;
    if (SPLIT) return multiply_add_pair(pair, both(high.at[i]), multiply_pair(pair, both(low.at[i])));
    if (ARE_SAME<SCALE, DTYPE>) return multiply_pair(pair, both(reinterpret_cast<const DTYPE&>(whole.at[i])));
    const Vector<DTYPE, 2> two = reinterpret_cast<const Vector<DTYPE, 2>&>(pair);
    const float scale = to_float(whole.at[i]);
    Vector<DTYPE, 2> result;
    for (int j = 0; j < 2; ++j) result.at[j] = from_float<DTYPE>(to_float(two.at[j]) * scale);
    return reinterpret_cast<const uint32_t&>(result);
  }

  static DEVICE uint32_t both(DTYPE number) {
    const Vector<DTYPE, 2> pair = {number, number};
    return reinterpret_cast<const uint32_t&>(pair);
  }

  static DEVICE uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
    typedef Sixteen<DTYPE>::Pair Pair;
    const Pair result =
        __hfma2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b), reinterpret_cast<const Pair&>(c));
    return reinterpret_cast<const uint32_t&>(result);
  }
};

// A warp's codes of a unit, and how half a unit of them becomes numbers. kept: see packed.cuh.
struct Codes {
  uint4 words[HALVES];

  DEVICE void load(const unsigned char* own) {
#pragma unroll
    for (int i = 0; i < HALVES; ++i)
      words[i] = *reinterpret_cast<const uint4*>(own + i * HALF_BYTES + threadIdx.x % WARP_SIZE * 16);
  }

  // Of half a unit: two steps of four registers.
  DEVICE void numbers(uint32_t (*registers)[4], const unsigned char* own, int part, uint32_t kept) const {
    const int place = part * ZERO_GROUPS / 2 * TILE_OUTPUTS + threadIdx.x % WARP_SIZE / 4 * 2;
    const uint8_t* zeros = own + TILE_BYTES + SCALES + place;
    const uint32_t middle = middle_of(ZEROS ? zeros[0] : DEFAULT_ZERO), other = middle_of(ZEROS ? zeros[1] : DEFAULT_ZERO);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t of_step[HALVES];
#pragma unroll
      for (int i = 0; i < HALVES; ++i) of_step[i] = reinterpret_cast<const uint32_t*>(&words[i])[part * 2 + step];
      numbers_of(registers[step], of_step, middle, other, kept);
    }
    if (GROUPS == 0) return;
    const Scales scales(reinterpret_cast<const SCALE*>(own + TILE_BYTES) + place);
#pragma unroll
    for (int i = 0; i < 8; ++i) registers[i / 4][i % 4] = scales.times(registers[i / 4][i % 4], i);
  }
};

KERNEL __launch_bounds__(THREADS, 1)
packed_wgmma(const DTYPE* x, const uint8_t* codes, const SCALE* scales, const uint8_t* zeros, const DTYPE* bias,
             const DTYPE* residual, OUT* out, float* partials, int* counters, int rows, int width, int outputs, int splits) {
  DYNAMIC_SHARED(unaligned);
#ifdef BUG_UNALIGNED
  unsigned char* shared = unaligned;
#else
  unsigned char* shared = unaligned + (PATTERN_BYTES - 1 - (shared_address(unaligned) - 1) % PATTERN_BYTES);
#endif
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int own_strip = warp % ACROSS, own_slice = warp / ACROSS;
  const Weight weight(codes, scales, zeros, width);
  const int strips = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, units = (weight.slices + ALONG - 1) / ALONG;
  const int tile = blockIdx.x / splits, split = blockIdx.x % splits;
  const int begin = (int64_t)split * units / splits, end = (int64_t)(split + 1) * units / splits;
  const Tile at = tile_of(tile, rows, (strips + ACROSS - 1) / ACROSS);
  const int first_row = at.first_row, strip = at.tile * ACROSS + own_strip;

  unsigned char* own = shared + X_STAGE + warp * STRIP_STAGE;
  CopyOfWeight of_weight(weight, strip, strips, end);
  CopyOfX of_x(x, own_slice, first_row, rows, width, end);
  keep(of_x.source), keep(of_x.left), keep(of_x.target), keep(of_x.rows_left), keep(of_weight.codes);
  const auto copy_weight_of = [&](int unit, int stage) { of_weight.copy(own + stage, unit * ALONG + own_slice); };
  const auto copy_x_of = [&](int unit, int stage) {
    of_x.copy(shared + stage, x, unit);
    commit_copies();
  };
  const auto wait_and_meet = [&]() {  // a unit is there, and everyone is done with the one before last
#ifndef BUG_NO_WAIT
    wait_copies<STAGES - 3>();
#endif
#ifndef BUG_NO_FENCE
    fence_for_products();
#endif
#ifndef BUG_NO_BARRIER
    __syncthreads();
#endif
  };
  for (int i = 0; i < STAGES - 1; ++i) copy_weight_of(begin + i, i * STAGE);
  wait_for_previous_kernel();
  for (int i = 0; i < STAGES - 1; ++i) copy_x_of(begin + i, i * STAGE);

  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  uint32_t numbers[2][2][4];  // halves of a unit, steps
  const uint32_t kept = KEPT ^ (uint32_t)(rows >> 31);
  Codes words;
  wait_and_meet();
  words.load(own);
  words.numbers(numbers[0], own, 0, kept);
  RowsOf128Bytes tokens(shared_address(shared) + own_slice * SLICE);
  keep(tokens.lower);
  int stage = 0, free_stage = (STAGES - 1) * STAGE;
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      wgmma_fence(numbers[part]);
#pragma unroll
      for (int step = 0; step < 2; ++step)
        wgmma<TOKENS, IS_BF16>(sums, numbers[part][step], tokens.descriptor(stage, part * 2 + step));
      wgmma_commit();
      if (part == 1) {
        const int next = next_stage(stage);
        wait_and_meet();
        copy_weight_of(unit + STAGES - 1, free_stage);
        copy_x_of(unit + STAGES - 1, free_stage);
        free_stage = stage, stage = next;
      }
#ifndef BUG_EARLY
      wgmma_wait<1>();  // the half before, whose registers are free now
#endif
      if (part == 1) words.load(own + stage);  // behind the last unit: whatever lies there
      words.numbers(numbers[1 - part], own + stage, 1 - part, kept);
    }
  }
  let_next_kernel_start();
#ifndef BUG_NO_END
  wgmma_wait<0>();
#endif
  sums_are_there<SUMS>(sums);
  wait_copies<0>();

  float* meeting = reinterpret_cast<float*>(shared);  // [TOKENS, MEETING_ROW]
  Vector<SCALE, 2> last_scales;
  if (!GROUPS) last_scales = Vector<SCALE, 2>::load(scales + (int64_t)min(strip, strips - 1) * TILE_OUTPUTS + lane / 4 * 2);
#pragma unroll 1
  for (int other = 0; other < ALONG; ++other) {
    __syncthreads();  // everyone is done with the stages, or with the sums of the slice before
    if (own_slice != other) continue;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, output = own_strip * TILE_OUTPUTS + i / 2 % 2 * 8 + lane / 4;
      float* place = meeting + token * MEETING_ROW + output;
      const float sum = GROUPS ? sums[i] : sums[i] * to_float(last_scales.at[i / 2 % 2]);
      *place = other ? *place + sum : sum;
    }
  }
  __syncthreads();
  const auto part_of = [&](int other) { return partials + ((int64_t)tile * splits + other) * (TOKENS * TILE_N); };
#pragma unroll 1
  for (int i = threadIdx.x; i < TOKENS * TILE_N / 4; i += THREADS) {
    const int token = i / (TILE_N / 4), output = i % (TILE_N / 4) * 4;
    if (first_row + token >= rows) break;
    const Vector<float, 4> four = Vector<float, 4>::load(meeting + token * MEETING_ROW + output);
    if (splits > 1) {
      four.store(part_of(split) + i * 4);
    } else {
      finish_four(four.at, bias, residual, out, first_row + token, at.tile * TILE_N + output, outputs);
    }
  }
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  int* is_last = reinterpret_cast<int*>(shared);
  if (threadIdx.x == 0) {
    *is_last = atomicAdd(counters + tile, 1) == splits - 1;
#ifndef BUG_COUNTER
    if (*is_last) counters[tile] = 0;
#endif
  }
  __syncthreads();
  if (!*is_last) return;
  __threadfence();
  finish_tile(part_of, 0, splits - 1, bias, residual, out, first_row, rows, at.tile * TILE_N, outputs);
}
EXPORT(packed_wgmma)
