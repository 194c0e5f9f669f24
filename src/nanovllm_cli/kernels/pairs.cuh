// Pairs of 16-bit numbers in a word, as operands of tensor cores, and e4m3 numbers that become such.
//
// By macro: DTYPE, bf16 or half.
#pragma once
#include "common.cuh"

// Pairs of DTYPE in a word. An e4m3 number whose sign, exponent and mantissa have moved to their places in DTYPE is too small by
// the difference of the exponents' biases; the product with a power of two is exact, subnormals included.
template <class T>
struct Pairs;
template <>
struct Pairs<bf16> {
  typedef __nv_bfloat162 Type;
  static constexpr int SHIFT = 4;
  static constexpr uint16_t BIAS = 0x7b80;  // 2^120
  static DEVICE Type of(float low, float high) { return __floats2bfloat162_rn(low, high); }
};
template <>
struct Pairs<half> {
  typedef __half2 Type;
  static constexpr int SHIFT = 1;
  static constexpr uint16_t BIAS = 0x5c00;  // 2^8
  static DEVICE Type of(float low, float high) { return __floats2half2_rn(low, high); }
};

template <class To, class From>
DEVICE To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

DEVICE uint32_t pack(float low, float high) { return same_bits<uint32_t>(Pairs<DTYPE>::of(low, high)); }

// Bytes a and a + 1 of a word of four e4m3 numbers.
DEVICE uint32_t dequantize(uint32_t word, int a) {
  typedef Pairs<DTYPE> To;
  const uint32_t high = __byte_perm(word, 0, a == 0 ? 0x1404 : 0x3424);
  const uint32_t moved = (high & 0x80008000u) | ((high & 0x7f007f00u) >> To::SHIFT);
  const uint32_t bias = To::BIAS * 0x10001u;
  return same_bits<uint32_t>(__hmul2(same_bits<To::Type>(moved), same_bits<To::Type>(bias)));
}
