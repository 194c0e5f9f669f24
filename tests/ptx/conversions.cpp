// From one type to another, and words from their parts.
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {
namespace {

// To `bits` of significand, to nearest even; below the least exponent of normal numbers with fewer.
double rounded(double x, int bits, int least) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), least) - (bits - 1);
  return std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
}

// The bits of a rounded number in a format with so many bits of exponent and fraction, without what lies beyond its largest.
uint32_t encoded(double x, int exponent_bits, int fraction_bits) {
  const uint32_t sign = std::signbit(x) ? 1u << (exponent_bits + fraction_bits) : 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (x == 0) return sign;
  const double size = std::fabs(x);
  const int exponent = std::ilogb(size);
  if (exponent < 1 - bias) return sign | (uint32_t)std::ldexp(size, fraction_bits + bias - 1);
  const uint32_t fraction = (uint32_t)std::ldexp(size, fraction_bits - exponent) - (1u << fraction_bits);
  return sign | (uint32_t)(exponent + bias) << fraction_bits | fraction;
}

double decoded(uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t fraction = bits & ((1u << fraction_bits) - 1), exponent = bits >> fraction_bits & ((1u << exponent_bits) - 1);
  const double size = exponent ? std::ldexp((double)(fraction + (1u << fraction_bits)), (int)exponent - bias - fraction_bits)
                               : std::ldexp((double)fraction, 1 - bias - fraction_bits);
  return bits >> (exponent_bits + fraction_bits) & 1 ? -size : size;
}

uint16_t to_sixteen(double x, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (x != x) return 0x7fff;
  const double near = rounded(x, fraction_bits + 1, 1 - bias);
  if (std::fabs(near) < std::ldexp(1.0, bias + 1)) return encoded(near, exponent_bits, fraction_bits);
  return (std::signbit(x) ? 0x8000 : 0) | ((1u << exponent_bits) - 1) << fraction_bits;
}

float of_half(uint32_t bits) {
  if ((bits >> 10 & 0x1f) != 0x1f) return decoded(bits, 5, 10);
  if (bits & 0x3ff) return std::numeric_limits<float>::quiet_NaN();
  return bits & 0x8000 ? -INFINITY : INFINITY;
}

// No infinities; NaN is all ones.
float of_e4m3(uint32_t bits) { return (bits & 0x7f) == 0x7f ? std::numeric_limits<float>::quiet_NaN() : (float)decoded(bits, 4, 3); }

template <int COUNT>
std::vector<float> all_of(float (*number)(uint32_t)) {
  std::vector<float> numbers(COUNT);
  for (int i = 0; i < COUNT; ++i) numbers[i] = number(i);
  return numbers;
}

const std::vector<float> HALVES = all_of<1 << 16>(of_half), E4M3 = all_of<1 << 8>(of_e4m3);

}  // namespace

float from_half(uint16_t bits) { return HALVES[bits]; }
float from_e4m3(uint8_t bits) { return E4M3[bits]; }
float from_bf16(uint16_t bits) { return __builtin_bit_cast(float, (uint32_t)bits << 16); }
uint16_t to_half(double x) { return to_sixteen(x, 5, 10); }
uint16_t to_bf16(double x) { return to_sixteen(x, 8, 7); }

uint8_t to_e4m3(double x) {
  if (x != x) return 0x7f;
  const double near = rounded(x, 4, -6);
  return encoded(std::fabs(near) > 448 ? std::copysign(448.0, x) : near, 4, 3);
}

namespace {

// What is narrower than its register is extended, as its type has it.
template <class To>
void set_number(Thread& t, const Op& op, To value) {
  if constexpr (std::is_integral_v<To>) {
    t.set<int64_t>(op, 0, (int64_t)value);
  } else {
    t.set<To>(op, 0, value);
  }
}

template <class To, class From>
void integer(Thread& t, const Op& op) { set_number<To>(t, op, (To)t.get<From>(op, 1)); }

// Out of range is the nearest there is, NaN zero.
template <class To, class From, bool FLUSHED, double (*ROUND)(double)>
void to_integer(Thread& t, const Op& op) {
  From value = t.get<From>(op, 1);
  if constexpr (FLUSHED) value = flush(value);
  const double whole = ROUND(value);
  using Limits = std::numeric_limits<To>;
  const double beyond = std::ldexp(1.0, Limits::digits);  // the first that does not fit
  set_number<To>(t, op, whole != whole                     ? To(0)
                        : whole >= beyond                  ? Limits::max()
                        : whole < (double)Limits::min() ? Limits::min()
                                                           : (To)whole);
}

template <class To>
void add_from(Table& table, const std::string& to) {
  table["cvt." + to + ".u8"] = {integer<To, uint8_t>}, table["cvt." + to + ".s8"] = {integer<To, int8_t>};
  table["cvt." + to + ".u16"] = {integer<To, uint16_t>}, table["cvt." + to + ".s16"] = {integer<To, int16_t>};
  table["cvt." + to + ".u32"] = {integer<To, uint32_t>}, table["cvt." + to + ".s32"] = {integer<To, int32_t>};
  table["cvt." + to + ".u64"] = {integer<To, uint64_t>}, table["cvt." + to + ".s64"] = {integer<To, int64_t>};
  table["cvt.rzi." + to + ".f32"] = {to_integer<To, float, false, std::trunc>};
  table["cvt.rni." + to + ".f32"] = {to_integer<To, float, false, std::nearbyint>};
  table["cvt.rzi.ftz." + to + ".f32"] = {to_integer<To, float, true, std::trunc>};
  table["cvt.rni.ftz." + to + ".f32"] = {to_integer<To, float, true, std::nearbyint>};
  table["cvt.rzi." + to + ".f64"] = {to_integer<To, double, false, std::trunc>};
}

template <class From>
void add_to_floats(Table& table, const std::string& from) {
  table["cvt.rn.f32." + from] = {integer<float, From>};
  table["cvt.rn.f64." + from] = {integer<double, From>};
}

template <class T, T (*F)(T)>
void whole(Thread& t, const Op& op) { t.set<T>(op, 0, F(t.get<T>(op, 1))); }

template <class Bits, auto FROM>
void small_to_float(Thread& t, const Op& op) { t.set<float>(op, 0, FROM(t.get<Bits>(op, 1))); }
template <class Bits, auto TO>
void float_to_small(Thread& t, const Op& op) { t.set<Bits>(op, 0, TO(t.get<float>(op, 1))); }

// Of two operands the first is the upper half.
template <class Word, class Bits, auto TO>
void floats_to_pair(Thread& t, const Op& op) {
  t.set<Word>(op, 0, (Word)((Word)TO(t.get<float>(op, 1)) << 8 * sizeof(Bits) | (Bits)TO(t.get<float>(op, 2))));
}

}  // namespace

void add_conversions(Table& table) {
  add_from<uint8_t>(table, "u8"), add_from<int8_t>(table, "s8"), add_from<uint16_t>(table, "u16"), add_from<int16_t>(table, "s16");
  add_from<uint32_t>(table, "u32"), add_from<int32_t>(table, "s32"), add_from<uint64_t>(table, "u64"), add_from<int64_t>(table, "s64");
  add_to_floats<uint8_t>(table, "u8"), add_to_floats<int8_t>(table, "s8");
  add_to_floats<uint16_t>(table, "u16"), add_to_floats<int16_t>(table, "s16");
  add_to_floats<uint32_t>(table, "u32"), add_to_floats<int32_t>(table, "s32");
  add_to_floats<uint64_t>(table, "u64"), add_to_floats<int64_t>(table, "s64");

  table["cvt.rni.f32.f32"] = {whole<float, std::nearbyint>}, table["cvt.rzi.f32.f32"] = {whole<float, std::trunc>};
  table["cvt.rpi.f64.f64"] = {whole<double, std::ceil>};
  table["cvt.ftz.f64.f32"] = {[](Thread& t, const Op& op) { t.set<double>(op, 0, flush(t.get<float>(op, 1))); }};
  table["cvt.rn.ftz.f32.f64"] = {[](Thread& t, const Op& op) { t.set<float>(op, 0, flush((float)t.get<double>(op, 1))); }};
  table["cvt.ftz.sat.f32.f32"] = {[](Thread& t, const Op& op) {  // to 0 … 1, NaN to 0
    t.set<float>(op, 0, std::fmin(std::fmax(flush(t.get<float>(op, 1)), 0.0f), 1.0f));
  }};

  table["cvt.f32.f16"] = {small_to_float<uint16_t, from_half>}, table["cvt.f32.bf16"] = {small_to_float<uint16_t, from_bf16>};
  table["cvt.rn.f16.f32"] = {float_to_small<uint16_t, to_half>}, table["cvt.rn.bf16.f32"] = {float_to_small<uint16_t, to_bf16>};
  table["cvt.rn.f16x2.f32"] = {floats_to_pair<uint32_t, uint16_t, to_half>};
  table["cvt.rn.bf16x2.f32"] = {floats_to_pair<uint32_t, uint16_t, to_bf16>};
  table["cvt.rn.satfinite.e4m3x2.f32"] = {floats_to_pair<uint16_t, uint8_t, to_e4m3>};
  table["cvt.rn.f16x2.e4m3x2"] = {[](Thread& t, const Op& op) {
    const uint16_t pair = t.get<uint16_t>(op, 1);
    t.set<uint32_t>(op, 0, (uint32_t)to_half(from_e4m3(pair >> 8)) << 16 | to_half(from_e4m3(pair & 0xff)));
  }};

  table["mov.pack"] = {[](Thread& t, const Op& op) {
    uint64_t word = 0;
    for (int i = 0; i < op.width; ++i) {
      uint64_t part = 0;
      memcpy(&part, &t.registers[op.at[1 + i]], op.bytes);
      word |= part << 8 * op.bytes * i;
    }
    t.set<uint64_t>(op, 0, word);
  }};
  table["mov.unpack"] = {[](Thread& t, const Op& op) {
    const uint64_t word = t.get<uint64_t>(op, op.width);
    for (int i = 0; i < op.width; ++i) {
      uint64_t part = 0;
      memcpy(&part, (const unsigned char*)&word + op.bytes * i, op.bytes);
      t.set<uint64_t>(op, i, part);
    }
  }};
}

}  // namespace ptx
