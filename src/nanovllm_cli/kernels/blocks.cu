// Whole blocks of the paged cache, moved as bytes, for all layers in one launch.
//
//   regions [R, 3] int64, a row for K and one for V of each layer: address, bytes of a block, bytes before it in a staged one
//   copy_blocks: pairs [P, 2] int64 (source, target), block `target` = block `source` in every region
//   swap_blocks: blocks [P] int64 to and from staging [P, staged_bytes], which has a block of every region side by side, and
//                may be pinned memory of the host
//
// All byte counts are multiples of 16. Grid (P, R, CHUNKs of the largest block): a thread moves MOVES vectors of 16 bytes, all
// loaded before the first is stored.
#include "common.cuh"

constexpr int THREADS = 256, MOVES = 4, CHUNK = THREADS * MOVES * 16;  // CHUNK as in blocks.py

struct Region {
  int64_t address, block_bytes, staged_at;
};

DEVICE void move_chunk(const unsigned char* source, unsigned char* target, int64_t num_bytes) {
  const int64_t first = (int64_t)blockIdx.z * CHUNK + threadIdx.x * 16;
  uint4 values[MOVES];
#pragma unroll
  for (int i = 0; i < MOVES; ++i) {
    const int64_t at = first + i * THREADS * 16;
    if (at < num_bytes) values[i] = *reinterpret_cast<const uint4*>(source + at);
  }
#ifdef BUG_UNMASKED_TAIL
  num_bytes += 16;
#endif
#pragma unroll
  for (int i = 0; i < MOVES; ++i) {
    const int64_t at = first + i * THREADS * 16;
    if (at < num_bytes) *reinterpret_cast<uint4*>(target + at) = values[i];
  }
}

DEVICE unsigned char* block_of(const Region& region, int64_t index) {
  int64_t offset = index * region.block_bytes;
#ifdef BUG_INT32
  offset = (int)offset;
#endif
  return reinterpret_cast<unsigned char*>(region.address) + offset;
}

KERNEL __launch_bounds__(256)
copy_blocks(const Region* regions, const int64_t* pairs) {
  wait_for_previous_kernel();
  const Region region = regions[blockIdx.y];
  move_chunk(block_of(region, pairs[2 * blockIdx.x]), block_of(region, pairs[2 * blockIdx.x + 1]), region.block_bytes);
  let_next_kernel_start();
}
EXPORT(copy_blocks)

KERNEL __launch_bounds__(256)
swap_blocks(const Region* regions, const int64_t* blocks, unsigned char* staging, int64_t staged_bytes, int into_cache) {
  wait_for_previous_kernel();
  const Region region = regions[blockIdx.y];
  unsigned char* block = block_of(region, blocks[blockIdx.x]);
  unsigned char* staged = staging + blockIdx.x * staged_bytes + region.staged_at;
  if (into_cache) {
    move_chunk(staged, block, region.block_bytes);
  } else {
    move_chunk(block, staged, region.block_bytes);
  }
  let_next_kernel_start();
}
EXPORT(swap_blocks)
