// Shared by all kernels: number types, 16-byte vectors, reductions, and wrappers around the PTX instructions in use.
//
// A kernel is compiled twice: by NVRTC for a GPU, and by g++ with EMULATION defined, for tests without one. What differs stands
// here and in the emulation's headers, never in a kernel. A kernel ends with EXPORT(name). Indices into tensors are int64_t.
//
// Types by macro: DTYPE (activations and weights) is bf16 or half, KV_DTYPE (the cache) is bf16, half or fp8 (e4m3).
#pragma once

#ifdef EMULATION
#include "cuda_emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef signed char int8_t;
typedef int int32_t;
typedef long long int64_t;
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define EXPORT(kernel)
#endif

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

typedef __nv_bfloat16 bf16;
typedef __nv_fp8_e4m3 fp8;

// Of elements of tensors, which may have more than 2^31.
#ifdef BUG_INT32
typedef int Index;
#else
typedef int64_t Index;
#endif

constexpr int WARP_SIZE = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float NEGATIVE_INFINITY = __builtin_bit_cast(float, 0xff800000u);  // NVRTC has no other constant for it

// ---- numbers ----

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
DEVICE float to_float(half x) { return __half2float(x); }
DEVICE float to_float(fp8 x) { return (float)x; }

// Rounds to nearest even; fp8 saturates at 448.
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) { return x; }
template <>
DEVICE bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
DEVICE half from_float<half>(float x) { return __float2half_rn(x); }
template <>
DEVICE fp8 from_float<fp8>(float x) { return fp8(x); }

// COUNT elements that are loaded and stored at once; the address is a multiple of their size.
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector {
  T at[COUNT];

  static DEVICE Vector load(const T* address) { return *reinterpret_cast<const Vector*>(address); }
  // As words: behind a condition the compiler stores a struct's elements one by one.
  DEVICE void store(T* address) const {
    if constexpr (sizeof(Vector) == 16) {
      *reinterpret_cast<uint4*>(address) = __builtin_bit_cast(uint4, *this);
    } else if constexpr (sizeof(Vector) == 8) {
      *reinterpret_cast<uint2*>(address) = __builtin_bit_cast(uint2, *this);
    } else {
      *reinterpret_cast<Vector*>(address) = *this;
    }
  }
};

// Elements of T in the widest load.
template <class T>
constexpr int WIDEST = 16 / sizeof(T);

// ---- reductions: every lane gets the result, the same bits in each ----

DEVICE float warp_sum(float value, int width = WARP_SIZE) {
  for (int bits = width / 2; bits; bits >>= 1) value += __shfl_xor_sync(ALL_LANES, value, bits);
  return value;
}

DEVICE float warp_max(float value, int width = WARP_SIZE) {
  for (int bits = width / 2; bits; bits >>= 1) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, bits));
  return value;
}

// Whole numbers have an instruction for it from Ampere on.
DEVICE uint32_t warp_max(uint32_t value) {
#if defined(EMULATION) || __CUDA_ARCH__ >= 800
  return __reduce_max_sync(ALL_LANES, value);
#else
  for (int bits = WARP_SIZE / 2; bits; bits >>= 1) value = max(value, __shfl_xor_sync(ALL_LANES, value, bits));
  return value;
#endif
}

// scratch: 32 floats of shared memory. All threads of a block whose size is a multiple of 32 call it; it begins and ends with a
// barrier, so scratch may be used again at once.
DEVICE float block_sum(float value, float* scratch) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  value = warp_sum(value);
  __syncthreads();
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_sum(lane < (int)blockDim.x / WARP_SIZE ? scratch[lane] : 0.0f);
}

// ---- PTX ----

#ifndef EMULATION

// d[16 x 8] += a[16 x 16] b[16 x 8] over a warp, fp32 sums; fragments as the PTX ISA has them for mma.m16n8k16.
template <class T>
DEVICE void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b);

template <>
DEVICE void mma_m16n8k16<half>(float* d, const uint32_t* a, const uint32_t* b) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else  // Turing has half the depth
  for (int i = 0; i < 2; ++i)
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#endif
}

#if __CUDA_ARCH__ >= 800
template <>
DEVICE void mma_m16n8k16<bf16>(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

DEVICE uint32_t shared_address(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, on a 16-byte boundary.
DEVICE void load_matrix_x4(uint32_t* words, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

DEVICE void load_matrix_x4_transposed(uint32_t* words, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

// 16 bytes that nobody writes meanwhile and nobody reads again, past the L1. Not ld.global.nc: ptxas moves those behind wait_for_previous_kernel.
DEVICE uint4 load_streaming(const void* source) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(source));
  return words;
}

// 16 bytes from global to shared memory, zeros where not in_range; there after wait_copies and a barrier.
DEVICE void copy_async_16(void* target, const void* source, bool in_range = true) {
#if __CUDA_ARCH__ >= 800
  const int bytes = in_range ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(target)), "l"(source), "r"(bytes) : "memory");
#else
  *reinterpret_cast<uint4*>(target) = in_range ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
#endif
}

DEVICE void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most LEFT of this thread's committed groups are under way.
template <int LEFT>
DEVICE void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// Programmatic dependent launch: with PDL a kernel starts while the one before it still runs. What it reads of that kernel's
// output it reads after wait_for_previous_kernel, which every kernel calls (weights may be prefetched before it).
DEVICE void wait_for_previous_kernel() {
#if defined(PDL) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_kernel_start() {
#if defined(PDL) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
