// What CUDA gives a kernel, for the emulation: built-in variables, barriers, warp functions, atomics, arithmetic, and the
// wrappers of common.cuh around PTX instructions. An intrinsic that a kernel needs and that is missing here is added here.
#pragma once

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_dim)
#define gridDim (emulation::grid_dim)
#define warpSize 32

using std::max;
using std::min;

// ---- waiting ----

inline void __syncthreads() { emulation::block_barrier(); }
inline void __syncwarp(unsigned mask = emulation::FULL_MASK) { emulation::meet(emulation::meeting_of(mask)); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {}

template <class T>
inline T block_reduce(T value, T (*combine)(T, T)) {
  static std::vector<T> values;
  static T result;
  values.push_back(value);
  const bool last = (int)values.size() == emulation::live_threads;
  if (last) {
    result = values[0];
    for (size_t i = 1; i < values.size(); ++i) result = combine(result, values[i]);
    values.clear();
  }
  emulation::block_barrier();
  T mine = result;
  emulation::block_barrier();
  return mine;
}
inline int __syncthreads_or(int p) { return block_reduce<int>(p != 0, [](int a, int b) { return a | b; }); }
inline int __syncthreads_and(int p) { return block_reduce<int>(p != 0, [](int a, int b) { return a & b; }); }
inline int __syncthreads_count(int p) { return block_reduce<int>(p != 0, [](int a, int b) { return a + b; }); }

// ---- warps ----

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emulation::current->lane;
  return emulation::exchange(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = emulation::current->lane, other = lane ^ bits;
  return emulation::exchange(mask, value, (other & ~(width - 1)) == (lane & ~(width - 1)) ? other : lane);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32) {
  const int lane = emulation::current->lane;
  return emulation::exchange(mask, value, (lane & (width - 1)) + delta < width ? lane + delta : lane);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32) {
  const int lane = emulation::current->lane;
  return emulation::exchange(mask, value, (lane & (width - 1)) - delta >= 0 ? lane - delta : lane);
}
inline unsigned __activemask() { return emulation::warps[emulation::current->warp].live; }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  auto slots = emulation::put_down<int>(mask, predicate != 0);
  const unsigned live = emulation::warps[emulation::current->warp].live;
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    if ((mask & live) >> lane & 1) bits |= (unsigned)emulation::take<int>(slots, lane) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T, class Combine>
inline T emulated_warp_reduce(unsigned mask, T value, Combine combine) {
  auto slots = emulation::put_down(mask, value);
  const unsigned live = mask & emulation::warps[emulation::current->warp].live;
  T result = value;
  for (int lane = 0; lane < 32; ++lane)
    if (lane != emulation::current->lane && (live >> lane & 1)) result = combine(result, emulation::take<T>(slots, lane));
  return result;
}
#define EMULATED_REDUCE(name, type, expression) \
  inline type name(unsigned mask, type value) { \
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

// ---- atomics: one thread runs at a time ----

template <class T>
inline T emulated_atomic(T* target, T value) {
  T old = *target;
  *target = value;
  return old;
}
template <class T>
inline T atomicAdd(T* target, T value) { return emulated_atomic<T>(target, *target + value); }
template <class T>
inline T atomicSub(T* target, T value) { return emulated_atomic<T>(target, *target - value); }
template <class T>
inline T atomicMax(T* target, T value) { return emulated_atomic<T>(target, std::max(*target, value)); }
template <class T>
inline T atomicMin(T* target, T value) { return emulated_atomic<T>(target, std::min(*target, value)); }
template <class T>
inline T atomicOr(T* target, T value) { return emulated_atomic<T>(target, *target | value); }
template <class T>
inline T atomicAnd(T* target, T value) { return emulated_atomic<T>(target, *target & value); }
template <class T>
inline T atomicExch(T* target, T value) { return emulated_atomic<T>(target, value); }
template <class T>
inline T atomicCAS(T* target, T expected, T value) {
  return emulated_atomic<T>(target, *target == expected ? value : *target);
}
inline unsigned atomicInc(unsigned* target, unsigned limit) {
  return emulated_atomic<unsigned>(target, *target >= limit ? 0 : *target + 1);
}

// ---- arithmetic and loads ----

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = (uint64_t)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
  return c;
}
template <class T>
inline T __ldg(const T* address) { return *address; }
template <class T>
inline T __ldcs(const T* address) { return *address; }
template <class T>
inline T __ldcg(const T* address) { return *address; }
template <class T>
inline void __stcs(T* address, T value) { *address = value; }
template <class T>
inline void __stcg(T* address, T value) { *address = value; }

// ---- the PTX wrappers of common.cuh ----

struct MmaOperands {
  uint32_t a[4], b[2];
  float c[4];
};

template <class T>
inline float half_word(uint32_t pair, int index) {
  T value;
  const uint16_t bits = index ? pair >> 16 : pair & 0xffff;
  memcpy(&value, &bits, sizeof value);
  return (float)value;
}

// Lane l owns rows l / 4 and l / 4 + 8 and columns 2 * (l % 4) and one more (PTX ISA, mma.m16n8k16).
template <class T>
inline void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b) {
  MmaOperands mine;
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b, sizeof mine.b);
  memcpy(mine.c, d, sizeof mine.c);
  auto slots = emulation::put_down(emulation::FULL_MASK, mine);
  auto operands = [&](int lane) { return (const MmaOperands*)slots[lane]; };
  const int lane = emulation::current->lane;
  for (int r = 0; r < 4; ++r) {
    const int row = lane / 4 + 8 * (r / 2), column = 2 * (lane % 4) + r % 2;
    float sum = mine.c[r];
    for (int k = 0; k < 16; ++k) {
      const int part = k % 8 / 2, high = k / 8;
      sum += half_word<T>(operands(row % 8 * 4 + part)->a[row / 8 + 2 * high], k % 2) *
             half_word<T>(operands(column * 4 + part)->b[high], k % 2);
    }
    d[r] = sum;
  }
}

// Of 8-bit numbers, four a word: lane l owns columns 4 * (l % 4) … of each sixteen (PTX ISA, mma.m16n8k32 and m16n8k16).
template <class T, int DEPTH, class Sum>
inline void emulated_mma_bytes(Sum* d, const uint32_t* a, const uint32_t* b) {
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
template <int DEPTH>
inline void mma_s8(int* d, const uint32_t* a, const uint32_t* b) { emulated_mma_bytes<int8_t, DEPTH>(d, a, b); }
inline void mma_m16n8k32(int* d, const uint32_t* a, const uint32_t* b) { mma_s8<32>(d, a, b); }
inline void mma_m16n8k32(float* d, const uint32_t* a, const uint32_t* b) { emulated_mma_bytes<__nv_fp8_e4m3, 32>(d, a, b); }

template <bool TRANSPOSED>
inline void emulated_load_matrix(uint32_t* words, const void* row) {
  if ((uintptr_t)row % 16) emulation::fail("ldmatrix: a row that is not on a 16-byte boundary");
  auto slots = emulation::put_down(emulation::FULL_MASK, row);
  const int lane = emulation::current->lane;
  for (int i = 0; i < 4; ++i) {
    auto element = [&](int row, int column) {
      return (uint32_t)((const uint16_t*)emulation::take<const void*>(slots, 8 * i + row))[column];
    };
    const int a = lane / 4, b = 2 * (lane % 4);
    words[i] = TRANSPOSED ? element(b, a) | element(b + 1, a) << 16 : element(a, b) | element(a, b + 1) << 16;
  }
  __syncwarp();  // a row may be overwritten as soon as the instruction is done
}
inline void load_matrix_x4(uint32_t* words, const void* row) { emulated_load_matrix<false>(words, row); }
inline void load_matrix_x4_transposed(uint32_t* words, const void* row) { emulated_load_matrix<true>(words, row); }

inline uint4 load_streaming(const void* source) {
  if ((uintptr_t)source % 16) emulation::fail("a 16-byte load that is not on a 16-byte boundary");
  return *(const uint4*)source;
}

// The copy happens at the wait; until then its target is poison.
inline void copy_async_16(void* target, const void* source, bool in_range = true) {
  if ((uintptr_t)target % 16 || (in_range && (uintptr_t)source % 16)) emulation::fail("cp.async: not on a 16-byte boundary");
  emulation::current->open_copies.push_back({target, source, 16, in_range ? 16 : 0});
  memset(target, emulation::POISON, 16);
}
inline void commit_copies() {
  emulation::current->copy_groups.push_back(std::move(emulation::current->open_copies));
  emulation::current->open_copies.clear();
}
template <int LEFT>
inline void wait_copies() {
  auto& groups = emulation::current->copy_groups;
  while ((int)groups.size() > LEFT) {
    for (const emulation::AsyncCopy& copy : groups[0]) {
      if (copy.source_bytes) {
        memcpy(copy.target, copy.source, copy.source_bytes);
      } else {
        memset(copy.target, 0, copy.bytes);
      }
    }
    groups.erase(groups.begin());
  }
}
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
