// A record of GGUF's blocks (block_records.py): 16 weight rows by COLUMNS columns, their codes and what these are worth.
//
//   weight = scale * (code - OFFSET) + low          code of BITS bits, unsigned; signed of 8 bits, or a number of the TABLE
//
// Macros: BITS; GROUP, the columns of a scale, 16 or 32; SCALE and LOW, their kinds as in record_kinds.py; OFFSET; UNIT, supers are
// divided by 2^UNIT; TABLE0 … TABLE3, sixteen signed bytes, or none of them. A record lies in global or in shared memory, on a
// boundary of 16 bytes; nothing here crosses lanes.
#pragma once
#include "common.cuh"

constexpr int F16 = 1, E8M0 = 3, SUB_U8 = 4, SUB_I8 = 5;          // SCALE
constexpr int NO_LOW = 0, MIN = 2, SUB_MIN = 3, NIBBLE = 4;       // LOW

constexpr int TILE = 16, STEP = 64;
constexpr bool HAS_SUPERS = SCALE >= SUB_U8, HAS_SUPER_LOWS = LOW >= SUB_MIN;
constexpr int COLUMNS = HAS_SUPERS ? 256 : 128, STEPS = COLUMNS / STEP, GROUPS = COLUMNS / GROUP, STEP_GROUPS = STEP / GROUP;
constexpr int BASE_BITS = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH_BITS = BITS - BASE_BITS;
constexpr int LANE_BASE = BASE_BITS * 4, LANE_HIGH = HIGH_BITS * 4;  // bytes of a lane and step
constexpr int SCALE_BYTES = SCALE == F16 ? 2 : 1, LOW_BYTES = LOW == MIN ? 2 : LOW == SUB_MIN ? 1 : 0;
constexpr int HIGH_AT = STEPS * WARP_SIZE * LANE_BASE;
constexpr int SCALES_AT = HIGH_AT + STEPS * WARP_SIZE * LANE_HIGH;
constexpr int LOWS_AT = SCALES_AT + TILE * GROUPS * SCALE_BYTES;
constexpr int SUPERS_AT = LOWS_AT + TILE * GROUPS * LOW_BYTES;
constexpr int RECORD_BYTES = SUPERS_AT + TILE * 2 * (HAS_SUPERS + HAS_SUPER_LOWS);
static_assert(RECORD_BYTES % 16 == 0 && (GROUP == 16 || GROUP == 32), "whole loads; groups of half an mma or a whole one");

// A lane's codes of a step, four a word: [32 columns][16 columns][row r, row r + 8], as two mma.m16n8k32 take them.
struct Words {
  uint32_t at[8];
};

#ifdef TABLE0
// Four codes of up to four bits, one a nibble of `selectors`, as the numbers they stand for; upper: the fourth bits, one a nibble
// from 0x3210 on, where there are any.
DEVICE uint32_t look_up(uint32_t selectors, uint32_t upper) {
  const uint32_t low = __byte_perm(TABLE0, TABLE1, selectors);
  return BITS < 4 ? low : __byte_perm(low, __byte_perm(TABLE2, TABLE3, selectors), upper);
}
#endif

DEVICE Words load_words(const uint8_t* record, int step, int lane) {
  Words words;
  uint32_t base[BASE_BITS == 8 ? 8 : 4], high[2];
#pragma unroll
  for (int i = 0; i < BASE_BITS; i += 4) {
    if (BASE_BITS == 2) {
      Vector<uint32_t, 2>::load(reinterpret_cast<const uint32_t*>(record + (step * WARP_SIZE + lane) * 8)).store(base);
    } else {
      const int place = (step * (BASE_BITS / 4) + i / 4) * WARP_SIZE + lane;
      const uint4 four = *reinterpret_cast<const uint4*>(record + place * 16);
      base[i] = four.x, base[i + 1] = four.y, base[i + 2] = four.z, base[i + 3] = four.w;
    }
  }
  if (HIGH_BITS) {
    const uint32_t* source = reinterpret_cast<const uint32_t*>(record + HIGH_AT) + (step * WARP_SIZE + lane) * HIGH_BITS;
    if (HIGH_BITS == 2) Vector<uint32_t, 2>::load(source).store(high);
    if (HIGH_BITS == 1) high[0] = *source;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (BITS == 8) {
      words.at[i] = base[i];
      continue;
    }
#ifdef TABLE0
    if (BITS == 4) {
      const uint32_t nibbles = base[i / 2] >> i % 2 * 16;
      words.at[i] = look_up(nibbles & 0x7777u, (nibbles >> 1 & 0x4444u) | 0x3210u);
      continue;
    }
#endif
    constexpr uint32_t MASK = 0x01010101u * ((1u << BASE_BITS) - 1);
    constexpr int SHARED = 8 / BASE_BITS;  // words in one of the plane
    uint32_t word = base[i / SHARED] >> i % SHARED * BASE_BITS & MASK;
    if (HIGH_BITS) {
      constexpr int COUNT = HIGH_BITS ? 8 / (HIGH_BITS ? HIGH_BITS : 1) : 1;
      constexpr uint32_t HIGH_MASK = 0x01010101u * (((1u << HIGH_BITS) - 1) << BASE_BITS);
      const int shift = i % COUNT * HIGH_BITS - BASE_BITS;  // to the right
      const uint32_t bits = high[i / COUNT];
      word |= (shift < 0 ? bits << -shift : bits >> shift) & HIGH_MASK;
    }
#ifdef TABLE0
    word |= word >> 4;  // bytes to nibbles
    word = look_up((word & 0xffu) | (word >> 8 & 0xff00u), 0);
#endif
    words.at[i] = word;
  }
  return words;
}

// 2^(exponent - 128), a denormal number below two.
DEVICE float power_of_two(uint32_t exponent) {
  return __uint_as_float(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23);
}

// What codes of one row of a record are worth, group by group, at indices that are constants once loops are unrolled.
struct RowScales {
  Vector<uint8_t, GROUPS * SCALE_BYTES> scales;
  Vector<uint8_t, GROUPS * (LOW_BYTES ? LOW_BYTES : 1)> lows;
  float super, super_low;

  DEVICE RowScales(const uint8_t* record, int row) {
    scales = scales.load(record + SCALES_AT + row * GROUPS * SCALE_BYTES);
    if (LOW_BYTES) lows = lows.load(record + LOWS_AT + row * GROUPS * LOW_BYTES);
    const half* supers = reinterpret_cast<const half*>(record + SUPERS_AT) + row;
    if (HAS_SUPERS) super = to_float(supers[0]) * (1.0f / (1 << UNIT));
    if (HAS_SUPER_LOWS) super_low = to_float(supers[TILE]);
  }

  DEVICE float half_at(const uint8_t* bytes) const {
    return __half2float(__ushort_as_half((unsigned short)(bytes[0] | bytes[1] << 8)));
  }

  DEVICE float scale(int group) const {
    if (SCALE == F16) return half_at(scales.at + group * 2);
    const uint8_t byte = scales.at[group];
    if (SCALE == E8M0) return power_of_two(byte);
    return super * (LOW == NIBBLE ? (float)(byte & 15) : SCALE == SUB_I8 ? (float)(int8_t)byte : (float)byte);
  }

  // Only where LOW is not NO_LOW.
  DEVICE float low(int group) const {
    if (LOW == MIN) return half_at(lows.at + group * 2);
    return -(super_low * (float)(LOW == NIBBLE ? scales.at[group] >> 4 : (int)lows.at[group]));
  }
};
