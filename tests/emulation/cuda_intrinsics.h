// What CUDA gives a kernel, for the emulation: built-in variables, barriers, warp functions, atomics, arithmetic, and the
// wrappers of common.cuh around PTX instructions. What is long is in warps.cpp. An intrinsic that a kernel needs and that is
// missing here is added here.
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
inline void __syncwarp(unsigned mask = emulation::FULL_MASK) { emulation::warp_barrier(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { sched_yield(); }  // a kernel waits for another process

inline int __syncthreads_or(int p) { return emulation::block_reduce(p != 0, [](int a, int b) { return a | b; }); }
inline int __syncthreads_and(int p) { return emulation::block_reduce(p != 0, [](int a, int b) { return a & b; }); }
inline int __syncthreads_count(int p) { return emulation::block_reduce(p != 0, [](int a, int b) { return a + b; }); }

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
inline unsigned __activemask() { return emulation::live_lanes(); }
unsigned __ballot_sync(unsigned mask, int predicate);
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
unsigned __reduce_add_sync(unsigned mask, unsigned value);
int __reduce_add_sync(unsigned mask, int value);
unsigned __reduce_min_sync(unsigned mask, unsigned value);
int __reduce_min_sync(unsigned mask, int value);
unsigned __reduce_max_sync(unsigned mask, unsigned value);
int __reduce_max_sync(unsigned mask, int value);
unsigned __reduce_or_sync(unsigned mask, unsigned value);
unsigned __reduce_and_sync(unsigned mask, unsigned value);

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
inline float emulated_fma(float a, float b, float c) { return (float)((double)a * b + c); }
template <class Pair>
inline Pair __hfma2(Pair a, Pair b, Pair c) {
  const float low = emulated_fma(__low2float(a), __low2float(b), __low2float(c));
  const float high = emulated_fma(__high2float(a), __high2float(b), __high2float(c));
  return {decltype(a.x)(low), decltype(a.x)(high)};
}
template <class T>
inline T __ldg(const T* address) { return *address; }
template <class T>
inline T __ldcs(const T* address) { return *address; }
template <class T>
inline T __ldcg(const T* address) { return *address; }
inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }
template <class T>
inline void __stcs(T* address, T value) { *address = value; }
template <class T>
inline void __stcg(T* address, T value) { *address = value; }

// ---- the PTX wrappers of common.cuh ----

template <class T>
void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b);
template <int DEPTH>
void mma_s8(int* d, const uint32_t* a, const uint32_t* b);
void mma_m16n8k32(int* d, const uint32_t* a, const uint32_t* b);
void mma_m16n8k32(float* d, const uint32_t* a, const uint32_t* b);
void load_matrix_x4(uint32_t* words, const void* row);
void load_matrix_x4_transposed(uint32_t* words, const void* row);

inline uint4 load_streaming(const void* source) {
  if ((uintptr_t)source % 16) emulation::fail("a 16-byte load that is not on a 16-byte boundary");
  return *(const uint4*)source;
}

inline void copy_async_16(void* target, const void* source, bool in_range = true) {
  if ((uintptr_t)target % 16 || (in_range && (uintptr_t)source % 16)) emulation::fail("cp.async: not on a 16-byte boundary");
  emulation::copy_async_16(target, source, in_range);
}
inline void commit_copies() { emulation::commit_copies(); }
template <int LEFT>
inline void wait_copies() { emulation::wait_copies(LEFT); }

inline uint32_t shared_address(const void* pointer) { return emulation::shared_address(pointer); }
template <int COLUMNS, bool IN_BF16>
inline void wgmma(float* d, const uint32_t* a, uint64_t b) { emulation::begin_product(d, a, b, COLUMNS, IN_BF16); }
template <int COUNT>
inline void wgmma_fence(uint32_t (&a)[COUNT][4]) { emulation::fence_registers(a[0], COUNT); }
inline void wgmma_commit() { emulation::commit_products(); }
template <int LEFT>
inline void wgmma_wait() { emulation::wait_products(LEFT); }
template <class T>
inline void keep(T&) {}
template <int COUNT>
inline void sums_are_there(float*) {}
inline void fence_for_products() { emulation::fence_copies(); }
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
