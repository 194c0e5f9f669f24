// K and V kept in int8, as the CPU's cache has them (cpu_cache.py): a row is that of a token and head, a number is its code times
// the row's scale, which lies in a tensor of its own, [blocks, kv_heads, BLOCK_SIZE] float.
#pragma once
#include "common.cuh"

template <class T>
constexpr bool IS_INT8 = false;
template <>
constexpr bool IS_INT8<int8_t> = true;

DEVICE float to_float(int8_t code) { return (float)code; }
template <>
DEVICE int8_t from_float<int8_t>(float x) { return (int8_t)(int)rintf(x); }

// Of a row whose largest magnitude has these bits: that / 127. NaN where a number is not finite, 0 where this is below the smallest
// normal number; codes are zeros then.
DEVICE float int8_scale(uint32_t largest) {
  if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  const float scale = __uint_as_float(largest) / 127.0f;
  return scale < __uint_as_float(0x00800000u) ? 0.0f : scale;
}

// What a cache of T keeps of a number; scale: of its row, or of fp8's head.
template <class T>
DEVICE T kept(float value, float scale) {
  if constexpr (IS_INT8<T>) {
    return from_float<T>(scale > 0.0f ? value / scale : 0.0f);
  } else {
    return from_float<T>(sizeof(T) == 1 ? value / scale : value);
  }
}

// The codes in bytes 0 and 2 of a word, as halves. A byte below the bits of 1024 counts from there; a code's sign turned, it is
// 128 more than the code.
DEVICE uint32_t halves_of_even_codes(uint32_t word) {
  constexpr uint32_t MIDDLE = 0x64806480u;  // 1152, twice
  const uint32_t raised = (word & 0x00ff00ffu) ^ MIDDLE;
  const __half2 codes = __hsub2(reinterpret_cast<const __half2&>(raised), reinterpret_cast<const __half2&>(MIDDLE));
  return reinterpret_cast<const uint32_t&>(codes);
}
