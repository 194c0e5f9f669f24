// A record of GGUF's blocks (block_records.py): 16 weight rows by COLUMNS columns, their codes and what these are worth.
//
//   weight = scale * (code - OFFSET) + low          code of BITS bits, unsigned; signed of 8 bits, or a number of the TABLE
//
// Macros: BITS, of which one alone stands for 0 and 2, and eight for a number with a sign; GROUP, the columns of x that share a scale, 16 or 32; SPAN, the columns of a
// scale here, as many or 64 to 256; SCALE and LOW, their kinds as in record_kinds.py; OFFSET; UNIT, supers are
// divided by 2^UNIT; TABLE0 … TABLE3, sixteen signed bytes, or none of them. A record lies in global or in shared memory, on a
// boundary of 16 bytes; nothing here crosses lanes.
#pragma once
#include "common.cuh"

constexpr int F32 = 0, F16 = 1, BF16 = 2, E8M0 = 3, SUB_U8 = 4, SUB_I8 = 5, UE4M3 = 7;  // SCALE
constexpr int NO_LOW = 0, MIN = 2, SUB_MIN = 3, NIBBLE = 4;         // LOW

constexpr int TILE = 16, STEP = 64;
constexpr bool HAS_SUPERS = SCALE >= SUB_U8, HAS_SUPER_LOWS = LOW >= SUB_MIN;
constexpr int COLUMNS = HAS_SUPERS || SPAN > 128 ? 256 : 128, STEPS = COLUMNS / STEP, STEP_GROUPS = STEP / GROUP;
constexpr int SCALES = COLUMNS / SPAN, STEP_SCALES = SPAN < STEP ? STEP / SPAN : 1;
constexpr int BASE_BITS = BITS == 8 ? 8 : BITS >= 4 ? 4 : BITS >= 2 ? 2 : 1, HIGH_BITS = BITS - BASE_BITS;
constexpr int LANE_BASE = BASE_BITS * 4, LANE_HIGH = HIGH_BITS * 4;  // bytes of a lane and step
constexpr int SCALE_BYTES = SCALE == F32 ? 4 : SCALE <= BF16 ? 2 : 1, LOW_BYTES = LOW == MIN ? SCALE_BYTES : LOW == SUB_MIN;
constexpr int HIGH_AT = STEPS * WARP_SIZE * LANE_BASE;
constexpr int SCALES_AT = HIGH_AT + STEPS * WARP_SIZE * LANE_HIGH;
constexpr int LOWS_AT = SCALES_AT + TILE * SCALES * SCALE_BYTES;
constexpr int SUPERS_AT = LOWS_AT + TILE * SCALES * LOW_BYTES;
constexpr int SUPER_BYTES = SCALE == UE4M3 ? 4 : 2 * (HAS_SUPERS + HAS_SUPER_LOWS);
constexpr int RECORD_BYTES = SUPERS_AT + TILE * SUPER_BYTES;
static_assert(RECORD_BYTES % 16 == 0 && (GROUP == 16 || GROUP == 32), "whole loads; groups of half an mma or a whole one");
static_assert(SPAN == GROUP || (SPAN >= STEP && SCALE <= BF16 && LOW <= MIN), "a step has a scale a group, or one");
static_assert(LOW != MIN || (SCALE <= BF16 && STEP_SCALES * SCALE_BYTES <= 8), "minima as scales are");

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
    if (BASE_BITS == 1) {
      base[0] = reinterpret_cast<const uint32_t*>(record)[step * WARP_SIZE + lane];
    } else if (BASE_BITS == 2) {
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
    if (BITS == 1) {
      words.at[i] = (i ? base[0] >> (i - 1) : base[0] << 1) & 0x02020202u;
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

constexpr float BYTE_BASE = 8388608.0f;  // 2^23: a float of 0x4b0000xx is this plus xx, without a conversion

// What all codes of one row of a record have in common.
struct RowSupers {
  float scale = 1.0f, low = 1.0f;

  DEVICE RowSupers(const uint8_t* record, int row) {
    if (SCALE == UE4M3) {  // whose scales are read as halves: 2^-8 of what they are
      scale = reinterpret_cast<const float*>(record + SUPERS_AT)[row] * (256.0f / (1 << UNIT));
      return;
    }
    const half* supers = reinterpret_cast<const half*>(record + SUPERS_AT) + row;
    if (HAS_SUPERS) scale = to_float(supers[0]) * (1.0f / (1 << UNIT));
    if (HAS_SUPER_LOWS) low = -to_float(supers[TILE]);
  }
};

// What codes of one row are worth in a step, group by group, at indices that are constants once loops are unrolled.
struct RowScales {
  uint32_t scales[2], lows[2];
  const RowSupers& supers;

  DEVICE RowScales(const uint8_t* record, int row, int step, const RowSupers& supers) : supers(supers) {
    const int place = row * SCALES + step * STEP / SPAN;
    load<STEP_SCALES * SCALE_BYTES>(scales, record + SCALES_AT + place * SCALE_BYTES);
    if (LOW_BYTES) load<STEP_SCALES*(LOW_BYTES ? LOW_BYTES : 1)>(lows, record + LOWS_AT + place * LOW_BYTES);
  }

  DEVICE float scale(int group) const {
    if (SCALE <= BF16) return number_at(scales, SPAN == GROUP ? group : 0);
    if (SCALE == E8M0) {  // 2^(e - 128); denormal numbers are zero
      const uint32_t exponent = scales[0] >> group * 8 & 0xff;
      return __uint_as_float((max(exponent, 1u) - 1) << 23);
    }
    if (SCALE == UE4M3) return supers.scale * __half2float(__ushort_as_half((unsigned short)((scales[0] >> group * 8 & 0x7f) << 7)));
    if (SCALE == SUB_I8) return supers.scale * (byte_at(scales, group) - (BYTE_BASE + 128.0f));  // from -128 on
    return times(supers.scale, LOW == NIBBLE ? nibble_at(scales, group * 8) : byte_at(scales, group));
  }

  // Only where LOW is not NO_LOW.
  DEVICE float low(int group) const {
    if (LOW == MIN) return number_at(lows, SPAN == GROUP ? group : 0);
    return times(supers.low, LOW == NIBBLE ? nibble_at(scales, group * 8 + 4) : byte_at(lows, group));
  }

 private:
  template <int COUNT>
  static DEVICE void load(uint32_t* words, const uint8_t* source) {
    if (COUNT == 2) words[0] = *reinterpret_cast<const uint16_t*>(source);
    if (COUNT >= 4) words[0] = *reinterpret_cast<const uint32_t*>(source);
    if (COUNT == 8) words[1] = *reinterpret_cast<const uint32_t*>(source + 4);
  }
  static DEVICE float number_at(const uint32_t* words, int i) {
    if (SCALE == F32) return __uint_as_float(words[i]);
    if (SCALE == BF16) return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    return __half2float(__ushort_as_half((unsigned short)(words[i / 2] >> i % 2 * 16)));
  }
  // BYTE_BASE plus a byte, or four bits.
  static DEVICE float byte_at(const uint32_t* words, int i) {
    return __uint_as_float(__byte_perm(words[i / 4], 0x4b000000u, 0x7540u | i % 4));
  }
  static DEVICE float nibble_at(const uint32_t* words, int bit) {
    return __uint_as_float((words[bit / 32] >> bit % 32 & 15) | 0x4b000000u);
  }
  // super * what is above BYTE_BASE, rounded once: the product with the base is exact.
  static DEVICE float times(float super, float above) { return fmaf(super, above, -BYTE_BASE * super); }
};
