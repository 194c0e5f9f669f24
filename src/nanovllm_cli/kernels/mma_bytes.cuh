// Matrix instructions of 8-bit numbers: d[16 x 8] += a[16 x 32] b[32 x 8] over a warp, fragments as the PTX ISA has them for
// mma.m16n8k32. d is int for int8 (sm_80), float for e4m3 (sm_89).
#pragma once
#include "common.cuh"

#ifndef EMULATION

// d[16 x 8] += a[16 x DEPTH] b[DEPTH x 8] over a warp, signed bytes and 32-bit sums; DEPTH 32 or 16, fragments as for m16n8k32 and
// m16n8k16 of .s8.
template <int DEPTH>
DEVICE void mma_s8(int* d, const uint32_t* a, const uint32_t* b) {
#if __CUDA_ARCH__ >= 800
  if (DEPTH == 32) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  }
#else  // Turing has half the rows, too
  for (int i = 0; i < DEPTH / 16; ++i)
    for (int half = 0; half < 2; ++half)
      asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
                   : "+r"(d[2 * half]), "+r"(d[2 * half + 1])
                   : "r"(a[2 * i + half]), "r"(b[i]));
#endif
}

DEVICE void mma_m16n8k32(int* d, const uint32_t* a, const uint32_t* b) { mma_s8<32>(d, a, b); }

#if __CUDA_ARCH__ >= 890
DEVICE void mma_m16n8k32(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

#endif
