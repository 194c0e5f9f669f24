// Pairs of 16-bit numbers in a word, as operands of tensor cores, and numbers of eight bits that become such.
//
// By macro: DTYPE, bf16 or half.
#pragma once
#include "int8_rows.cuh"

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

// Bytes a and a + 1 of a word, 0 or 2, as pairs of DTYPE: e4m3, and int8 below.
template <class T>
struct Dequantizer {
  DEVICE explicit Dequantizer(float) {}
  DEVICE uint32_t pair(uint32_t word, int a) const {
    typedef Pairs<DTYPE> To;
    const uint32_t high = __byte_perm(word, 0, a == 0 ? 0x1404 : 0x3424);
    const uint32_t moved = (high & 0x80008000u) | ((high & 0x7f007f00u) >> To::SHIFT);
    const uint32_t bias = To::BIAS * 0x10001u;
    return same_bits<uint32_t>(__hmul2(same_bits<To::Type>(moved), same_bits<To::Type>(bias)));
  }
};

// Times the row's scale, which is two numbers of DTYPE: rounded once, but for what the second one's product loses.
template <>
struct Dequantizer<int8_t> {
  typedef Pairs<DTYPE>::Type Type;
  // half's smallest scales would lose bits: its codes are 64ths.
  static constexpr bool IS_HALF = Pairs<DTYPE>::SHIFT == 1;
  Type high, low;

  DEVICE explicit Dequantizer(float scale) {
    scale *= IS_HALF ? 64.0f : 1.0f;
    const float rounded = to_float(from_float<DTYPE>(scale));
    high = Pairs<DTYPE>::of(rounded, rounded);
    low = Pairs<DTYPE>::of(scale - rounded, scale - rounded);
  }
  DEVICE uint32_t pair(uint32_t word, int a) const {
    const uint32_t permuted = a == 0 ? 0x4140 : 0x4342;
    Type codes;
    if constexpr (IS_HALF) {  // a code's sign turned, below the bits of 16 it is 18 and 64ths of the code
      const uint32_t raised = __byte_perm(word ^ 0x80808080u, 0x4c4c4c4cu, permuted);
      codes = __hsub2(same_bits<Type>(raised), same_bits<Type>(0x4c804c80u));
    } else {  // 128 and the code's low seven bits, minus 128, or 256 by its sign
      const uint32_t raised = __byte_perm(word, 0x43434343u, permuted);
      codes = __hsub2(same_bits<Type>(raised & 0xff7fff7fu), same_bits<Type>(raised & 0xff80ff80u));
    }
    return same_bits<uint32_t>(__hfma2(codes, high, __hmul2(codes, low)));
  }
};
