// GGUF's blocks as numbers: out = scale * (code - OFFSET) + low, rounded to fp32 after each step and then to DTYPE, as `gguf.quants`
// and the CPU have it.
//
//   weight [tiles, records, RECORD_BYTES] (block_records.cuh); out [rows, width] DTYPE
//
// block_unpack: rows first_row … of the weight. block_rows: rows by ids and tokens (row_by_id.cuh).
//
// A warp has a record, a lane four neighbouring columns of two rows at a time. Grid (tiles, or ids; records / WARPS).
#include "block_records.cuh"
#include "row_by_id.cuh"

constexpr int WARPS = 8;

// The lane's columns of row `row` of a record, to `out`, which is where the record's first column goes. left: columns of the record
// that the weight has. Of zeros where there is no such row.
DEVICE void unpack_row(const uint8_t* record, int row, int left, bool there, DTYPE* out) {
  const int lane = row % 8 * 4 + threadIdx.x % 4;
  const RowSupers supers(record, row);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const RowScales scales(record, row, step, supers);
    const Words words = load_words(record, step, lane);
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // 16 columns
      const int column = step * STEP + part * 16 + threadIdx.x % 4 * 4;
      const float scale = scales.scale(part * 16 / GROUP), low = LOW == NO_LOW ? 0.0f : scales.low(part * 16 / GROUP);
      const uint32_t word = row < 8 ? words.at[part * 2] : words.at[part * 2 + 1];
      Vector<DTYPE, 4> values;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int code = (int)(int8_t)(word >> i * 8) - OFFSET;
        float value = __fmul_rn(scale, (float)code);
        if (LOW != NO_LOW) value = __fadd_rn(value, low);
        values.at[i] = from_float<DTYPE>(there ? value : 0.0f);
      }
      if (column < left) values.store(out + column);
    }
  }
}

#ifndef IDS
KERNEL __launch_bounds__(WARPS * WARP_SIZE)
block_unpack(const uint8_t* weight, DTYPE* out, int first_row, int rows, int width) {
  const int records = (width + COLUMNS - 1) / COLUMNS;
  const int at = blockIdx.y * WARPS + threadIdx.x / WARP_SIZE;
  const Index tile = first_row / TILE + blockIdx.x;
  if (at >= records) return;
  const uint8_t* record = weight + (tile * records + at) * RECORD_BYTES;
  wait_for_previous_kernel();  // out may be what it still reads
  let_next_kernel_start();
#pragma unroll 1
  for (int row = threadIdx.x % WARP_SIZE / 4; row < TILE; row += 8) {
    const int64_t target = (int64_t)tile * TILE + row - first_row;
    if (target >= 0 && target < rows)
      unpack_row(record, row, width - at * COLUMNS, true, out + target * width + at * COLUMNS);
  }
}
EXPORT(block_unpack)
#else
KERNEL __launch_bounds__(WARPS * WARP_SIZE)
block_rows(const int64_t* ids, const int64_t* tokens, int64_t num_tokens, const uint8_t* weight, DTYPE* out, int64_t num_rows,
           int width) {
  // Four lanes have a row's columns: a warp's eight such teams take a record each.
  const int records = (width + COLUMNS - 1) / COLUMNS;
  const int at = blockIdx.y * WARPS * 8 + threadIdx.x / 4;
  if (at >= records) return;
  wait_for_previous_kernel();
  const int64_t found = row_by_id(ids, tokens, num_tokens, num_rows), id = max(found, (int64_t)0);
  let_next_kernel_start();
  const uint8_t* record = weight + ((Index)(id / TILE) * records + at) * RECORD_BYTES;
  unpack_row(record, id % TILE, width - at * COLUMNS, found >= 0, out + (int64_t)blockIdx.x * width + at * COLUMNS);
}
EXPORT(block_rows)
#endif
