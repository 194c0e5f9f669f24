// What CUDA computes for a whole warp: votes, reductions, products of matrices. Compiled once for all kernels.
#include "cuda_emulation.h"

unsigned __ballot_sync(unsigned mask, int predicate) {
  auto slots = emulation::put_down<int>(mask, predicate != 0);
  const unsigned live = emulation::live_lanes();
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    if ((mask & live) >> lane & 1) bits |= (unsigned)emulation::take<int>(slots, lane) << lane;
  return bits;
}

namespace {

template <class T, class Combine>
T emulated_warp_reduce(unsigned mask, T value, Combine combine) {
  auto slots = emulation::put_down(mask, value);
  const unsigned live = mask & emulation::live_lanes();
  T result = value;
  for (int lane = 0; lane < 32; ++lane)
    if (lane != emulation::current->lane && (live >> lane & 1)) result = combine(result, emulation::take<T>(slots, lane));
  return result;
}

struct MmaOperands {
  uint32_t a[4], b[2];
};

typedef float Columns __attribute__((vector_size(32)));

// Of 8-bit numbers, four a word: lane l owns columns 4 * (l % 4) … of each sixteen (PTX ISA, mma.m16n8k32 and m16n8k16).
template <class T, int DEPTH, class Sum>
void emulated_mma_bytes(Sum* d, const uint32_t* a, const uint32_t* b) {
  MmaOperands mine = {};
  memcpy(mine.a, a, DEPTH / 8 * sizeof *a);
  memcpy(mine.b, b, DEPTH / 16 * sizeof *b);
  auto slots = emulation::put_down(emulation::FULL_MASK, mine);
  auto operands = [&](int lane) { return (const MmaOperands*)slots[lane]; };
  const int lane = emulation::current->lane;
  for (int r = 0; r < 4; ++r) {
    const int row = lane / 4 + 8 * (r / 2), column = 2 * (lane % 4) + r % 2;
    for (int k = 0; k < DEPTH; ++k) {
      const int part = k % 16 / 4, high = k / 16;
      const T x = ((const T*)&operands(row % 8 * 4 + part)->a[row / 8 + 2 * high])[k % 4];
      const T y = ((const T*)&operands(column * 4 + part)->b[high])[k % 4];
      d[r] += (Sum)(float)x * (Sum)(float)y;
    }
  }
}

template <bool TRANSPOSED>
void emulated_load_matrices(emulation::Slots slots, emulation::Results results) {
  for (int i = 0; i < 4; ++i) {
    const uint16_t* rows[8];
    for (int row = 0; row < 8; ++row) rows[row] = (const uint16_t*)emulation::take<const void*>(slots, 8 * i + row);
    for (int lane = 0; lane < 32; ++lane) {
      const int a = lane / 4, b = 2 * (lane % 4);
      ((uint32_t*)results[lane])[i] =
          TRANSPOSED ? rows[b][a] | (uint32_t)rows[b + 1][a] << 16 : rows[a][b] | (uint32_t)rows[a][b + 1] << 16;
    }
  }
}

template <bool TRANSPOSED>
void emulated_load_matrix(uint32_t* words, const void* row) {
  if ((uintptr_t)row % 16) emulation::fail("ldmatrix: a row that is not on a 16-byte boundary");
  memcpy(words, emulation::compute(emulation::FULL_MASK, &row, sizeof row, emulated_load_matrices<TRANSPOSED>), 16);
}

// What a lane has of the operands, as floats.
struct MmaNumbers {
  float a[8], b[4], c[4];
};

// Lane l owns rows l / 4 and l / 4 + 8 and columns 2 * (l % 4) and one more (PTX ISA, mma.m16n8k16).
void emulated_mma(emulation::Slots slots, emulation::Results results) {
  float a[16][16];
  Columns b[16], sums[16];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaNumbers& its = *(const MmaNumbers*)slots[lane];
    const int place = lane / 4, pair = 2 * (lane % 4);
    for (int i = 0; i < 8; ++i) a[place + i / 2 % 2 * 8][pair + i / 4 * 8 + i % 2] = its.a[i];
    for (int i = 0; i < 4; ++i) b[pair + i / 2 * 8 + i % 2][place] = its.b[i];
    for (int i = 0; i < 4; ++i) sums[place + i / 2 * 8][pair + i % 2] = its.c[i];
  }
  for (int row = 0; row < 16; row += 4)  // of one row alone each sum would wait for the one before it
    for (int k = 0; k < 16; ++k)
      for (int i = row; i < row + 4; ++i) sums[i] += a[i][k] * b[k];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) ((float*)results[lane])[i] = sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

}  // namespace

// ---- reductions ----

#define EMULATED_REDUCE(name, type, expression) \
  type name(unsigned mask, type value) { \
    return emulated_warp_reduce(mask, value, [](type a, type b) { return (type)(expression); }); \
  }
EMULATED_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATED_REDUCE(__reduce_add_sync, int, a + b)
EMULATED_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMULATED_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMULATED_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMULATED_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMULATED_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATED_REDUCE(__reduce_and_sync, unsigned, a& b)
#undef EMULATED_REDUCE

// ---- matrices ----

template <class T>
void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b) {
  MmaNumbers mine;
  for (int i = 0; i < 8; ++i) mine.a[i] = (float)((const T*)a)[i];
  for (int i = 0; i < 4; ++i) mine.b[i] = (float)((const T*)b)[i];
  memcpy(mine.c, d, sizeof mine.c);
  memcpy(d, emulation::compute(emulation::FULL_MASK, &mine, sizeof mine, emulated_mma), sizeof mine.c);
}
template void mma_m16n8k16<__nv_bfloat16>(float* d, const uint32_t* a, const uint32_t* b);
template void mma_m16n8k16<__half>(float* d, const uint32_t* a, const uint32_t* b);

template <int DEPTH>
void mma_s8(int* d, const uint32_t* a, const uint32_t* b) { emulated_mma_bytes<int8_t, DEPTH>(d, a, b); }
template void mma_s8<16>(int* d, const uint32_t* a, const uint32_t* b);
template void mma_s8<32>(int* d, const uint32_t* a, const uint32_t* b);
void mma_m16n8k32(int* d, const uint32_t* a, const uint32_t* b) { mma_s8<32>(d, a, b); }
void mma_m16n8k32(float* d, const uint32_t* a, const uint32_t* b) { emulated_mma_bytes<__nv_fp8_e4m3, 32>(d, a, b); }

void load_matrix_x4(uint32_t* words, const void* row) { emulated_load_matrix<false>(words, row); }
void load_matrix_x4_transposed(uint32_t* words, const void* row) { emulated_load_matrix<true>(words, row); }
