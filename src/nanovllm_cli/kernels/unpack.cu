// Packed weights (packed.py) as numbers: out = value of the code * scale, rounded to DTYPE once.
//
//   codes, scales SCALE and zeros as packed.py has them; order [width]: the column of out that each packed one is, or null
//   out [rows, width] DTYPE
//
// unpack: rows first_row … of the weight, for the vendor's matmul. A warp has a tile, which it turns around in shared memory, so
// that eight lanes store 64 columns of a row. packed_rows: rows by ids and tokens (row_by_id.cuh). Four lanes have a row's columns
// of a tile.
//
// Grid (strips of 16 outputs, or ids; tiles along the columns, by the block's warps or teams of four lanes).
#include "packed.cuh"
#include "row_by_id.cuh"

constexpr int WARPS = 8, CHUNK = 8, CHUNKS = TILE_COLUMNS / CHUNK;

struct Registers {
  uint32_t at[TILE_STEPS][4];  // as packed.py has them
};

DEVICE uint32_t scaled(uint32_t pair, float scale) {
  typedef Vector<DTYPE, 2> Two;
  Two two = reinterpret_cast<const Two&>(pair);
  two.at[0] = from_float<DTYPE>(to_float(two.at[0]) * scale);
  two.at[1] = from_float<DTYPE>(to_float(two.at[1]) * scale);
  return reinterpret_cast<const uint32_t&>(two);
}

// A lane's numbers of a tile.
DEVICE Registers registers_of(const Weight& weight, int64_t strip, int slice, int lane) {
  const uint8_t* tile = weight.codes_of(strip, slice, lane);
  uint4 codes[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) codes[half] = load_streaming(tile + half * HALF_BYTES);
  Registers result;
#pragma unroll
  for (int step = 0; step < TILE_STEPS; ++step) {
    const int group = min(weight.group_of(slice * TILE_COLUMNS + step * 16), weight.groups - 1);
    const int64_t place = weight.group_at(strip, group) + lane / 4 * 2;
    const uint32_t middle = middle_of(ZEROS ? weight.zeros[place] : DEFAULT_ZERO);
    const uint32_t other_middle = middle_of(ZEROS ? weight.zeros[place + 1] : DEFAULT_ZERO);
    uint32_t words[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; ++half) words[half] = reinterpret_cast<const uint32_t*>(&codes[half])[step];
    uint32_t* numbers = result.at[step];
    numbers_of(numbers, words, middle, other_middle);
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers[i] = scaled(numbers[i], to_float(weight.scales[place + i % 2]));
  }
  return result;
}

// COUNT neighbouring columns, to where they belong in `row` of out; those past the width nowhere.
template <int COUNT>
DEVICE void store(const Vector<DTYPE, COUNT>& values, DTYPE* row, int column, int width, const int* order) {
  if (!ORDERED && VECTOR >= COUNT) {
    if (column < width) values.store(row + column);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (column + i < width) row[ORDERED ? order[column + i] : column + i] = values.at[i];
  }
}

#ifndef IDS
KERNEL __launch_bounds__(WARPS * WARP_SIZE)
unpack(const uint8_t* codes, const SCALE* scales, const uint8_t* zeros, const int* order, DTYPE* out, int first_row, int rows,
       int width) {
  __shared__ __align__(16) uint32_t tiles[WARPS][TILE_OUTPUTS][CHUNKS][CHUNK / 2];
  const Weight weight(codes, scales, zeros, width);
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int slice = blockIdx.y * WARPS + warp;
  const int64_t strip = first_row / TILE_OUTPUTS + blockIdx.x;
  if (slice >= weight.slices) return;
  const Registers registers = registers_of(weight, strip, slice, lane);
  auto tile = tiles[warp];  // chunk c of row r is at c ^ r % 8: rows of a chunk are in different banks, and so are a row's chunks
#pragma unroll
  for (int step = 0; step < TILE_STEPS; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i % 2 * 8 + lane / 4][(step * 2 + i / 2) ^ lane / 4][lane % 4] = registers.at[step][i];
  wait_for_previous_kernel();  // out may be what it still reads
  let_next_kernel_start();
#ifndef BUG_NO_SYNC
  __syncwarp();
#endif
  const int chunk = lane % CHUNKS;
#pragma unroll
  for (int i = lane / CHUNKS; i < TILE_OUTPUTS; i += WARP_SIZE / CHUNKS) {
    const int64_t row = strip * TILE_OUTPUTS + i - first_row;
    const auto values = reinterpret_cast<const Vector<DTYPE, CHUNK>&>(tile[i][chunk ^ i % 8]);
    if (row >= 0 && row < rows) store(values, out + row * width, slice * TILE_COLUMNS + chunk * CHUNK, width, order);
  }
}
EXPORT(unpack)
#else
KERNEL __launch_bounds__(WARPS * WARP_SIZE)
packed_rows(const int64_t* ids, const int64_t* tokens, int64_t num_tokens, const uint8_t* codes, const SCALE* scales,
            const uint8_t* zeros, const int* order, DTYPE* out, int64_t num_rows, int width) {
  const Weight weight(codes, scales, zeros, width);
  const int slice = (blockIdx.y * WARPS * WARP_SIZE + threadIdx.x) / 4, place = threadIdx.x % 4;
  if (slice >= weight.slices) return;
  wait_for_previous_kernel();
  const int64_t found = row_by_id(ids, tokens, num_tokens, num_rows), id = max(found, (int64_t)0);
  const bool there = found >= 0;
  let_next_kernel_start();
  const int output = id % TILE_OUTPUTS;
  const Registers registers = registers_of(weight, id / TILE_OUTPUTS, slice, output % 8 * 4 + place);
#pragma unroll
  for (int step = 0; step < TILE_STEPS; ++step)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint32_t* numbers = registers.at[step] + part * 2;
      const uint32_t pair = there ? output < 8 ? numbers[0] : numbers[1] : 0;
      store(reinterpret_cast<const Vector<DTYPE, 2>&>(pair), out + (int64_t)blockIdx.x * width,
            slice * TILE_COLUMNS + step * 16 + part * 8 + place * 2, width, order);
    }
}
EXPORT(packed_rows)
#endif
