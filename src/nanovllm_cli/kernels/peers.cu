// What each of several GPUs has of a tensor's columns, or of a table's rows, brought together: each in a process of its own, in
// memory that all of them see.
//
// A GPU has a region there: a flag for each block of a launch, a cache line (LINE) apart, and behind HEAD two areas that take
// turns. Block b writes its part of what the GPU gives into the area, tells so in its flag, waits for everybody's flag b, and reads
// their parts. When an area is written again all have met once in between, who have then read what was there. For that all
// launches of a group have BLOCKS blocks, and no launch of it starts before the last one's end.
//
// control int64: address of a word that is not 0 once somebody is lost, and nobody waits any more; bytes of an area; the GPU's
// number; how many there are; the address of each one's region; and how often each block has met the others.
//
// UNIT is a number of 2 to 16 bytes, which everything is a multiple of.
#include "common.cuh"

constexpr int THREADS = 256, BLOCKS = 16, LINE = 128, HEAD = BLOCKS * LINE;  // as in peers.py

typedef volatile uint64_t Flag;

struct Control {
  Flag* lost;
  int64_t area_bytes, rank, size;
  int64_t words[1];  // and more: addresses of regions [size], counts [BLOCKS]

  DEVICE unsigned char* region(int64_t of) const { return reinterpret_cast<unsigned char*>(words[of]); }
  DEVICE int64_t& met() { return words[size + blockIdx.x]; }
  DEVICE UNIT* area(int64_t of, int64_t count) const {
#ifdef BUG_ONE_AREA
    count = 0;
#endif
    return reinterpret_cast<UNIT*>(region(of) + HEAD + count % 2 * area_bytes);
  }
};

// Of so many things, those of this block.
DEVICE int64_t part_begin(int64_t total, int block) { return total * block / BLOCKS; }

// All threads; what they wrote to the area is there for whoever sees the flag, and what the others wrote for all of these.
DEVICE void meet(Control& control, int64_t count) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    *reinterpret_cast<Flag*>(control.region(control.rank) + blockIdx.x * LINE) = count;
  }
  if (threadIdx.x < control.size) {
    const Flag* flag = reinterpret_cast<const Flag*>(control.region(threadIdx.x) + blockIdx.x * LINE);
#ifdef BUG_NO_WAIT
    if (false)
#endif
    while (*flag < (uint64_t)count && *control.lost == 0) __nanosleep(100);
    __threadfence_system();
  }
  __syncthreads();
  if (threadIdx.x == 0) control.met() = count;
}

// out [rows, width] of own [rows, widths[rank]], what this GPU has, and the others'. table int64: widths of all, then of each piece
// whose it is, its first column there, its first column in the whole, and how many it has. gives: whether others take this
// GPU's; takes: whether it takes theirs. Widths and columns count UNITs.
KERNEL __launch_bounds__(256)
gather(Control* where, const int64_t* table, int num_pieces, const UNIT* own, UNIT* out, int rows, int width, int gives, int takes) {
  wait_for_previous_kernel();
  Control& control = *where;
  const int64_t count = control.met() + 1;
  const int size = control.size;
  if (gives) {
    UNIT* area = control.area(control.rank, count);
    const int64_t total = table[control.rank] * rows, end = part_begin(total, blockIdx.x + 1);
    for (int64_t i = part_begin(total, blockIdx.x) + threadIdx.x; i < end; i += THREADS) area[i] = own[i];
  }
  meet(control, count);
  if (takes) {
    for (int piece = 0; piece < num_pieces; ++piece) {
      const int64_t* words = table + size + 4 * piece;
      const int of = words[0], first = words[1], to = words[2], num = words[3], its_width = table[of];
      const UNIT* source = of == control.rank ? own : control.area(of, count);
      const int64_t total = (int64_t)its_width * rows;
      const uint32_t end = part_begin(total, blockIdx.x + 1);
      for (uint32_t i = (uint32_t)part_begin(total, blockIdx.x) + threadIdx.x; i < end; i += THREADS) {
        const uint32_t row = i / its_width, column = i % its_width;
        if (column - first < (uint32_t)num) out[(int64_t)row * width + to + column - first] = source[i];
      }
    }
  }
}
EXPORT(gather)

// own [T] int64: which of this GPU's rows of a table ids ask for, -1 where another one has it or nobody; whose [T] int32: who has
// it, -1 for nobody. bounds [size + 1] int64: where each one's rows begin. ids, tokens: as in row_by_id.cuh.
KERNEL __launch_bounds__(256)
find_rows(const Control* where, const int64_t* bounds, const int64_t* ids, const int64_t* tokens, int64_t num_tokens, int64_t* own,
          int* whose, int rows) {
  wait_for_previous_kernel();
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= rows) return;
  const int size = where->size, rank = where->rank;
  int64_t id = ids[row];
  if (tokens) id = id >= 0 && id < num_tokens ? tokens[id] : -1;
  int found = -1;
  for (int of = 0; of < size; ++of)
    if (id >= bounds[of] && id < bounds[of + 1]) found = of;
  own[row] = found == rank ? id - bounds[rank] : -1;
  whose[row] = found;
  let_next_kernel_start();
}
EXPORT(find_rows)

// out [rows, width] of rows that one GPU has each, as whose [rows] says; zeros where nobody has. own: alike, right where it is this
// one's. width counts UNITs.
KERNEL __launch_bounds__(256)
gather_rows(Control* where, const int* whose, const UNIT* own, UNIT* out, int rows, int width) {
  wait_for_previous_kernel();
  Control& control = *where;
  const int64_t count = control.met() + 1, total = (int64_t)rows * width;
  const uint32_t begin = part_begin(total, blockIdx.x) + threadIdx.x, end = part_begin(total, blockIdx.x + 1);
  UNIT* area = control.area(control.rank, count);
  for (uint32_t i = begin; i < end; i += THREADS)
    if (whose[i / width] == control.rank) area[i] = own[i];
  meet(control, count);
  for (uint32_t i = begin; i < end; i += THREADS) {
    const int of = whose[i / width];
    UNIT unit = {};
    if (of >= 0) unit = of == control.rank ? own[i] : control.area(of, count)[i];
    out[i] = unit;
  }
}
EXPORT(gather_rows)
