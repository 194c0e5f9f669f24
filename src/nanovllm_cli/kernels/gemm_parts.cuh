// What gemm.cu and packed_gemm.cu share: buffers of x in shared memory, and what becomes of a product.
//
// A row of a buffer has DEPTH columns, 128 bytes, eight chunks, and its chunk c lies at c ^ (row % 8): eight rows of a chunk, as
// ldmatrix reads them, are in different banks, and so are a row's.
#pragma once
#include "common.cuh"

constexpr int DEPTH = 64, CHUNK = 8, CHUNKS = DEPTH / CHUNK;

DEVICE DTYPE* chunk_of(DTYPE* tile, int row, int chunk) { return tile + row * DEPTH + (chunk ^ row % CHUNKS) * CHUNK; }

// copy_async_16, of what nobody reads again: it leaves the L2 before other things do.
DEVICE void copy_async_16_once(void* target, const void* source, bool in_range) {
#if !defined(EMULATION) && __CUDA_ARCH__ >= 800
  const int bytes = in_range ? 16 : 0;
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0],[%1],16,%2,%3;" ::"r"(shared_address(target)), "l"(source),
               "r"(bytes), "l"(policy)
               : "memory");
#else
  copy_async_16(target, source, in_range);
#endif
}

// A chunk of a matrix on its way to a buffer. Elements outside become zeros: all of them, or those from `left` on. Both the address
// and `left` are multiples of VECTOR elements.
DEVICE void copy_chunk(DTYPE* target, const DTYPE* source, const DTYPE* matrix, bool inside, int left) {
  typedef Vector<DTYPE, VECTOR> Elements;
  if (VECTOR == CHUNK) {
    copy_async_16(target, inside ? source : matrix, inside);
  } else {  // rows without 16-byte boundaries: copied at once, seen after the same barrier
    for (int j = 0; j < CHUNK; j += VECTOR) {
      Elements elements;
      for (int k = 0; k < VECTOR; ++k) elements.at[k] = from_float<DTYPE>(0.0f);
      if (inside && j < left) elements = Elements::load(source + j);
      elements.store(target + j);
    }
  }
}

// COUNT neighbouring elements of y, on an address that is a multiple of their size.
template <int COUNT>
DEVICE void finish(const float* sums, const DTYPE* bias, const DTYPE* residual, OUT* out, int64_t place, int output) {
  if (sizeof(OUT) != sizeof(DTYPE)) residual = nullptr;  // logits: the compiler is told what the wrapper makes sure of
  Vector<DTYPE, COUNT> shift, added;
  if (bias) shift = Vector<DTYPE, COUNT>::load(bias + output);
  if (residual) added = Vector<DTYPE, COUNT>::load(residual + place);
  Vector<OUT, COUNT> result;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float y = sums[i];
    if (bias) y += to_float(shift.at[i]);
    if (residual) y += to_float(added.at[i]);
    result.at[i] = from_float<OUT>(y);
  }
  result.store(out + place);
}
