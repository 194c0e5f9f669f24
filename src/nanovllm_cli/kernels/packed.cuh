// Packed weights (packed.py has the layout) from words of codes to registers of two 16-bit numbers, for those who multiply them.
//
// By macro: DTYPE, the numbers' type; KIND, what codes are; GROUP, columns that share a scale, 0 for all of a row; SCALE, the type
// of scales; ZEROS, whether groups have zero points.
//
// Every number is exact, and its scale apart: sum a group, then scale the sum. How codes become numbers, in instructions a word:
//   int4   a nibble below the bits of 128 (bf16) or 1024 (half) is that plus the code; what zero would be is subtracted. 11
//   int8   half: as int4, 5. bf16, with seven bits of mantissa: 128 + the code's low seven bits, minus 128 or 256 by its eighth
//          bit, which is the sign of a code that counts from the middle. 7, and 2 for a zero point
//   fp8    sign, exponent and mantissa in their places, subnormal numbers too, then times what the exponents' biases differ by. 9
//   nf4    low and high bytes of a table of 16 numbers, by byte permutes whose selectors the codes are. 21
#pragma once
#include "common.cuh"

constexpr int INT4 = 0, INT8 = 1, FP8 = 2, NF4 = 3;
constexpr int TILE_OUTPUTS = 16, TILE_COLUMNS = 64, TILE_STEPS = 4;  // a step is the 16 columns of an mma
constexpr int HALVES = KIND == INT4 || KIND == NF4 ? 1 : 2;         // 16-byte loads of a lane in a tile
constexpr int HALF_BYTES = 512, TILE_BYTES = HALVES * HALF_BYTES;
constexpr int DEFAULT_ZERO = KIND == INT4 ? 8 : 128;

// A weight of `width` columns: strips of 16 outputs, slices of 64 columns.
struct Weight {
  static constexpr int DIVISOR = GROUP ? GROUP : 1;

  const uint8_t* codes;
  const SCALE* scales;
  const uint8_t* zeros;
  int width, slices, groups;

  DEVICE Weight(const uint8_t* codes, const SCALE* scales, const uint8_t* zeros, int width)
      : codes(codes), scales(scales), zeros(zeros), width(width), slices((width + TILE_COLUMNS - 1) / TILE_COLUMNS),
        groups(GROUP ? (width + DIVISOR - 1) / DIVISOR : 1) {}

  // A lane's first bytes of a tile.
  DEVICE const uint8_t* codes_of(int64_t strip, int slice, int lane) const {
    return codes + ((Index)strip * slices + slice) * TILE_BYTES + lane * 16;
  }
  // Where scales and zero points of a strip's group begin.
  DEVICE int64_t group_at(int64_t strip, int group) const { return (strip * groups + group) * TILE_OUTPUTS; }
  DEVICE int group_of(int column) const { return GROUP ? (unsigned)column / DIVISOR : 0; }
};

template <class T>
struct Sixteen;

template <>
struct Sixteen<bf16> {
  typedef __nv_bfloat162 Pair;
  static constexpr uint32_t WHOLE = 0x4300;      // 128: its mantissa counts whole numbers
  static constexpr uint32_t FP8_SCALE = 0x7b80;  // 2^120, for exponents of bias 7 and 127
  static constexpr int FP8_SHIFT = 4;
};
template <>
struct Sixteen<half> {
  typedef __half2 Pair;
  static constexpr uint32_t WHOLE = 0x6400;      // 1024
  static constexpr uint32_t FP8_SCALE = 0x5c00;  // 2^8, for 7 and 15
  static constexpr int FP8_SHIFT = 1;
};
constexpr bool IS_BF16 = Sixteen<DTYPE>::FP8_SHIFT == 4;

constexpr DEVICE uint32_t twice(uint32_t number) { return number << 16 | number; }

DEVICE uint32_t subtract_pair(uint32_t a, uint32_t b) {
  typedef Sixteen<DTYPE>::Pair Pair;
  const Pair result = __hsub2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}

DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b) {
  typedef Sixteen<DTYPE>::Pair Pair;
  const Pair result = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}

// What `numbers_of` subtracts for a zero point, ready for use: keep it for as long as a group lasts.
DEVICE uint32_t middle_of(uint32_t zero) {
  if (KIND == INT8 && IS_BF16) {
    const DTYPE shift = from_float<DTYPE>((float)((int)zero - DEFAULT_ZERO));
    return twice(reinterpret_cast<const uint16_t&>(shift));
  }
  return twice(Sixteen<DTYPE>::WHOLE + zero);
}

// Of the two constants of int4's and int8's conversion, one. A caller with a register to spare hands it in from a place that the
// compiler can't see through: an instruction takes one constant, and ptxas moves a second one into a register for every use.
constexpr uint32_t KEPT = KIND == INT4 ? 0x000f000f : twice(Sixteen<DTYPE>::WHOLE);

// Registers 0 to 3 of a step, of a word of four-bit codes. middles: of outputs g and g + 8; nf4 has none.
DEVICE void numbers_of_nibbles(uint32_t* registers, uint32_t word, uint32_t middle, uint32_t other_middle,
                               uint32_t kept = KEPT) {
  if (KIND == INT4) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      registers[i] = subtract_pair((word >> 4 * i & kept) | twice(Sixteen<DTYPE>::WHOLE), i % 2 ? other_middle : middle);
  } else {  // four codes at once: from the lower and from the upper half of the table, then one of both by the fourth bit
    constexpr uint32_t LOW[4] = {IS_BF16 ? 0xca063280 : 0x52339200, IS_BF16 ? 0x00ba3d92 : 0x00d4ea8d,
                                 IS_BF16 ? 0xad7c25a3 : 0x68e02618, IS_BF16 ? 0x803910e2 : 0x00c9800d};
    constexpr uint32_t HIGH[4] = {IS_BF16 ? 0xbebfbfbf : 0xb6b8b9bc, IS_BF16 ? 0x00bdbebe : 0x00adb1b4,
                                  IS_BF16 ? 0x3e3e3e3d : 0x3533312d, IS_BF16 ? 0x3f3f3f3e : 0x3c393837};
    const uint32_t within = word & 0x77777777, which = (word >> 1 & 0x44444444) | 0x32103210;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t place = within >> 16 * i, which_half = which >> 16 * i;
      const auto looked_up = [&](const uint32_t* table) {
        return __byte_perm(__byte_perm(table[0], table[1], place), __byte_perm(table[2], table[3], place), which_half);
      };
      const uint32_t low = looked_up(LOW), high = looked_up(HIGH);
      registers[2 * i] = __byte_perm(low, high, 0x5140);
      registers[2 * i + 1] = __byte_perm(low, high, 0x7362);
    }
  }
}

// Two registers of a step, of a word of eight-bit codes: 0 and 2 from the first half of a tile, 1 and 3 from the second.
DEVICE void numbers_of_bytes(uint32_t& first, uint32_t& second, uint32_t word, uint32_t middle, uint32_t kept = KEPT) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t& result = i ? second : first;
    if (KIND == FP8) {
      const uint32_t upper = i ? word : word << 8;
      constexpr int SHIFT = Sixteen<DTYPE>::FP8_SHIFT;
      const uint32_t number = (upper & 0x80008000) | (upper >> SHIFT & twice(0x7f00 >> SHIFT));
      result = multiply_pair(number, twice(Sixteen<DTYPE>::FP8_SCALE));
    } else if (!IS_BF16) {
      result = subtract_pair((word >> 8 * i & 0x00ff00ff) | kept, middle);
    } else {
      const uint32_t lower = word >> 8 * i;
      result = subtract_pair((lower & 0x007f007f) | kept, (~lower & 0x00800080) | kept);
      if (ZEROS) result = subtract_pair(result, middle);
    }
  }
}

// Registers 0 to 3 of a step, of a lane's words of it, one of each half of the tile.
DEVICE void numbers_of(uint32_t* registers, const uint32_t* words, uint32_t middle, uint32_t other_middle, uint32_t kept = KEPT) {
  if (HALVES == 1) {
    numbers_of_nibbles(registers, words[0], middle, other_middle, kept);
  } else {
    numbers_of_bytes(registers[0], registers[2], words[0], middle, kept);
    numbers_of_bytes(registers[1], registers[3], words[HALVES - 1], other_middle, kept);
  }
}
