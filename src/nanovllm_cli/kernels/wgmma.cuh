// Hopper's matrix products of a warpgroup (wgmma, sm_90a): four neighbouring warps, of which the first one's index is a multiple
// of four. They run by themselves while the threads go on:
//
//   wgmma_fence      these registers of A, as the threads have written them, are seen by the products that follow
//   wgmma            a product begins; until it is waited for, its registers and its shared memory are its own
//   wgmma_commit     products since the last one are a group
//   wgmma_wait       until at most so many groups are under way
//
// They read shared memory past the way that threads write it: each thread that wrote calls `fence_for_products` in front of the
// barrier that tells the others.
#pragma once
#include "common.cuh"

constexpr int WARPGROUP_WARPS = 4;
constexpr int PATTERN_BYTES = 1024;  // of eight rows of 128 bytes, on addresses that are multiples of this

// A matrix of 16-bit numbers in shared memory for wgmma's B, by its first byte's shared address: rows (of tokens) have 128 bytes,
// 64 columns; eight rows are a pattern, chunk c of row r at place c ^ r % 8. Its descriptor (PTX ISA, matrix descriptor format):
// bits 0-13 the address / 16, 16-29 a distance that this pattern doesn't need, 32-45 from pattern to pattern, 62-63 the pattern.
struct RowsOf128Bytes {
#ifdef BUG_PATTERN
  static constexpr uint64_t SWIZZLE_128 = 2;
#else
  static constexpr uint64_t SWIZZLE_128 = 1;
#endif
  static constexpr uint32_t UNUSED = 1;

  uint32_t lower;

  DEVICE RowsOf128Bytes(uint32_t address) : lower(UNUSED << 16 | address / 16) {}

  // Of 16 columns of a matrix that lies so many bytes further, a multiple of a pattern's.
  DEVICE uint64_t descriptor(uint32_t offset, int columns) const {
    return SWIZZLE_128 << 62 | (uint64_t)(PATTERN_BYTES / 16) << 32 | (lower + offset / 16 + columns * 2);
  }
};

#ifndef EMULATION

// A value that stays in its registers: it is not made again from what it was made of.
DEVICE void keep(int& value) { asm volatile("" : "+r"(value)); }
DEVICE void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }
template <class T>
DEVICE void keep(T*& value) {
  asm volatile("" : "+l"(value));
}

// What makes the registers stays ahead of the fence, where the PTX ISA wants it. Left alone, the compiler moves some of that
// between fence and product, and ptxas then ends the group there and fences again.
template <int COUNT>
DEVICE void wgmma_fence(uint32_t (&a)[COUNT][4]) {
#ifndef BUG_LATE_NUMBERS
#pragma unroll
  for (int i = 0; i < COUNT * 4; ++i) keep(a[i / 4][i % 4]);
#endif
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
DEVICE void fence_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(i) WGMMA_4(i), WGMMA_4(i + 4), WGMMA_4(i + 8), WGMMA_4(i + 12)
#define WGMMA_TEXT_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
#define WGMMA_TEXT_16 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_TEXT_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_TEXT_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA(n, type, sums, operands, ...) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" sums "}," operands ",1,1,1,0;" \
               : __VA_ARGS__ \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d[64 x COLUMNS] += a[64 x 16] b[16 x COLUMNS] over a warpgroup, of bf16 or half, fp32 sums. A warp has 16 rows of a and d, as
// mma.m16n8k16 has them, and COLUMNS / 8 tiles of d.
template <int COLUMNS, bool IN_BF16>
DEVICE void wgmma(float* d, const uint32_t* a, uint64_t b) {
  static_assert(COLUMNS == 64 || COLUMNS == 96 || COLUMNS == 128 || COLUMNS == 192);
#define WGMMA_OF(type) \
  if constexpr (COLUMNS == 64) \
    WGMMA("64", type, WGMMA_TEXT_0 WGMMA_TEXT_16, "{%32,%33,%34,%35},%36", WGMMA_16(0), WGMMA_16(16)); \
  else if constexpr (COLUMNS == 96) \
    WGMMA("96", type, WGMMA_TEXT_0 WGMMA_TEXT_16 WGMMA_TEXT_32, "{%48,%49,%50,%51},%52", WGMMA_16(0), WGMMA_16(16), \
          WGMMA_16(32)); \
  else if constexpr (COLUMNS == 128) \
    WGMMA("128", type, WGMMA_TEXT_0 WGMMA_TEXT_16 WGMMA_TEXT_32 WGMMA_TEXT_48, "{%64,%65,%66,%67},%68", WGMMA_16(0), \
          WGMMA_16(16), WGMMA_16(32), WGMMA_16(48)); \
  else \
    WGMMA("192", type, WGMMA_TEXT_0 WGMMA_TEXT_16 WGMMA_TEXT_32 WGMMA_TEXT_48 WGMMA_TEXT_64 WGMMA_TEXT_80, \
          "{%96,%97,%98,%99},%100", WGMMA_16(0), WGMMA_16(16), WGMMA_16(32), WGMMA_16(48), WGMMA_16(64), WGMMA_16(80));
  if constexpr (IN_BF16) {
    WGMMA_OF("bf16")
  } else {
    WGMMA_OF("f16")
  }
}

// The compiler may not read these earlier than here.
template <int COUNT>
DEVICE void sums_are_there(float* d) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#endif
